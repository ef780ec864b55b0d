"""Conditional writes, beside those of three peers: what they cost, and what a race does to them."""

# the page says × and ≤
from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Final

from concurrency.exceptions import RecordModifiedError
from django.db import connection, connections, transaction
from django_fsm import TransitionNotAllowed
from rest_framework import serializers, viewsets
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework_extensions.etag.mixins import APIUpdateETAGMixin

from benchmarks.models import Order, PeerVersioned, Plain, Versioned
from benchmarks.report import Section, Table, Target
from benchmarks.timing import Block, Measured, Sample, interleave
from idempotency_django.contrib.concurrency import PreconditionMixin, compare_and_swap, transition
from idempotency_django.contrib.concurrency.errors import ConcurrentModification

THREADS: Final = 30
MOST: Final = 1.2  # times a save without a version

SAVE: Final = "save()"
SWAP: Final = "compare_and_swap()"
MOVE: Final = "transition"
PUT: Final = "PUT with If-Match"
BARE: Final = "Django alone"
OURS: Final = "this package"
FSM: Final = "django-fsm-2"
PEER: Final = "django-concurrency"
EXTENSIONS: Final = "drf-extensions"

TEXT: Final = """\
Times are for one change of one row, in {rounds} interleaved rounds of {calls} changes. Then
{threads} threads loaded one row and changed it at the same moment, {races} times. One of them
should have an effect; the most of all races is shown."""

Change = Callable[[Any], object]


class _View(viewsets.ModelViewSet[Any]):
    authentication_classes = ()

    def perform_update(self, serializer: Any) -> None:
        with transaction.atomic():
            serializer.save()
            Order.objects.create(reference="put", amount=1, currency="EUR")


class _PlainSerializer(serializers.ModelSerializer[Plain]):
    class Meta:
        model = Plain
        fields = ("id", "title")


class _PlainView(_View):
    queryset = Plain.objects.all()
    serializer_class = _PlainSerializer


class _Extensions(APIUpdateETAGMixin, _PlainView):
    def api_object_etag_func(self, *args: Any, **kwargs: Any) -> str:
        """The title is what is changed here."""
        rows = Plain.objects.filter(pk=kwargs["kwargs"]["pk"])
        return rows.values_list("title", flat=True).get()


class _VersionedSerializer(serializers.ModelSerializer[Versioned]):
    class Meta:
        model = Versioned
        fields = ("id", "title")


class _Ours(PreconditionMixin, _View):
    queryset = Versioned.objects.all()
    serializer_class = _VersionedSerializer
    require_preconditions = ("PUT",)


def measure(rounds: int, calls: int, races: int) -> Section:
    """Compare what a change costs, and how many of thirty win."""
    ways = _ways()
    blocks = {f"{what}, {who}": _block(*way, calls) for (what, who), way in ways.items()}
    measured = interleave(blocks, rounds)
    won = {names: max(_race(*way) for _ in range(races)) for names, way in ways.items()}
    table = Table(["", "", "ms", "× Django alone", "statements", f"effects of {THREADS} at once"])
    for (what, who), way in ways.items():
        wall = measured[f"{what}, {who}"].wall
        base = measured[f"{SAVE if what == SWAP else what}, {BARE}"].wall
        ratio = "1.00" if who == BARE else wall.over(base)
        effects = won[what, who]
        table.add(what, who, f"{wall.milliseconds:.3f}", ratio, _statements(*way), effects)
    text = TEXT.format(rounds=rounds, calls=calls, threads=THREADS, races=races)
    return Section("Conditional writes", [text, table], _targets(measured, won))


def _targets(measured: dict[str, Measured], won: dict[tuple[str, str], int]) -> list[Target]:
    save = measured[f"{SAVE}, {OURS}"].wall.over(measured[f"{SAVE}, {BARE}"].wall).value
    ours = [effects for (_, who), effects in won.items() if who == OURS]
    return [
        Target(f"a versioned save: {save:.2f} ≤ {MOST} × one without", save <= MOST),
        Target(f"of {THREADS} changes at once, one wins in every way of ours", set(ours) == {1}),
    ]


def _ways() -> dict[tuple[str, str], tuple[type[Any], Change]]:
    """What is changed by whom: the model, and a change that raises or returns ``False`` if lost."""
    return {
        (SAVE, BARE): (Plain, _save),
        (SAVE, OURS): (Versioned, _save),
        (SAVE, PEER): (PeerVersioned, _save),
        (SWAP, OURS): (Versioned, lambda row: compare_and_swap(row, title="new")),
        (MOVE, BARE): (Plain, _move_unchecked),
        (MOVE, OURS): (Versioned, lambda row: transition(row, "pending", "paid", effect=_effect)),
        (MOVE, FSM): (Plain, _pay),
        (PUT, BARE): (Plain, _putter(_PlainView)),
        (PUT, OURS): (Versioned, _putter(_Ours)),
        (PUT, EXTENSIONS): (Plain, _putter(_Extensions)),
    }


def _save(row: Any) -> None:
    row.title = "new"
    row.save()


def _effect(row: Any) -> None:
    Order.objects.create(reference=row.title, amount=1, currency="EUR")


def _move_unchecked(row: Plain) -> None:
    with transaction.atomic():
        row.state = "paid"
        row.save()
        _effect(row)


def _pay(row: Plain) -> None:
    """As its documentation says: the method, then save()."""
    with transaction.atomic():
        row.pay()
        row.save()


def _putter(view_class: type[Any]) -> Change:
    view, requests = view_class.as_view({"put": "update"}), APIRequestFactory()

    def put(row: Any) -> bool:
        etag = f'"{row.pk}.{row.version}"' if isinstance(row, Versioned) else f'"{row.title}"'
        request = requests.put("/", {"title": "new"}, format="json", headers={"If-Match": etag})
        response: Response = view(request, pk=row.pk)
        response.render()
        assert response.status_code in (200, 412), json.dumps(response.data)
        return response.status_code == 200

    return put


_numbers = count()


def _new(model: type[Any]) -> Any:
    return model.objects.create(title=f"row-{next(_numbers)}")


def _block(model: type[Any], change: Change, calls: int) -> Block:
    def block() -> Iterator[Sample]:
        for row in [_new(model) for _ in range(calls)]:
            started = time.perf_counter()
            change(row)
            yield Sample(time.perf_counter() - started)

    return block


def _statements(model: type[Any], change: Change) -> int:
    row, sent = _new(model), []
    with connection.execute_wrapper(lambda run, *args: sent.append(args[0]) or run(*args)):
        change(row)
    return len(sent)


def _race(model: type[Any], change: Change) -> int:
    """How many of the threads had an effect."""
    pk, together = _new(model).pk, threading.Barrier(THREADS)
    before = Order.objects.count()

    def contend(_: int) -> bool:
        try:
            row = model.objects.get(pk=pk)
            together.wait()
            return change(row) is not False
        except (ConcurrentModification, RecordModifiedError, TransitionNotAllowed):
            return False
        finally:
            connections.close_all()

    with ThreadPoolExecutor(THREADS) as pool:
        won = sum(pool.map(contend, range(THREADS)))
    return Order.objects.count() - before or won
