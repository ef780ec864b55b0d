"""What the harness is made of, in this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.http import HttpResponse
from django.utils import timezone

from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing.chaos import (
    Boundaries,
    Child,
    Report,
    Service,
    Strike,
    Trial,
    chaos,
    crash_point,
    end_waits,
    execute,
    outcome,
    shortened,
    stuck,
    validate_databases,
)
from tests.chaos import handlers
from tests.chaos.handlers import effects, message
from tests.models import Effect

committing = pytest.mark.django_db(transaction=True)


def write(reference: str = "a") -> None:
    """An effect in a transaction."""
    with transaction.atomic():
        Effect.objects.create(reference=reference)


class TestBoundaries:
    @committing
    def test_what_is_sent(self) -> None:
        """There is a boundary before each statement, each commit and each rollback."""
        boundaries = Boundaries()
        connection.close()
        with boundaries.observed():
            write()
            with transaction.atomic():
                Effect.objects.all().delete()
                transaction.set_rollback(True)
        words = [what.split()[0] for what in boundaries.passed]
        assert [word for word in words if word != "BEGIN"] == [
            *("CONNECT", "INSERT", "COMMIT"),
            *("DELETE", "ROLLBACK"),
        ]
        write()
        assert len(boundaries.passed) == len(words)

    def test_heartbeat(self) -> None:
        """Whatever renews leases passes none: nobody knows when it does."""
        boundaries = Boundaries()
        thread = threading.Thread(
            target=boundaries.before, args=["UPDATE"], name="idempotency-heartbeat-default"
        )
        thread.start()
        thread.join()
        assert boundaries.passed == []

    @pytest.mark.parametrize(
        ("how", "sent", "lost"),
        [
            ("kill", [signal.SIGKILL], False),
            ("pause", [signal.SIGSTOP], False),
            ("lose", [], True),
        ],
    )
    def test_strike(
        self, how: str, sent: list[int], lost: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process sends itself the signal at its boundary, and first says where it is."""
        done: list[object] = []
        monkeypatch.setattr(os, "kill", lambda pid, number: done.append(number))
        boundaries = Boundaries(Strike(how, 1), done.append)
        assert [boundaries.before(what) for what in "abc"] == [False, lost, False]
        assert done == ["b", *sent]

    def test_crash_point(self) -> None:
        """A crash point is a boundary, and outside of chaos it is nothing."""
        boundaries = Boundaries()
        with boundaries.observed():
            crash_point("the upload")
        crash_point("the upload")
        assert boundaries.passed == ["the upload"]

    @pytest.mark.parametrize(
        ("sql", "shown"),
        [
            ('SELECT\n "a", "b" FROM "c"', "SELECT … FROM c"),
            ("SELECT GET_LOCK(%(lock)s, 0)", "SELECT GET_LOCK(%(lock)s, 0)"),
            ("INSERT INTO `a` (`b`) VALUES (%s)", "INSERT INTO a (…)"),
            ("BEGIN; INSERT OR IGNORE INTO a(b) SELECT 1", "BEGIN; INSERT OR IGNORE INTO a (…)"),
            ("UPDATE " + "a" * 100, "UPDATE " + "a" * 52 + "…"),
        ],
    )
    def test_shortened(self, sql: str, shown: str) -> None:
        """A statement is shown on one line, without quotes and columns, as far as there is room."""
        assert shortened(sql) == shown


class TestService:
    def test_keys(self) -> None:
        """It does something once per key, and each time without one."""
        service = Service("provider")
        assert service.call(17, key="k") == service.call(17, key="k") == "provider-1"
        assert service.effects(17) == 1
        assert service.call(17) != service.call(17)
        assert (service.effects(17), service.effects("18")) == (3, 0)
        service.forget()
        assert service.effects(17) == 0

    def test_lost_answer(self) -> None:
        """When its answer is lost, it is done."""
        service = Service("provider")
        with (
            Boundaries(Strike("lose", 0)).observed(),
            pytest.raises(TimeoutError, match="provider"),
        ):
            service.call("a")
        assert service.effects("a") == 1

    def test_gone_with_it(self) -> None:
        """It leaves no file."""
        service = Service()
        path: Path = service._path
        assert path.exists()
        del service
        assert not path.parent.exists()


def ended(call: Callable[[], object]) -> str:
    """Why a delivery in a process of its own is not acknowledged."""
    child = Child(call)
    assert child.wait()
    return child.ended.error


class TestDelivery:
    @committing
    def test_acknowledged(self) -> None:
        """A delivery that returns is acknowledged, after its last boundary."""
        said: dict[str, object] = {}
        execute(write, None, lambda **more: said.update(more))
        assert said["error"] == ""
        assert said["passed"][-1] == "the acknowledgement"  # type: ignore[index]

    @committing
    def test_lost_commit(self) -> None:
        """When the answer to a COMMIT is lost, it is done, and the handler has an error."""
        connection.close()
        boundaries = Boundaries()
        with boundaries.observed():
            write("b")
        connection.close()
        said: dict[str, object] = {}
        strike = Strike("lose", boundaries.passed.index("COMMIT"))
        execute(write, strike, lambda **more: said.update(more))
        assert said["struck"] == "COMMIT"
        assert "OperationalError: The connection was lost" in str(said["error"])
        assert effects("a") == 1

    @committing
    def test_failed(self) -> None:
        """One that raises is not, and says why."""
        said: dict[str, object] = {}
        execute(lambda: 1 / 0, None, lambda **more: said.update(more))
        assert said == {"error": "ZeroDivisionError: division by zero", "passed": []}

    @pytest.mark.parametrize(("status", "error"), [(201, ""), (409, "HTTP 409"), (503, "HTTP 503")])
    def test_responses(self, status: int, error: str) -> None:
        """A view acknowledges by its status."""
        assert outcome(lambda: HttpResponse(status=status)) == error

    @committing
    def test_says_nothing(self) -> None:
        """A process that ends by itself in the middle is reported."""
        assert ended(lambda: os._exit(0)) == "its process did not say how it ended"
        assert ended(partial(signal.raise_signal, signal.SIGTERM)) == (
            "its process ended with SIGTERM"
        )
        assert "60 seconds" in ended(lambda: signal.raise_signal(signal.SIGALRM))

    @committing
    def test_pause(self) -> None:
        """A paused process goes on when it is resumed, and is killed when it is not needed."""
        child = Child(write, Strike("pause", 0))
        assert child.wait_for_pause()
        assert not child.wait(0)
        child.resume()
        assert child.wait()
        assert not child.ended.error
        other = Child(write, Strike("pause", 0))
        assert other.wait_for_pause()
        other.close()
        assert other.ended.error == "its process ended with SIGKILL"
        assert Effect.objects.count() == 1

    @committing
    def test_boundary_that_does_not_come(self) -> None:
        """A process that never comes to the boundary at which it is to be paused just ends."""
        assert not Child(write, Strike("pause", 99)).wait_for_pause()


class TestWaits:
    @committing
    def test_leases(self) -> None:
        """A record whose lease is ended can be taken over at once."""

        def take(execution: object) -> None:
            assert stuck() == {"record in progress": 1}
            assert end_waits() == 1
            assert end_waits() == 0
            assert IdempotencyKey.objects.all().interrupted().count() == 1

        policy = Policy(mode="leased", lease=timedelta(hours=1))
        idempotent_call(take, key="k", scope="s", policy=policy)
        assert stuck() - stuck() == {}

    @committing
    def test_messages(self) -> None:
        """A message that waits is due."""
        later = timezone.now() + timedelta(hours=1)
        InboxMessage.objects.create(
            source="s", message_id="m", body=b"", received_at=later, process_after=later
        )
        assert stuck() == {"inbox message pending": 1}
        assert end_waits() == 1
        assert end_waits() == 0


def a_trial(**changes: object) -> Trial:
    """One in which all went well."""
    given = {
        "number": 7,
        "what": "killed before COMMIT",
        "message": "m",
        "deliveries": 2,
        "kills": 1,
        "effects": 1,
        "expected": 1,
    }
    return Trial(**(given | changes))  # type: ignore[arg-type]


class TestReport:
    def test_table(self) -> None:
        """Each message has a line, and the last line says how to see a failure again."""
        report = Report(
            ["CONNECT", "COMMIT"],
            [a_trial(), a_trial(number=8, effects={"entries": 1, "paid": 2}, stuck={"held": 1})],
            seed=5,
        )
        assert str(report).splitlines() == [
            "trial  what happened         deliveries            effects",
            "    7  killed before COMMIT           2                  1",
            "    8  killed before COMMIT           2  entries 1, paid 2  ✗ expected 1; 1 held",
            "",
            str(report).splitlines()[-1],
        ]
        assert str(report).endswith(
            "\n2 boundaries, 2 messages, 4 deliveries, 2 kills, seed 5: 1 not as expected. "
            "To repeat one, run chaos(…, only=8, seed=5)."
        )
        assert report.effects == {1, 2}
        with pytest.raises(AssertionError, match="only=8"):
            report.assert_passed()

    def test_passed(self) -> None:
        """A report passes if each message is as expected."""
        report = Report([], [a_trial(effects={"a": 2}, expected={"a": 2})], seed=0)
        report.assert_passed()
        assert str(report).endswith("seed 0: all as expected")

    def test_empty(self) -> None:
        """No message is no success."""
        assert not Report([], [], seed=0).passed

    def test_never_acknowledged(self) -> None:
        """A message that nobody acknowledged is a failure, whatever its effects."""
        assert a_trial(error="Oops").failure == "never acknowledged: Oops"


class TestChoice:
    @committing
    def test_only(self) -> None:
        """One trial can be made again by its number, beside the undisturbed delivery."""
        report = chaos(handlers.remembers, message, effects, only=3)
        assert [trial.number for trial in report.trials] == [0, 3]

    @committing
    def test_unknown_number(self) -> None:
        """A number that there is no trial of is refused."""
        with pytest.raises(ValueError, match="no trial 99"):
            chaos(lambda number: None, int, lambda number: 0, only=99)

    @committing
    def test_limit(self) -> None:
        """A few trials are chosen by the seed."""

        def chosen(seed: int) -> list[int]:
            report = chaos(
                lambda number: write(str(number)), int, lambda number: 0, limit=2, seed=seed
            )
            return [trial.number for trial in report.trials]

        first = chosen(1)
        assert len(first) == 3
        assert chosen(1) == first

    @committing
    def test_fails_by_itself(self) -> None:
        """A handler that fails undisturbed is not disturbed."""
        report = chaos(lambda number: 1 / 0, int, lambda number: 0)
        [trial] = report.trials
        assert trial.error == "ZeroDivisionError: division by zero"

    @committing
    def test_several_kills(self) -> None:
        """Further deliveries are killed, too, at random boundaries."""
        report = chaos(
            lambda number: write(str(number)),
            int,
            lambda number: Effect.objects.filter(reference=str(number)).count() > 0,
            disturbances=["kill"],
            kills=3,
        )
        assert report.kills == 3 * len(report.boundaries)
        assert report.passed

    @committing
    def test_recover(self, tmp_path: Path) -> None:
        """What a project has to do before a redelivery is done."""
        lock = tmp_path / "lock"

        def deliver(number: int) -> None:
            lock.touch(exist_ok=False)
            write(str(number))
            lock.unlink()

        report = chaos(
            deliver,
            int,
            lambda number: min(effects(str(number)), 1),
            disturbances=["kill"],
            recover=lambda: lock.unlink(missing_ok=True),
        )
        report.assert_passed()

    @committing
    def test_coroutine_function(self) -> None:
        """An async handler is delivered to in an event loop."""

        async def deliver(reference: str) -> None:
            await Effect.objects.acreate(reference=reference)

        report = chaos(deliver, message, effects, disturbances=[])
        assert report.effects == {2}  # it was delivered twice


class TestTrials:
    @committing
    def test_storm(self) -> None:
        """Each of several processes delivers all messages, in an order of its own."""

        def deliver(reference: str) -> None:
            Effect.objects.create(reference=f"{os.getpid()} {reference}")

        def count(reference: str) -> int:
            return 0

        chaos(deliver, message, count, expected=0, disturbances=["storm"]).assert_passed()
        orders: dict[str, list[str]] = {}
        for effect in Effect.objects.order_by("pk"):
            process, reference = effect.reference.split()
            orders.setdefault(process, []).append(reference)
        storms = [order for order in orders.values() if len(order) > 1]
        assert [set(order) for order in storms] == [set(storms[0])] * 3
        assert len(storms[0]) == 6
        assert len({tuple(order) for order in storms}) > 1

    @committing
    @pytest.mark.parametrize("disturbance", ["kill", "pause"])
    def test_boundary_that_is_gone(self, disturbance: str) -> None:
        """A delivery that does not come to its boundary is none that was disturbed, and says so."""

        def deliver(number: int) -> None:
            write(str(number))
            for _ in range(3 if number < 2 else 0):  # where the boundaries are counted
                crash_point("here")

        report = chaos(
            deliver,
            int,
            lambda number: min(effects(str(number)), 1),
            disturbances=[disturbance],
        )
        report.assert_passed()
        missed = [trial for trial in report.trials if "that it did not come to" in trial.what]
        assert len(missed) == 3
        assert report.kills == (len(report.boundaries) - 3 if disturbance == "kill" else 0)

    @committing
    def test_stuck(self) -> None:
        """What a message leaves in the tables of the package is reported for it."""
        policy = Policy(mode="leased", on_interrupted="hold")

        def deliver(reference: str) -> None:
            idempotent_call(
                lambda execution: write(reference), key=reference, scope="s", policy=policy
            )

        report = chaos(deliver, message, effects, disturbances=["kill"], attempts=1)
        failures = {trial.failure.rpartition("; ")[2] for trial in report.failures}
        assert failures == {"1 record held"}
        assert report.effects == {0, 1}


class TestRefusals:
    @committing
    def test_same_message(self) -> None:
        """A message that is not new would be handled already, and show nothing."""
        with pytest.raises(ValueError, match="before its first delivery: 2"):
            chaos(write, lambda number: "same", effects)

    @committing
    @pytest.mark.parametrize("none", [(0, 0), [], None, {"paid": None}, "0", 1.0])
    def test_effects_that_are_no_count(self, none: Any) -> None:
        """What is neither a number nor a dict of numbers is refused, not taken for effects."""
        with pytest.raises(TypeError, match=r"effects\(\) returned .*, which is not a count"):
            chaos(write, message, lambda reference: none, expected=0)
        with pytest.raises(TypeError, match=r"expected= is .*, which is not a count"):
            chaos(write, message, effects, expected=none)
        assert not Effect.objects.exists()

    @pytest.mark.django_db
    def test_transaction(self) -> None:
        """Where nothing is committed, the processes would see nothing."""
        with pytest.raises(ImproperlyConfigured, match="transaction=True"):
            validate_databases("the processes")

    @committing
    def test_in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same is true of a database in memory."""
        monkeypatch.setattr(connection, "is_in_memory_db", lambda: True, raising=False)
        with pytest.raises(ImproperlyConfigured, match=r"test\.sqlite3"):
            validate_databases("the processes")

    def test_without_fork(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Windows has no fork, and the error says so."""
        monkeypatch.delattr(os, "fork")
        with pytest.raises(ImproperlyConfigured, match="Linux or macOS"):
            chaos(lambda number: None, int, lambda number: 0)

    def test_unknown_disturbance(self) -> None:
        """A misspelt disturbance is refused, with the ones there are."""
        with pytest.raises(ValueError, match=r"'kil'.*kill, pause, lose, storm"):
            chaos(lambda number: None, int, lambda number: 0, disturbances=["kil"])
