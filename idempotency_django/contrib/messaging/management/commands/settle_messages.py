"""``manage.py settle_messages``"""

from __future__ import annotations

import getpass
from argparse import ArgumentParser
from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand

from ...databases import database
from ...inbox import INBOX
from ...models import MessageState
from ...outbox.relay import OUTBOX
from ...queue import counted
from ...settling import settle


class Command(BaseCommand):
    """Settles many dead letters."""

    help = (
        "Retries or discards all dead letters of a topic or a source, or those of them whose "
        "error contains a text. Each is settled as in the admin."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "action", choices=["retry", "discard"], help="What to do to each of them."
        )
        chosen = parser.add_mutually_exclusive_group(required=True)
        chosen.add_argument("--topic", metavar="TOPIC", help="The topic of the outbox.")
        chosen.add_argument(
            "--source", metavar="SOURCE", help="The source of the inbox, or consumer:NAME."
        )
        parser.add_argument(
            "--error", default="", metavar="TEXT", help="Only those whose error contains this text."
        )

    def handle(self, *, action: str, topic: str, source: str, error: str, **_: Any) -> None:
        queue = OUTBOX if topic else INBOX
        dead = queue.all(database()).filter(
            state=MessageState.DEAD, error__contains=error, **{queue.place: topic or source}
        )
        outcomes = Counter(refusal for _, refusal in settle(dead, action, by=getpass.getuser()))
        self.stdout.write(f"{counted(outcomes.pop('', 0))}: {action}.")
        for refusal, number in outcomes.items():
            self.stdout.write(f"Left unchanged: {counted(number)}. {refusal}")
