"""Errors that are odd themselves: with a key, they are handled as without one."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils import timezone
from django.views.decorators.csrf import csrf_exempt
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.functions import aidempotent_call, idempotent_call
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy, store_errors
from tests.models import Effect
from tests.support.shared import effects, new_key, post, record

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Unprintable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class UnprintableRuntimeError(Unprintable, RuntimeError):
    """The same of a class whose texts are looked into."""


class Refused(APIException):
    """An error of REST framework whose detail is a dict, which its ``__str__`` returns."""

    status_code = 422

    def __init__(self) -> None:
        self.detail: Any = {"code": "refused"}

    def __str__(self) -> str:
        return self.detail  # type: ignore[no-any-return]


def fail(error: BaseException) -> Any:
    Effect.objects.create(reference="a")
    raise error


ERRORS = {
    "unprintable": Unprintable,
    "runtime": UnprintableRuntimeError,
    "refused": Refused,
    "stop": StopIteration,
    "generator": GeneratorExit,
}


def view(request: HttpRequest, name: str) -> HttpResponse:
    return fail(ERRORS[name]())  # type: ignore[no-any-return]


async def aview(request: HttpRequest, name: str) -> HttpResponse:
    raise ERRORS[name]


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request, name: str) -> Response:
        return fail(ERRORS[name]())  # type: ignore[no-any-return]


class LeasedDRF(DRF):
    idempotency_policy = Policy(mode="leased")


class StoredDRF(DRF):
    idempotency_policy = Policy(should_store=store_errors)


urlpatterns = [
    path("view/<name>/", csrf_exempt(idempotent(view))),
    path("leased/<name>/", csrf_exempt(idempotent(mode="leased")(view))),
    path("async/<name>/", csrf_exempt(idempotent(aview))),
    path("drf/<name>/", DRF.as_view()),
    path("leased-drf/<name>/", LeasedDRF.as_view()),
    path("stored-drf/<name>/", StoredDRF.as_view()),
]

DRF_VIEWS = ["drf", "leased-drf", "stored-drf"]
VIEWS = ["view", "leased", "async", *DRF_VIEWS]


@pytest.mark.parametrize("how", DRF_VIEWS)
def test_response_of_an_error_without_a_text(client: Client, how: str) -> None:
    """The response that REST framework makes of it is the same with a key, and frees the key."""
    without, first, second = (
        post(client, f"/{how}/refused/", key) for key in [None, *[new_key()] * 2]
    )
    assert [each.status_code for each in (without, first, second)] == [422] * 3
    assert first.content == without.content == second.content == b'{"code":"refused"}'


@pytest.mark.parametrize("name", ["unprintable", "runtime"])
@pytest.mark.parametrize("how", VIEWS)
def test_error_without_a_text(client: Client, how: str, name: str) -> None:
    """It is raised as itself, the key is free again, and the record names its class."""
    key = new_key()
    for attempt in (1, 2):
        with pytest.raises(Unprintable) as caught:
            post(client, f"/{how}/{name}/", key)
        assert type(caught.value) is ERRORS[name]
        row = record(key)
        assert (row.status, row.attempt) == ("failed", attempt)
        assert ERRORS[name].__name__ in row.error


def test_call_that_fails_without_a_text() -> None:
    """A call of plain Python raises it, too, and can be made again."""
    for attempt in (1, 2):
        with pytest.raises(Unprintable):
            idempotent_call(lambda _: fail(Unprintable()), key="k", scope="odd")

        async def fn(_: Any) -> Any:
            raise Unprintable

        with pytest.raises(Unprintable):
            async_to_sync(aidempotent_call)(fn, key="ak", scope="odd")
        assert (record("k").status, record("k").attempt) == ("failed", attempt)
        assert (record("ak").status, record("ak").attempt) == ("failed", attempt)
    assert effects() == 0


@pytest.mark.parametrize("name", ["stop", "generator"])
@pytest.mark.parametrize("how", VIEWS)
def test_errors_of_python_s_own(client: Client, how: str, name: str) -> None:
    """What ends an iterator ends the view like any other error: the key is free.

    What ends a generator is no ``Exception``, so a leased key is free when its lease is over.
    """
    key = new_key()
    is_leased = how in ("leased", "leased-drf", "async")  # whose engine is a coroutine
    for _ in "ab":
        IdempotencyKey.objects.filter(key=key, status="in_progress").update(
            lease_expires_at=timezone.now() - timedelta(hours=1)
        )
        with pytest.raises((StopIteration, GeneratorExit, RuntimeError)) as caught:
            post(client, f"/{how}/{name}/", key)
        error: BaseException | None = caught.value
        while error is not None and not isinstance(error, ERRORS[name]):
            error = error.__cause__
        assert error is not None, "the view's own error is the cause"
        assert isinstance(caught.value, (RuntimeError, ERRORS[name]))
        if is_leased and name == "stop":
            assert "StopIteration" in str(caught.value)
    assert effects() == 0 or "leased" in how
    row = IdempotencyKey.objects.filter(key=key).first()
    left = "in_progress" if is_leased and name == "generator" else "failed"
    assert row is None or row.status == left


def test_closed_coroutine() -> None:
    """The coroutine of an async handler that is closed while it waits ends at once, and quietly."""
    begun = False

    async def fn(_: Any) -> None:
        nonlocal begun
        begun = True
        await asyncio.Event().wait()

    async def main() -> Any:
        coroutine = aidempotent_call(fn, key="closed", scope="odd")
        # Driven by hand, as by a loop that ends before it: no task of the loop's is running it.
        waiting = coroutine.send(None)
        while not begun:
            await asyncio.wait([waiting])
            waiting = coroutine.send(None)
        return coroutine

    coroutine = asyncio.run(main())
    coroutine.close()
    assert record("closed").status == "in_progress"
