"""The errors: each with one home, one status, one type and a text that a person can act on."""

from __future__ import annotations

import pickle
import re

import pytest

from idempotency_django import errors
from idempotency_django.errors import IdempotencyError, KeyRefused, OperationInProgress

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, IdempotencyError)
]
every_class = pytest.mark.parametrize("error_class", CLASSES)


def test_docstring_draws_the_tree() -> None:
    """The module's docstring names every error with its status, below the class it derives from."""
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+) +(\d{3}) ", errors.__doc__ or "", re.MULTILINE)
    below = {0: IdempotencyError}
    for prefix, name, status in drawn:
        depth = len(prefix) // 4
        error_class = getattr(errors, name)
        assert error_class.status == int(status), name
        assert error_class.__base__ is below[depth - 1], name
        below[depth] = error_class
    assert {name for _, name, _ in drawn} == {cls.__name__ for cls in CLASSES} - {
        "IdempotencyError"
    }


def test_slugs() -> None:
    """Each type of problem has one slug and one title, also where several errors share it."""
    types = {(error_class.slug, error_class.title) for error_class in CLASSES}
    slugs, titles = {slug for slug, _ in types}, {title for _, title in types}
    assert len(slugs) == len(titles) == len(types)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", slug) for slug in slugs)


@every_class
def test_default_text_is_written_for_people(error_class: type[IdempotencyError]) -> None:
    """An error without a detail of its own says its class's text, which is made of sentences."""
    error = error_class()
    assert str(error) == error.detail == error_class.default_detail
    assert re.fullmatch(r"[A-Z].*\.", error.detail)
    assert not error_class.title.endswith(".")
    assert error.retry_after is None


@every_class
def test_survives_pickle(error_class: type[IdempotencyError]) -> None:
    """An error reaches another process (a Celery worker's caller, say) with all that it says.

    0 seconds are not "no retry".
    """
    again = pickle.loads(pickle.dumps(error_class("What was wrong.", retry_after=0)))
    assert type(again) is error_class
    assert (str(again), again.detail, again.retry_after) == ("What was wrong.",) * 2 + (0,)


def test_a_bad_key_is_one_kind_of_error() -> None:
    """Whoever catches KeyRefused catches all that is the key's own fault, and nothing else."""
    refused = {cls.__name__ for cls in CLASSES if issubclass(cls, KeyRefused)}
    kinds = "Missing Malformed Guessable Unsupported Refused".split()
    assert refused == {f"Key{kind}" for kind in kinds}
    assert not issubclass(OperationInProgress, KeyRefused)
