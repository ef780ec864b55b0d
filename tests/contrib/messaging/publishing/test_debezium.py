"""The connector of the documentation reads the table that there is."""

from __future__ import annotations

import re

from idempotency_django.contrib.messaging import Event
from idempotency_django.contrib.messaging.models import OutboxMessage
from tests.docs.examples import ROOT

PAGE = ROOT / "docs" / "messages" / "outbox.md"


def properties() -> dict[str, str]:
    """The properties of the connector."""
    shown = re.search(r"```{code-block} properties\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    return dict(line.split("=", 1) for line in shown[1].splitlines())


def test_columns() -> None:
    """Each column that the connector names is one of the table's, and so is the table."""
    found, prefix = properties(), "transforms.outbox."
    columns = {field.column for field in OutboxMessage._meta.concrete_fields}
    named = [value for key, value in found.items() if key.startswith(f"{prefix}table.field.")]
    named.append(found[f"{prefix}route.by.field"])
    placed = found[f"{prefix}table.fields.additional.placement"].split(",")
    assert len(named) == 4
    assert {*named, *(each.split(":")[0] for each in placed)} <= columns
    assert found["table.include.list"] == f"public.{OutboxMessage._meta.db_table}"
    listed = set(re.findall(r"^- \*\*\w+:\*\* [^`]*`(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert {"message_id", "group", "topic", "is_base64", "caused_by"} == listed <= columns


def test_attributes() -> None:
    """The headers that it makes are the attributes of an event, all of those that it must have."""
    found = properties()
    placed = found["transforms.outbox.table.fields.additional.placement"].split(",")
    headers = [each.split(":")[2] for each in placed] + [found["transforms.version.header"]]
    attributes = {name.removeprefix("ce_"): "1.0" for name in headers}
    attributes["time"] = "2031-05-07T09:30:00Z"
    assert attributes.keys() >= {"id", "source", "type", "specversion"}
    event = Event.from_binary(attributes, "", b"")
    assert event.id == "1.0"
