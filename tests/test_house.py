"""The house is easy to live in: few rooms, short modules, short functions, no import cycle.

The numbers are those of CONTRIBUTING. What is over them today is listed here by its present size,
and can only shrink. Which room may import from which is for ``make imports``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import idempotency_django

PACKAGE = Path(idempotency_django.__file__).parent
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
ROOM = re.compile(r"\w+(/|\.py)").fullmatch
NAMED_BY_DJANGO = {"management", "migrations", "static", "templates", "templatetags"}

ENTRIES = 24
MODULE_LINES = 250
FUNCTION_LINES = 40

LONG_MODULES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


@cache
def modules() -> dict[str, ast.Module]:
    """What is written in each module, by its path in the package."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "migrations")
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}


def dotted(path: str) -> str:
    """The name that a module is imported by."""
    parts = Path(PACKAGE.name, path).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has without its docstring, which says all that it has to."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    match function.body[0]:
        case ast.Expr(value=ast.Constant(value=str())) as docstring:
            assert docstring.end_lineno is not None
            lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST, int]]:
    """Each function below a node: its name, the function, and how many lines it has."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child, length(child)
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


def test_picture() -> None:
    """The picture in CONTRIBUTING has the rooms and the levels that import-linter knows."""
    [picture] = re.findall(
        r"## The house.*?```{code-block} text\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL
    )
    rows = [line.split("  ") for line in picture.splitlines()]
    drawn = [{re.sub(r"/$|\.py$", "", word.strip()) for word in row if ROOM(word)} for row in rows]
    linter = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    levels = [set(re.findall(r"\w+", layer)) for layer in linter["contracts"][0]["layers"]]
    assert drawn == levels


def test_entries() -> None:
    """The top of the package can be taken in at a glance."""
    entries = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and next(path.rglob("*.py"), None))
    } - {"__init__", *NAMED_BY_DJANGO}
    assert len(entries) <= ENTRIES, sorted(entries)


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
        for name, function, _ in functions(tree, "")
        for module in imported(path, function)
        if not name.endswith("Config.ready")
    }
    assert hidden == set()


def test_long_modules() -> None:
    """A module has 250 lines at most."""
    lines = {path: len((PACKAGE / path).read_text().splitlines()) for path in modules()}
    assert_only_shrinks(lines, MODULE_LINES, LONG_MODULES)


def test_long_functions() -> None:
    """A function has 40 lines at most, besides its docstring."""
    lines = {
        f"{path}: {name}": size
        for path, tree in modules().items()
        for name, _, size in functions(tree, "")
    }
    assert_only_shrinks(lines, FUNCTION_LINES, LONG_FUNCTIONS)


def assert_only_shrinks(sizes: dict[str, int], limit: int, excepted: dict[str, int]) -> None:
    """Nothing is over its limit; what was excepted and no longer need be is told."""
    over = {name: size for name, size in sizes.items() if size > max(limit, excepted.get(name, 0))}
    assert over == {}, f"longer than {limit} lines, or than they were"
    done = {name for name in excepted if sizes.get(name, 0) <= limit}
    assert done == set(), "remove them from the list: they are short enough now"
