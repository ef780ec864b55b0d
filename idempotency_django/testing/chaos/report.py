"""What became of each message, and the table that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Effects = int | Mapping[str, int]

_HEAD = ("trial", "what happened", "deliveries", "effects", "")


@dataclass(frozen=True)
class Trial:
    """What became of one message.

    Attributes:
        number: of the trial, for ``chaos(…, only=number)``.
        what: what happened to its deliveries, such as ``"killed before COMMIT"``.
        message: the message.
        deliveries: how often it was delivered.
        kills: how many of the deliveries were killed.
        effects: what was counted in the end.
        expected: what should have been.
        error: why the last delivery was not acknowledged; empty: it was.
        stuck: what the message left in the package's tables that is neither done nor given up.
    """

    number: int
    what: str
    message: object
    deliveries: int
    kills: int
    effects: Effects
    expected: Effects
    error: str = ""
    stuck: Mapping[str, int] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """What is wrong; empty: nothing."""
        wrong = [] if self._as_expected else [f"expected {told(self.expected)}"]
        if self.error:
            wrong.append(f"never acknowledged: {self.error}")
        wrong += [f"{count} {state}" for state, count in self.stuck.items()]
        return "; ".join(wrong)

    @property
    def _as_expected(self) -> bool:
        if isinstance(self.effects, Mapping) and isinstance(self.expected, int):
            return all(count == self.expected for count in self.effects.values())
        return self.effects == self.expected


@dataclass(frozen=True)
class Report:
    """What :func:`chaos` has seen; ``str()`` of it is a table with a line for each message.

    Attributes:
        boundaries: what an undisturbed delivery passes, in order.
        trials: what became of each message.
        seed: what the order of the messages, and the choice of trials, came from.
    """

    boundaries: Sequence[str]
    trials: Sequence[Trial]
    seed: int

    def assert_passed(self) -> None:
        """Raise an ``AssertionError`` with the table unless :attr:`passed`."""
        if not self.passed:
            raise AssertionError(f"Not all messages are as expected.\n\n{self}")

    @property
    def passed(self) -> bool:
        """Whether each message has the expected effects, is acknowledged and left nothing."""
        return bool(self.trials) and not self.failures

    @property
    def failures(self) -> list[Trial]:
        """The trials in which something is wrong."""
        return [trial for trial in self.trials if trial.failure]

    @property
    def effects(self) -> set[int]:
        """The numbers of effects that messages had: ``{1}`` if each had one of each kind."""
        return {
            count
            for trial in self.trials
            for count in (
                trial.effects.values() if isinstance(trial.effects, Mapping) else [trial.effects]
            )
        }

    @property
    def kills(self) -> int:
        """How many processes were killed."""
        return sum(trial.kills for trial in self.trials)

    @property
    def deliveries(self) -> int:
        """How many deliveries there were."""
        return sum(trial.deliveries for trial in self.trials)

    def __str__(self) -> str:
        rows = [_HEAD] + [
            (str(t.number), t.what, str(t.deliveries), told(t.effects), _marked(t.failure))
            for t in self.trials
        ]
        widths = [max(len(row[place]) for row in rows) for place in range(4)]
        lines = [
            f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
            f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self._summary()])

    def _summary(self) -> str:
        said = (
            f"{len(self.boundaries)} boundaries, {len(self.trials)} messages, "
            f"{self.deliveries} deliveries, {self.kills} kills, seed {self.seed}: "
        )
        if not self.failures:
            return said + "all as expected"
        first = self.failures[0]
        again = f"only={first.number}, seed={self.seed}"
        return f"{said}{len(self.failures)} not as expected. See one again with chaos(…, {again})."


def _marked(failure: str) -> str:
    return f"✗ {failure}" if failure else ""


def told(effects: Effects) -> str:
    """Counts in words: ``1``, or ``entries 1, charges 2``."""
    if isinstance(effects, Mapping):
        return ", ".join(f"{name} {count}" for name, count in effects.items())
    return str(effects)


def counted(effects: Effects, what: str = "effects() returned") -> Effects:
    """The counts as they are.

    Raises:
        TypeError: they are none, such as a tuple, which would be compared as a whole.
    """
    counts = effects.values() if isinstance(effects, Mapping) else [effects]
    if not all(isinstance(count, int) for count in counts):
        raise TypeError(
            f"{what} {effects!r}, which is no count. It must be a whole number, or a dict of them: "
            'one for each thing that is counted, such as {"entries": 1, "charges": 1}.'
        )
    return effects
