"""The public names of the package: what a release must not change without saying so.

A name is public if the docs name it, or the class that it is in. ``public_names.txt`` lists these
names, with the parameters of what can be called. When a change of it is wanted::

    python -m tests.test_public_names > tests/public_names.txt
"""

from __future__ import annotations

import ast
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command

import idempotency_django

PACKAGE = Path(idempotency_django.__file__).parent
DOCS = PACKAGE.parent / "docs"
PINNED = Path(__file__).with_name("public_names.txt")


def public_names() -> Iterator[str]:
    """The package's public names, one to a line, in the order of the source."""
    documented, public, exported = _documented(), set[str](), dict(_exported())
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            module = exported.get(f"{_module(path)}.{_name(node)}", "")
            module = module if f"{module}.{_name(node)}" in documented else _module(path)
            for line in _names(module, [node]):
                name, _, _ = line.partition("(")
                if name in documented or name.rpartition(".")[0] in public:
                    public.add(name)
                    yield line


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _exported() -> Iterator[tuple[str, str]]:
    """The names that a folder imports from its own modules, and the folder."""
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.walk(ast.parse(path.read_text())):  # also for type checkers only
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                for alias in node.names:
                    yield f"{_module(path)}.{node.module}.{alias.name}", _module(path)


def _documented() -> set[str]:
    """Every dotted path of the package in the docs, and the members that the reference shows."""
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages if "_build" not in page.parts)
    names = set(re.findall(r"idempotency_django(?:\.\w+)+", text))
    for directive in re.finditer(r"auto\w+:: ([\w.]+).*\n((?: +:.*\n)*)", text):
        if directive[1].partition(".")[0] == PACKAGE.name and ":members:" in directive[2]:
            names |= {f"{directive[1]}.{member}" for member in _members(*directive.groups())}
    return names


def _members(path: str, options: str) -> list[str]:
    listed = re.search(r":members:(.*)", options)
    assert listed is not None
    return listed[1].replace(",", " ").split() or dir(pydoc.locate(path))


def _names(prefix: str, body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        name = _name(node)
        if name.startswith("_") and name != "__init__":
            continue
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{prefix}.{name}({ast.unparse(_bare(node.args))})"
            case ast.ClassDef():
                yield f"{prefix}.{name}({', '.join(map(ast.unparse, node.bases))})"
                yield from _names(f"{prefix}.{name}", node.body)
            case _:
                yield f"{prefix}.{name}"


def _name(node: ast.stmt) -> str:
    """The name that a statement defines; one that is private for statements that define none."""
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return name
        case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
            return name
        case _:
            return "_"


def _bare(arguments: ast.arguments) -> ast.arguments:
    """The parameters without their annotations; a default shows as an ellipsis."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return arguments


def test_public_names() -> None:
    """The package has the names, and their parameters, that are written down."""
    assert list(public_names()) == PINNED.read_text().splitlines()


@pytest.mark.django_db(databases="__all__")
def test_no_migration_is_missing() -> None:
    """The migrations make the model as it is."""
    call_command("makemigrations", "idempotency_django", check=True, dry_run=True, verbosity=0)


def test_project_passes_the_checks() -> None:
    """``manage.py check`` finds nothing in a project that is set up as the docs say."""
    done = subprocess.run(
        [sys.executable, "-m", "django", "check", "--fail-level", "DEBUG"],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings", "TEST_DATABASES": "sqlite"},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no issues" in done.stdout


if __name__ == "__main__":
    print("\n".join(public_names()))
