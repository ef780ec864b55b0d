"""``manage.py settle_messages``"""

from __future__ import annotations

import getpass
from argparse import ArgumentParser
from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand

from ...databases import database
from ...inbox.processing import INBOX
from ...models import MessageState
from ...outbox.relay import OUTBOX
from ...queue import counted
from ...settling import settle_all


class Command(BaseCommand):
    """Settles many dead letters."""

    help = (
        "Retries or discards all dead letters of a topic or a source, or those of them whose "
        "error contains a text. Each is settled as in the admin, in a transaction of its own."
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
        parser.add_argument("--dry-run", action="store_true", help="Only say how many there are.")

    def handle(self, *, action: str, error: str, **options: Any) -> None:
        queue = OUTBOX if options["topic"] else INBOX
        place = {queue.place: options["topic"] or options["source"]}
        dead = queue.all(database()).filter(state=MessageState.DEAD, **place)
        chosen = dead.filter(error__contains=error)
        if options["dry_run"]:
            self.stdout.write(f"Would {action} {counted(chosen.count())}.")
            return
        outcomes = Counter(text for _, text in settle_all(chosen, action, by=getpass.getuser()))
        self.stdout.write(f"{counted(outcomes.pop('', 0))}: {action}.")
        for refusal, number in outcomes.items():
            self.stdout.write(f"Left unchanged: {counted(number)}. {refusal}")
