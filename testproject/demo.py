"""``make demo``: what retries, races and crashes do to an endpoint that is protected.

Starts the reference app under gunicorn with an SQLite file of its own, sends it real requests and
counts the effects. Ends with 0 only when every response and every count is right. To see what goes
wrong without protection: ``python -m testproject.demo /api/unprotected/``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier

import httpx
from redis import Redis
from rich import box
from rich.console import Console
from rich.table import Table

from idempotency_django.contrib.messaging import StandardWebhooks
from testproject import ledger, settings
from testproject.server import ROOT, running
from tests.servers import valkey

CHARGES = "/api/charges/"
TRANSFERS = "/api/transfers/"
PUBLISHED = "/api/published/"
WEBHOOKS = "/webhooks/standard/"
UNPROTECTED = "/api/unprotected/"
JOBS = "/api/jobs/"
UNPROTECTED_JOBS = "/api/unprotectedjobs/"
WORK = "sleep-ms=3000"
REDELIVERY = "1"  # seconds
AT_ONCE = 20
LEASE = "3"  # seconds
PATIENCE = 10  # how often the client sends a request that is refused as "in progress"
NO_RESPONSE = "no response"

INTRODUCTION = (
    "Alice's program sends charges of 25.00 EUR to [bold]POST {path}[/], each with its own key in "
    "the header [bold]Idempotency-Key[/]. The reference app runs under gunicorn: two processes, "
    "SQLite. An effect is a row in its table of payments; a transfer has three: its debit, its "
    "booking in an external ledger, and its credit. A payment with a message has two: its own, "
    "and that of another process, which gets the message from the outbox."
)

ON_SQLITE = (
    "On SQLite the duplicates of a charge wait for its write lock. On PostgreSQL, MariaDB and "
    "MySQL they are refused with 409 at once, and the client sends them again."
)


@dataclass(frozen=True)
class Charge:
    """The data of one request; transfers look the same."""

    amount: int = 2500
    reference: str = field(default_factory=lambda: f"order-{uuid.uuid4()}")
    key: str = field(default_factory=lambda: str(uuid.uuid4()))


TRACED = Charge()
"""The payment whose timeline is shown: its request, its message, and what that has led to."""


@dataclass(frozen=True)
class Step:
    """The requests of a step, the expected result and the actual result."""

    sent: str
    expected_response: str
    response: str
    expected_effects: int | str
    effects: int | str

    @property
    def right(self) -> bool:
        return (self.expected_response, self.expected_effects) == (self.response, self.effects)


class Client:
    """Alice's program, and her look at what it has done."""

    def __init__(self, http: httpx.Client, path: str, ledger_url: str = "") -> None:
        self._http = http
        self._path = path
        self._ledger = ledger_url

    def send(
        self, charge: Charge, fault: str = "", patience: int = PATIENCE
    ) -> httpx.Response | None:
        """The response; ``None`` when the connection ended without one."""
        body = {"reference": charge.reference, "amount": charge.amount, "currency": "EUR"}
        headers = {
            "Authorization": "Token alice-token",
            "Idempotency-Key": f'"{charge.key}"',
            "X-Simulate": fault,
        }
        while True:
            try:
                response = self._http.post(self._path, json=body, headers=headers)
            except httpx.TransportError:
                return None
            patience -= 1
            if response.status_code != httpx.codes.CONFLICT or not patience:
                return response
            time.sleep(int(response.headers["Retry-After"]))

    def send_at_once(self, charge: Charge) -> list[httpx.Response | None]:
        """The responses to many duplicates, released together."""
        start = Barrier(AT_ONCE)

        def send() -> httpx.Response | None:
            start.wait()
            return self.send(charge)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [sent.result() for sent in [pool.submit(send) for _ in range(AT_ONCE)]]

    def effects(self, charge: Charge) -> int:
        """The number of times that the charge was made."""
        response = self._http.get("/effects/", params={"reference": charge.reference})
        return int(response.raise_for_status().json()["count"])

    def parts(self, transfer: Charge) -> str:
        """The number of times that each part of the transfer was made: debit, booking, credit."""
        asked = {"reference": transfer.reference}
        posted = self._http.get("/postings/", params=asked).raise_for_status().json()
        booked = self._http.get(f"{self._ledger}/calls", params=asked).raise_for_status().json()
        return f"{posted['debit']}+{booked['effects']}+{posted['credit']}"

    def deliver(self, asked: Charge) -> str:
        """The statuses of a webhook that its sender delivers three times, signed."""
        data = {"reference": asked.reference, "amount": asked.amount}
        body = json.dumps({"type": "order.paid", "data": data}).encode()
        signed = StandardWebhooks([settings.WEBHOOK_SECRET]).sign(body, message_id=asked.key)
        headers = {"Content-Type": "application/json", **signed}
        sent = [self._http.post(WEBHOOKS, content=body, headers=headers) for _ in range(3)]
        return ", ".join(str(response.status_code) for response in sent)

    def when_done(self, asked: Charge) -> int:
        """The number of effects, after waiting for the first one."""
        ends = time.monotonic() + PATIENCE
        while not (seen := self.effects(asked)) and time.monotonic() < ends:
            time.sleep(0.1)
        return seen

    def made_and_told(self, charge: Charge) -> str:
        """The number of payments, and of their messages that another process has handled."""
        asked = {"reference": charge.reference}
        kinds = self._http.get("/effects/", params=asked).raise_for_status().json()["kinds"]
        return f"{kinds.get('published', 0)}+{kinds.get('consumed', 0)}"

    def when_told(self, charge: Charge, expected: str) -> str:
        """The same, once it is what is expected, or has had the time to be."""
        ends = time.monotonic() + PATIENCE
        while (seen := self.made_and_told(charge)) != expected and time.monotonic() < ends:
            time.sleep(0.1)
        return seen


def said(response: httpx.Response | None) -> str:
    """A response in a few words."""
    if response is None:
        return NO_RESPONSE
    replayed = " replayed" if "Idempotent-Replayed" in response.headers else ""
    return f"{response.status_code}{replayed}"


def said_at_once(responses: list[httpx.Response | None]) -> str:
    """Many responses in a few words."""
    words = [said(response) for response in responses]
    executed, replayed = words.count("201"), words.count("201 replayed")
    failed = len(words) - executed - replayed
    return f"{executed} executed, {replayed} replayed" + (f", {failed} failed" if failed else "")


def retries(client: Client) -> Iterator[Step]:
    charge = Charge()
    first = client.send(charge)
    yield Step("A charge with a new key", "201", said(first), 1, client.effects(charge))

    again = client.send(charge)
    same = "same bytes" if first and again and first.content == again.content else "other bytes"
    response, expected = f"{said(again)}, {same}", "201 replayed, same bytes"
    yield Step("The same request again: a retry", expected, response, 1, client.effects(charge))

    other = client.send(replace(charge, amount=9900))
    yield Step("Its key again, another amount", "422", said(other), 1, client.effects(charge))


def duplicates(client: Client) -> Iterator[Step]:
    charge = Charge()
    response = said_at_once(client.send_at_once(charge))
    expected = f"1 executed, {AT_ONCE - 1} replayed"
    yield Step(f"{AT_ONCE} duplicates at once", expected, response, 1, client.effects(charge))


def crash_before_the_commit(client: Client) -> Iterator[Step]:
    charge = Charge()
    lost = client.send(charge, "kill=after-effect")
    sent = "SIGKILL to the process before its commit"
    yield Step(sent, NO_RESPONSE, said(lost), 0, client.effects(charge))
    retry = client.send(charge)
    yield Step("The retry", "201", said(retry), 1, client.effects(charge))


def crash_after_the_commit(client: Client) -> Iterator[Step]:
    charge = Charge()
    lost = client.send(charge, "kill=after-commit")
    sent = "SIGKILL to the process after its commit"
    yield Step(sent, NO_RESPONSE, said(lost), 1, client.effects(charge))
    retry = client.send(charge)
    yield Step("The retry", "201 replayed", said(retry), 1, client.effects(charge))


def crash_between_steps(client: Client) -> Iterator[Step]:
    transfer = Charge()
    lost = client.send(transfer, "kill=after-ledger")
    sent = "A transfer; SIGKILL after two of its three steps"
    yield Step(sent, NO_RESPONSE, said(lost), "1+1+0", client.parts(transfer))
    early = client.send(transfer, patience=1)
    sent = "A retry while the dead process has its lease"
    yield Step(sent, "409", said(early), "1+1+0", client.parts(transfer))
    resumed = client.send(transfer)
    sent = "A retry after that: the third step alone is left"
    yield Step(sent, "201", said(resumed), "1+1+1", client.parts(transfer))


def messages(client: Client, payment: Charge) -> Iterator[Step]:
    uncommitted = Charge()
    lost = client.send(payment, "kill=after-commit")
    sent = "A payment with a message; SIGKILL after its commit"
    yield Step(sent, NO_RESPONSE, said(lost), "1+1", client.when_told(payment, "1+1"))
    retry = client.send(payment)
    sent = "The retry: its message is not published again"
    yield Step(sent, "201 replayed", said(retry), "1+1", client.when_told(payment, "1+1"))
    lost = client.send(uncommitted, "kill=after-effect")
    sent = "Another; SIGKILL before its commit"
    yield Step(sent, NO_RESPONSE, said(lost), "0+0", client.made_and_told(uncommitted))
    retry = client.send(uncommitted)
    sent = "The retry: one payment, one message"
    yield Step(sent, "201", said(retry), "1+1", client.when_told(uncommitted, "1+1"))


def webhooks(client: Client) -> Iterator[Step]:
    asked, later = Charge(), Charge()
    response = client.deliver(asked)
    client.deliver(later)
    client.when_done(later)  # by then, the first one had every chance of a second effect
    sent = "A webhook that its sender delivers three times"
    yield Step(sent, "200, 200, 200", response, 1, client.when_done(asked))


def redeliveries(protected: Client, unprotected: Client, broker: Redis) -> Iterator[Step]:
    job, other = Charge(), Charge()
    responses = [
        protected.send(job, WORK),
        protected.send(job, WORK),
        unprotected.send(other, WORK),
    ]
    while broker.llen("celery") or broker.hlen("unacked"):
        time.sleep(0.1)
    sent = "A job of 3 s that Redis delivers each second: ours"
    yield Step(sent, "202", said(responses[0]), 1, protected.effects(job))
    sent = "The request for it again: a retry"
    yield Step(sent, "202 replayed", said(responses[1]), 1, protected.effects(job))
    sent = "To compare: with Celery's own deduplication"
    done = unprotected.effects(other)
    yield Step(sent, "202", said(responses[2]), max(done, 2), done)


def comparison(client: Client) -> Iterator[Step]:
    charge = Charge()
    response = said_at_once(client.send_at_once(charge))
    sent = f"To compare: {AT_ONCE} duplicates without protection"
    expected = f"{AT_ONCE} executed, 0 replayed"
    yield Step(sent, expected, response, AT_ONCE, client.effects(charge))


def chapters(url: str, ledger_url: str, broker: str, path: str) -> Iterator[list[Step]]:
    """Everything that is shown, in order."""
    one_request_each = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, limits=one_request_each, timeout=60) as http:
        client = Client(http, path)
        for chapter in (retries, duplicates, crash_before_the_commit, crash_after_the_commit):
            yield list(chapter(client))
        yield list(crash_between_steps(Client(http, TRANSFERS, ledger_url)))
        yield list(messages(Client(http, PUBLISHED), TRACED))
        yield list(webhooks(client))
        with Redis.from_url(broker) as queue:
            clients = Client(http, JOBS), Client(http, UNPROTECTED_JOBS)
            yield list(redeliveries(*clients, queue))
        yield list(comparison(Client(http, UNPROTECTED)))


def shown(folder: Path, path: str, timelines: list[str]) -> Iterator[list[Step]]:
    """The same, with servers that keep their data and their logs in the folder."""
    with ledger.running(folder / "ledger.log") as ledger_url, valkey() as broker:
        environment = {
            "DATABASE_URL": f"sqlite:///{folder}/demo.sqlite3",
            "REDIS_URL": "",
            "ASGI": "",
            "LEDGER_URL": ledger_url,
            "LEASE_SECONDS": LEASE,
            "BROKER_URL": broker.url,
            "REDELIVERY_SECONDS": REDELIVERY,
            "SIMULATE": "1",
            "WORKERS": "2",
        }
        with running(folder / "server.log", **environment) as url:
            yield from chapters(url, ledger_url, broker.url, path)
            timelines.append(timeline_of(TRACED, environment))


def timeline_of(charge: Charge, environment: dict[str, str]) -> str:
    """The timeline of one key, from the operator's command."""
    command = [sys.executable, "-m", "testproject.manage", "trace_idempotency", charge.key]
    settings = {"DJANGO_SETTINGS_MODULE": "testproject.settings"}  # whatever the caller's are
    return subprocess.check_output(  # noqa: S603  # nothing in it comes from outside
        command, cwd=ROOT, env={**os.environ, **settings, **environment}, text=True
    )


def table_of(told: list[list[Step]]) -> Table:
    """The steps in colours, each with what was expected and what was seen."""
    table = Table(box=box.ROUNDED)
    for heading in ("Sent", "Response\nexpected", "Response\nseen"):
        table.add_column(heading)
    for heading in ("Effects\nexpected", "Effects\nseen"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for chapter in told:
        for step in chapter:
            colour, verdict = ("green", "right") if step.right else ("bold red", "WRONG")
            table.add_row(
                step.sent,
                step.expected_response,
                f"[{colour}]{step.response}[/]",
                str(step.expected_effects),
                f"[{colour}]{step.effects}[/]",
                f"[{colour}]{verdict}[/]",
            )
        table.add_section()
    return table


def main(path: str = CHARGES) -> int:
    """Run the demo; returns the exit code."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a log has no width of its own
    console.print(INTRODUCTION.format(path=path))
    with tempfile.TemporaryDirectory() as folder, console.status("Sending …"):
        timelines: list[str] = []
        told = list(shown(Path(folder), path, timelines))
    console.print(table_of(told))
    console.print("The payment with a message, from its request to what it led to elsewhere:\n")
    console.print(*timelines, markup=False, soft_wrap=True)
    console.print(ON_SQLITE)
    wrong = [step for chapter in told for step in chapter if not step.right]
    if wrong:
        console.print(f"[bold red]{len(wrong)} of these are wrong.[/]")
        return 1
    console.print("[green]All of it is right.[/] To try it yourself: [bold]make serve[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
