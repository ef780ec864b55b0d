"""What all errors of operations have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class IdempotencyError(Exception):
    """The base of all errors that an operation can end in.

    ``str(error)`` is written for the person who reads it: what was wrong and what to do.

    Args:
        detail: what was wrong with this request; by default the class's own text.
        retry_after: seconds after which a retry makes sense; ``None``: a retry makes no sense.

    Attributes:
        foreign: whether it is about another operation than the request's: an ``idempotent_call``,
            or what a hook did after the commit. An adapter treats it like any other exception of
            the view.
    """

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "error"
    title: ClassVar[str] = "The operation could not be made safe to retry"
    default_detail: ClassVar[str] = "The operation could not be made safe to retry."
    foreign: bool = False

    def __init__(self, detail: str = "", *, retry_after: int | None = None) -> None:
        self.detail = detail or self.default_detail
        self.retry_after = retry_after
        super().__init__(self.detail)


def all_errors(base: type[IdempotencyError] = IdempotencyError) -> Iterator[type[IdempotencyError]]:
    """Every error that is raised: the leaves of the tree below ``base``."""
    for error in base.__subclasses__():
        if error.__subclasses__():
            yield from all_errors(error)
        else:
            yield error
