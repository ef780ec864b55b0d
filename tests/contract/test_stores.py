"""The store contract, over every store and database."""

from __future__ import annotations

import pytest
from django.conf import settings

from idempotency_django.contrib.cached import CachedStore
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from tests.contract.batches import BatchesContract

ALL_DATABASES = pytest.mark.django_db(transaction=True, databases="__all__")


class TestMemoryStore(BatchesContract):
    """The store in memory."""

    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = MemoryStore("memory")


class _DatabaseStore(BatchesContract):
    name: str
    cached: bool = False
    combines: bool = True

    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        if self.name not in settings.ALIASES:
            pytest.skip(f"NO {self.name} HERE")
        store = CachedStore if self.cached else DatabaseStore
        using = settings.ALIASES[self.name]
        self.store = store("default", using=using, combine_statements=self.combines)


@ALL_DATABASES
@pytest.mark.driver
class TestPostgreSQL(_DatabaseStore):
    """The database store on PostgreSQL."""

    name = "postgres"


@ALL_DATABASES
class TestPostgreSQLOneByOne(_DatabaseStore):
    """The same, which sends each statement in a message of its own."""

    name = "postgres"
    combines = False


@ALL_DATABASES
class TestMariaDB(_DatabaseStore):
    """The database store on MariaDB."""

    name = "mariadb"


@ALL_DATABASES
class TestSQLite(_DatabaseStore):
    """The database store on SQLite, whose one write lock makes duplicates wait."""

    name = "sqlite"
    refuses_at_once = False


@ALL_DATABASES
class TestCached(_DatabaseStore):
    """The database store behind a cache, on PostgreSQL."""

    name = "postgres"
    cached = True
