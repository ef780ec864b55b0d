"""Mutations of Strawberry: what runs once, what a retry gets, and who gets nothing.

What holds for every adapter is in ``test_adapters.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import enum
import json
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import graphql
import pytest
import strawberry
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.urls import path
from strawberry.django.views import AsyncGraphQLView, GraphQLView
from strawberry.extensions import FieldExtension
from strawberry.file_uploads import Upload
from strawberry.schema.config import StrawberryConfig

from idempotency_django import idempotent_call
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.policy import Policy, fingerprints, keys, scopes, store_errors, store_only
from idempotency_django.strawberry import IdempotencyExtension
from tests import ways
from tests.models import Effect
from tests.support import effects, new_key, record

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[..., None]


@strawberry.type
class Query:
    """What a schema must have."""

    one: int = 1


@strawberry.type
class Order:
    """A result that is no model."""

    reference: str
    number: int


def once(function: Any, *others: Any, permission_classes: Any = (), **options: Any) -> Any:
    """A mutation with our extension."""
    return strawberry.mutation(
        resolver=function,
        extensions=[IdempotencyExtension(**options), *others],
        permission_classes=permission_classes,
    )


def schema_of(config: StrawberryConfig | None = None, **mutations: Any) -> strawberry.Schema:
    """A schema with these mutations."""
    mutation = strawberry.type(type("Mutation", (), mutations))
    return strawberry.Schema(Query, mutation, config=config)


@pytest.fixture
def serve(settings: Any) -> Serve:
    """Serve mutations at ``/graphql/``."""

    def serve(view: Any = GraphQLView, **mutations: Any) -> None:
        route = path("graphql/", view.as_view(schema=schema_of(**mutations)))
        settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [route]})

    return serve


def ask(client: Client, mutation: str, key: str | None = None, **headers: str) -> Any:
    """Send a mutation; the whole answer."""
    if key is not None:
        headers["Idempotency-Key"] = key
    response = client.post(
        "/graphql/",
        json.dumps({"query": f"mutation {{ {mutation} }}"}),
        "application/json",
        headers=headers,
    )
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def code_of(answer: Any) -> str:
    """The code of the one problem in an answer."""
    [error] = answer["errors"]
    assert error["extensions"]["type"].endswith(error["extensions"]["code"])
    return str(error["extensions"]["code"])


def make(reference: str) -> Order:
    """Make an effect."""
    Effect.objects.create(reference=reference)
    return Order(reference=reference, number=Effect.objects.count())


async def amake(reference: str) -> Order:
    """Make an effect."""
    await Effect.objects.acreate(reference=reference)
    return Order(reference=reference, number=await Effect.objects.acount())


@pytest.fixture(params=["sync", "async"])
def made(request: Any, serve: Serve) -> None:
    """The mutation ``make``, sync or async."""
    if request.param == "sync":
        serve(make=once(make))
    else:
        serve(AsyncGraphQLView, make=once(amake))


@pytest.mark.usefixtures("made")
class TestKeys:
    """Where the key is."""

    def test_an_argument(self, client: Client) -> None:
        """The resolver runs once; a retry gets its result, with any selection and any alias."""
        key = new_key()
        first = ask(client, f'make(reference: "a", idempotencyKey: "{key}") {{ number }}')
        assert first["data"] == {"make": {"number": 1}}
        again = ask(
            client, f'b: make(reference: "a", idempotencyKey: "{key}") {{ reference number }}'
        )
        assert again["data"] == {"b": {"reference": "a", "number": 1}}
        assert effects() == 1
        assert record(key).operation == "mutation make"

    @pytest.mark.parametrize("view", [GraphQLView, AsyncGraphQLView])
    def test_status_of_the_header(self, serve: Serve, settings: Any, view: Any) -> None:
        """The middleware does not call a key ignored that a mutation has read, only others."""
        settings.MIDDLEWARE = ways.MIDDLEWARE
        settings.IDEMPOTENCY = {"MIDDLEWARE_EXEMPT": ["strawberry"]}
        resolver = make if view is GraphQLView else amake
        serve(view, make=once(resolver), plain=strawberry.mutation(resolver))
        argument = 'make(idempotencyKey: "6c1a3c1e-6f0e-4c6e-9d39-9d8c1b4bb1c5", '
        for field, expected in (("make(", None), (argument, None), ("plain(", "ignored")):
            response = Client().post(
                "/graphql/",
                json.dumps({"query": f'mutation {{ {field}reference: "a") {{ number }} }}'}),
                "application/json",
                headers={"Idempotency-Key": new_key()},
            )
            assert response.json()["data"]
            assert response.get("Idempotency-Status") == expected

    def test_the_header(self, client: Client) -> None:
        """One header serves all mutations of a request: each alias has a record of its own."""
        key = new_key()
        two = 'b: make(reference: "b") { number } a: make(reference: "a") { number }'
        first = ask(client, two, key)
        assert first["data"] == {"b": {"number": 1}, "a": {"number": 2}}
        assert ask(client, two, key) == first
        assert (effects(), effects("b")) == (1, 1)

    def test_another_request(self, client: Client) -> None:
        """Other arguments with the same key are refused."""
        key = new_key()
        ask(client, 'make(reference: "a") { number }', key)
        answer = ask(client, 'make(reference: "b") { number }', key)
        assert code_of(answer) == "mismatch"
        assert answer["errors"][0]["message"] == FingerprintMismatch.default_detail
        assert effects("b") == 0

    @pytest.mark.parametrize(
        ("key", "code"), [("short", "key-guessable"), ("\\t", "key-malformed")]
    )
    def test_bad_keys(self, client: Client, key: str, code: str) -> None:
        """They are refused as for any other request."""
        answer = ask(client, f'make(reference: "a", idempotencyKey: "{key}") {{ number }}')
        assert code_of(answer) == code
        assert effects() == 0


class TestBatches:
    """A request with a list of operations, which all have its headers."""

    @pytest.fixture(params=["sync", "async"])
    def send(self, request: Any, settings: Any, client: Client) -> Callable[..., list[Any]]:
        """Serve the mutation ``make``, and send mutations in one request."""
        view, function = (
            (GraphQLView, make) if request.param == "sync" else (AsyncGraphQLView, amake)
        )

        def send(mutations: list[str], key: str, /, *, form: bool = False, **options: Any) -> Any:
            schema = schema_of(
                StrawberryConfig(batching_config={"max_operations": 5}),
                make=once(function, **options),
            )
            route = view.as_view(schema=schema, multipart_uploads_enabled=True)
            settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("graphql/", route)]})
            operations = json.dumps([{"query": f"mutation {{ {each} }}"} for each in mutations])
            headers = {"Idempotency-Key": key}
            if form:
                body = {"operations": operations, "map": "{}"}
                return client.post("/graphql/", body, headers=headers).json()
            return client.post("/graphql/", operations, "application/json", headers=headers).json()

        return send

    @pytest.mark.parametrize("other", ["a", "b"])
    @pytest.mark.parametrize("form", [False, True])
    def test_the_key_of_the_header(self, send: Any, other: str, form: bool) -> None:
        """Two operations cannot share it: nothing runs, and the error says what to do."""
        key = new_key()
        answers = send(
            [f'make(reference: "{each}") {{ number }}' for each in ("a", other)], key, form=form
        )
        assert [code_of(answer) for answer in answers] == ["key-missing"] * 2
        assert answers[0]["errors"][0]["message"] == (
            "This request is a batch of several operations, which cannot share the key in the "
            "header Idempotency-Key. Send each mutation with the argument idempotencyKey, or in a "
            "request of its own."
        )
        assert effects() == effects("b") == 0

    def test_keys_of_their_own(self, send: Any) -> None:
        """Each operation runs once for the key in its argument, whatever the header has."""
        mutations = [
            f'make(reference: "a", idempotencyKey: "{new_key()}") {{ number }}' for _ in range(2)
        ]
        numbers = [
            sorted(answer["data"]["make"]["number"] for answer in send(mutations, new_key()))
            for _ in range(2)
        ]
        assert numbers[0] == numbers[1]
        assert effects() == 2

    def test_a_list_of_one(self, send: Any, client: Client) -> None:
        """It is the same operation as without the list."""
        key = new_key()
        [first] = send(['make(reference: "a") { number }'], key)
        assert first["data"] == {"make": {"number": 1}}
        assert send(['make(reference: "a") { number }'], key) == [first]
        assert ask(client, 'make(reference: "a") { number }', key) == first
        assert effects() == 1

    def test_a_key_that_a_browser_made_up(self, send: Any) -> None:
        """It is none of the client's; so it is refused only where a key is required."""
        mutations, key = ['make(reference: "a") { number }'] * 2, '"1234567890123456789"'
        refused = send(mutations, key, required=True)
        assert [code_of(answer) for answer in refused] == ["key-missing"] * 2
        assert effects() == 0
        assert not any("errors" in answer for answer in send(mutations, key))
        assert effects() == 2

    def test_disabled(self, send: Any, settings: Any) -> None:
        """Nothing is refused where nothing is protected."""
        settings.IDEMPOTENCY = {"ENABLED": False}
        answers = send(['make(reference: "a") { number }'] * 2, new_key())
        assert not any("errors" in answer for answer in answers)
        assert effects() == 2

    def test_a_derived_key(self, send: Any) -> None:
        """A key that only the arguments make is each operation's own."""
        derived = keys.instead_of_header(keys.natural("reference"))
        mutations = [f'make(reference: "{each}") {{ number }}' for each in "ab"]
        for _ in range(2):
            answers = send(mutations, new_key(), key=derived)
            assert not any("errors" in answer for answer in answers)
        assert (effects(), effects("b")) == (1, 1)


def test_a_required_key(serve: Serve, client: Client) -> None:
    """Without its key, a mutation is refused, and the error names the argument."""
    serve(make=once(make, required=True))
    answer = ask(client, 'make(reference: "a") { number }')
    assert code_of(answer) == "key-missing"
    assert answer["errors"][0]["message"] == (
        "This mutation requires the argument idempotencyKey, or the header Idempotency-Key. Send a "
        "new, unique key with each new operation and the same key with each retry of it."
    )
    assert effects() == 0


def test_the_name_of_the_argument(client: Client, settings: Any) -> None:
    """A schema may have its own names."""
    mutation = strawberry.type(type("Mutation", (), {"make": once(make, required=True)}))
    config = StrawberryConfig(auto_camel_case=False)
    schema = strawberry.Schema(Query, mutation, config=config)
    route = path("graphql/", GraphQLView.as_view(schema=schema))
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [route]})
    [error] = ask(client, 'make(reference: "a") { number }')["errors"]
    assert "requires the argument idempotency_key, or" in error["message"]


class TestErrors:
    """Errors are not stored, though the status of the HTTP response is 200."""

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_of_another_operation(self, serve: Serve, client: Client, kind: str) -> None:
        """A refusal of a nested call is no refusal of the mutation's own key."""

        def calls(reference: str) -> Order:
            idempotent_call(lambda _: None, key="k", scope="s", fingerprint=reference)
            return make(reference)

        async def acalls(reference: str) -> Order:
            await sync_to_async(calls)(reference)
            return Order(reference=reference, number=0)

        if kind == "sync":
            serve(make=once(calls))
        else:
            serve(AsyncGraphQLView, make=once(acalls))
        assert "errors" not in ask(client, 'make(reference: "b") { number }', new_key())
        [error] = ask(client, 'make(reference: "a") { number }', new_key())["errors"]
        assert "already used" in error["message"]
        assert "extensions" not in error

    def test_returned(self, serve: Serve, client: Client) -> None:
        """A result that is an error is rolled back if the policy says so."""

        @strawberry.type
        class Refused:
            why: str

        def fails(reference: str) -> Order | Refused:
            made = make(reference)
            return Refused(why="No money") if reference == "a" else made

        fails.__annotations__["return"] = Annotated[Order | Refused, strawberry.union("Result")]
        serve(make=once(fails, should_store=lambda _, result: not isinstance(result, Refused)))
        key, other = new_key(), new_key()
        for _ in range(2):
            answer = ask(client, 'make(reference: "a") { ... on Refused { why } }', key)
            assert answer["data"] == {"make": {"why": "No money"}}
        for _ in range(2):
            answer = ask(client, 'make(reference: "b") { ... on Order { reference } }', other)
            assert answer["data"] == {"make": {"reference": "b"}}
        assert (effects(), effects("b")) == (0, 1)
        assert record(key).attempt == 2

    @pytest.mark.parametrize("policy", [{"should_store": store_errors}, {"dialect": "stripe-v2"}])
    def test_of_responses(self, serve: Serve, client: Client, settings: Any, policy: Any) -> None:
        """What the project and a dialect say of responses is not asked of results."""
        settings.IDEMPOTENCY = {"POLICY": policy}
        serve(make=once(make))
        key = new_key()
        first = ask(client, 'make(reference: "a") { number }', key)
        assert "errors" not in first
        assert ask(client, 'make(reference: "a") { number }', key) == first
        assert effects() == 1

    def test_within_atomic_requests(self, serve: Serve, client: Client) -> None:
        """The request's transaction commits; the failed mutation's part is rolled back.

        A leased mutation is refused there.
        """

        def fails(reference: str) -> Order:
            made = make(reference)
            if reference == "a":
                raise PermissionDenied("No money")
            return made

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            serve(make=once(fails))
            key = new_key()
            for _ in range(2):
                ask(
                    client,
                    'b: make(reference: "b") { number } a: make(reference: "a") { number }',
                    key,
                )
            serve(make=once(make, mode="leased"))
            [error] = ask(client, 'make(reference: "leased") { number }', key)["errors"]
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert (effects(), effects("b"), effects("leased")) == (0, 1, 0)
        assert "must commit on its own" in error["message"]


@strawberry.enum
class Color(enum.Enum):
    """An enum of the schema."""

    RED = "r"
    BLUE = "b"


@strawberry.type
class Everything:
    """A result with every kind of value."""

    amount: Decimal
    number: uuid.UUID
    at: dt.datetime
    on: dt.date
    time: dt.time
    color: Color
    orders: list[Order]
    nothing: str | None
    share: float
    ok: bool
    id: strawberry.ID

    @strawberry.field
    def doubled(self) -> Decimal:
        """A field that is resolved from the others."""
        return self.amount * 2


EVERYTHING = Everything(
    amount=Decimal("1.20"),
    number=uuid.UUID(int=7),
    at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    on=dt.date(2026, 1, 1),
    time=dt.time(1, 2),
    color=Color.RED,
    orders=[Order(reference="a", number=1)],
    nothing=None,
    share=0.5,
    ok=True,
    id=strawberry.ID("x"),
)
SELECTION = "{ amount number at on time color orders { number } nothing share ok id doubled }"


@strawberry.type
class EffectType:
    """How a model is shown."""

    reference: str


class TestResults:
    """What a retry gets is made of what was stored."""

    def test_types(self, serve: Serve, client: Client) -> None:
        """A Strawberry type comes back whole, and its own resolvers run on it."""
        serve(make=once(everything))
        key = new_key()
        first = ask(client, f"make {SELECTION}", key)
        assert first["data"]["make"]["doubled"] == "2.40"
        assert ask(client, f"make {SELECTION}", key) == first

    @pytest.mark.parametrize(
        ("kind", "value"), [(int, 7), (str, "x"), (bool, True), (list[int], [1, 2]), (float, 0.5)]
    )
    def test_scalars(self, serve: Serve, client: Client, kind: Any, value: Any) -> None:
        """Scalars and lists of them come back as they were."""
        ran: list[Any] = []

        def returns() -> Any:
            ran.append(value)
            return value

        returns.__annotations__["return"] = kind
        serve(make=once(returns))
        key = new_key()
        assert ask(client, "make", key) == ask(client, "make", key) == {"data": {"make": value}}
        assert ran == [value]

    def test_models(self, serve: Serve, client: Client) -> None:
        """A model comes back as its row is now; if the row is gone, the retry is told so."""

        def creates(reference: str) -> Any:
            return Effect.objects.create(reference=reference)

        creates.__annotations__["return"] = EffectType
        serve(make=once(creates))
        key = new_key()
        mutation = 'make(reference: "a") { reference }'
        assert ask(client, mutation, key)["data"]["make"] == {"reference": "a"}
        Effect.objects.update(reference="b")
        assert ask(client, mutation, key)["data"]["make"] == {"reference": "b"}
        Effect.objects.all().delete()
        assert code_of(ask(client, mutation, key)) == "response-not-stored"
        assert not Effect.objects.exists()

    def test_what_cannot_be_stored(self, serve: Serve, client: Client) -> None:
        """It is refused at the first execution, which is rolled back; store= and load= help."""

        def returns(reference: str) -> Any:
            make(reference)
            return dataclasses.make_dataclass("Plain", ["reference"])(reference)

        returns.__annotations__["return"] = EffectType
        serve(make=once(returns))
        [error] = ask(client, 'make(reference: "a") { reference }', new_key())["errors"]
        assert "Pass store= and load= to the IdempotencyExtension" in error["message"]
        assert effects() == 0
        serve(
            make=once(
                returns,
                store=lambda result: result.reference,
                load=lambda stored: EffectType(reference=stored),
            )
        )
        key = new_key()
        first = ask(client, 'make(reference: "a") { reference }', key)
        assert ask(client, 'make(reference: "a") { reference }', key) == first
        assert effects() == 1


T = TypeVar("T")


@strawberry.type
class Page(Generic[T]):
    """A result that several types share."""

    items: list[T]
    total: int


def test_generic_types(serve: Serve, client: Client) -> None:
    """They come back whole, though the schema has another name for each of their uses."""

    def pages(reference: str) -> Any:
        return Page(items=[make(reference)], total=1)

    def numbers(reference: str) -> Any:
        return Page(items=[effects(reference)], total=2)

    pages.__annotations__["return"] = Page[Order]
    numbers.__annotations__["return"] = Page[int]
    serve(numbers=once(numbers), pages=once(pages))
    key = new_key()
    both = 'pages(reference: "a") { items { number } total } numbers(reference: "a") { items }'
    first = ask(client, both, key)
    assert first["data"]["pages"] == {"items": [{"number": 1}], "total": 1}
    assert ask(client, both, key) == first
    assert effects() == 1


def test_a_type_that_the_schema_has_not(serve: Serve, client: Client) -> None:
    """It is refused at the first execution, which is rolled back."""
    other: Any = strawberry.type(type("Other", (), {"__annotations__": {"reference": str}}))

    def returns(reference: str) -> Any:
        make(reference)
        return other(reference=reference)

    returns.__annotations__["return"] = EffectType
    serve(make=once(returns))
    [error] = ask(client, 'make(reference: "a") { reference }', new_key())["errors"]
    assert "Pass store= and load= to the IdempotencyExtension" in error["message"]
    assert effects() == 0


@strawberry.input
class Changes:
    """An input whose fields may be left out."""

    reference: str
    unset: str | None = strawberry.UNSET
    maybe: strawberry.Maybe[str | None]


def change(changes: list[Changes]) -> int:
    """Make an effect for each of them."""
    for each in changes:
        Effect.objects.create(reference=each.reference)
    return len(changes)


@pytest.mark.parametrize(
    "fields", ["", ", unset: null", ', unset: "x"', ", maybe: null", ', maybe: "x"']
)
def test_inputs_with_fields_that_are_left_out(serve: Serve, client: Client, fields: str) -> None:
    """A retry is replayed; a field that is left out differs from one that is null."""
    serve(change=once(change))
    key = new_key()

    def send(fields: str) -> Any:
        return ask(client, f'change(changes: [{{reference: "a"{fields}}}])', key)

    assert send(fields) == send(fields) == {"data": {"change": 1}}
    for other in {"", ", unset: null", ", maybe: null", ', maybe: "y"'} - {fields}:
        assert code_of(send(other)) == "mismatch"
    assert effects() == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_uploads(settings: Any, client: Client, kind: str) -> None:
    """The bytes of a file are compared, and the resolver reads all of it."""

    def upload(file: Any) -> str:
        content = str(file.read().decode())
        Effect.objects.create(reference=content)
        return content

    async def aupload(file: Any) -> str:
        return await sync_to_async(upload)(file)

    function, view = (upload, GraphQLView) if kind == "sync" else (aupload, AsyncGraphQLView)
    function.__annotations__["file"] = Upload
    route = view.as_view(schema=schema_of(upload=once(function)), multipart_uploads_enabled=True)
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("graphql/", route)]})
    key = new_key()

    def send(content: bytes) -> Any:
        query = "mutation($file: Upload!) { upload(file: $file) }"
        data = {
            "operations": json.dumps({"query": query, "variables": {"file": None}}),
            "map": json.dumps({"0": ["variables.file"]}),
            "0": SimpleUploadedFile("a.txt", content),
        }
        return client.post("/graphql/", data, headers={"Idempotency-Key": key}).json()

    assert send(b"a") == send(b"a") == {"data": {"upload": "a"}}
    assert code_of(send(b"b")) == "mismatch"
    assert (effects(), effects("b")) == (1, 0)


def everything() -> Everything:
    """Return every kind of value."""
    return EVERYTHING


class Notes(FieldExtension):
    """Another extension."""

    ran: ClassVar[list[str]] = []

    def resolve(self, next_: Any, source: Any, info: Any, **kwargs: Any) -> Any:
        """Note that it ran."""
        self.ran.append(info.field_name)
        return next_(source, info, **kwargs)


class TestCallers:
    """A replay goes only to who would be allowed the operation now."""

    @pytest.fixture
    def key(self, serve: Serve) -> str:
        serve(make=once(make))
        return new_key()

    @staticmethod
    def number(answer: Any) -> Any:
        return (answer["data"] or {}).get("make")

    def test_sessions(self, key: str) -> None:
        """Neither another user nor an anonymous caller gets another's result."""
        alice, bob, nobody = Client(), Client(), Client()
        alice.force_login(User.objects.create_user("alice"))
        bob.force_login(User.objects.create_user("bob"))
        mutation = 'make(reference: "a") { number }'
        assert self.number(ask(alice, mutation, key)) == {"number": 1}
        assert self.number(ask(bob, mutation, key)) == {"number": 2}
        assert self.number(ask(nobody, mutation, key)) == {"number": 3}
        assert self.number(ask(alice, mutation, key)) == {"number": 1}

    @pytest.mark.parametrize("how", ["header", "argument"])
    def test_tokens(self, key: str, client: Client, how: str) -> None:
        """Where no user is known, the credentials of the request are whose result it is."""
        argument = f', idempotencyKey: "{key}"' if how == "argument" else ""
        mutation = f'make(reference: "a"{argument}) {{ number }}'
        sent = key if how == "header" else None
        first = ask(client, mutation, sent, Authorization="Bearer alice")
        assert ask(client, mutation, sent, Authorization="Bearer alice") == first
        assert code_of(ask(client, mutation, sent, Authorization="Bearer bob")) == "mismatch"
        assert code_of(ask(client, mutation, sent)) == "mismatch"
        assert effects() == 1

    def test_other_extensions(self, serve: Serve, client: Client) -> None:
        """They run for each request, before a replay; one that would not is refused."""
        Notes.ran.clear()
        serve(make=once(make, Notes()))
        key = new_key()
        for _ in range(2):
            ask(client, 'make(reference: "a") { number }', key)
        assert (Notes.ran, effects()) == (["make", "make"], 1)
        field = strawberry.mutation(resolver=make, extensions=[Notes(), IdempotencyExtension()])
        with pytest.raises(TypeError, match="not the first of its extensions"):
            schema_of(make=field)


def test_an_argument_of_the_same_name(serve: Serve) -> None:
    """A resolver that takes the argument itself is refused."""

    def takes(reference: str, idempotency_key: str) -> int: ...

    with pytest.raises(TypeError, match="Remove it from the resolver"):
        schema_of(make=once(takes))


def test_one_of_store_and_load() -> None:
    """One alone is refused."""
    with pytest.raises(ImproperlyConfigured, match="Pass both"):
        IdempotencyExtension(store=str)


@pytest.mark.parametrize("name", ["on_replay", "rebuild", "replay_status", "on_conflict"])
def test_options_for_responses(name: str) -> None:
    """What a policy does to HTTP responses is refused, because it would do nothing."""
    others: dict[str, Any] = {"replay_status": {201: 200}, "on_conflict": "accepted"}
    value: Any = others.get(name, lambda request, response: response)
    with pytest.raises(ImproperlyConfigured, match=f"has {name}.* These are for HTTP responses"):
        IdempotencyExtension(**{name: value})


@pytest.mark.parametrize("function", [store_errors, store_only(200)])
def test_functions_for_responses(function: Any) -> None:
    """They read the status of a response, which no result has, so they are refused, too."""
    name = "store_errors" if function is store_errors else "store_only"
    with pytest.raises(ImproperlyConfigured, match=f"has should_store={name}. These are for HTTP"):
        IdempotencyExtension(policy=Policy(required=True), should_store=function)


def test_a_field_in_two_schemas() -> None:
    """It has the argument once."""
    field = once(make)
    mutation = strawberry.type(type("Mutation", (), {"make": field}))
    for _ in range(2):
        text = str(strawberry.Schema(Query, mutation))
        assert text.count("idempotencyKey: String = null") == 1
    assert len(mutation.__strawberry_definition__.fields[0].arguments) == 2


def test_a_key_from_an_argument(serve: Serve, client: Client) -> None:
    """A key that is made of arguments is the same under any alias."""
    serve(make=once(make, key=keys.natural("reference")))
    first = ask(client, 'make(reference: "a") { number }')["data"]["make"]
    assert ask(client, 'b: make(reference: "a") { number }')["data"]["b"] == first
    assert effects() == 1
    assert record("a").path == "/graphql/#make"


@pytest.mark.parametrize("scope", [scopes.shared, scopes.per_user])
def test_the_key_of_another_mutation(serve: Serve, client: Client, scope: Any) -> None:
    """The same alias and arguments of another mutation are no retry."""
    serve(make=once(make, scope=scope), other=once(make, scope=scope))
    key = new_key()
    ask(client, 'a: make(reference: "a") { number }', key)
    assert code_of(ask(client, 'a: other(reference: "a") { number }', key)) == "mismatch"
    assert effects() == 1


def test_a_fingerprint_of_arguments(serve: Serve, client: Client) -> None:
    """A policy may leave arguments out of what is compared."""
    serve(make=once(make, fingerprint=fingerprints.fields(exclude=["reference"])))
    key = new_key()
    first = ask(client, 'make(reference: "a") { number }', key)
    assert ask(client, 'make(reference: "b") { number }', key) == first


def test_the_execution(serve: Serve, client: Client) -> None:
    """The resolver has the execution as ``request.idempotency``, for steps and derived keys."""

    def steps(info: strawberry.Info) -> str:
        return str(info.context.request.idempotency.derive_key("charge"))

    serve(make=once(steps))
    answer = ask(client, "make", new_key())
    assert len(answer["data"]["make"]) == 36


def test_a_context_without_a_request(client: Client) -> None:
    """A schema that is not served by Django is refused clearly."""
    result = schema_of(make=once(make)).execute_sync(
        'mutation { make(reference: "a") { number } }', context_value={}
    )
    assert "has no request of Django" in str(result.errors)


def test_below_the_middleware(serve: Serve, client: Client, settings: Any) -> None:
    """The middleware refuses a key for the view, whose 200 may hold errors; exempt it."""
    settings.MIDDLEWARE = ways.MIDDLEWARE
    serve(make=once(make))
    key = new_key()
    with pytest.raises(ImproperlyConfigured, match="a view of Strawberry"):
        ask(client, 'make(reference: "a") { number }', key)
    settings.IDEMPOTENCY = {"MIDDLEWARE_EXEMPT": ["strawberry"]}
    for _ in range(2):
        ask(client, 'make(reference: "a") { number }', key)
    assert effects() == 1


@strawberry.input
class Choice:
    """An input of the field around a mutation."""

    color: Color
    since: dt.date
    note: str | None = strawberry.UNSET


@strawberry.interface
class Named:
    """What both kinds of shop are."""

    name: str


SHELVES = "{ ... on Small { shelf(number: %s) { … } } ... on Large { shelf(number: %s) { … } } }"


leaves_others = graphql.version_info < (3, 3)
"""Whether graphql-core answers when a field has failed, and leaves those beside it to the loop."""


@pytest.mark.skipif(leaves_others, reason="The test's loop ends with the answer")
def test_a_field_beside_it_fails(serve: Serve, client: Client) -> None:
    """A mutation that has begun runs to its end: what it did is stored, and is not repeated.

    graphql-core cancels the fields beside one that fails.
    """
    done, failing = asyncio.Event(), asyncio.Event()

    async def made(reference: str) -> Order:
        result = await amake(reference)
        done.set()
        await failing.wait()
        await asyncio.sleep(0)  # here it would be cancelled
        return result

    async def fail() -> int:
        await done.wait()
        failing.set()
        raise LookupError

    @strawberry.type
    class Shop:
        make: Order = once(made)
        fails: int = strawberry.field(resolver=fail)

    def shop() -> Any:
        return Shop()

    shop.__annotations__["return"] = Shop
    serve(AsyncGraphQLView, shop=strawberry.field(shop))
    key = new_key()
    make = f'make(reference: "a", idempotencyKey: "{key}") {{ number }}'
    assert "errors" in ask(client, f"shop {{ {make} fails }}")
    assert effects() == 1
    assert ask(client, f"shop {{ {make} }}")["data"] == {"shop": {"make": {"number": 1}}}
    assert effects() == 1


class TestNested:
    """A mutation below other fields: their arguments say what it changes, so they count."""

    @pytest.fixture(autouse=True, params=["sync", "async"])
    def nested(self, request: Any, serve: Serve) -> None:
        """Serve ``make`` of a shop, of another kind of shop, and of shops in a list."""
        self.is_async = request.param == "async"
        function, view = (amake, AsyncGraphQLView) if self.is_async else (make, GraphQLView)
        shelf = strawberry.type(type("Shelf", (), {"make": once(function)}))

        def shelves(number: int) -> Any:
            return shelf()

        shelves.__annotations__["return"] = shelf
        small, large = (
            strawberry.type(
                type(name, (Named,), {"make": once(function), "shelf": strawberry.field(shelves)})
            )
            for name in ("Small", "Large")
        )

        def shop(number: strawberry.ID, choice: Choice | None = None) -> Any:
            return small(name=f"{number} {choice}")

        def shops(ids: list[int]) -> Any:
            return [small(name=str(each)) for each in ids]

        def either(is_large: bool) -> Any:
            return (large if is_large else small)(name="")

        def any_shop() -> Any:
            return small(name="")

        shop.__annotations__["return"] = any_shop.__annotations__["return"] = small
        shops.__annotations__["return"] = list[small]  # type: ignore[valid-type]
        either.__annotations__["return"] = Annotated[small | large, strawberry.union("Either")]
        mutations = {each.__name__: each for each in (shop, shops, either, any_shop)}
        serve(view, **{name: strawberry.field(each) for name, each in mutations.items()})

    @staticmethod
    def send(
        client: Client, around: str, key: str, how: str = "argument", *, rest: str = "", **more: Any
    ) -> Any:
        """Send the mutation below these fields."""
        argument = f', idempotencyKey: "{key}"' if how == "argument" else ""
        inner = f'make(reference: "a"{argument}) {{ number }}'
        query = around.replace("…", inner) + rest
        if not query.startswith(("mutation", "query")):
            query = f"mutation {{ {query} }}"
        headers = {"Idempotency-Key": key} if how == "header" else {}
        body = json.dumps({"query": query, **more})
        response = client.post("/graphql/", body, "application/json", headers=headers)
        return json.loads(response.content)

    @pytest.mark.parametrize("how", ["argument", "header"])
    @pytest.mark.parametrize(
        ("around", "other"),
        [
            ('shop(number: "1") { … }', 'shop(number: "2") { … }'),
            (
                'shop(number: "1", choice: {color: RED, since: "2026-01-01"}) { … }',
                'shop(number: "1", choice: {color: BLUE, since: "2026-01-01"}) { … }',
            ),
            (
                'shop(number: "1", choice: {color: RED, since: "2026-01-01"}) { … }',
                'shop(number: "1", choice: {color: RED, since: "2026-01-02"}) { … }',
            ),
            (
                'shop(number: "1", choice: {color: RED, since: "2026-01-01"}) { … }',
                'shop(number: "1", choice: {color: RED, since: "2026-01-01", note: null}) { … }',
            ),
            ("shops(ids: [1]) { … }", "shops(ids: [2]) { … }"),
            ('anyShop { … } shop(number: "2") { name }', 'anyShop: shop(number: "2") { … }'),
            (
                "either(isLarge: true) { __typename } either(isLarge: true) " + SHELVES % (1, 2),
                "either(isLarge: true) { __typename } either(isLarge: true) " + SHELVES % (1, 3),
            ),
            (
                "either(isLarge: true) " + SHELVES % (1, 2),
                "either(isLarge: false) " + SHELVES % (1, 2),
            ),
            (
                "either(isLarge: true) " + SHELVES % (1, 2),
                "either(isLarge: true) " + SHELVES % (1, 3),
            ),
            (
                "either(isLarge: false) " + SHELVES % (1, 2),
                "either(isLarge: false) " + SHELVES % (3, 2),
            ),
        ],
    )
    def test_another_place(self, client: Client, around: str, other: str, how: str) -> None:
        """It is another request; the same one is replayed."""
        key = new_key()
        first = self.send(client, around, key, how)
        assert "errors" not in first
        assert self.send(client, around, key, how) == first
        assert code_of(self.send(client, other, key, how)) == "mismatch"
        assert effects() == 1

    @pytest.mark.parametrize("how", ["argument", "header"])
    def test_variables(self, client: Client, how: str) -> None:
        """Their values are compared, also in fragments."""
        key = new_key()
        around = (
            "mutation ($id: ID!, $color: Color = RED) { ...Fields } "
            "fragment Fields on Mutation { ... { shop(number: $id, "
            'choice: {color: $color, since: "2026-01-01"}) { ... on Named { …Make } } } } '
            "fragment Make on Small { … }"
        ).replace("…Make", "...Make")
        first = self.send(client, around, key, how, variables={"id": "1"})
        assert "errors" not in first
        again = self.send(client, around, key, how, variables={"id": "1", "color": "RED"})
        assert again == first
        for other in ({"id": "2"}, {"id": "1", "color": "BLUE"}):
            answer = self.send(client, around, key, how, variables=other)
            assert code_of(answer) == "mismatch"
        assert effects() == 1

    def test_other_words(self, client: Client) -> None:
        """Aliases, other selections and written defaults around it are the same to its own key."""
        key = new_key()
        first = self.send(client, 'shop(number: "1") { … }', key)
        again = self.send(
            client,
            'b: shop(number: "1", choice: null) { name ... on Named { ... on Small { … } } }',
            key,
        )
        assert again["data"]["b"]["make"] == first["data"]["shop"]["make"] == {"number": 1}
        assert effects() == 1

    def test_a_list(self, client: Client) -> None:
        """With a key in the header, each item has its own; one in the argument is for one item."""
        key = new_key()
        first = self.send(client, "shops(ids: [1, 2]) { … }", key, "header")
        assert "errors" not in first
        assert self.send(client, "shops(ids: [1, 2]) { … }", key, "header") == first
        assert effects() == 2
        answer = self.send(client, "shops(ids: [1, 2]) { … }", new_key())
        assert code_of(answer) == "mismatch"
        assert effects() == 3 or (leaves_others and self.is_async)

    def test_its_path(self, client: Client) -> None:
        """The record says where the mutation is."""
        plain, item = new_key(), new_key()
        self.send(client, "b: anyShop { … }", plain)
        assert record(plain).path == "/graphql/#anyShop.make"
        self.send(client, "shops(ids: [1]) { … }", item)
        assert re.fullmatch(r"/graphql/#shops\([0-9a-f]{24}\)\.0\.make", record(item).path)
