"""What the commands for operators print."""

from __future__ import annotations

from io import StringIO

from django.core.management import CommandError, call_command


def status(*arguments: str) -> str:
    """What ``idempotency_status`` prints, and what it fails with."""
    said = StringIO()
    try:
        call_command("idempotency_status", *arguments, stdout=said)
    except CommandError as error:
        said.write(str(error))
    return said.getvalue()
