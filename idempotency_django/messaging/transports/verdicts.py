"""What is to be done with a delivered message: a closed set, matched by the loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """All that the message asks for is committed, or it is kept elsewhere. Acknowledge it."""


@dataclass(frozen=True, slots=True)
class Later:
    """Deliver it again after some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """It cannot be handled, and only the broker can keep it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The database does not answer. Keep the message, and hand it over again.

    A broker that got it back would count that, and give the message up during a long outage.
    """

    error: Exception


@dataclass(frozen=True, slots=True)
class Refused:
    """The loop is to end: the message cannot be handled, and must stay where it is."""

    error: Exception


Verdict = Done | Later | Rejected | Unavailable | Refused
