"""Stores as a project configures them: which one is meant, and what is wrong with how it is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django.checks import check_stores
from idempotency_django.decorators import idempotent
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.policy import Policy
from idempotency_django.stores import stores
from idempotency_django.stores.memory import MemoryStore
from tests.models import Effect
from tests.support import factories
from tests.support.shared import assert_replays, effects, new_key, post

DATABASE = "idempotency_django.stores.database.DatabaseStore"
CACHED = "idempotency_django.contrib.cached.CachedStore"
REDIS = "idempotency_django.contrib.redis.RedisStore"
MEMORY = "idempotency_django.stores.memory.MemoryStore"


@csrf_exempt
@idempotent
def order(request: HttpRequest) -> HttpResponse:
    """Names no store."""
    Effect.objects.create(reference="a")
    return HttpResponse(status=201)


urlpatterns = [path("order/", order), path("", include("tests.urls"))]


def configured(policy: dict[str, Any] | None = None, **backends: Any) -> override_settings:
    """A project with these stores: the path of a class each, or a whole declaration."""
    declared = {
        alias: {"BACKEND": given} if isinstance(given, str) else given
        for alias, given in backends.items()
    }
    return override_settings(
        ROOT_URLCONF=__name__, IDEMPOTENCY={"STORES": declared, "POLICY": policy or {}}
    )


def found() -> list[CheckMessage]:
    """What the checks say of the stores."""
    return [message for message in check_stores() if "SQLite" not in message.msg]


class TestWithoutDefault:
    """``STORES`` may name its stores as it likes."""

    @pytest.mark.django_db(transaction=True)
    def test_the_only_store_is_meant(self, client: Client) -> None:
        """Where there is one store, a policy that names none means it, in views and in calls."""
        with configured(main=DATABASE):
            assert found() == []
            assert Policy().resolved().store == "main"
            key = new_key()
            assert_replays(post(client, "/order/", key), post(client, "/order/", key))
            assert effects() == 1
            for _ in range(2):
                assert idempotent_call(lambda _: 17, key=key, scope="calls") == 17

    @pytest.mark.django_db
    @pytest.mark.parametrize(
        "stores_and_policy",
        [
            {"main": DATABASE},
            {"one": DATABASE, "two": DATABASE, "policy": {"store": "two"}},
            {"one": DATABASE, "two": DATABASE},
            {"redis": REDIS},
        ],
    )
    def test_the_admin_opens(self, admin_client: Client, stores_and_policy: Any) -> None:
        """The admin lists and shows records, whatever the stores are called."""
        with configured(**stores_and_policy):
            row = factories.record()
            url = "/admin/idempotency_django/idempotencykey/"
            for page in (url, f"{url}{row.pk}/change/"):
                assert admin_client.get(page).status_code == 200

    def test_the_projects_policy_may_name_it(self) -> None:
        """Where there are several, the project's policy says which one is meant."""
        with configured({"store": "two"}, one=DATABASE, two=DATABASE):
            assert found() == []
            assert Policy().resolved().store == "two"

    def test_nobody_says_which(self) -> None:
        """Several stores, and no word of which is meant, is an error."""
        with (
            configured(one=DATABASE, two=DATABASE),
            pytest.raises(ImproperlyConfigured, match="no store 'default'"),
        ):
            stores[Policy().resolved().store]


@pytest.mark.parametrize(
    ("backend", "typo"),
    [(DATABASE, "usign"), (CACHED, "maxage"), (REDIS, "cashe"), (MEMORY, "size")],
)
def test_typos_of_options(backend: str, typo: str) -> None:
    """An option that a store does not take is refused, and named."""
    with configured(default={"BACKEND": backend, "OPTIONS": {typo: 1}}):
        [message] = found()
        assert message.id == "idempotency_django.E003"
        assert f"{typo!r}" in message.msg


class Forgetful(MemoryStore):
    """Cannot keep a record for good."""

    validated: ClassVar[list[Any]] = []

    def validate(self, policy: Policy) -> None:
        super().validate(policy)
        self.validated.append(policy.ttl)
        if policy.ttl is None:
            raise ImproperlyConfigured("This store forgets. Give the policy a ttl.")


class TestValidate:
    """A store refuses what it cannot do."""

    @pytest.mark.django_db
    @pytest.mark.usefixtures("no_receivers")
    def test_refused(self, client: Client) -> None:
        """A policy that its store refuses fails the system checks and each request."""
        with configured({"ttl": None}, default=f"{__name__}.Forgetful"):
            errors = [str(error) for error in run_checks() if "This store forgets" in str(error)]
            assert all("idempotency_django.E019" in error for error in errors)
            assert errors
            for _ in range(2):
                with pytest.raises(ImproperlyConfigured, match="This store forgets"):
                    post(client, "/order/", new_key())
        assert effects() == 0

    @pytest.mark.django_db(transaction=True)
    def test_once(self, client: Client) -> None:
        """What it takes, it is asked about once, not with each request."""
        with configured(default=f"{__name__}.Forgetful"):
            Forgetful.validated.clear()
            for _ in range(3):
                assert post(client, "/order/", new_key()).status_code == 201
            assert len(Forgetful.validated) == 1


@pytest.mark.parametrize("debug", [True, False])
def test_memory_store_in_production(debug: bool) -> None:
    """A store in memory is warned of unless DEBUG is on."""
    with configured(default=DATABASE, quick=MEMORY), override_settings(DEBUG=debug):
        messages = found()
    assert [message.id for message in messages] == ([] if debug else ["idempotency_django.W026"])
    assert debug or "'quick'" in messages[0].msg
