"""The pytest plugin that starts the database servers before Django's settings are read.

``TEST_DATABASES`` chooses among ``postgres``, ``mariadb`` and ``sqlite``; the first is the
``default`` one. ``TEST_PSYCOPG=2`` runs everything on psycopg2.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import pytest

from tests.support import orphans
from tests.support.machine import patience
from tests.support.servers import mariadb, postgres

_servers = ExitStack()
_servers.enter_context(orphans.guarded())
os.environ["TEST_SCRATCH"] = _servers.enter_context(TemporaryDirectory(prefix="scratch-"))
_names = os.environ.setdefault("TEST_DATABASES", "postgres,mariadb,sqlite").split(",")

if "postgres" in _names:
    os.environ["TEST_POSTGRES_URL"] = _servers.enter_context(postgres(durable=False)).url
if "mariadb" in _names:
    _mariadb = _servers.enter_context(mariadb())
    if _mariadb is not None:
        os.environ["TEST_MARIADB_URL"] = _mariadb.url
    else:
        os.environ["TEST_DATABASES"] = ",".join(name for name in _names if name != "mariadb")


def pytest_report_header() -> str:
    """Say what the tests run on."""
    found = os.environ["TEST_DATABASES"]
    missing = "" if "mariadb" in found or "mariadb" not in _names else "; NO mariadbd FOUND"
    return f"databases: {found}{missing}; psycopg {os.environ.get('TEST_PSYCOPG', '3')}"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give a test the time that this machine needs now."""
    if config.option.timeout is None:
        config.option.timeout = patience(float(config.getini("timeout")))


def pytest_unconfigure() -> None:
    """Stop what was started."""
    _servers.close()
