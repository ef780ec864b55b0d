"""Break the code in one place at a time, and see whether its tests notice: ``make mutants``.

Each mutant is a copy of the project with one change. The tests of the change's own folder run over
it until the first that fails. A mutant that survives them is shown with its line.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
PACKAGE = "idempotency_django"
MESSAGING = "tests/contrib/messaging"
TESTS = {
    "engine": (
        "postgres",
        ["tests/engine", "tests/contract/test_stores.py", f"{MESSAGING}/test_consumers.py"],
    ),
    "stores": ("postgres", ["tests/stores", "tests/contract"]),
    "http": ("sqlite", ["tests/http", "tests/test_decorators.py", "tests/test_middleware.py"]),
    "contrib/messaging": ("sqlite", [MESSAGING, f"--ignore={MESSAGING}/transports"]),
}
"""The folders of the package: on which database which tests look at them."""

PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE)),
    *((ast.Gt, ast.GtE), (ast.And, ast.Or), (ast.Add, ast.Sub)),
]
OTHERS = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
LOST = 900
"""Seconds after which a mutant counts as noticed: it waits for what does not come."""


@dataclass(frozen=True)
class Mutant:
    """One change: the text between two places of a file, and what is there instead."""

    folder: str
    file: Path
    start: tuple[int, int]
    end: tuple[int, int]
    instead: str
    line: str

    def apply(self, root: Path) -> None:
        """Make the change in a copy of the project."""
        path = root / self.file
        lines = path.read_bytes().splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.end
        rest = lines[last - 1][right:]
        lines[first - 1 : last] = [lines[first - 1][:left] + self.instead.encode() + rest]
        path.write_bytes(b"".join(lines))

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0]}: {self.line}  →  {self.instead}"


def changed(node: ast.AST) -> ast.AST | None:
    """The node with another meaning; ``None``: it is left alone."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[operator]) if type(operator) in OTHERS:
            other.ops = [OTHERS[type(operator)]()]  # type: ignore[list-item]
        case ast.BoolOp() | ast.BinOp() if type(other.op) in OTHERS:
            other.op = OTHERS[type(other.op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.Constant(value=bool()):
            other.value = not other.value
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            other.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()) if "logger" not in ast.unparse(other):
            return ast.Pass()
        case _:
            return None
    return other


def in_functions(module: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """What is in the bodies of functions."""
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in (each for line in function.body for each in ast.walk(line)):
                if isinstance(node, ast.expr | ast.stmt):
                    yield node


def all_mutants() -> Iterator[Mutant]:
    """Every change that could be made."""
    for folder in TESTS:
        for path in sorted((ROOT / PACKAGE / folder).rglob("*.py")):
            if "migrations" in path.parts or path.name == "mysql.py":  # not on these databases
                continue
            source = path.read_text()
            for node in in_functions(ast.parse(source)):
                if (other := changed(node)) is not None:
                    start = node.lineno, node.col_offset
                    end = node.end_lineno or 0, node.end_col_offset or 0
                    text = ast.unparse(other)
                    instead = f"({text})" if isinstance(other, ast.expr) else text
                    line = source.splitlines()[node.lineno - 1].strip()
                    yield Mutant(folder, path.relative_to(ROOT), start, end, instead, line)


def survives(mutant: Mutant, root: Path) -> bool:
    """Whether the tests pass over the copy of the project with this change."""
    original = (root / mutant.file).read_bytes()
    mutant.apply(root)
    database, tests = TESTS[mutant.folder]
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not e2e and not nightly", *tests]
    environment = {**os.environ, "TEST_DATABASES": database, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=LOST, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        (root / mutant.file).write_bytes(original)
    return ended.returncode == 0


def main(count: int, seed: int, least: float) -> int:
    """Try a sample, show what survives, and fail if too few are noticed."""
    mutants = sorted(set(all_mutants()), key=str)
    sample = random.Random(seed).sample(mutants, min(count, len(mutants)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        left_out = shutil.ignore_patterns(".*", "build", "dist", "_build", "__pycache__")
        workers = os.cpu_count() or 1
        for number in range(workers):
            copies.put(shutil.copytree(ROOT, Path(scratch, str(number)), ignore=left_out))

        def tried(mutant: Mutant) -> bool:
            root = copies.get()
            survived = survives(mutant, root)
            copies.put(root)
            print("SURVIVED" if survived else "noticed", mutant, flush=True)
            return survived

        with ThreadPoolExecutor(workers) as threads:
            survived = sum(threads.map(tried, sample))
    print(f"{len(sample) - survived} of {len(sample)} mutants were noticed (seed {seed}).")
    return survived > len(sample) * (1 - least)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.8)
    sys.exit(main(**vars(parser.parse_args())))
