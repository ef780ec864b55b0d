"""The report and the truth: each endpoint of the reference app is sent the same request twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from typing import Any

import pytest

from testproject.server import ROOT

from .clients import Api, Order
from .conftest import Server

pytestmark = pytest.mark.e2e


def reported(server: Server) -> list[dict[str, Any]]:
    """The endpoints that the report lists."""
    run = subprocess.run(
        [sys.executable, "-m", "testproject.manage", "idempotency_report", "--format=json"],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE_URL": server.database.url,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
        },
    )
    endpoints: list[dict[str, Any]] = json.loads(run.stdout)["endpoints"]
    return endpoints


def is_protected(api: Api, method: str, route: str) -> bool:
    """Whether a second request with the same key, and the same body, gets the first response."""
    order = Order()
    headers = {}
    if "{pk}" in route:
        created = api.send("/api/invoices/", Order()).json()
        route = route.replace("{pk}", str(created["id"]))
        headers["If_Match"] = api.get(
            f"/api/invoices/{created['id']}/", headers=order.headers
        ).headers["ETag"]
    if route == "/api/payments/":
        body = json.dumps({"order": uuid.uuid4().hex, "amount": 500})
        first, second = [api.send(route, order, content=body) for _ in range(2)]
    else:
        first, second = [api.request(method, route, order, **headers) for _ in range(2)]
    assert first.status_code < 500, first.text
    return second.headers.get("Idempotent-Replayed") == "true"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_report(server: Server, api: Api) -> None:
    """What the report calls protected replays, and what it calls anything else does not."""
    wrong = {}
    for endpoint in reported(server):
        method, route, status = endpoint["method"], endpoint["route"], endpoint["status"]
        if is_protected(api, method.replace("*", "POST"), route) != (
            status in ("required", "optional")
        ):
            wrong[f"{method} {route}"] = status
    assert wrong == {}
