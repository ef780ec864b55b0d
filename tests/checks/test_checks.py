"""The system checks: what each says of a wrong configuration, and that none ever crashes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from celery import Celery
from django.conf import settings
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.test import override_settings
from django.urls import path
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from idempotency_django import checks
from idempotency_django.conf import DEFAULT_STORES
from idempotency_django.contrib.celery import check_celery
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http import IdempotencyStatusView
from idempotency_django.policy import Policy
from idempotency_django.stores import Store, stores
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("no_receivers")

MEMORY = "idempotency_django.stores.memory.MemoryStore"
DATABASE = "idempotency_django.stores.database.DatabaseStore"


def found(*databases: str) -> list[CheckMessage]:
    """What all of our checks say, as ``manage.py check`` runs them."""
    messages = run_checks(databases=databases, include_deployment_checks=True)
    return [message for message in messages if str(message.id).startswith("idempotency_django.")]


def only(number: str, *databases: str) -> CheckMessage:
    """The one message that the checks have, which has this id."""
    messages = found(*databases)
    assert [message.id for message in messages] == [f"idempotency_django.{number}"], messages
    return messages[0]


def configured(**names: Any) -> override_settings:
    """A project with this ``IDEMPOTENCY``."""
    return override_settings(IDEMPOTENCY=names)


def a_store(**entries: Any) -> override_settings:
    """A project whose default store is declared so."""
    return configured(STORES={"default": entries})


def test_right_configuration() -> None:
    """A project that sets every name rightly hears nothing."""
    names = {
        "DIALECT": "stripe",
        "DOCS_URL": "https://docs.example.com/",
        "HEADER": "X-Key",
        "MIDDLEWARE_PROTECTS": "with-policy",
        "POLICY": {"store": "other"},
        "STATUS_CODES": {"mismatch": 409},
        "STORES": {**DEFAULT_STORES, "other": {"BACKEND": MEMORY}},
    }
    with configured(**names), override_settings(DEBUG=True):  # as with a store for tests
        assert found() == []


def test_ids_are_those_of_the_docs() -> None:
    """The module's docstring lists every id once, in order."""
    listed = re.findall(r"idempotency_django\.([EW]\d{3})", checks.__doc__ or "")
    numbers = [int(number[1:]) for number in listed]
    assert numbers == sorted({*numbers})


# Settings.


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("STORE", "Did you mean 'STORES'?"),
        ("XYZ", "Known names: AROUND_EXECUTION, CONSUMERS"),
        (1, "Known names"),
    ],
)
def test_unknown_setting(name: Any, hint: str) -> None:
    """E001: a name that is no setting, with the one that was probably meant."""
    with override_settings(IDEMPOTENCY={name: "x"}):
        message = only("E001")
    assert repr(name) in message.msg
    assert hint in str(message.hint)


@pytest.mark.parametrize("value", [None, [], "default"])
def test_setting_that_is_no_dict(value: object) -> None:
    """E002, once: IDEMPOTENCY itself is of a wrong kind."""
    with override_settings(IDEMPOTENCY=value):
        assert "must be a dict" in only("E002").msg


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MIDDLEWARE_PROTECTS", "all", "'all'"),
        ("MIDDLEWARE_PROTECTS", ["api/"], "['api/']"),
        ("POLICY", {"ttl": 60}, "ttl=60"),
        ("POLICY", {1: 2, "x": 3}, "'x'"),
        ("POLICY", {"ttl": None, "retentoin": 1}, "'retentoin'. Did you mean 'retention'?"),
        ("POLICY", "PAYMENT", "not str"),
        ("STATUS_CODES", {"mismatch": 200}, "['mismatch'] is 200"),
        ("STATUS_CODES", {"mismatch": "409"}, "['mismatch'] is '409'"),
        ("STATUS_CODES", {"mismatch": 600}, "['mismatch'] is 600"),
        ("STATUS_CODES", None, "STATUS_CODES"),
        ("STATUS_CODES", {"mismach": 409}, "'mismach'"),
        ("STORES", None, "STORES"),
        ("HEADER", "", "HEADER"),
        ("HEADER", "Idempotency Key", "HEADER"),
        ("DIALECT", "strype", "'strype'"),
        ("DOCS_URL", None, "DOCS_URL"),
    ],
)
def test_wrong_value(name: str, value: Any, said: str) -> None:
    """E002: a value that a setting cannot hold, named."""
    with configured(**{name: value}):
        message = only("E002")
    assert said in message.msg


# Stores.


class WithOptions(MemoryStore):
    """A store with an option, and with something to say."""

    def __init__(self, alias: str, *, size: int = 1) -> None:
        super().__init__(alias)
        self.size = size


HERE = __name__


def test_stores_are_made_once_per_alias() -> None:
    """A store is made at its first use, with its options, and is the same one ever after."""
    declared = {
        "default": {"BACKEND": MEMORY},
        "large": {"BACKEND": f"{HERE}.WithOptions", "OPTIONS": {"size": 5}},
    }
    with configured(STORES=declared):
        large = stores["large"]
        assert isinstance(large, WithOptions)
        assert (large.alias, large.size) == ("large", 5)
        assert stores["large"] is large
        assert list(stores) == ["default", "large"]
        assert stores.all() == [stores["default"], large]
    assert list(stores) == ["default"]


def test_stores_follow_the_settings() -> None:
    """A store is forgotten when its setting, or the databases, change; not when others do."""
    before = stores["default"]
    assert isinstance(before, DatabaseStore)
    with override_settings(TIME_ZONE="UTC"):
        assert stores["default"] is before
    with configured(STORES={"default": {"BACKEND": MEMORY}}):
        assert isinstance(stores["default"], MemoryStore)
    assert isinstance(stores["default"], DatabaseStore)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"defualt": {"BACKEND": MEMORY}}, "Did you mean 'defualt'?"),
        ({"xyz": {"BACKEND": MEMORY}}, "Known names: xyz."),
        ({}, "Known names: none."),
    ],
)
def test_unknown_alias(declared: Mapping[str, Any], said: str) -> None:
    """An alias that is not there is refused with those that are."""
    with configured(STORES=declared), pytest.raises(ImproperlyConfigured) as caught:
        _ = stores["default"]
    assert "has no store 'default'." in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({}, "is {}; it must be a dict with 'BACKEND'"),
        ({"BACKEND": "nothing.Here"}, "No module named 'nothing'"),
        ({"BACKEND": ".Store"}, "cannot be created"),
        ({"BACKEND": "builtins.str"}, "is no subclass of"),
        ({"BACKEND": f"{Store.__module__}.Store"}, "abstract"),
        ({"BACKEND": f"{HERE}.HERE"}, "cannot be created: 'str' object is not callable"),
        ({"BACKEND": MEMORY, "USING": "x"}, "it must be a dict with 'BACKEND'"),
        ({"BACKEND": MEMORY, "OPTIONS": {"using": "x"}}, "'using'"),
        ({"BACKEND": MEMORY, "OPTIONS": None}, "argument after ** must be a mapping"),
        (MEMORY, "['default']"),
        (None, "['default']"),
    ],
)
def test_store_that_cannot_be_made(declared: Any, said: str) -> None:
    """E003: a store that cannot be made, with the reason; where it is used, with its alias."""
    with configured(STORES={"default": declared}):
        assert said in only("E003").msg
        with pytest.raises(ImproperlyConfigured, match="'default'"):
            _ = stores["default"]


def test_store_that_a_policy_names() -> None:
    """E003: a policy names a store that is not there."""
    with configured(POLICY={"store": "defalt"}):
        message = only("E003")
    assert "has no store 'defalt'. Did you mean 'default'?" in message.msg
    assert message.hint == "See IDEMPOTENCY['POLICY']."


# Databases.


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Adds databases to DATABASES, each like the default one with some changes."""
    added = []

    def add(alias: str, **changes: Any) -> None:
        like = connections.settings["default"]
        monkeypatch.setitem(connections.settings, alias, {**like, "TEST": {}, **changes})
        added.append(alias)

    yield add
    for alias in added:
        if hasattr(connections._connections, alias):  # type: ignore[attr-defined]  # Django's own
            del connections[alias]


def test_unknown_database() -> None:
    """E003: the store's database is not in DATABASES."""
    with a_store(BACKEND=DATABASE, OPTIONS={"using": "nowhere"}):
        message = only("E003")
    assert "'nowhere'" in message.msg
    assert "'default'" in str(message.hint)


def test_effects_in_another_database(databases: Any) -> None:
    """W007: with ATOMIC_REQUESTS, effects and responses must be in the same database."""
    databases("effects", ATOMIC_REQUESTS=True)
    assert "on for 'effects'" in only("W007").msg
    with a_store(BACKEND=DATABASE, OPTIONS={"using": "effects"}):
        assert found() == []


# Views.


def handle(self: Any, request: Any) -> None:
    """The handler of the views below."""


def served(*views: Any, **names: Any) -> list[CheckMessage]:
    """What the checks say of a project with these views, and this ``IDEMPOTENCY``."""
    patterns = [path(f"{number}/", view) for number, view in enumerate(views)]
    urls: Any = type("urls", (), {"urlpatterns": patterns})
    with configured(**names), override_settings(ROOT_URLCONF=urls):
        return found()


class TestViews:
    """What is said of the views that have the mixin."""

    def test_mixin_behind_the_view(self) -> None:
        """DRF's view stands before the mixin, which would then do nothing: no such class."""
        with pytest.raises(ImproperlyConfigured, match=r"class Charges\(IdempotentViewMixin, …\)"):

            class Charges(APIView, IdempotentViewMixin):
                pass

    def test_policy_of_an_action_that_is_not(self) -> None:
        """E012: idempotency_policies names no action of the view; said once for all its routes."""

        class Charges(IdempotentViewMixin, ViewSet):
            idempotency_policies: ClassVar[Any] = {"create": Policy(), "captur": None}

            create = capture = handle

        create, capture = Charges.as_view({"post": "create"}), Charges.as_view({"put": "capture"})
        [message] = served(create, capture)
        assert message.id == "idempotency_django.E012"
        assert f"{HERE}.Charges.idempotency_policies names 'captur'" in message.msg

    @pytest.mark.parametrize(
        ("names", "number"),
        [
            ({"POLICY": {"ttl": 60}}, "E002"),
            ({"POLICY": {"store": "audit"}}, "E003"),
            ({"STORES": None}, "E002"),
        ],
    )
    def test_wrong_project_policy_is_said_once(self, names: Any, number: str) -> None:
        """What is wrong with the project's settings is not said of each view again."""
        views = [a_view(required=True), a_view(store="audit")]
        [message] = served(*views, **names)
        assert message.id == f"idempotency_django.{number}"

    def test_project_without_urls(self) -> None:
        """Without a URLconf there are no views to look at."""
        with override_settings():
            del settings.ROOT_URLCONF
            assert list(checks.check_views()) == []


def a_view(**policy: Any) -> Any:
    """A view of REST framework with this policy."""

    class View(IdempotentViewMixin, APIView):
        idempotency_policy = Policy(**policy)
        post = handle

    return View.as_view()


@pytest.mark.django_db
def test_command() -> None:
    """``manage.py check`` fails for what is wrong, and so does every command that runs it."""
    with configured(STORE={}), pytest.raises(SystemCheckError, match="E001"):
        call_command("check")


@pytest.mark.parametrize(
    ("policy", "store", "said"),
    [
        ({"mode": "transactional"}, MEMORY, "has no transactions"),
        ({"mode": "leased", "ttl": timedelta(seconds=20)}, DATABASE, "not longer than its lease"),
        ({"on_conflict": "accepted"}, DATABASE, "in the transactional mode"),
    ],
)
def test_promises_that_nobody_can_keep(policy: dict[str, Any], store: str, said: str) -> None:
    """A policy that its store or its mode cannot fulfil is told, for the project and for a view."""
    stores_ = {"default": {"BACKEND": store}}
    errors = served(a_view(**policy), a_view(**policy), STORES=stores_)
    [error] = [message for message in errors if message.id == "idempotency_django.E019"]
    assert said in error.msg
    assert "View" in str(error.hint)
    errors = served(a_view(required=True), STORES=stores_, POLICY=policy)
    hints = [str(m.hint) for m in errors if m.id == "idempotency_django.E019"]
    assert hints == ["See IDEMPOTENCY['POLICY']."]


def test_accepted_without_a_status_view() -> None:
    """A view that returns 202 must have a place to point at."""
    policy = {"mode": "leased", "on_conflict": "accepted"}
    with configured(POLICY=policy):
        assert "no URL is named 'idempotency-status'" in only("E020").msg
    with configured(POLICY=policy), override_settings(ROOT_URLCONF=__name__):
        assert found() == []


urlpatterns = [
    path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status")
]


# Celery's tasks.


@pytest.fixture
def app() -> Iterator[Celery]:
    """The project's app."""
    before = Celery("before", set_as_current=False)
    with Celery("shop", broker="memory://", backend="redis://127.0.0.1:1/0") as app:
        for shared in [name for name in app.tasks if not name.startswith("celery.")]:
            del app.tasks[shared]  # of other tests: each new app gets them
        yield app
    before.set_current()
    Celery("default").set_current()


def test_nothing_to_check(app: Celery) -> None:
    """A project without tasks is told nothing."""
    assert list(check_celery()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"idempotency": Policy()}, "has idempotency=, but is not an IdempotentTask"),
        (
            {"idempotency_policy": Policy(), "key": "{order}"},
            "has idempotency_policy= and key=, but is not",
        ),
    ],
)
def test_forgotten_base(app: Celery, options: dict[str, Any], said: str) -> None:
    """A task with the options of an idempotent one, and without its base, is named."""

    @app.task(name="shop.pay", shared=False, **options)
    def pay(order: str) -> None: ...

    @app.task(name="shop.plain", shared=False)
    def plain() -> None: ...

    [message] = check_celery()
    assert message.id == "idempotency_django.W061"
    assert f"The task shop.pay {said}" in message.msg
    assert "base=IdempotentTask" in str(message.hint)


def test_registered(app: Celery) -> None:
    """``manage.py check`` runs them, and they do not run the checks again."""

    @app.task(name="shop.pay", shared=False, key="{order}")
    def pay(order: str) -> None: ...

    assert [message.id for message in run_checks()].count("idempotency_django.W061") == 1
