"""No import runs in a circle, and none is hidden; no function of the core is long.

Which room may import from which is for ``make imports``.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import idempotency_django

PACKAGE = Path(idempotency_django.__file__).parent


@cache
def modules() -> dict[str, ast.Module]:
    """What is written in each module, by its path in the package."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "migrations")
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}


def dotted(path: str) -> str:
    """The name that a module is imported by."""
    parts = Path(PACKAGE.name, path).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Each function below a node, after its name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        name = getattr(child, "name", "") if isinstance(child, ast.stmt) else ""
        yield from functions(child, f"{prefix}{name}." if name else prefix)


def imported(path: str, node: ast.AST) -> Iterator[str]:
    """The package's own modules that are imported anywhere below a node of a module."""
    known = {dotted(other) for other in modules()}
    package = dotted(path) if path.endswith("__init__.py") else dotted(path).rpartition(".")[0]
    for statement in ast.walk(node):
        match statement:
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    submodule = f"{base}.{alias.name}"
                    yield from {submodule if submodule in known else base} & known
            case ast.Import(names=names):
                yield from {alias.name for alias in names} & known


def test_no_import_cycle() -> None:
    """No two modules need each other, not even for the types' sake."""
    graph = {dotted(path): set(imported(path, tree)) for path, tree in modules().items()}
    assert sum(map(len, graph.values())) > len(graph)  # they were found
    TopologicalSorter(graph).prepare()


def test_no_import_within_a_function() -> None:
    """Who reads the head of a module knows what it needs; Django's ``ready()`` has to wait."""
    hidden = {
        f"{path}: {name} imports {module}"
        for path, tree in modules().items()
        for name, function in functions(tree, "")
        for module in imported(path, function)
        if not name.endswith("Config.ready")
    }
    assert hidden == set()


CORE = ("policy", "engine", "stores", "http")
LONGEST = 60


def test_length_of_functions() -> None:
    """A function of the core is read at once, with its signature and its docstring."""
    core = {path: tree for path, tree in modules().items() if path.split("/")[0] in CORE}
    core |= {path: tree for path, tree in modules().items() if "/" not in path}
    assert "http/rule.py" in core
    assert "middleware.py" in core
    lengths = {
        f"{path}: {name}": function.end_lineno - function.lineno + 1  # type: ignore[attr-defined]
        for path, tree in core.items()
        for name, function in functions(tree, "")
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


def test_makefile_names_tests_that_exist() -> None:
    """No test leaves its part of ``make`` when its file is renamed."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # or an outer make would be told of
    said = subprocess.run(
        ["make", "--dry-run", "quick", "parts"],
        cwd=PACKAGE.parent,
        env={name: value for name, value in os.environ.items() if name not in outer},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    named = set(re.findall(r"tests/[\w/.]+(?![\w/.*])", said))
    assert {"tests/faults", "tests/docs", "tests/checks/test_checks.py"} <= named
    assert not {path for path in named if not (PACKAGE.parent / path).exists()}


def test_contributing_names_what_exists() -> None:
    """A reader of CONTRIBUTING.md finds each file, folder, function and class that it names."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    architecture = text.partition("## Architecture")[2].partition("## A store of your own")[0]
    root = PACKAGE.parent
    found = chain(*((root / each).rglob("*") for each in ("docs", "tests", PACKAGE.name)))
    paths = [f"/{each.relative_to(root)}{'/' if each.is_dir() else ''}" for each in found]
    defined = {
        node.name
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = re.findall(r"`([\w./]+(?:/|\.py))`", architecture)
    called = re.findall(r"`(?:\w+\.)*(\w+)(?:\(\)`|`(?= \(`))", architecture)
    assert len(named) > 40
    assert len(called) > 15
    assert [each for each in named if not any(path.endswith(f"/{each}") for path in paths)] == []
    assert [each for each in called if each not in defined] == []
