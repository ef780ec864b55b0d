"""``manage.py relay_outbox``"""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import closing
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import number, stop_on_signals
from ...outbox.relay import POLL, Relay, run_relay
from ...queue import counted


class Command(BaseCommand):
    """Relays from a terminal, cron or a supervisor."""

    help = (
        "Sends the messages of the outbox as they are committed. On SIGTERM, it finishes the "
        "current batch and exits. Several processes can run."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="Exit as soon as nothing is due, for cron."
        )
        parser.add_argument(
            "--topic",
            action="append",
            default=[],
            metavar="TOPIC",
            help="Send only this topic. Can be repeated.",
        )
        parser.add_argument(
            "--poll",
            type=number(float),
            default=POLL.total_seconds(),
            metavar="SECONDS",
            help="The polling interval when nothing is due (default: 1).",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *, once: bool, topic: list[str], **options: Any) -> None:
        try:
            relay = Relay(topic)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        say = self.stdout.write if options["verbosity"] else str
        with closing(relay), stop_on_signals() as stop:
            if once:
                say(_outcome(relay.drain(stop), relay))
            else:
                say(f"The relay sends {', '.join(relay.names)}. It ends on SIGTERM.")
                poll = timedelta(seconds=options["poll"])
                run_relay(stop, relay, poll=poll, health=options["health"])


def _outcome(tried: int, relay: Relay) -> str:
    """The summary of the due messages."""
    sentences = []
    if sent := tried - relay.refused:
        sentences.append(f"Sent {counted(sent)}.")
    if relay.refused:
        sentences.append(f"Not sent: {counted(relay.refused)}. See the log for the reason.")
    if relay.unreachable:
        sentences.append(
            f"{', '.join(relay.unreachable)} cannot be sent now; see the log for the reason. No "
            "message is lost. Run this again."
        )
    return " ".join(sentences) or "Nothing was due."
