"""The effect sanitizer finds nothing in the reference app, whose views call others in steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testproject.server import ROOT

pytestmark = pytest.mark.e2e

PROGRAM = """
import sys
import uuid

import django

django.setup()

from django.core.management import call_command
from django.test import Client

from idempotency_django.testing import effects_outside

call_command("migrate", verbosity=0)
call_command("seed", verbosity=0, stdout=sys.stderr)
client = Client(headers={"Authorization": "Token alice-token"})
urls = ["/api/charges/", "/api/orders/", "/api/viamiddleware/", "/api/published/", "/api/invoices/"]
urls += ["/plain/orders/", "/decorated/orders/", "/async/orders/"]
with effects_outside() as effects:
    for url in urls:
        body = {"reference": uuid.uuid4().hex, "amount": 100, "currency": "EUR"}
        key = str(uuid.uuid4())
        for _ in range(2):
            response = client.post(
                url, body, content_type="application/json", headers={"Idempotency-Key": key}
            )
            assert response.status_code < 400, (url, response.content)
        assert response.headers.get("Idempotent-Replayed") == "true", url
for effect in effects:
    print(effect)
"""


@pytest.mark.nightly
def test_no_false_alarm(tmp_path: Path) -> None:
    """Each protected endpoint is sent a request twice, and nothing is reported."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE_URL": f"sqlite:///{tmp_path}/db.sqlite3",
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
        },
    )
    assert run.stdout == ""
