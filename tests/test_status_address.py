"""The address of an operation's status: it shows nothing to those who read it on its way."""

from __future__ import annotations

import base64
import re
from datetime import timedelta
from typing import Any

import pytest

from idempotency_django import sealing, status
from idempotency_django.records import Operation
from idempotency_django.stores import stores

pytestmark = pytest.mark.urls("tests.test_status")

NAMED = {
    "key": "order-17-of-alice",
    "scope": "user:42|POST /api/charges/",
    "principal": "user:42",
    "fingerprint": "f" * 64,
}


@pytest.fixture(autouse=True)
def _setup(settings: Any) -> None:
    settings.IDEMPOTENCY = {"STATUS_VIEW": "operations:plain"}


def token(**changes: str) -> str:
    """The token in the address of an operation's status."""
    operation = Operation(**{**NAMED, **changes}, name="POST /", ttl=timedelta(hours=1))
    return status.location(stores["default"], operation).rstrip("/").rsplit("/", 1)[1]


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


class TestSealing:
    """What is sealed is read by this project only."""

    @pytest.mark.parametrize("data", [b"", b"x", b"x" * 32, bytes(range(256)) * 5])
    def test_round_trip(self, data: bytes) -> None:
        """It reads back, whatever its length."""
        assert sealing.unsealed(sealing.sealed(data, salt="a"), salt="a") == data

    def test_other_purpose(self) -> None:
        """What was sealed for one purpose is nothing for another."""
        assert sealing.unsealed(sealing.sealed(b"data", salt="a"), salt="b") is None

    def test_every_change(self) -> None:
        """A change of any bit is found out, those that base64 ignores included."""
        made = sealing.sealed(b"some data", salt="a")
        characters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=\nü"
        for place in range(len(made)):
            for other in characters.replace(made[place], ""):
                changed = made[:place] + other + made[place + 1 :]
                assert sealing.unsealed(changed, salt="a") is None, changed
        for made_up in ("", "A", "é", made[:-1], made + "A", made + "=", "\0", made * 40):
            assert sealing.unsealed(made_up, salt="a") is None, made_up

    def test_rotation(self, settings: Any) -> None:
        """A former secret key opens what it sealed for as long as it is a fallback."""
        made = sealing.sealed(b"data", salt="a")
        settings.SECRET_KEY, former = "new", settings.SECRET_KEY
        settings.SECRET_KEY_FALLBACKS = ["older", former]
        assert sealing.unsealed(made, salt="a") == b"data"
        assert sealing.sealed(b"data", salt="a") != made
        settings.SECRET_KEY_FALLBACKS = []
        assert sealing.unsealed(made, salt="a") is None
