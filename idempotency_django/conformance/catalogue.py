"""The requirements and the dialects: reads the YAML files, and refuses what they do not define."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, get_args

import yaml

Level = Literal["MUST", "SHOULD", "MAY"]

CHOICES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "level": frozenset(get_args(Level)),
        "form": frozenset({"quoted", "bare", "raw"}),
        "body": frozenset(
            "usual other invalid reordered spaced large text none".split(),
        ),
        "caller": frozenset({"first", "other", "anonymous"}),
        "target": frozenset({"usual", "other", "query"}),
        "leave": frozenset({"", "within-request", "after-request"}),
        "key_in": frozenset({"", "header"}),
    }
)
STATUSES: Final = ("missing", "malformed", "mismatch", "in_progress", "too_old")
"""The statuses that a dialect names."""
RANGES: Final[Mapping[str, range]] = MappingProxyType(
    {
        "success": range(200, 400),
        "refused": range(400, 500),
        "answered": range(200, 500),
        "failed": range(500, 600),
    }
)
"""The statuses that mean the same in each dialect."""

Made = TypeVar("Made")


class CatalogueError(ValueError):
    """A file has what its format does not define; the text says where."""


@dataclass(frozen=True)
class Send:
    """Sends a request, once or several times at once."""

    send: str
    key: str | list[str] | None = None
    form: str = ""
    body: str | list[str] = "usual"
    caller: str = "first"
    target: str = "usual"
    method: str = ""
    headers: str | dict[str, str] = field(default_factory=dict)
    required: bool = False
    times: int = 1
    leave: str = ""
    patient: bool = False

    @property
    def bodies(self) -> list[str]:
        """The kinds of body, to be used in turn."""
        return [self.body] if isinstance(self.body, str) else self.body


@dataclass(frozen=True)
class Restart:
    """Restarts the API."""

    restart: bool


@dataclass(frozen=True)
class Expect:
    """Says what holds for a response, or for each of several."""

    expect: str
    when: list[int | str] = field(default_factory=list)
    some: list[int | str] = field(default_factory=list)
    status: list[int | str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    as_: str = ""
    marked: bool | None = None
    header: str = ""
    own: str = ""
    problem: bool = False
    uncached: bool = False


@dataclass(frozen=True)
class Effects:
    """Says how many effects there were."""

    effects: int | list[int]
    if_counted: bool = False

    @property
    def allowed(self) -> range:
        """The numbers that are right."""
        least, most = self.effects if isinstance(self.effects, list) else [self.effects] * 2
        return range(least, most + 1)


Step = Send | Restart | Expect | Effects
STEPS: Final[Mapping[str, type[Step]]] = MappingProxyType(
    {"send": Send, "restart": Restart, "expect": Expect, "effects": Effects}
)


@dataclass(frozen=True)
class Requirement:
    """What an API does, why, and how to test it."""

    id: str
    level: Level
    text: str
    source: str
    steps: list[Step]
    dialects: list[str] = field(default_factory=list)
    key_in: str = ""
    repeat: int = 1

    def applies_to(self, dialect: Dialect) -> bool:
        """Whether the dialect is one of those that the requirement is for."""
        named = not self.dialects or dialect.name in self.dialects
        return named and self.key_in in {"", dialect.key["in"]}


@dataclass(frozen=True)
class Dialect:
    """How an API spells keys and refusals."""

    name: str
    says: str
    key: dict[str, Any]
    statuses: dict[str, list[int]] = field(default_factory=dict)
    marker: dict[str, Any] = field(default_factory=dict)
    required: bool = False

    def numbers(self, names: Iterable[int | str]) -> set[int]:
        """The statuses that names stand for; empty if the dialect does not say."""
        numbers: set[int] = set()
        for name in names:
            if isinstance(name, int):
                numbers.add(name)
            else:
                numbers.update(RANGES.get(name) or self.statuses.get(name) or ())
        return numbers


def requirements() -> list[Requirement]:
    """All requirements, in the order of their file.

    Raises:
        CatalogueError: the file has what its head does not define.
    """
    return requirements_in(_read("requirements.yaml"), dialects())


def requirements_in(entries: Any, known: Mapping[str, Dialect]) -> list[Requirement]:
    """The requirements in parsed YAML.

    Raises:
        CatalogueError: it has what the format does not define.
    """
    made: dict[str, Requirement] = {}
    for entry in entries:
        where = str(entry.get("id", entry))
        steps = [
            _step(step, f"{where}, step {number}") for number, step in enumerate(entry["steps"], 1)
        ]
        requirement = _made(Requirement, {**entry, "steps": steps}, where)
        if where in made:
            raise CatalogueError(f"{where} is there twice.")
        if unknown := set(requirement.dialects) - set(known):
            raise CatalogueError(f"{where}: unknown dialects: {', '.join(sorted(unknown))}.")
        _check_names(requirement)
        made[where] = requirement
    return list(made.values())


def dialects() -> dict[str, Dialect]:
    """All dialects by name."""
    return {name: dialect_of(name, entry) for name, entry in _read("dialects.yaml").items()}


def dialect_of(name: str, entry: Mapping[str, Any]) -> Dialect:
    """A dialect from parsed YAML.

    Raises:
        CatalogueError: it has what the format does not define.
    """
    dialect = _made(Dialect, {"says": name, **entry, "name": name}, f"The dialect {name}")
    for part in ("key", "statuses", "marker"):
        if not isinstance(getattr(dialect, part), dict):
            raise CatalogueError(f"The dialect {name}: {part} is not a mapping.")
    key, marker = dialect.key, dialect.marker
    named = isinstance(key.get("name"), str) and key["name"]
    if key.get("in") not in ("header", "body") or not named:
        raise CatalogueError(f"The dialect {name}: its key needs 'in' (header, body) and 'name'.")
    if unknown := set(key) - {"in", "name", "form", "max", "format", "first_sent"}:
        unknown_names = ", ".join(sorted(map(str, unknown)))
        raise CatalogueError(f"The dialect {name}: its key has no {unknown_names}.")
    if not isinstance(key.get("max", 1), int):
        raise CatalogueError(f"The dialect {name}: the key's max is not a number of characters.")
    if unknown := set(dialect.statuses) - set(STATUSES):
        unknown_names = ", ".join(sorted(map(str, unknown)))
        raise CatalogueError(f"The dialect {name}: there is no status {unknown_names}.")
    for status, numbers in dialect.statuses.items():
        if not isinstance(numbers, list) or not all(isinstance(each, int) for each in numbers):
            raise CatalogueError(f"The dialect {name}: {status} is not a list such as [400].")
    if marker and not all(isinstance(marker.get(each), str) for each in ("header", "value")):
        raise CatalogueError(
            f"The dialect {name}: its marker needs the texts 'header' and 'value'."
        )
    return dialect


def _read(name: str) -> Any:
    return yaml.safe_load((files(__package__) / name).read_text(encoding="utf-8"))


def _step(entry: Mapping[str, Any], where: str) -> Step:
    kinds = [kind for verb, kind in STEPS.items() if verb in entry]
    if len(kinds) != 1:
        raise CatalogueError(f"{where} is not one of {', '.join(STEPS)}: {dict(entry)}.")
    return _made(kinds[0], entry, where)


def _made(kind: type[Made], entry: Mapping[str, Any], where: str) -> Made:
    """A value of a dataclass from a mapping, whose names and choices are checked."""
    given = {"as_" if name == "as" else name: value for name, value in entry.items()}
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := set(given) - set(known):
        raise CatalogueError(f"{where}: unknown: {', '.join(sorted(map(str, unknown)))}.")
    needed = {
        name
        for name, each in known.items()
        if each.default is MISSING and each.default_factory is MISSING
    }
    if missing := needed - set(given):
        raise CatalogueError(f"{where}: missing: {', '.join(sorted(missing))}.")
    for name, value in given.items():
        # Elsewhere "body" is a body and "headers" are headers, and their values are free.
        for word in value if isinstance(value, list) else [value]:
            if name in CHOICES and word not in CHOICES[name]:
                choices = ", ".join(sorted(CHOICES[name] - {""}))
                raise CatalogueError(f"{where}: {name} is one of {choices}, not {word!r}.")
    return kind(**given)


def _check_names(requirement: Requirement) -> None:
    """Each response that a step names was sent before; each status is a known one."""
    sent: set[str] = set()
    for number, step in enumerate(requirement.steps, 1):
        where = f"{requirement.id}, step {number}"
        if isinstance(step, Send):
            if not step.leave:
                sent.add(step.send)
        elif isinstance(step, Expect):
            for name in filter(None, (step.expect, step.as_, step.own)):
                if name not in sent:
                    raise CatalogueError(f"{where}: no response is called {name!r}.")
            if bool(step.same) != bool(step.as_):
                raise CatalogueError(f"{where}: 'same' needs 'as', and 'as' needs 'same'.")
            words: Sequence[int | str] = [*step.when, *step.some, *step.status]
            for word in words:
                if isinstance(word, str) and word not in {*RANGES, *STATUSES}:
                    raise CatalogueError(f"{where}: there is no status {word!r}.")
