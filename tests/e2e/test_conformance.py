"""The reference app meets the requirements that this package publishes for others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from idempotency_django.conformance.__main__ import main

from .conftest import Server
from .databases import Database

pytestmark = pytest.mark.e2e

BODY = {"reference": "{unique}", "amount": 500, "currency": "EUR"}
UNTESTED = {"IDEM-008", "IDEM-050"}  # nothing restarts it; its dialect limits no key's length


def report_of(
    server: Server, path: str, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, Any]:
    """What the runner reports as unmet or untested, and why."""
    bodies = {
        "--body": BODY,
        "--other-body": BODY | {"amount": 700},
        "--invalid-body": BODY | {"amount": "many"},
    }
    arguments = [f"{server.url}{path}", "--format", "json", *more]
    for option, body in bodies.items():
        arguments += [option, json.dumps(body)]
    arguments += ["--header", "Authorization: Token alice-token"]
    arguments += ["--other-header", "Authorization: Token bob-token"]
    arguments += ["--failing-header", "X-Simulate: status=503"]
    arguments += ["--slow-header", "X-Simulate: sleep-ms=100"]
    arguments += ["--other-url", f"{server.url}/api/viamiddleware/"]
    arguments += ["--count", f"{server.url}/effects/?reference={{unique}}", "/count"]
    main(arguments)
    found = json.loads(capsys.readouterr().out)["requirements"]
    return {each["id"]: each for each in found if each["result"] != "passed"}


def test_reference_app(
    server: Server, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """A view of REST framework that requires a key meets all requirements, on each database."""
    unmet = report_of(server, "/api/charges/", capsys, "--required")

    if database.name == "sqlite":  # one writes, and the others wait for it: none is refused
        unmet = {name: unmet[name] for name in unmet.keys() - {"IDEM-013", "IDEM-014"}}
    assert set(unmet) == UNTESTED, unmet


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_async_view(asgi_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """So does an async view, whose key is optional, under ASGI."""
    unmet = report_of(asgi_server, "/async/orders/", capsys)

    assert set(unmet) == UNTESTED | {"IDEM-040", "IDEM-041", "IDEM-042"}, unmet


def test_unprotected_view(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A view without protection does not."""
    unmet = report_of(server, "/api/unprotected/", capsys, "--only", "IDEM-002")

    assert unmet["IDEM-002"]["reason"] == "effects: 3, not 1"
