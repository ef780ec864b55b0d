"""``manage.py trace_idempotency``: what it prints, and how it says that there is nothing."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from idempotency_django.stores.records import reference
from tests.contrib.timeline.messages import named, published
from tests.support.factories import ago, copies, record, step
from tests.support.outside import ROOT, environment

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}(?: [A-Z]+)? *"


def printed(*arguments: str) -> str:
    written = io.StringIO()
    call_command("trace_idempotency", *arguments, stdout=written)
    return written.getvalue()


def a_chain() -> Any:
    """A request, what it published, and the record of its consumer, which has a step."""
    request = record(key="order-17", operation="POST /orders/", created_at=ago(minutes=5))
    message = published(message_id="m-1", caused_by=named(request))
    handled = record(
        key="m-1",
        scope="consumer:billing:/orders",
        operation="billing order.paid",
        created_at=ago(minutes=1),
        caused_by=named(message),
    )
    step(handled, name="charge")
    return request, message, handled


def test_text() -> None:
    """It prints who has caused what, and what happened in order, with the time of each."""
    a_chain()
    causes, timeline = printed("order-17").split("\n\n")
    assert causes.splitlines() == [
        "Causes",
        "* [1] POST /orders/ (record, completed): order-17  user:1|POST /api/charges/",
        "  [2]   order.paid to orders (outbox message, done): m-1  outbox:orders",
        "  [3]     billing order.paid (record, completed): m-1  consumer:billing:/orders",
    ]
    heading, *lines = timeline.splitlines()
    assert heading == "Timeline"
    told = [re.fullmatch(rf"  {TIME}  \[(\d)\] (.+)", line) for line in lines]
    assert [(found[1], found[2]) for found in told if found] == [
        ("1", "created"),
        ("1", "completed"),
        ("2", "published to the outbox"),
        ("2", "done"),
        ("3", "created"),
        ("3", "step charge, by attempt 1"),
        ("3", "completed"),
        ("1", "expires"),
        ("3", "expires"),
        ("1", "may be purged"),
        ("3", "may be purged"),
    ]
    assert len(lines) == len(told)


def test_gap_and_more() -> None:
    """It says what is missing, and that there is more than it prints."""
    gone = reference("gone", "a scope")
    copies(300, record(key="key-1", caused_by=gone))
    told = printed("key-1")
    assert "  [  1] purged, rolled back or elsewhere: gone a scope\n" in told
    assert "Only 200 are listed." in told


def test_unknown() -> None:
    """Of what is not there, it says so and what may have become of it."""
    record(key="key-1", scope="here")
    with pytest.raises(CommandError, match=r"no message has the key or id 'key-2'\. It may"):
        printed("key-2")
    with pytest.raises(CommandError, match="has the key or id ''"):
        printed("")


def test_in_several_chains() -> None:
    """If a key is in several chains, all are printed."""
    record(key="key-1", scope="here")
    record(key="key-1", scope="there")
    assert printed("key-1").count("Causes") == 2


WITHOUT = """
from tests.support.outside_settings import *

ROOT_URLCONF = "without_messaging"
urlpatterns = []
INSTALLED_APPS = [
    app for app in INSTALLED_APPS
    if app not in ("idempotency_django.contrib.messaging", "django.contrib.admin", "tests")
]
"""


def test_without_the_app(tmp_path: Any) -> None:
    """Without messaging and the admin, it prints the chain of the records."""
    root = record(key="order-17")
    record(key="child", caused_by=named(root))
    (tmp_path / "without_messaging.py").write_text(WITHOUT)
    variables = {
        **environment(),
        "DJANGO_SETTINGS_MODULE": "without_messaging",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "django", "trace_idempotency", "order-17"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "[2]   POST /api/charges/ (record, completed): child" in ended.stdout
