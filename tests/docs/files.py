"""The files of a page: blocks of Python that begin with a comment with their path.

Such a block adds to the file of that name in the example project (``docs/project``). It imports all
it uses, as if the file held nothing else; it sees what is *defined* in the file already.
"""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.core.management.commands.shell import Command as Shell
from django.db import connection, models
from django.test.utils import isolate_apps
from django.urls import clear_url_caches
from sybil.document import Document
from sybil.parsers.myst import CodeBlockParser

from idempotency_django.contrib.messaging.inbox import _RECEIVERS

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "docs" / "project"
TABLES = "shop/models.py"
SETTINGS = "config/settings.py"
URLS = "config/urls.py"


def path_of(text: str) -> str | None:
    """The path of the file that a block belongs to, if its first line says one."""
    found = re.match(r"# ([\w/]+\.py)\b", text)
    return found[1] if found else None


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of Python on a page."""

    text: str
    line: int
    is_visible: bool

    @property
    def path(self) -> str | None:
        return path_of(self.text)

    @property
    def stands_alone(self) -> bool:
        return not self.is_visible or self.path is not None or self.text.startswith(">>>")


def blocks(page: Path) -> list[Block]:
    """All blocks of Python of a page, the invisible ones included."""
    found = []
    for example in Document.parse(str(page), CodeBlockParser("python", lambda _: None)):
        shown = example.document.text[example.start :].lstrip()
        is_visible = shown.startswith("```")  # no comment
        found.append(Block(example.parsed, example.line, is_visible))
    return found


def files(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.path]


def defined(text: str) -> set[str]:
    """What a file defines, in contrast to what it imports."""
    names: set[str] = set()

    def look(nodes: list[Any]) -> None:
        for node in nodes:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Import() | ast.ImportFrom():
                    pass
                case _:
                    names.update(
                        each.id
                        for each in ast.walk(node)
                        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                    )
                    for part in ("body", "orelse", "handlers", "finalbody"):
                        look(getattr(node, part, []))

    look(ast.parse(text).body)
    return names


def original(path: str) -> str:
    """The text of the file in the example project; nothing if it has none."""
    file = PROJECT / path
    return file.read_text() if file.exists() else ""


# Checks of the text -------------------------------------------------------------------------


def undefined(page: Path, folder: Path) -> str:
    """What ruff says of names that a block uses and neither defines nor imports."""
    known: dict[str, set[str]] = {}
    folder.mkdir()
    for block in files(page):
        assert block.path
        names = known.setdefault(block.path, defined(original(block.path)))
        _, _, rest = block.text.partition("\n")
        given = "; ".join(f"{name} = None" for name in sorted(names - defined(rest)))
        (folder / f"line_{block.line}.py").write_text(f"{given}\n{rest}")
        names |= defined(rest)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F821"]
    found = subprocess.run(
        [*command, "--output-format=concise", folder], capture_output=True, text=True, check=False
    )
    return "" if found.returncode == 0 else found.stdout + found.stderr


class _Added(ast.NodeTransformer):
    """``X = [..., "a"]`` and ``X += ["a"]``: the list of before, and what it has not."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        match node:
            case ast.Assign([ast.Name(name)], ast.List(parts)):
                given = [part for part in parts if not _is_ellipsis(part)]
                if len(given) < len(parts):
                    before = _before(name, given)
                    node.value = ast.List(
                        [before if _is_ellipsis(part) else part for part in parts], ast.Load()
                    )
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        match node:
            case ast.AugAssign(ast.Name(name), ast.Add(), ast.List(parts)) if name.isupper():
                value = ast.List([_before(name, parts), *parts], ast.Load())
                return ast.Assign([ast.Name(name, ast.Store())], value)
        return node


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _before(name: str, given: list[ast.expr]) -> ast.expr:
    listed = ast.unparse(ast.List(given, ast.Load()))
    text = f"[*(x for x in globals().get({name!r}, []) if x not in {listed})]"
    parsed = ast.parse(text, mode="eval").body
    assert isinstance(parsed, ast.List)
    return parsed.elts[0]


def added_to_settings(text: str) -> str:
    """A block of settings as it runs after those that are there."""
    return ast.unparse(ast.fix_missing_locations(_Added().visit(ast.parse(text)))) + "\n"


def shown_again(text: str) -> list[ast.ClassDef]:
    """The models of the example project that a page shows again."""
    ours = defined(original(TABLES))
    return [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name in ours
    ]


def only_new_models(text: str) -> str:
    """The same text without the models that the example project has."""
    lines = text.splitlines(keepends=True)
    for node in reversed(shown_again(text)):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        lines[first - 1 : node.end_lineno] = ["\n"] * (node.end_lineno - first + 1)
    return "".join(lines)


# Running ------------------------------------------------------------------------------------


class Files:
    """The files of a page as modules, for as long as the page runs."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._modules: dict[str, types.ModuleType] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Files:
        self._undo.enter_context(_own_modules())
        self._undo.enter_context(_registries())
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, text: str) -> dict[str, Any]:
        """Add a block to its file; return the names that it made."""
        path = path_of(text)
        assert path
        if path == SETTINGS:
            return self._configure(text)
        module = self.module(path)
        names = vars(module)
        before = dict(names)
        if path == TABLES:
            _compare(text)
            with self._new_tables():
                exec(compile(only_new_models(text), path, "exec"), names)
        else:
            exec(compile(text, path, "exec"), names)
        if path == URLS:
            self.settings.ROOT_URLCONF = module
            clear_url_caches()
        shown = {node.name for node in shown_again(text)} if path == TABLES else set()
        return {
            name: value
            for name, value in names.items()
            if not name.startswith("__")
            and (name in shown or name not in before or value is not before[name])
        }

    def module(self, path: str) -> types.ModuleType:
        """The module of a file, with what the example project defines in it."""
        if path not in self._modules:
            name = module_of(path)
            module = types.ModuleType(name)
            if text := original(path):
                theirs = import_module(name)  # anew; the models are what they were
                for each in defined(text):
                    value = getattr(theirs, each)
                    setattr(module, each, copy.copy(value) if isinstance(value, list) else value)
            install(module)
            self._modules[path] = module
        return self._modules[path]

    def _configure(self, text: str) -> dict[str, Any]:
        theirs = import_module("config.settings")
        names = {"__name__": "config.settings"}
        for name, value in vars(theirs).items():
            if name.isupper():
                names[name] = _copied(getattr(self.settings, name, value))
        exec(compile(added_to_settings(text), SETTINGS, "exec"), names)
        changed = {*defined(text), *re.findall(r"^([A-Z_]+)\b", text, re.MULTILINE)}
        for name in [name for name in names if name.isupper()]:
            value = names.pop(name)
            # The apps are installed, and the databases are those of the tests.
            if name not in {"INSTALLED_APPS", "DATABASES"} and name in changed:
                setattr(self.settings, name, value)
        return {name: value for name, value in names.items() if not name.startswith("__")}

    @contextmanager
    def _new_tables(self) -> Iterator[None]:
        ours = apps.all_models["shop"]
        before = set(ours)
        yield
        for name in [name for name in ours if name not in before]:
            model = ours[name]
            with connection.schema_editor() as editor:
                editor.create_model(model)
            self._undo.callback(_forget, model)


def _copied(value: Any) -> Any:
    """A setting that a block may change without harm to others."""
    match value:
        case dict():
            return {name: _copied(each) for name, each in value.items()}
        case list():
            return [_copied(each) for each in value]
    return value


def _forget(model: type[models.Model]) -> None:
    with connection.schema_editor() as editor:
        editor.delete_model(model)
    del apps.all_models["shop"][model._meta.model_name]
    apps.clear_cache()


def _compare(text: str) -> None:
    """Hold the models that a page shows again against those of the example project."""
    again = {node.name for node in shown_again(text)}
    if not again:
        return
    names: dict[str, Any] = {"__name__": "shop.models"}
    with isolate_apps("shop"):
        exec(compile(text, TABLES, "exec"), names)
    for name in again:
        real = {
            field.name: field.deconstruct() for field in apps.get_model("shop", name)._meta.fields
        }
        shown = {field.name: field.deconstruct() for field in names[name]._meta.fields}
        assert shown == real, f"The example project has another {name}."


def install(module: types.ModuleType) -> None:
    """Make a module importable, and its parents."""
    parent, _, name = module.__name__.rpartition(".")
    if parent:
        try:
            package = import_module(parent)
        except ModuleNotFoundError:
            package = types.ModuleType(parent)
            package.__path__ = []
            install(package)
        setattr(package, name, module)
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=hasattr(module, "__path__"))
    sys.modules[module.__name__] = module


@contextmanager
def _own_modules() -> Iterator[None]:
    """Import the example project anew, but for its models, and forget all of it afterwards."""
    stays = {"shop", "shop.models", "shop.migrations", "shop.migrations.0001_initial"}
    before = dict(sys.modules)
    packages = {
        name: dict(vars(sys.modules[name]))
        for name in ("shop", "config", "tests")
        if name in sys.modules
    }
    for name in before:
        if name.partition(".")[0] in {"shop", "config"} and name not in stays:
            del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name not in before]:
            if name.partition(".")[0] in {"shop", "config", "tests", "conftest"}:
                del sys.modules[name]
        for name, module in before.items():
            if name.partition(".")[0] in {"shop", "config"}:
                sys.modules[name] = module
        for name, names in packages.items():
            vars(before[name]).clear()
            vars(before[name]).update(names)


@contextmanager
def _registries() -> Iterator[None]:
    """Forget the receivers and the admin's pages that a page has registered."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (registry, copied(registry))
        for registry, copied in [
            (_RECEIVERS, dict),
            (admin.site._registry, dict),
        ]
    ]
    try:
        yield
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def models_of_the_shell() -> dict[str, Any]:
    """What ``manage.py shell`` imports by itself."""
    return Shell().get_namespace(verbosity=0)
