"""``manage.py settle_messages``"""

from __future__ import annotations

import getpass
from argparse import ArgumentParser
from typing import Any, Final

from django.core.management.base import BaseCommand

from ...databases import database
from ...inbox.processing import INBOX
from ...models import MessageState
from ...outbox.relay import OUTBOX
from ...queue import counted
from ...settling import discard, retry, settle_all

ACTIONS: Final = {"retry": retry, "discard": discard}


class Command(BaseCommand):
    """Settles many dead letters."""

    help = (
        "Retries or discards all dead letters of a topic or a source, or those of them whose "
        "error contains a text. Each is settled as in the admin, in a transaction of its own."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=list(ACTIONS), help="What to do to each of them.")
        chosen = parser.add_mutually_exclusive_group(required=True)
        chosen.add_argument("--topic", metavar="TOPIC", help="The topic of the outbox.")
        chosen.add_argument(
            "--source", metavar="SOURCE", help="The source of the inbox, or consumer:NAME."
        )
        parser.add_argument(
            "--error", default="", metavar="TEXT", help="Only those whose error contains this text."
        )
        parser.add_argument("--dry-run", action="store_true", help="Only say how many there are.")

    def handle(self, *args: Any, **options: Any) -> None:
        queue = OUTBOX if options["topic"] else INBOX
        place = {queue.place: options["topic"] or options["source"]}
        chosen = {**place, "error__contains": options["error"]}
        if options["dry_run"]:
            dead = queue.all(database()).filter(state=MessageState.DEAD, **chosen)
            self.stdout.write(f"Would {options['action']} {counted(dead.count())}.")
            return
        change = ACTIONS[options["action"]]
        settled, refusals = settle_all(queue.model, change, getpass.getuser(), **chosen)
        self.stdout.write(f"{counted(settled)}: {options['action']}.")
        for refusal, number in refusals.items():
            self.stdout.write(f"Left unchanged: {counted(number)}. {refusal}")
