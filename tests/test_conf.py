"""The IDEMPOTENCY setting: live, with a default for each name."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from idempotency_django.conf import DEFAULT_STORES
from idempotency_django.contrib.messaging.conf import conf

DEFAULTS = {
    "AROUND_EXECUTION": (),
    "CONSUMERS": (),
    "DIALECT": "ietf",
    "DOCS_URL": "https://idempotency-django.readthedocs.io/problems/#",
    "HEADER": "Idempotency-Key",
    "MESSAGING_DATABASE": "default",
    "MIDDLEWARE_PROTECTS": "unsafe",
    "OUTBOX": {},
    "POLICY": {},
    "RECORD_REPLAYS": True,
    "RETRY_AFTER": timedelta(seconds=1),
    "STATUS_CODES": {},
    "STORES": DEFAULT_STORES,
}
OTHERS = {
    "AROUND_EXECUTION": (nullcontext,),
    "CONSUMERS": ["shop.consumers.billing"],
    "DIALECT": "stripe",
    "DOCS_URL": "https://docs.example.com/#",
    "HEADER": "X-Request-Key",
    "MESSAGING_DATABASE": "other",
    "MIDDLEWARE_PROTECTS": ["/api/", "shop:v1"],
    "OUTBOX": {"orders": {"BACKEND": "shop.publishers.Orders"}},
    "POLICY": {"required": True},
    "RECORD_REPLAYS": False,
    "RETRY_AFTER": timedelta(seconds=4),
    "STATUS_CODES": {"mismatch": 409},
    "STORES": {},
}


def test_every_name_is_tested_and_has_a_property() -> None:
    """The names that IDEMPOTENCY may hold are the properties that read them."""
    assert conf.names() == set(DEFAULTS) == set(OTHERS)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_default(name: str) -> None:
    """A name that the project leaves out has its default, whatever else the project sets."""
    others = {other: value for other, value in OTHERS.items() if other != name}
    with override_settings(IDEMPOTENCY=others):
        assert getattr(conf, name.lower()) == DEFAULTS[name]


def test_no_setting_at_all() -> None:
    """A project needs no IDEMPOTENCY."""
    with override_settings():
        if hasattr(django_settings, "IDEMPOTENCY"):
            del django_settings.IDEMPOTENCY
        assert {name: getattr(conf, name.lower()) for name in conf.names()} == DEFAULTS


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_follows_override_settings(name: str) -> None:
    """A setting counts from the moment it is set to the moment it is gone."""
    before = getattr(conf, name.lower())
    with override_settings(IDEMPOTENCY={name: OTHERS[name]}):
        assert getattr(conf, name.lower()) == OTHERS[name]
    assert getattr(conf, name.lower()) == before


@pytest.mark.parametrize("value", [None, []])
def test_what_is_no_dict_is_refused(value: object) -> None:
    """IDEMPOTENCY is a dict; the error says what it is instead."""
    with (
        override_settings(IDEMPOTENCY=value),
        pytest.raises(ImproperlyConfigured, match=f"must be a dict, not {type(value).__name__}"),
    ):
        _ = conf.header


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DIALECT", "strype"),
        ("DIALECT", None),
        ("RECORD_REPLAYS", 0),
        ("RETRY_AFTER", 1),
        ("RETRY_AFTER", timedelta(seconds=-1)),
        *(
            ("MIDDLEWARE_PROTECTS", value)
            for value in ["all", "/api/", None, {"/api/"}, [], [1], ["api/"], ["unsafe"]]
        ),
    ],
)
def test_wrong_value_is_refused(name: str, value: object) -> None:
    """The error names the setting, its value and what it must be."""
    with (
        override_settings(IDEMPOTENCY={name: value}),
        pytest.raises(ImproperlyConfigured, match=re.escape(f"[{name!r}] is {value!r}; it must")),
    ):
        getattr(conf, name.lower())
