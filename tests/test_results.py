"""Results that are dataclasses and models of pydantic: a retry gets an equal object."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from celery import Celery
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field
from pydantic.alias_generators import to_camel

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.contrib.jobs import idempotent_job
from idempotency_django.engine.functions import (
    aidempotent_call,
    idempotent_call,
    idempotent_outcome,
)
from idempotency_django.errors import ResponseNotStored
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support import effects

if TYPE_CHECKING:
    from idempotency_django.engine.context import ExecutionContext

pytestmark = pytest.mark.django_db(transaction=True)

LEASED = Policy(mode="leased")


class State(Enum):
    PAID = "paid"


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Line:
    price: Decimal
    tags: tuple[str, ...] = ()


@dataclass
class Charge:
    id: UUID
    at: datetime
    on: date
    state: State
    lines: list[Line]
    by_name: dict[str, Line] = field(default_factory=dict)
    parent: Charge | None = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.lines)


class Model(BaseModel):
    model_config = ConfigDict(
        strict=True, alias_generator=to_camel, extra="forbid", populate_by_name=True
    )

    amount_due: Decimal
    at: datetime
    state: State = State.PAID
    pair: tuple[int, str] = (1, "a")

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def shown(self) -> str:
        return f"{self.amount_due} EUR"


@dataclass
class Both:
    model: Model
    secret: Any = None


AT = datetime(2026, 7, 1, 12, 30, 0, 17, tzinfo=UTC)
LINE = Line(Decimal("1.50"), ("a", "b"))
CHARGE = Charge(UUID(int=7), AT, AT.date(), State.PAID, [LINE], {"first": LINE})
MODEL = Model(amount_due=Decimal("17.10"), at=AT)


def call(value: Any, **options: Any) -> Any:
    """The results of the first call and of a replay; there is one effect."""

    def pay(execution: ExecutionContext) -> Any:
        Effect.objects.create(reference="a")
        return value

    first = idempotent_call(pay, key="17", scope="payments", **options)
    again = idempotent_call(pay, key="17", scope="payments", **options)
    assert effects() == 1
    return first, again


@pytest.mark.parametrize("policy", [Policy(), LEASED], ids=["transactional", "leased"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Charge, Charge(UUID(int=8), AT, AT.date(), State.PAID, [], parent=CHARGE)),
        (Model, MODEL),
        (Both, Both(MODEL)),
        (list[Charge], [CHARGE, CHARGE]),
        (Charge | None, None),
        (dict[str, Model], {"a": MODEL}),
        (tuple[Decimal, Line], (Decimal("1.0"), LINE)),
        (Decimal, Decimal("1.00")),
    ],
    ids=str,
)
def test_equal(kind: Any, value: Any, policy: Policy) -> None:
    """The first call and a replay return an equal object, and all in it has the same type."""
    for got in call(value, result=kind, policy=policy):
        assert type(got) is type(value)
        assert got == value
        assert repr(got).replace("datetime.timezone.utc", "TzInfo(0)") == repr(value).replace(
            "datetime.timezone.utc", "TzInfo(0)"
        )


def pay_charge(execution: ExecutionContext) -> Charge:
    Effect.objects.create(reference="a")
    return CHARGE


def test_return_annotation() -> None:
    """The return annotation says the type, also where others are there for type checkers only."""
    first = idempotent_outcome(pay_charge, key="17", scope="payments")
    again = idempotent_outcome(pay_charge, key="17", scope="payments")
    assert first.result == again.result == CHARGE
    assert (first.replayed, again.replayed, effects()) == (False, True, 1)


def test_async() -> None:
    """It is the same for coroutine functions."""

    async def pay(execution: ExecutionContext) -> list[Charge]:
        await sync_to_async(Effect.objects.create)(reference="a")
        return [CHARGE]

    async def twice() -> list[Any]:
        options: Any = {"key": "17", "scope": "payments", "policy": LEASED}
        return [await aidempotent_call(pay, **options) for _ in range(2)]

    assert asyncio.run(twice()) == [[CHARGE], [CHARGE]]
    assert effects() == 1


def test_annotation_without_an_object() -> None:
    """An annotation of JSON's types, or one that names nothing, leaves results as JSON has them."""

    def pair(execution: ExecutionContext) -> tuple[int, int]:
        return (1, 2)

    def unknown(execution: ExecutionContext) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        return (1, 2)

    for function in (pair, unknown):
        for _ in range(2):
            found: Any = idempotent_call(function, key=function.__name__, scope="payments")
            assert found == [1, 2]


def test_annotation_of_a_decorated_function() -> None:
    """What a decorator makes of the result is not what the annotation says."""

    @wraps(pay_charge)
    def decorated(execution: ExecutionContext) -> Any:
        return {"id": str(pay_charge(execution).id)}

    for _ in range(2):
        assert idempotent_call(decorated, key="17", scope="payments") == {"id": str(UUID(int=7))}


@dataclass(frozen=True)
class Sub(Line):
    pass


class Hidden(BaseModel):
    secret: SecretStr


class Renamed(BaseModel):
    amount: int = Field(validation_alias="Amount")


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (Line, {"price": "1.50"}, r"it is a dict, and a retry would get a Line"),
        (Line, Sub(Decimal(1)), r"it is a Sub, and a retry would get a Line"),
        (Line, Line(Decimal(1), ["a"]), r"it\.tags is a list, and a retry would get a tuple"),  # type: ignore[arg-type]
        (Line, Line(Decimal(1), (Colour.RED,)), r"it\.tags\[0\] is a Colour, .* get a str"),
        (Line, Line(Decimal("NaN")), r"it\.price would not be equal"),
        (Both, Both(MODEL, date(2026, 1, 1)), r"it\.secret is a date, and a retry would get a str"),
        (Both, Both(MODEL, object()), r"Object of type object is not JSON"),
        (dict[str, Line], {1: LINE}, r"it would not be equal"),
        (Hidden, Hidden(secret=SecretStr("abc")), r"it would not be equal"),
        (Renamed, Renamed(Amount=1), r"ValidationError"),  # type: ignore[call-arg]
        (Decimal, float("nan"), r"ValueError"),
    ],
    ids=str,
)
def test_refused(kind: Any, value: Any, why: str) -> None:
    """A result that would differ after a round trip is refused when it is to be stored."""
    with pytest.raises(TypeError, match=rf"(?s)The result of .*pay' cannot be stored.*{why}") as at:
        call(value, result=kind)
    assert "abc" not in str(at.value)
    assert effects() == 0


@pytest.mark.parametrize("returned", [{"id": "ch_1"}, [CHARGE]], ids=["dict", "list"])
def test_annotation_that_is_wrong(returned: Any) -> None:
    """A function that returns something other than its annotation says is refused."""

    def pay(execution: Any) -> Charge:
        Effect.objects.create(reference="a")
        return returned  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=r"pay' cannot be stored and rebuilt as Charge: "):
        idempotent_call(pay, key="one", scope="tests")
    assert effects() == 0


def test_unnamed_type() -> None:
    """Without a type, an object is refused, and the error says how to name its type."""
    with pytest.raises(TypeError, match=r"is not JSON, so it cannot be stored") as at:
        call(CHARGE)
    assert "pass it as result=" in at.value.__notes__[0]
    assert effects() == 0


def test_changed_type() -> None:
    """A new field with a default is filled; a result that no longer fits is not executed again."""

    def pay(execution: ExecutionContext) -> Any:
        Effect.objects.create(reference="a")
        return Line(Decimal("1.50"))

    def again(kind: Any) -> Any:
        return idempotent_call(pay, key="17", scope="payments", result=kind)

    again(Line)
    grown = make_dataclass("Line", [("price", Decimal), ("currency", str, field(default="EUR"))])
    assert again(grown) == grown(Decimal("1.50"), "EUR")
    with pytest.raises(ResponseNotStored, match=r"does not fit Line, which has probably changed"):
        again(make_dataclass("Line", [("price", Decimal), ("currency", str)]))
    assert effects() == 1


@idempotent_job(key="order-{order_id}")
def job(order_id: int) -> Charge:
    Effect.objects.create(reference="a")
    return CHARGE


def test_job() -> None:
    """A job's result is rebuilt by its annotation, or as the given type."""
    named = idempotent_job(key="{a}", result=Line)(lambda a: LINE)
    assert job(17) == job(17) == CHARGE
    assert named("a") == named("a") == LINE
    assert effects() == 1


@pytest.mark.parametrize("options", [{}, {"key": "a"}, {"result": Charge}], ids=str)
def test_celery_task(options: dict[str, Any]) -> None:
    """A task's result is rebuilt by its annotation, or as the given type."""
    with Celery("tests", broker="memory://", set_as_current=False) as app:
        app.conf.task_always_eager = True

        def pay() -> Charge:
            Effect.objects.create(reference="a")
            return CHARGE

        if "result" in options:
            pay.__annotations__.clear()
        task = app.task(pay, base=IdempotentTask, shared=False, **options)
        for _ in range(2):
            assert task.apply(task_id="one").get() == CHARGE
            assert "key" not in options or task() == CHARGE
        assert effects() == 1


def test_celery_task_with_pydantic() -> None:
    """Celery's own pydantic=True returns plain data, which stays as it is."""
    with Celery("tests", broker="memory://", set_as_current=False) as app:

        @app.task(base=IdempotentTask, shared=False, pydantic=True)
        def pay() -> Model:
            return MODEL

        for _ in range(2):
            assert pay.apply(task_id="one").get() == MODEL.model_dump(mode="json")


def test_result_that_celery_cannot_store() -> None:
    """A result that Celery would fail to store after the commit is refused before it."""
    with Celery(
        "tests", broker="memory://", backend="cache+memory://", set_as_current=False
    ) as app:

        @app.task(base=IdempotentTask, shared=False)
        def pay() -> Charge:
            Effect.objects.create(reference="a")
            return CHARGE

        request: Any = {"id": "one", "is_eager": False, "called_directly": False}
        for ignored in (False, True):
            pay.push_request(**request, ignore_result=ignored)
            try:
                if ignored:
                    assert pay() == CHARGE
                else:
                    with pytest.raises(TypeError, match=r"backend .* cannot store a Charge"):
                        pay()
            finally:
                pay.pop_request()
            assert effects() == ignored
