"""The discovery document and the specification page: what a client can know before it sends."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.conf.urls.i18n import i18n_patterns
from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import Group, User
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import clear_url_caches, include, path, re_path, set_script_prefix
from django.views.decorators.http import require_http_methods
from ninja import NinjaAPI
from rest_framework.authtoken.views import obtain_auth_token
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.urlpatterns import format_suffix_patterns
from rest_framework.views import APIView

from idempotency_django import discovery as module
from idempotency_django.client.retrying import Retries
from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.discovery import discovery
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.errors import KeyMissing
from idempotency_django.policy import Policy, keys
from tests.test_inventory import router
from tests.ways import MIDDLEWARE, OwnDispatch

WHERE = "/.well-known/idempotency"


def plain(request: HttpRequest, **named: str) -> HttpResponse:
    return HttpResponse(request.path)


@idempotency_exempt
def exempt(request: HttpRequest) -> HttpResponse:
    return plain(request)


class PerTenant(IdempotentViewMixin, APIView):
    authentication_classes = ()

    def get_idempotency_policy(self) -> Policy | None:
        return Policy(ttl=timedelta(hours=1))

    def post(self, request: Request) -> Response:
        return Response()


class Groups(admin.ModelAdmin):  # type: ignore[type-arg]
    """A page of the project's own in the admin."""

    def get_urls(self) -> Any:
        return [path("close/", self.admin_site.admin_view(plain)), *super().get_urls()]


site = admin.AdminSite()
site.register(Group, Groups)

TWO = ["/internal/", "/api/tenants/"]
post = require_http_methods(["POST"])
derived = idempotent(key=keys.instead_of_header(keys.natural("reference")))(plain)
urlpatterns = [
    path("api/", include(format_suffix_patterns(router.urls))),
    path("api/derived/", post(derived)),
    path("api/exempt/", exempt),
    path("api/observed/", post(idempotent(mode="observe")(plain))),
    path("api/broken/", OwnDispatch.as_view()),
    path("api/login/", LoginView.as_view()),
    path("api/token/", obtain_auth_token),
    path("api/forever/", post(idempotent(ttl=None, key_format="uuid")(plain))),
    path("api/natural/", post(idempotent(key=keys.natural("reference"))(plain))),
    path("api/tenants/", PerTenant.as_view()),
    path("api/whatever/", idempotent(required=True)(plain)),
    path("internal/", post(idempotent(plain))),
    path("internal/api/", post(idempotent(plain))),
    path("backstage/", site.urls),
    path(".well-known/idempotency", discovery),
    path("api/idempotency", discovery, {"routes": "/api/"}),
    path("two/idempotency", discovery, {"routes": TWO}),
    path("hidden/idempotency", login_required(discovery)),
]
pytestmark = pytest.mark.urls(__name__)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    module._body.cache_clear()
    yield
    module._body.cache_clear()
    clear_url_caches()


def operation(method: str, path: str, **members: Any) -> dict[str, Any]:
    required, lifetime = members.get("required", False), members.get("lifetime", 86400)
    return {
        "method": method,
        "path": path,
        "required": required,
        "key_format": members.get("key_format", "any"),
        "lifetime": lifetime,
        "key_lifetime": members.get("key_lifetime", lifetime),
    }


MONTH = 30 * 86400
API = [
    operation("POST", "/api/charges/", required=True, lifetime=MONTH),
    operation("DELETE", "/api/charges/{pk}/", lifetime=MONTH),
    operation("POST", "/api/charges/{pk}/pay/", required=True),
    operation("POST", "/api/derived/", key_format=None),
    operation("POST", "/api/forever/", lifetime=None, key_format="uuid"),
    operation("POST", "/api/natural/"),
    {"method": "POST", "path": "/api/tenants/"},
    operation("*", "/api/whatever/", required=True),
]


INTERNAL = {"/internal/": None, "/internal/api/": None}.keys()


def listed(where: str = WHERE, **headers: str) -> list[tuple[str, str]]:
    operations = Client().get(where, headers=headers).json()["operations"]
    return [(each["method"], each["path"]) for each in operations]


def test_document() -> None:
    """The document says what is enforced for each protected endpoint, and nothing of others.

    An endpoint that is only observed is not listed.
    An endpoint is listed once, also if REST framework gives it a second URL with a suffix.
    Where each request has a policy of its own, it promises nothing.
    """
    document = Client().get(WHERE).json()
    assert document == {
        "header": "Idempotency-Key",
        "operations": [*API, *(operation("POST", path) for path in INTERNAL)],
    }


def test_what_is_not_listed(settings: Any) -> None:
    """With the middleware, the views of Django, REST framework and the admin stay out, also one's
    own there, and so does a view that cannot be protected.
    """
    settings.MIDDLEWARE = MIDDLEWARE
    assert ("*", "/api/charges/preview/") not in listed()
    assert {path for _, path in listed()} == {each["path"] for each in API} | INTERNAL


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("/api/idempotency", {each["path"] for each in API}),
        ("/two/idempotency", {*INTERNAL, "/api/tenants/"}),
    ],
)
def test_routes(where: str, paths: set[str]) -> None:
    """A project chooses the routes that are published."""
    assert {path for _, path in listed(where)} == paths


@pytest.mark.django_db
def test_hidden() -> None:
    """Behind a decorator, the document is for those whom it lets pass, also when it is cached."""
    assert listed()
    assert Client().get("/hidden/idempotency").status_code == 302
    client = Client()
    client.force_login(User.objects.create_user("alice"))
    response = client.get("/hidden/idempotency")
    assert response.json() == client.get(WHERE).json()
    assert response["Vary"] == "Accept, Cookie"
    assert Client().get("/hidden/idempotency").status_code == 302


def test_settings(settings: Any) -> None:
    """The document follows the settings: the header, and the project's policy."""
    assert Client().get(WHERE).json()["operations"][-1]["lifetime"] == 86400
    settings.IDEMPOTENCY = {"HEADER": "Request-Id", "POLICY": {"ttl": timedelta(hours=2)}}
    document = Client().get(WHERE).json()
    assert document["header"] == "Request-Id"
    assert document["operations"][-1]["lifetime"] == 7200


def test_project_dialect(settings: Any) -> None:
    """Where the project's dialect has the key in the body, each operation says in which member."""
    settings.IDEMPOTENCY = {"POLICY": {"dialect": "ec2"}}
    shown = Client().get(WHERE).json()["operations"][-1]
    assert (shown["dialect"], shown["header"], shown["member"]) == ("ec2", None, "ClientToken")


@pytest.mark.parametrize(
    ("fields", "key_lifetime"),
    [
        ({"dialect": "oasis"}, None),
        ({"key_format": "uuid7"}, None),
        ({"key_ttl": timedelta(days=7)}, 7 * 86400),
        ({"ttl": None}, None),
    ],
    ids=str,
)
def test_key_lifetime(
    fields: dict[str, Any], key_lifetime: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that outlives its response, or that is refused for its age, says so."""
    other = [path("other/", post(idempotent(**fields)(plain)))]
    monkeypatch.setattr(sys.modules[__name__], "urlpatterns", other)
    clear_url_caches()
    response = discovery(RequestFactory().get(WHERE), routes="/other/")
    [shown] = json.loads(response.content)["operations"]  # type: ignore[attr-defined]
    assert shown["key_lifetime"] == key_lifetime


def publish(monkeypatch: pytest.MonkeyPatch, *patterns: Any) -> list[dict[str, Any]]:
    """The operations in the document of a project with these URLs."""
    monkeypatch.setattr(
        sys.modules[__name__],
        "urlpatterns",
        [*patterns, path(".well-known/idempotency", discovery)],
    )
    clear_url_caches()
    module._body.cache_clear()
    operations: list[dict[str, Any]] = Client().get(WHERE).json()["operations"]
    return operations


def is_replayed(where: str) -> bool:
    """Whether the second request with a key gets the response of the first."""
    headers = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
    return ["Idempotent-Replayed" in Client().post(where, headers=headers) for _ in range(2)][1]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "earlier",
    [
        path("charges/", post(plain)),
        path("charges/", plain),
        path("<slug:name>/", post(plain)),
        re_path("^ch", exempt),
    ],
    ids=str,
)
def test_hidden_by_an_earlier_route(earlier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint whose requests an earlier, unprotected route takes is not listed."""
    charges = path("charges/", post(idempotent(plain)))
    assert publish(monkeypatch, earlier, charges) == []
    assert not is_replayed("/charges/")
    assert publish(monkeypatch, charges, earlier) == [operation("POST", "/charges/")]
    assert is_replayed("/charges/")


@pytest.mark.django_db
def test_parameters_hidden_by_an_earlier_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one with parameters, if an earlier route has the same path."""
    earlier = path("charges/<int:pk>/", post(plain))
    charges = path("charges/<int:pk>/", post(idempotent(plain)))
    assert publish(monkeypatch, earlier, charges) == []
    assert not is_replayed("/charges/17/")
    assert publish(monkeypatch, charges, earlier) == [operation("POST", "/charges/{pk}/")]
    assert is_replayed("/charges/17/")


def test_expression_that_cannot_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression whose readable form is no path of its own is listed as it is."""
    odd = re_path(r"^charges/\d\d/$", post(idempotent(plain)))
    [listed] = publish(monkeypatch, odd)
    assert listed["method"] == "POST"


@pytest.mark.django_db
def test_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations of django-ninja with one path are both listed, each with its own policy."""
    api = NinjaAPI(urls_namespace=uuid.uuid4().hex)

    @api.post("/charges/")
    @idempotent
    def create(request: HttpRequest) -> str:
        return "created"

    @api.put("/charges/")
    @idempotent(ttl=timedelta(hours=1))
    def change(request: HttpRequest) -> str:
        return "changed"

    @api.delete("/charges/")
    def delete(request: HttpRequest) -> str:
        return "deleted"

    assert publish(monkeypatch, path("", api.urls)) == [
        operation("POST", "/charges/"),
        operation("PUT", "/charges/", lifetime=3600),
    ]


@pytest.mark.django_db
def test_switched_off(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """With ``ENABLED=False``, nothing is protected, so nothing is promised."""
    charges = path("charges/", post(idempotent(plain)))
    assert publish(monkeypatch, charges) == [operation("POST", "/charges/")]
    settings.IDEMPOTENCY = {"ENABLED": False}
    assert publish(monkeypatch, charges) == []
    assert not is_replayed("/charges/")


@pytest.mark.parametrize(("milliseconds", "lifetimes"), [(999, []), (1000, [1]), (1999, [1])])
def test_short_lifetimes(
    milliseconds: int, lifetimes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is listed with a lifetime of 0: no retry can be sure of it."""
    ttl = timedelta(milliseconds=milliseconds)
    operations = publish(monkeypatch, path("charges/", post(idempotent(ttl=ttl)(plain))))
    assert [each["lifetime"] for each in operations] == lifetimes


def test_parameter_with_slashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has read the document retries a path whose parameter has slashes."""
    files = [
        path("files/<path:name>", post(idempotent(ttl=timedelta(seconds=60))(plain))),
        path("users/<slug:name>/", post(idempotent(plain))),
        path(".well-known/idempotency", discovery),
    ]
    monkeypatch.setattr(sys.modules[__name__], "urlpatterns", files)
    clear_url_caches()
    retries, host = Retries(), "https://shop.example.com"
    retries.learn(Client().get(WHERE).json(), f"{host}{WHERE}")
    for sent in ("a.txt", "a/b/c.txt"):
        assert Client().post(f"/files/{sent}").status_code == 200
        assert retries.lifetime_of("POST", f"{host}/files/{sent}?x=1") == 60
    assert Client().post("/users/a/b/").status_code == 404
    assert retries.lifetime_of("POST", f"{host}/users/a/b/") == 0


def test_script_prefix() -> None:
    """The paths are those that a client sees, below the prefix under which it has asked."""
    assert listed("/two/idempotency")[0] == ("POST", "/api/tenants/")
    set_script_prefix("/shop/")
    try:
        content = discovery(RequestFactory().get(WHERE), routes=TWO).content  # type: ignore[attr-defined]
    finally:
        set_script_prefix("/")
    assert b'"/shop/api/tenants/"' in content
    assert b'"/api/tenants/"' not in content


def test_another_urlconf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of a project that has URLs of its own (``pytest.mark.urls``) gets its own document."""
    assert ("POST", "/internal/") in listed()
    one = [path("one/", post(idempotent(plain)))]
    monkeypatch.setattr(django_settings, "ROOT_URLCONF", type("Urls", (), {"urlpatterns": one}))
    clear_url_caches()
    response = discovery(RequestFactory().get(WHERE))
    assert json.loads(response.content)["operations"] == [operation("POST", "/one/")]  # type: ignore[attr-defined]


def test_languages(client: Client, settings: Any) -> None:
    """Of routes that differ by language, it has those of the project, whoever asks first."""
    settings.MIDDLEWARE = ["django.middleware.locale.LocaleMiddleware"]
    protected = path("orders/", idempotent(require_http_methods(["POST"])(plain)))
    urlpatterns = [*i18n_patterns(protected), path(WHERE[1:], discovery)]
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": urlpatterns})
    for language in ("de", "en"):
        document = client.get(WHERE, headers={"Accept-Language": language}).json()
        assert [each["path"] for each in document["operations"]] == ["/en-us/orders/"]


def test_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inventory is read once, and a client that has the document gets 304."""
    first = Client().get(WHERE)
    monkeypatch.setattr(module, "endpoints", None)
    again = Client().get(WHERE, headers={"If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first["Cache-Control"] == again["Cache-Control"] == "max-age=300"
    assert first["Vary"] == "Accept"
    assert Client().head(WHERE)["ETag"] == first["ETag"]
    assert Client().post(WHERE).status_code == 405


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("image/png", "application/json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text/html"),
    ],
)
def test_media_types(accept: str, media_type: str) -> None:
    """A browser gets a page, and everybody else JSON; each has its own ETag."""
    response = Client().get(WHERE, headers={"Accept": accept} if accept else {})
    assert response["Content-Type"] == media_type
    page = Client().get(WHERE, headers={"Accept": "text/html"})
    assert (response["ETag"] == page["ETag"]) == (media_type == "text/html")


def test_page(settings: Any) -> None:
    """The page has each operation and each problem, and no script or inline style."""
    settings.IDEMPOTENCY = {"STATUS_CODES": {"mismatch": 409}}
    page = Client().get(WHERE, headers={"Accept": "text/html"}).content.decode()
    for expected in (
        '<td>POST</td><th scope="row"><code>/api/charges/</code></th><td>required</td>',
        '<td>any</td><th scope="row"><code>/api/whatever/</code></th>',
        "<td>30 days</td>",
        "<td>1 day</td>",
        "<td>without limit</td>",
        "<td>from the request itself</td>",
        "<td>depends on the request</td>",
        "<code>uuid</code>",
        'href="https://idempotency-django.readthedocs.io/problems/mismatch"',
        "<td>409</td>",
    ):
        assert expected in page, expected
    assert "<td>422</td>" not in page
    assert "Errors are <code>application/problem+json</code>" in page
    assert "or where the table says" not in page
    assert "retry only if you know the rules of your request" in page
    assert "an error of a later attempt doesn't say what became of the first one" in page
    assert "Count the lifetime from when you first send the request." in page
    assert "<script" not in page
    assert "style=" not in page


def test_page_with_several_dialects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dialect's operations have their own errors, and the page says where their keys are."""
    mixed = [
        path("mixed/plain/", post(idempotent(plain))),
        path("mixed/stripe/", post(idempotent(dialect="stripe")(plain))),
        path("mixed/any/", idempotent(dialect="stripe", required=["POST"])(plain)),
        path("mixed/ec2/", post(idempotent(dialect="ec2")(plain))),
        path("mixed/paypal/", post(idempotent(dialect="paypal", required=True)(plain))),
    ]
    monkeypatch.setattr(sys.modules[__name__], "urlpatterns", mixed)
    clear_url_caches()
    browser = RequestFactory(headers={"Accept": "text/html"}).get(WHERE)
    page = discovery(browser, routes="/mixed/").content.decode()  # type: ignore[attr-defined]
    ietf, stripe, ec2, _ = page.split("Errors of ")[1:]
    assert "<code>POST /mixed/plain/</code> are <code>application/problem+json</code>" in ietf
    assert "<td>422</td>" in ietf
    named = "<code>POST /mixed/stripe/</code>, <code>/mixed/any/</code>"
    assert f"{named} are <code>application/json</code>.\n" in stripe
    assert "<td>422</td>" not in stripe
    assert KeyMissing.title in stripe  # a view without declared methods has the errors of all
    assert KeyMissing.title not in ietf + ec2
    assert "<code>text/xml</code>.\n" in ec2
    assert "<td>optional, ClientToken in the body</td>" in page
    assert "<td>required, in PayPal-Request-Id</td>" in page
    assert "or where the table says" in page
    assert "retry only if you know the rules of your request" not in page


def test_no_operations() -> None:
    """An API without protected endpoints says so."""
    page = discovery(RequestFactory(headers={"Accept": "text/html"}).get(WHERE), routes="/none/")
    assert b"No operation takes a key." in page.content  # type: ignore[attr-defined]
    assert b'<h2 id="errors">' not in page.content  # type: ignore[attr-defined]


def test_without_templates(settings: Any) -> None:
    """A project without Django's templates serves JSON, to browsers, too."""
    settings.TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]
    response = Client().get(WHERE, headers={"Accept": "text/html"})
    assert (response.status_code, response["Content-Type"]) == (200, "application/json")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 seconds"), (1, "1 second"), (90, "90 seconds"), (3600, "1 hour"), (129600, "36 hours")],
)
def test_durations(seconds: int, text: str) -> None:
    """A lifetime is shown in the largest unit without a fraction."""
    assert module._duration(seconds) == text
