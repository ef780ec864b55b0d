"""The checks of a page's files find what a reader would stumble over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop.models import Order

from tests.docs.files import Checker, Files, undefined, write

VIEW = "# shop/views.py\nfrom django.http import HttpResponse\n\ndef here(request):\n"


def page(folder: Path, *blocks: str) -> Path:
    """A page with these blocks."""
    path = folder / "page.md"
    path.write_text("\n\n".join(f"```python\n{block}\n```" for block in blocks))
    return path


@pytest.fixture
def checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    checker.close()


@pytest.mark.parametrize(
    "blocks",
    [
        (f"{VIEW}    return JsonResponse({{}})",),
        (f"{VIEW}    return HttpResponse()", "# shop/views.py\nthere = HttpResponse"),
        ("# shop/orders.py\nfree = []", "# shop/views.py\nprint(free)"),
    ],
    ids=["never called", "imported by an earlier block", "of another file"],
)
def test_missing_import(blocks: tuple[str, ...], tmp_path: Path) -> None:
    """A block that does not import what it uses is found, even in a function that never runs."""
    assert "F821" in undefined(page(tmp_path, *blocks), tmp_path / "blocks")


def test_same_file(tmp_path: Path) -> None:
    """A block sees what earlier blocks of its file, and the example project, define in it."""
    blocks = ["# shop/views.py\nfirst = 1", "# shop/views.py\nprint(first, ChargeViewSet)"]
    assert undefined(page(tmp_path, *blocks), tmp_path / "blocks") == ""


def test_modules(settings) -> None:
    """A page's files are modules with names of their own, for as long as the page runs."""
    with Files(settings) as files:
        files.run("# shop/free.py\nprice = 0")
        names = files.run("# shop/views.py\nfrom shop.free import price\ndef total(): return price")
        assert names["total"]() == 0
        assert names["total"].__module__ == "shop.views"
        with pytest.raises(NameError):
            files.run("# shop/more.py\nprint(price)")
    assert "shop.free" not in sys.modules


def test_settings(settings) -> None:
    """Settings add to those that are there, and take effect."""
    before = list(settings.MIDDLEWARE)
    with Files(settings) as files:
        files.run('# config/settings.py\nMIDDLEWARE = ["first", ..., "last"]\nSTRIPE = "whsec"')
        files.run('# config/settings.py\nMIDDLEWARE += ["last", "more"]')
    assert list(settings.MIDDLEWARE) == ["first", *before, "last", "more"]
    assert settings.STRIPE == "whsec"


def test_model_shown_again(settings) -> None:
    """A model that a page shows again is the example project's, which has the same fields."""
    shown = """# shop/models.py
from django.db import models
from idempotency_django.contrib.concurrency import Versioned, VersionField

class Order(Versioned, models.Model):
    reference = models.CharField(max_length=100)
    amount = models.PositiveIntegerField(default=0)
    state = models.CharField(max_length=20, default="pending")
    version = VersionField()
"""
    with Files(settings) as files:
        assert files.run(shown)["Order"] is Order
        with pytest.raises(AssertionError, match="another Order"):
            files.run(shown.replace("max_length=20", "max_length=30"))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("# shop/former.py\nfrom shop.models import Bill", "cannot import name 'Bill'"),
        ('# config/settings.py\nINSTALLED_APPS += ["shop.bills"]', "No module named 'shop.bills'"),
        ('# config/settings.py\nIDEMPOTENCY = {"TTL": 1}', "ERRORS"),
    ],
    ids=["import", "settings", "check"],
)
def test_broken_project(block: str, reason: str, tmp_path: Path, checker: Checker) -> None:
    """A project that does not start, or does not pass its checks, is found."""
    modules = write(page(tmp_path, block), tmp_path / "project")
    assert reason in checker.check(tmp_path / "project", modules)
