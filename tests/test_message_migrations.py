"""The migrations of the app of messaging, with the rows of those who used it before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.parametrize("using", settings.ALIASES.values(), ids=list(settings.ALIASES)),
    pytest.mark.driver,
]

APP = "idempotency_messaging"
INBOX = {
    # state before: state, whether it must be accepted, group, error
    "pending": ("pending", False, "g", "it failed"),
    "handled": ("done", False, "g", ""),
    "ignored": ("discarded", False, "g", "There is no handler for its type."),
    "held": ("dead", True, "", "There is another message with this id or this body. Accept it if"),
    "parked": ("dead", False, "g", "it failed"),
}
OUTBOX = {
    "pending": ("pending", "it failed"),
    "sent": ("done", ""),
    "blocked": ("dead", "it failed"),
    "skipped": ("discarded", "it failed"),
    "left": ("external", ""),
}


def migrate(using: str, name: str) -> Any:
    """Migrate the app to this migration; the models as they are then."""
    executor = MigrationExecutor(connections[using])
    executor.migrate([(APP, name)])
    return MigrationExecutor(connections[using]).loader.project_state([(APP, name)]).apps


@pytest.fixture
def before(using: str) -> Iterator[Any]:
    """The models as they were before the states had one vocabulary."""
    yield migrate(using, "0005_queue")
    [latest] = (
        name
        for app, name in MigrationExecutor(connections[using]).loader.graph.leaf_nodes()
        if app == APP
    )
    migrate(using, latest)


def rows(apps: Any, name: str, using: str) -> Any:
    return apps.get_model(APP, name)._base_manager.using(using)


def indexes(using: str, table: str) -> set[str]:
    with connections[using].cursor() as cursor:
        found = connections[using].introspection.get_constraints(cursor, f"{APP}_{table}")
    return {name for name in found if "stopped" in name or "dead" in name}


def test_states(using: str, before: Any) -> None:
    """Messages of each old state have the new one, and say why; the way back restores them."""
    now = timezone.now()
    for state, (_, _, _, error) in INBOX.items():
        rows(before, "InboxMessage", using).create(
            source="s",
            message_id=state,
            state=state,
            group="g",
            body=b"{}",
            error=error if error == "it failed" else "",
            received_at=now,
        )
    for state, (_, error) in OUTBOX.items():
        rows(before, "OutboxMessage", using).create(
            message_id=state,
            topic="t",
            state=state,
            type="e",
            payload="1",
            error=error,
            created_at=now,
        )

    after = migrate(using, "0006_states")

    for message in rows(after, "InboxMessage", using).all():
        state, suspect, group, error = INBOX[message.message_id]
        assert (message.state, message.is_suspect, message.group) == (state, suspect, group)
        assert message.error.startswith(error)
        assert bool(message.error) == bool(error)
    told = rows(after, "OutboxMessage", using).values_list("message_id", "state", "error")
    assert {name: tuple(rest) for name, *rest in told} == OUTBOX
    assert indexes(using, "inboxmessage") == {"idempotency_inbox_dead_idx"}
    assert indexes(using, "outboxmessage") == {"idempotency_outbox_dead_idx"}

    again = migrate(using, "0005_queue")

    for name, states in (("InboxMessage", INBOX), ("OutboxMessage", OUTBOX)):
        names = rows(again, name, using).values_list("message_id", "state")
        assert dict(names) == {state: state for state in states}
    assert indexes(using, "inboxmessage") == {"idempotency_inbox_stopped_idx"}
    assert indexes(using, "outboxmessage") == {"idempotency_outbox_stopped_idx"}


def test_texts(using: str, before: Any) -> None:
    """A dead letter that had no error says that its attempts were used up."""
    rows(before, "InboxMessage", using).create(
        source="s", message_id="m", state="parked", body=b"", received_at=timezone.now()
    )
    after = migrate(using, "0006_states")
    assert rows(after, "InboxMessage", using).get().error == "Its attempts were used up."
