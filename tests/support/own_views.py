"""The views of a test's own: the checks look at each subclass of the mixin that is alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from idempotency_django.checks import drf as drf_checks


def only_own_views(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """The views of other tests are no part of the projects that these modules' tests check.

    Args:
        monkeypatch: undoes it.
        modules: the beginnings of the modules' names.
    """
    every = drf_checks._subclasses

    def own(of: type[Any]) -> Iterator[type[Any]]:
        return (view for view in every(of) if view.__module__.startswith(modules))

    monkeypatch.setattr(drf_checks, "_subclasses", own)
