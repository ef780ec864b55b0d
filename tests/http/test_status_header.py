"""``Idempotency-Status`` says what became of each request with a key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import http_sf
import pytest
from django.http import Http404, HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path
from django.views.decorators.http import require_POST
from rest_framework.permissions import IsAuthenticated

from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.errors import StoreUnavailable
from idempotency_django.http.responses import executed, replayed
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import keys, store_errors
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Record, Status
from idempotency_django.testing import an_operation
from tests.support.shared import effects, new_key, post
from tests.support.views import Mixed, acreate, create
from tests.support.ways import MIDDLEWARE, copied

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

DAY = timedelta(days=1)
FIREFOX = "17463529834658723465"


def missing(request: HttpRequest) -> HttpResponse:
    raise Http404


urlpatterns = [
    path("missing/", idempotent(mode="transactional", should_store=store_errors)(missing)),
    path("missing-leased/", idempotent(mode="leased", should_store=store_errors)(missing)),
    path("decorator/", idempotent(mode="transactional")(create)),
    path("leased/", idempotent(mode="leased")(create)),
    path("async/", idempotent(acreate)),
    path("mixin/", Mixed.as_view()),
    path("middleware/", create),
    path("large/", idempotent(max_response_bytes=0)(create)),
    path("forever/", idempotent(ttl=None)(create)),
    path("sliding/", idempotent(ttl=timedelta(days=1), extend_on_replay=True)(create)),
    path("outlived/", idempotent(ttl=DAY, on_expired="refuse", retention=DAY * 8)(create)),
    path("uuid/", idempotent(key_format="uuid")(create)),
    path("unread/", idempotent(key=keys.instead_of_header(lambda _: None))(create)),
    path("exempt/", idempotency_exempt(copied(create))),
]

WAYS = ["decorator", "leased", "async", "mixin"]


def status_of(response: HttpResponse) -> tuple[str, dict[str, Any]]:
    """The token and the parameters of the header, as a parser of RFC 9651 has them."""
    token, parameters = http_sf.parse(response["Idempotency-Status"].encode(), tltype="item")
    return str(token), parameters


def is_promised(response: HttpResponse, name: str = "Idempotency-Status") -> bool:
    """Whether the view ran, and its response is replayed for about a day."""
    token, parameters = http_sf.parse(response[name].encode(), tltype="item")
    # However slow the machine is.
    return str(token) == "executed" and 86100 < parameters.get("ttl", 0) <= 86400


all_ways = pytest.mark.parametrize("way", [f"/{name}/" for name in WAYS])


@all_ways
def test_first_response_and_replay(way: str) -> None:
    """Both say for how many seconds a retry is replayed; a replay says which attempt it is of."""
    client, key = Client(), new_key()
    first, second = post(client, way, key), post(client, way, key)
    assert is_promised(first)
    token, parameters = status_of(second)
    assert (token, parameters["attempt"]) == ("replayed", 1)
    assert 86340 < parameters["ttl"] <= 86400
    assert second["Idempotent-Replayed"] == "true"


@all_ways
@pytest.mark.parametrize("status", [409, 429, 500])
def test_response_that_is_not_stored(way: str, status: int) -> None:
    """A response that no retry gets says so."""
    client, key = Client(), new_key()
    for _ in range(2):
        again = post(client, way, key, str(status))
        assert again.status_code == status
        assert again["Idempotency-Status"] == "executed; stored=?0"
    assert post(client, way, key)["Idempotency-Status"].startswith("executed; ttl=")


@all_ways
def test_refusals(way: str) -> None:
    """A refusal says which one it is."""
    client, key = Client(), new_key()
    post(client, way, key)
    mismatched = post(client, way, key, reference="other")
    assert (mismatched.status_code, mismatched["Idempotency-Status"]) == (422, "mismatch")
    malformed = post(client, way, headers={"Idempotency-Key": '"a b"'})
    guessable = post(client, way, "17")
    for refusal in (malformed, guessable):
        assert (refusal.status_code, refusal["Idempotency-Status"]) == (400, "refused")
    under_way = Record(key="", scope="", status=Status.IN_PROGRESS)
    with mock.patch.object(DatabaseStore, "acquire", return_value=under_way):
        assert post(client, way, new_key())["Idempotency-Status"] == "in-progress"
    with mock.patch.object(DatabaseStore, "acquire", side_effect=StoreUnavailable):
        assert post(client, way, new_key())["Idempotency-Status"] == "failed"
    assert effects() == 1


@pytest.mark.parametrize("where", ["large", "missing", "missing-leased"])
def test_body_that_is_not_kept(client: Client, where: str) -> None:
    """A response without a stored body says so, and its retries say that they are not replays."""
    key = new_key()
    assert post(client, f"/{where}/", key)["Idempotency-Status"] == "executed; stored=?0"
    assert post(client, f"/{where}/", key)["Idempotency-Status"] == "not-replayed"


def test_lifetimes(client: Client) -> None:
    """Without a ``ttl`` no seconds are told, and never more of them than are left."""
    key = new_key()
    assert post(client, "/forever/", key)["Idempotency-Status"] == "executed"
    assert post(client, "/forever/", key)["Idempotency-Status"] == "replayed; attempt=1"
    post(client, "/sliding/", key)
    left = {"expires_at": DatabaseNow() + timedelta(seconds=600)}
    IdempotencyKey.objects.filter(path="/sliding/").update(**left)
    token, parameters = status_of(post(client, "/sliding/", key))
    assert token == "replayed"
    assert 0 < parameters["ttl"] <= 600
    used = IdempotencyKey.objects.get(path="/sliding/")
    assert used.expires_at - used.last_replayed_at == DAY
    post(client, "/outlived/", key)
    IdempotencyKey.objects.filter(path="/outlived/").update(expires_at=DatabaseNow() - DAY)
    assert post(client, "/outlived/", key)["Idempotency-Status"] == "expired"


def test_response_that_could_not_be_stored(client: Client) -> None:
    """If a leased view ran and its response was not stored, no replay is promised."""
    with (
        mock.patch("idempotency_django.engine.leased.PERSISTENCE", ()),
        mock.patch.object(DatabaseStore, "complete", side_effect=StoreUnavailable),
    ):
        response = post(client, "/leased/", new_key())
    assert (response.status_code, effects()) == (201, 1)
    assert response["Idempotency-Status"] == "executed; stored=?0"


WITH_POLICY = {"MIDDLEWARE_PROTECTS": "with-policy"}


@override_settings(MIDDLEWARE=MIDDLEWARE, IDEMPOTENCY=WITH_POLICY)
@pytest.mark.parametrize("where", ["/middleware/", "/exempt/", "/unread/", "/nowhere/"])
def test_ignored(client: Client, where: str) -> None:
    """A key that nothing honours has no effect, and no header."""
    assert not post(client, where, new_key()).has_header("Idempotency-Status")


class Closed(Mixed):
    permission_classes: Any = (IsAuthenticated,)


urlpatterns += [
    path("closed/", Closed.as_view()),
    path("post/", require_POST(idempotent(create))),
]


@pytest.mark.parametrize(
    ("method", "where", "status"), [("post", "/closed/", 403), ("put", "/post/", 405)]
)
def test_refused_before_the_claim(client: Client, method: str, where: str, status: int) -> None:
    """Where something else refuses a request of a protected view, nothing is said of the key."""
    response = post(client, where, new_key(), method=method)
    assert (response.status_code, effects()) == (status, 0)
    assert not response.has_header("Idempotency-Status")


# Keys that a browser makes up.


@pytest.mark.parametrize("where", ["decorator", "async", "uuid"])
def test_key_of_a_browser(client: Client, where: str) -> None:
    """A key that Firefox has made up counts as none where the caller is anonymous."""
    for count in (1, 2):
        response = post(client, f"/{where}/", FIREFOX)
        assert (response.status_code, response.has_header("Idempotency-Status")) == (201, False)
        assert effects() == count
    assert not IdempotencyKey.objects.exists()


def test_key_of_a_browser_with_a_caller(admin_client: Client) -> None:
    """A caller who is known gets a replay."""
    assert post(admin_client, "/decorator/", FIREFOX)["Idempotency-Status"].startswith("executed")
    assert status_of(post(admin_client, "/decorator/", FIREFOX))[0] == "replayed"
    assert effects() == 1


@pytest.mark.parametrize("elapsed", [0.001, 1.0, 90.2])
def test_rounded_down(elapsed: float) -> None:
    """The first response promises no more seconds than a replay at the same moment would."""
    operation = an_operation(ttl=DAY)
    left = DAY.total_seconds() - elapsed
    record = Record(key="", scope="", status=Status.COMPLETED, ttl_left=left)
    promised = executed(operation, elapsed).removeprefix("executed; ttl=")
    assert replayed(record) == f"replayed; ttl={promised}; attempt=1"
    assert left - 1 < int(promised) <= left
