"""Every example of the documentation, the README's included, is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client

from idempotency_django.contrib.messaging import inbox as receivers
from tests.docs.examples import COMPARED, LANGUAGES, ROOT, Page
from tests.docs.files import blocks, files, undefined

TUTORIAL = ROOT / "docs" / "tutorial.md"  # run by test_tutorial.py, in a shell
WRITTEN_BY_PROGRAMS = ROOT / "docs" / "benchmarks.md"

PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")}
    - {WRITTEN_BY_PROGRAMS, *(ROOT / "docs" / "_build").rglob("*.md")}
)


def name(path: Path) -> str:
    """A page's path as its readers know it."""
    return str(path.relative_to(ROOT))


@pytest.mark.django_db(transaction=True, reset_sequences=True)
@pytest.mark.parametrize("path", [path for path in PAGES if path != TUTORIAL], ids=name)
def test_examples(
    path: Path,
    settings,
    client: Client,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The examples of a page do what the page says."""
    # A page knows nothing of other tests.
    monkeypatch.setattr(receivers, "_RECEIVERS", {})
    settings.ROOT_URLCONF = "tests.docs.urls"
    settings.DEBUG = False
    client.force_login(User.objects.create_user("alice", password="alice"))
    Page(path, settings, client, lambda: broker(request)).run()


def broker(request: pytest.FixtureRequest) -> str:
    """The URL of RabbitMQ, or of kombu's own where there is none."""
    try:
        return str(request.getfixturevalue("rabbit").url)
    except pytest.skip.Exception:
        return "memory://"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_block_is_run(path: Path) -> None:
    """A page has no block of code in a language that nothing runs."""
    text = path.read_text()
    opened = re.findall(r"^ *```([\w{-][^\n]*)$", text, re.MULTILINE)
    assert "{code-block} py" not in text
    assert {info for info in opened if not info.startswith("{")} <= LANGUAGES | COMPARED


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_block_is_a_file_or_a_session(path: Path) -> None:
    """A visible block of Python begins with the path of its file, or with ``>>>``."""
    assert [block.line for block in blocks(path) if not block.stands_alone] == []
    assert {str(block.path).partition("/")[0] for block in files(path)} <= PLACES


PLACES = {"config", "shop", "conftest.py", "client.py"}  # the project, its app, pytest, a client
WITH_FILES = [path for path in PAGES if files(path)]


@pytest.mark.parametrize("path", WITH_FILES, ids=name)
def test_files_import_what_they_use(path: Path, tmp_path: Path) -> None:
    """Each block of a file imports what it uses: a reader copies it as it is."""
    assert undefined(path, tmp_path / "blocks") == ""
