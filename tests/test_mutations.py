"""Mutations of Strawberry in the inventory, and in what reads it: checks, report, plugin."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import strawberry
from django.contrib.auth.decorators import login_required
from django.core.checks import CheckMessage, run_checks
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from strawberry.django.views import AsyncGraphQLView, GraphQLView
from strawberry.extensions import FieldExtension
from strawberry.schema.config import StrawberryConfig

from idempotency_django.checks.inventory import endpoints
from idempotency_django.contrib.messaging import publish
from idempotency_django.decorators import idempotency_exempt
from idempotency_django.policy import PAYMENT, Policy
from idempotency_django.strawberry import IdempotencyExtension
from tests import ways
from tests.models import Effect
from tests.support import effects, new_key
from tests.test_replaying import Driver, driver, only_protected

__all__ = ["driver"]  # a fixture

pytestmark = pytest.mark.django_db
REQUIRED = Policy(required=True)


class Noting(FieldExtension):
    """An extension of the project."""

    def resolve(self, next_: Any, source: Any, info: Any, **kwargs: Any) -> Any:
        """Do nothing else."""
        return next_(source, info, **kwargs)


def work(reference: str) -> int:
    """Make an effect."""
    Effect.objects.create(reference=reference)
    return Effect.objects.count()


@idempotency_exempt
def left_out() -> int:
    """Change nothing that matters."""
    return 1


@strawberry.type
class Charges:
    """A namespace."""

    number: int = 1
    create = strawberry.mutation(work, extensions=[IdempotencyExtension(PAYMENT), Noting()])
    cancel = strawberry.mutation(work)


@strawberry.type
class Receipt:
    """The result of a mutation, which is no namespace."""

    number: int = 1
    again: Receipt | None = None

    @strawberry.field
    def text(self) -> str:
        """A field with a resolver."""
        return "Thanks"


@strawberry.type
class Query:
    """What a schema must have."""

    one: int = 1


@strawberry.type
class Mutation:
    """Mutations that are protected, and others."""

    pay_now = strawberry.mutation(work, extensions=[IdempotencyExtension(REQUIRED)])
    refund = strawberry.mutation(work, name="giveBack", extensions=[IdempotencyExtension()])
    ship = strawberry.mutation(work, extensions=[Noting()])
    left_out = strawberry.mutation(left_out)

    @strawberry.field
    def charges(self) -> Charges:
        """The namespace."""
        return Charges()

    @strawberry.mutation
    def thank(self) -> Receipt:
        """Return an object."""
        return Receipt()


schema = strawberry.Schema(Query, Mutation)


class ProjectView(GraphQLView):
    """A project's own."""


FOUND = [
    ("POST", "/graphql/", "payNow", "extension", REQUIRED),
    ("POST", "/graphql/", "giveBack", "extension", Policy()),
    ("POST", "/graphql/", "ship", "", None),
    ("POST", "/graphql/", "leftOut", "exempt", None),
    ("POST", "/graphql/", "charges.create", "extension", PAYMENT),
    ("POST", "/graphql/", "charges.cancel", "", None),
    ("POST", "/graphql/", "thank", "", None),
]

Serve = Callable[..., None]


@pytest.fixture
def serve(settings: Any) -> Serve:
    """Serve a view at ``/graphql/``."""

    def serve(view: Any = None, **mutations: Any) -> None:
        if mutations:
            mutation = strawberry.type(type("Mutation", (), mutations))
            view = GraphQLView.as_view(schema=strawberry.Schema(Query, mutation))
        view = view or GraphQLView.as_view(schema=schema)
        settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("graphql/", view)]})

    return serve


def found() -> list[tuple[Any, ...]]:
    """What the inventory has."""
    return [(e.method, e.route, e.mutation, e.how, e.policy) for e in endpoints()]


def messages(*numbers: str) -> list[CheckMessage]:
    """What the checks of this package say, under these ids if some are given."""
    ours = [m for m in run_checks() if str(m.id).startswith("idempotency_django.")]
    return [m for m in ours if not numbers or str(m.id).endswith(numbers)]


class TestEndpoints:
    """Each mutation, instead of the view that serves it."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: GraphQLView.as_view(schema=schema),
            lambda: AsyncGraphQLView.as_view(schema=schema),
            lambda: ProjectView.as_view(schema=schema),
            lambda: type("View", (ProjectView,), {"schema": schema}).as_view(),
            lambda: csrf_exempt(login_required(GraphQLView.as_view(schema=schema))),
            lambda: ways.guard(GraphQLView.as_view(schema=schema)),
        ],
    )
    @pytest.mark.parametrize("middleware", [True, False])
    def test_each(self, serve: Serve, settings: Any, make: Any, middleware: bool) -> None:
        """Those of a namespace, too; with the names that clients use, and how it is protected."""
        if middleware:
            settings.MIDDLEWARE = ways.MIDDLEWARE
            settings.IDEMPOTENCY = {"MIDDLEWARE_EXEMPT": ["strawberry"]}
        serve(make())
        assert found() == FOUND
        assert messages() == []

    def test_the_resolver(self, serve: Serve) -> None:
        """An endpoint names the function that does the work; without one, the view."""
        field: Any = strawberry.field(extensions=[IdempotencyExtension()])
        serve(GraphQLView.as_view(schema=schema))
        assert next(endpoints()).view_name == f"{__name__}.work"
        owner = type("Mutation", (), {"__annotations__": {"pay": int}, "pay": field})
        serve(GraphQLView.as_view(schema=strawberry.Schema(Query, strawberry.type(owner))))
        [endpoint] = endpoints()
        assert (endpoint.mutation, endpoint.how) == ("pay", "extension")
        assert endpoint.view_name == "strawberry.django.views.GraphQLView"

    def test_queries(self, serve: Serve) -> None:
        """A schema without mutations changes nothing."""
        serve(GraphQLView.as_view(schema=strawberry.Schema(Query)))
        assert found() == []

    def test_a_view_that_the_middleware_covers(self, serve: Serve, settings: Any) -> None:
        """The middleware refuses keys of the view, which is reported beside its mutations."""
        settings.MIDDLEWARE = ways.MIDDLEWARE
        serve()
        view, *mutations = endpoints()
        assert (view.method, view.mutation, view.how) == ("*", "", "middleware")
        assert view.problem
        assert [each.mutation for each in mutations] == [each[2] for each in FOUND]
        assert len(messages("E023")) == len(messages()) == 1

    def test_an_exempt_view(self, serve: Serve) -> None:
        """``@idempotency_exempt`` on the view leaves out all mutations that nothing protects."""
        serve(idempotency_exempt(GraphQLView.as_view(schema=schema)))
        assert [each[3] for each in found()] == [each[3] or "exempt" for each in FOUND]

    def test_two_views(self, serve: Serve, settings: Any) -> None:
        """Each view has the mutations of its schema."""
        other = strawberry.Schema(Query, Charges)
        settings.ROOT_URLCONF = type("urls", (), {})
        settings.ROOT_URLCONF.urlpatterns = [
            path("a/", GraphQLView.as_view(schema=schema)),
            path("b/", GraphQLView.as_view(schema=other)),
        ]
        assert [(e.route, e.mutation) for e in endpoints()] == [
            *(("/a/", each[2]) for each in FOUND),
            *(("/b/", name) for name in ("number", "create", "cancel")),
        ]


def publishes(reference: str) -> int:
    """Publish a message."""
    publish("orders", reference, type="n")
    return 1


class TestChecks:
    """What is checked of policies is checked of those of mutations."""

    def test_unknown_store(self, serve: Serve) -> None:
        """E003: the policy of a mutation names a store that does not exist."""
        extension = IdempotencyExtension(Policy(store="nope"))
        serve(pay=strawberry.mutation(work, extensions=[extension]))
        [message] = messages("E003")
        assert f"The idempotency policy of {__name__}.work names the store 'nope'" in message.msg

    def test_a_policy_that_nothing_reads(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E060: the policy is the view's, which is not protected, and not its mutations'."""
        monkeypatch.setattr(ProjectView, "idempotency_policy", REQUIRED, raising=False)
        serve(ProjectView.as_view(schema=schema))
        assert len(messages("E060")) == len(messages()) == 1

    @pytest.mark.parametrize("is_required", [True, False])
    def test_publishing(self, serve: Serve, is_required: bool) -> None:
        """W059: a mutation publishes messages, and its key is optional."""
        extension = IdempotencyExtension(required=is_required)
        serve(pay=strawberry.mutation(publishes, extensions=[extension]))
        assert [m.id for m in messages()] == [] if is_required else ["idempotency_django.W059"]


def report(*arguments: str, **options: Any) -> str:
    """What the command writes."""
    written = StringIO()
    call_command("idempotency_report", *arguments, stdout=written, **options)
    return written.getvalue()


class TestReport:
    """``manage.py idempotency_report``."""

    def test_lines(self, serve: Serve) -> None:
        """Each mutation has a line, with its status."""
        serve()
        rows = [line.split() for line in report().splitlines()[1:8]]
        assert [row[:4] for row in rows] == [
            ["POST", "/graphql/", "payNow", "required"],
            ["POST", "/graphql/", "giveBack", "optional"],
            ["POST", "/graphql/", "ship", "unprotected"],
            ["POST", "/graphql/", "leftOut", "exempt"],
            ["POST", "/graphql/", "charges.create", "required"],
            ["POST", "/graphql/", "charges.cancel", "unprotected"],
            ["POST", "/graphql/", "thank", "unprotected"],
        ]
        assert rows[0][4:] == ["extension", "auto", f"{__name__}.work"]
        first, *_ = json.loads(report("--format=json"))["endpoints"]
        assert (first["route"], first["mutation"]) == ("/graphql/", "payNow")

    def test_fail_on(self, serve: Serve) -> None:
        """An unprotected mutation makes CI fail."""
        serve()
        with pytest.raises(CommandError, match=r"3 of 7 .*: POST /graphql/ ship \(unprotected\)"):
            report("--fail-on=unprotected")


class TestPlugin:
    """``pytest --idempotency-replay``."""

    @pytest.fixture(autouse=True)
    def _serve(self, serve: Serve, settings: Any) -> None:
        settings.MIDDLEWARE = ways.MIDDLEWARE
        settings.IDEMPOTENCY = {"MIDDLEWARE_EXEMPT": ["strawberry"]}
        serve()

    @staticmethod
    def send(client: Client, query: str, **headers: str) -> None:
        """Send an operation."""
        response = client.post("/graphql/", {"query": query}, "application/json", headers=headers)
        assert "errors" not in response.json()

    def test_protected(self, driver: Driver, client: Client, sent: list[str]) -> None:
        """A mutation that takes an optional key gets one, and its retry does nothing."""
        self.send(client, 'mutation { giveBack(reference: "a") }')
        argument = f'idempotencyKey: "{new_key()}"'
        self.send(client, f'mutation {{ charges {{ create(reference: "a", {argument}) }} }}')
        assert driver.findings == ""
        assert (effects(), sent.count("replayed")) == (2, 2)

    def test_unprotected(self, driver: Driver, client: Client) -> None:
        """A mutation that nothing protects is found, beside one that is protected, too."""
        self.send(client, 'mutation { giveBack(reference: "a") ship(reference: "a") }')
        assert "Put IdempotencyExtension first in its extensions" in driver.findings

    @only_protected
    def test_only_protected(self, driver: Driver, client: Client, sent: list[str]) -> None:
        """Without a key, a mutation that nothing protects is left alone, and no other one."""
        self.send(client, 'mutation { ship(reference: "a") }')
        self.send(client, 'mutation { giveBack(reference: "a") }')
        assert driver.findings == ""
        assert sent.count("replayed") == 1

    def test_batch(self, driver: Driver, client: Client, serve: Serve) -> None:
        """A batch gets no key, which its operations could not share, and is sent once."""
        config = StrawberryConfig(batching_config={"max_operations": 2})
        serve(GraphQLView.as_view(schema=strawberry.Schema(Query, Mutation, config=config)))
        operation = {"query": 'mutation { giveBack(reference: "a") }'}
        answers = client.post("/graphql/", [operation] * 2, "application/json").json()
        assert [each["data"] for each in answers] == [{"giveBack": 1}, {"giveBack": 2}]
        assert driver.findings == ""
