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
from rich.console import Console

from idempotency_django.contrib.messaging import StandardWebhooks
from testproject import ledger, settings
from testproject.server import ROOT, running
from tests.support.servers import valkey

CHARGES = "/api/charges/"
TRANSFERS = "/api/transfers/"
PUBLISHED = "/api/published/"
WEBHOOKS = "/webhooks/standard/"
UNPROTECTED = "/api/unprotected/"
JOBS = "/api/jobs/"
UNPROTECTED_JOBS = "/api/unprotectedjobs/"
WORK = "sleep-ms=5000"
REDELIVERY = "2"  # seconds
AT_ONCE = 20
LEASE = "2"  # seconds
PATIENCE = 10  # how often the client sends a request that is refused as "in progress"
NO_RESPONSE = "no response"
WIDTH = 80

INTRODUCTION = """\
A payments API under gunicorn: two processes, SQLite. A program sends it charges
of 25.00 EUR, each with its own Idempotency-Key. Then things go wrong.
"""

TIMELINE = """\
What the operator sees of the payment whose process was killed after its commit:
[1] is the request, [2] its message, and [3] its handling in the other process.\
"""

WHAT_NEXT = """\
To try it yourself:

  make serve       the same API at http://127.0.0.1:8000/, with its admin
  make test        the tests, on servers of their own
  README.md        protect a view of your own in two minutes
"""


@dataclass(frozen=True)
class Charge:
    """The data of one request; transfers look the same."""

    amount: int = 2500
    reference: str = field(default_factory=lambda: f"order-{uuid.uuid4()}")
    key: str = field(default_factory=lambda: str(uuid.uuid4()))


TRACED = Charge()
"""The payment whose timeline is shown: its request, its message, and what that has led to."""


@dataclass(frozen=True)
class Scene:
    """One line of the demo.

    Attributes:
        sent: what the client sends, or what happens to it.
        response: what came back.
        expected_response: what should have come back.
        effects: what the counters show.
        expected_effects: what they should show.
    """

    sent: str
    response: str
    expected_response: str
    effects: str
    expected_effects: str

    @property
    def is_right(self) -> bool:
        return (self.response, self.effects) == (self.expected_response, self.expected_effects)

    def __str__(self) -> str:
        """In columns, within 80 characters."""
        return f"  {self.sent:40} {self.response:24} {self.effects}"


@dataclass(frozen=True)
class Chapter:
    """Scenes that belong together."""

    heading: str
    scenes: Iterator[Scene]


class Client:
    """A user's program, and its look at the effects."""

    def __init__(
        self, http: httpx.Client, path: str, ledger_url: str = "", user: str = "alice"
    ) -> None:
        self._http = http
        self._path = path
        self._ledger = ledger_url
        self._user = user

    def send(
        self, charge: Charge, fault: str = "", patience: int = PATIENCE
    ) -> httpx.Response | None:
        """The response; ``None`` when the connection ended without one."""
        body = {"reference": charge.reference, "amount": charge.amount, "currency": "EUR"}
        headers = {
            "Authorization": f"Token {self._user}-token",
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

    def charges(self, charge: Charge) -> str:
        """The number of charges that were made, in words."""
        return charges(self.effects(charge))

    def parts(self, transfer: Charge) -> str:
        """The number of times that each part of the transfer was made: debit, booking, credit."""
        params = {"reference": transfer.reference}
        posted = self._http.get("/postings/", params=params).raise_for_status().json()
        booked = self._http.get(f"{self._ledger}/calls", params=params).raise_for_status().json()
        return f"{posted['debit']} + {booked['effects']} + {posted['credit']}"

    def deliver(self, order: Charge) -> str:
        """The statuses of a webhook that its sender delivers three times, signed."""
        data = {"reference": order.reference, "amount": order.amount}
        body = json.dumps({"type": "order.paid", "data": data}).encode()
        signed = StandardWebhooks([settings.WEBHOOK_SECRET]).sign(body, message_id=order.key)
        headers = {"Content-Type": "application/json", **signed}
        sent = [self._http.post(WEBHOOKS, content=body, headers=headers) for _ in range(3)]
        return ", ".join(str(response.status_code) for response in sent)

    def wait_for_effects(self, order: Charge) -> int:
        """The number of effects, after waiting for the first one."""
        deadline = time.monotonic() + PATIENCE
        while not (seen := self.effects(order)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return seen

    def payments_and_messages(self, charge: Charge) -> str:
        """The number of payments, and of their messages that another process has handled."""
        params = {"reference": charge.reference}
        kinds = self._http.get("/effects/", params=params).raise_for_status().json()["kinds"]
        return f"{kinds.get('published', 0)} + {kinds.get('consumed', 0)}"

    def wait_for_messages(self, charge: Charge, expected: str) -> str:
        """:meth:`payments_and_messages`, once it is the expected one or has had time to be."""
        deadline = time.monotonic() + PATIENCE
        while (seen := self.payments_and_messages(charge)) != expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return seen


def charges(count: int) -> str:
    """A number of charges in words."""
    return "1 charge" if count == 1 else f"{count} charges"


def summary(response: httpx.Response | None) -> str:
    """A response in a few words."""
    if response is None:
        return NO_RESPONSE
    replayed = " replayed" if "Idempotent-Replayed" in response.headers else ""
    return f"{response.status_code}{replayed}"


def summary_of_many(responses: list[httpx.Response | None]) -> str:
    """Many responses in a few words."""
    words = [summary(response).replace("201 replayed", "replayed") for response in responses]
    return ", ".join(f"{words.count(word)} x {word}" for word in sorted(set(words)))


def duplicates(protected: Client, unprotected: Client) -> Iterator[Scene]:
    unprotected_charge, charge = Charge(), Charge()
    yield Scene(
        "without protection",
        summary_of_many(unprotected.send_at_once(unprotected_charge)),
        f"{AT_ONCE} x 201",
        unprotected.charges(unprotected_charge),
        charges(AT_ONCE),
    )
    yield Scene(
        "with protection",
        summary_of_many(protected.send_at_once(charge)),
        f"1 x 201, {AT_ONCE - 1} x replayed",
        protected.charges(charge),
        charges(1),
    )


def retries(client: Client, other_user: Client) -> Iterator[Scene]:
    charge = Charge()
    first = client.send(charge)
    yield Scene(
        "a charge with a new key", summary(first), "201", client.charges(charge), charges(1)
    )

    again = client.send(charge)
    same = "same bytes" if first and again and first.content == again.content else "other bytes"
    yield Scene(
        "the same request again",
        f"{summary(again)}, {same}",
        "201 replayed, same bytes",
        client.charges(charge),
        charges(1),
    )

    other_amount = client.send(replace(charge, amount=9900))
    yield Scene(
        "its key with another amount",
        summary(other_amount),
        "422",
        client.charges(charge),
        charges(1),
    )

    others = replace(charge, reference=Charge().reference)
    response = other_user.send(others)
    yield Scene(
        "its key from another user, a new charge",
        summary(response),
        "201",
        other_user.charges(others),
        charges(1),
    )


def crashes(client: Client) -> Iterator[Scene]:
    charge = Charge()
    lost = client.send(charge, "kill=after-effect")
    effects = client.charges(charge)
    yield Scene("killed before its commit", summary(lost), NO_RESPONSE, effects, charges(0))
    retry = client.send(charge)
    yield Scene("  the retry", summary(retry), "201", client.charges(charge), charges(1))

    charge = Charge()
    lost = client.send(charge, "kill=after-commit")
    effects = client.charges(charge)
    yield Scene("killed after its commit", summary(lost), NO_RESPONSE, effects, charges(1))
    retry = client.send(charge)
    yield Scene("  the retry", summary(retry), "201 replayed", client.charges(charge), charges(1))


def steps(client: Client) -> Iterator[Scene]:
    transfer = Charge()
    lost = client.send(transfer, "kill=after-ledger")
    parts = client.parts(transfer)
    yield Scene("killed after the second step", summary(lost), NO_RESPONSE, parts, "1 + 1 + 0")
    early = client.send(transfer, patience=1)
    parts = client.parts(transfer)
    yield Scene("  a retry before its lease has ended", summary(early), "409", parts, "1 + 1 + 0")
    resumed = client.send(transfer)
    parts = client.parts(transfer)
    yield Scene("  a retry after that", summary(resumed), "201", parts, "1 + 1 + 1")


def messages(client: Client, payment: Charge) -> Iterator[Scene]:
    lost = client.send(payment, "kill=after-commit")
    effects = client.wait_for_messages(payment, "1 + 1")
    yield Scene("killed after its commit", summary(lost), NO_RESPONSE, effects, "1 + 1")
    retry = client.send(payment)
    effects = client.wait_for_messages(payment, "1 + 1")
    yield Scene("  the retry", summary(retry), "201 replayed", effects, "1 + 1")

    uncommitted = Charge()
    lost = client.send(uncommitted, "kill=after-effect")
    effects = client.payments_and_messages(uncommitted)
    yield Scene("killed before its commit", summary(lost), NO_RESPONSE, effects, "0 + 0")
    retry = client.send(uncommitted)
    effects = client.wait_for_messages(uncommitted, "1 + 1")
    yield Scene("  the retry", summary(retry), "201", effects, "1 + 1")


def webhooks(client: Client) -> Iterator[Scene]:
    order, later = Charge(), Charge()
    response = client.deliver(order)
    client.deliver(later)
    client.wait_for_effects(later)  # by then, the first one had every chance of a second effect
    effects = charges(client.wait_for_effects(order))
    yield Scene("delivered three times", response, "200, 200, 200", effects, charges(1))


def redeliveries(protected: Client, unprotected: Client, broker: Redis) -> Iterator[Scene]:
    job, other = Charge(), Charge()
    responses = [
        unprotected.send(other, WORK),
        protected.send(job, WORK),
        protected.send(job, WORK),
    ]
    while broker.llen("celery") or broker.hlen("unacked"):
        time.sleep(0.1)
    count = unprotected.effects(other)
    expected = charges(max(count, 2))
    sent = "with Celery's own deduplication"
    yield Scene(sent, summary(responses[0]), "202", charges(count), expected)
    sent = "with IdempotentTask"
    yield Scene(sent, summary(responses[1]), "202", protected.charges(job), charges(1))
    sent = "  its request again"
    yield Scene(sent, summary(responses[2]), "202 replayed", protected.charges(job), charges(1))


def chapters(url: str, ledger_url: str, broker: str, path: str) -> Iterator[Chapter]:
    """Everything that is shown, in order."""
    one_request_each = httpx.Limits(max_keepalive_connections=0)
    with (
        httpx.Client(base_url=url, limits=one_request_each, timeout=60) as http,
        Redis.from_url(broker) as queue,
    ):
        client, bob = Client(http, path), Client(http, path, user="bob")
        unprotected = Client(http, UNPROTECTED)
        yield Chapter(
            f"{AT_ONCE} duplicates of a charge, sent at once", duplicates(client, unprotected)
        )
        yield Chapter("Retries", retries(client, bob))
        yield Chapter("A process is killed while it charges", crashes(client))
        yield Chapter(
            "A transfer: debit + booking at a provider + credit",
            steps(Client(http, TRANSFERS, ledger_url)),
        )
        yield Chapter(
            "A payment + its message, handled in another process",
            messages(Client(http, PUBLISHED), TRACED),
        )
        yield Chapter("A signed webhook", webhooks(client))
        yield Chapter(
            "A Celery task of 5 s, which the broker delivers every 2 s",
            redeliveries(Client(http, JOBS), Client(http, UNPROTECTED_JOBS), queue),
        )


def show(console: Console, folder: Path, path: str) -> int:
    """Run the servers, which keep their data and logs in the folder, and print each scene as it
    happens; returns how many are wrong.
    """
    wrong = 0
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
            for chapter in chapters(url, ledger_url, broker.url, path):
                console.print(f"[bold]{chapter.heading}[/]")
                for scene in chapter.scenes:
                    print_scene(console, scene)
                    wrong += not scene.is_right
                console.print()
            console.print(TIMELINE, style="bold", markup=False)
            console.print(timeline_of(TRACED, environment), markup=False, no_wrap=True)
    return wrong


def print_scene(console: Console, scene: Scene) -> None:
    """One line; another one says what was expected where it differs."""
    console.print(str(scene), style="" if scene.is_right else "bold red", markup=False)
    if not scene.is_right:
        expected = f"{scene.expected_response:24} {scene.expected_effects}"
        console.print(f"  {'WRONG; expected:':40} {expected}", style="bold red", markup=False)


def timeline_of(charge: Charge, environment: dict[str, str]) -> str:
    """The timeline of one key, from the operator's command, without its list of causes."""
    module = "testproject.manage"
    command = [sys.executable, "-m", module, "trace_idempotency", charge.key, "--skip-checks"]
    settings = {"DJANGO_SETTINGS_MODULE": "testproject.settings"}  # not the caller's
    written = subprocess.check_output(  # noqa: S603  # nothing in it comes from outside
        command, cwd=ROOT, env={**os.environ, **settings, **environment}, text=True
    )
    return written.partition("Timeline\n")[2]


def main(path: str = CHARGES) -> int:
    """Run the demo; returns the exit code."""
    console = Console(highlight=False, width=WIDTH)
    console.print(INTRODUCTION)
    with tempfile.TemporaryDirectory() as folder:
        wrong = show(console, Path(folder), path)
    if wrong:
        console.print(f"[bold red]{wrong} of these are wrong.[/]")
        return 1
    console.print(f"[green]Everything came out as expected.[/] {WHAT_NEXT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
