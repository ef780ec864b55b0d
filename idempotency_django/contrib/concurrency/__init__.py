"""Natural keys, transitions, versions and preconditions: two writers, and one of them wins."""

from typing import TYPE_CHECKING

from ...lazy import lazily

if TYPE_CHECKING:
    from .conditions import preconditions
    from .drf import PreconditionMixin
    from .once import AlreadyThere, Moved, once_per, transition
    from .versions import Versioned, VersionedForm, VersionField, compare_and_swap

__all__ = [
    "AlreadyThere",
    "Moved",
    "PreconditionMixin",
    "VersionField",
    "Versioned",
    "VersionedForm",
    "compare_and_swap",
    "once_per",
    "preconditions",
    "transition",
]

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "AlreadyThere": "once",
        "Moved": "once",
        "PreconditionMixin": "drf",
        "VersionField": "versions",
        "Versioned": "versions",
        "VersionedForm": "versions",
        "compare_and_swap": "versions",
        "once_per": "once",
        "preconditions": "conditions",
        "transition": "once",
    },
)
