"""The address of an operation's status: it shows nothing to those who read it on its way."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from idempotency_django.http import status
from idempotency_django.policy import seals as opaque
from idempotency_django.stores import stores
from idempotency_django.stores.records import Claim, Operation

pytestmark = pytest.mark.urls("tests.test_status")

NAMED = {
    "key": "order-17-of-alice",
    "scope": "user:42|POST /api/charges/",
    "principal": "user:42",
    "fingerprint": "f" * 64,
}


@pytest.fixture(autouse=True)
def _setup(settings: Any) -> None:
    memory = {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}
    settings.IDEMPOTENCY = {"STATUS_VIEW": "operations:plain", "STORES": {"default": memory}}


def token(**changes: Any) -> str:
    """The token in the address of an operation's status."""
    operation = Operation(**{**NAMED, **changes}, name="POST /", ttl=timedelta(hours=1))
    return (
        status.location(stores["default"], operation, operation.principal)
        .rstrip("/")
        .rsplit("/", 1)[1]
    )


def readings(text: str) -> str:
    """All that a text says to somebody who decodes each part of it that looks like base64."""
    parts = [text, *re.split(r"[:.]", text)]
    decoded = [base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts]
    return "\n".join([text, *(part.decode("latin-1") for part in decoded)])


def test_nothing_is_shown() -> None:
    """The address shows neither key nor scope, caller, fingerprint or store, in any encoding."""
    shown = readings(token())
    for named in (*NAMED.values(), "user:", "POST", "default"):
        assert named not in shown


def test_one_address() -> None:
    """An operation has one address, whoever asks again; every other operation has another."""
    assert token() == token()
    others = [token(**{name: value[:-1] + "x"}) for name, value in NAMED.items()]
    assert len({token(), *others}) == 5
    # Nor do operations that have much in common have parts of their addresses in common.
    assert all(token()[:8] != other[:8] and token()[-8:] != other[-8:] for other in others)


def test_rotation_meanwhile() -> None:
    """A duplicate after a rotation of SECRET_KEY gets an address of the record from before it."""
    store = stores["default"]
    operation = Operation(**NAMED, name="POST /", ttl=timedelta(hours=1))
    assert isinstance(store.acquire(operation), Claim)
    duplicate = replace(operation, fingerprint="e" * 64, aliases={operation.fingerprint: ""})
    location = status.location(store, duplicate, duplicate.principal)
    found = status.record_of(location.rstrip("/").rsplit("/", 1)[1], {NAMED["principal"]})
    assert found is not None
    assert found.status == "in_progress"


class TestOpaque:
    """What is encrypt_token is read by this project only."""

    @pytest.mark.parametrize("data", [b"", b"x", b"x" * 32, bytes(range(256)) * 5])
    def test_round_trip(self, data: bytes) -> None:
        """It reads back, whatever its length."""
        assert opaque.decrypt_token(opaque.encrypt_token(data, salt="a"), salt="a") == data

    def test_other_purpose(self) -> None:
        """What was made for one purpose is nothing for another."""
        assert opaque.decrypt_token(opaque.encrypt_token(b"data", salt="a"), salt="b") is None

    def test_every_change(self) -> None:
        """A change of any bit is found out, those that base64 ignores included."""
        made = opaque.encrypt_token(b"some data", salt="a")
        characters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=\nü"
        for place in range(len(made)):
            for other in characters.replace(made[place], ""):
                changed = made[:place] + other + made[place + 1 :]
                assert opaque.decrypt_token(changed, salt="a") is None, changed
        for made_up in ("", "A", "é", made[:-1], made + "A", made + "=", "\0", made * 40):
            assert opaque.decrypt_token(made_up, salt="a") is None, made_up

    def test_rotation(self, settings: Any) -> None:
        """A former secret key reveals what it encrypt_token for as long as it is a fallback."""
        made = opaque.encrypt_token(b"data", salt="a")
        settings.SECRET_KEY, former = "new", settings.SECRET_KEY
        settings.SECRET_KEY_FALLBACKS = ["older", former]
        assert opaque.decrypt_token(made, salt="a") == b"data"
        assert opaque.encrypt_token(b"data", salt="a") != made
        settings.SECRET_KEY_FALLBACKS = []
        assert opaque.decrypt_token(made, salt="a") is None
