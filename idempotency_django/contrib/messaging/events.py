"""Events: messages in the envelope of CloudEvents 1.0."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self

from ...policy import fingerprints
from ...stores import is_reference

CAUSED_BY: Final = "causedby"
"""The extension attribute with the message or operation that caused an event."""

VERSION: Final = "1.0"
STRUCTURED: Final = "application/cloudevents+json"
"""The media type of an event whose attributes and data are one JSON object."""

MAX_NESTING: Final = 100
"""The deepest nesting of lists and objects in the data of an event."""

_NAME: Final = re.compile(r"[a-z0-9]+", re.ASCII)
_REQUIRED: Final = ("id", "source", "type")
_TEXTS: Final = (*_REQUIRED, "subject")
_FIELDS: Final = frozenset({*_TEXTS, "time", "data", "specversion"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, as a message tells it (CloudEvents 1.0).

    The source and the id together name the event: its sender sends the same two each time.

    Attributes:
        id: which event of its source it is; any text that is not empty.
        source: where it happened, a URI reference such as ``"/shops/17"``.
        type: what happened, such as ``"order.paid"``.
        data: the details: what JSON can say, or bytes.
        subject: what of the source it is about.
        time: when it happened, with a time zone.
        extensions: further attributes: texts, whole numbers and booleans, by lower-case names.

    Raises:
        ValueError: an attribute is missing, or is none of CloudEvents.
    """

    id: str
    source: str
    type: str
    data: Any = None
    subject: str | None = None
    time: datetime | None = None
    extensions: Mapping[str, str | int | bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if (value is not None or name in _REQUIRED) and not (isinstance(value, str) and value):
                found = f"no {name}" if value is None else f"the {name} {value!r}"
                raise ValueError(
                    f"The event has {found}. A CloudEvent needs id, source and type, and each must "
                    f"be a non-empty string. Its sender must set {name}."
                )
        if self.time is not None and self.time.utcoffset() is None:
            raise ValueError(f"The event's time {self.time} has no time zone.")
        for name, value in self.extensions.items():
            if not _NAME.fullmatch(name) or name in _FIELDS or not isinstance(value, str | int):
                raise ValueError(
                    f"The event has the attribute {name!r} with the value {value!r}. The names of "
                    "CloudEvents attributes have only lower-case letters (a to z) and digits, and "
                    "their values are strings, integers and booleans. Move it into data."
                )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The event in a message of the JSON format (``application/cloudevents+json``).

        Raises:
            ValueError: it is no such event; the text says why.
        """
        try:
            members = _loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The event is not JSON in UTF-8: {error}.") from None
        if not isinstance(members, dict):
            raise ValueError(  # noqa: TRY004  # of a message, not of an argument
                f"The event is a {type(members).__name__} in JSON, not an object with the "
                "attributes of a CloudEvent. If it is a batch, read its events one by one."
            )
        validate_nesting("The event's data", members.get("data"))
        members = {name: value for name, value in members.items() if value is not None}
        version = members.pop("specversion", None)
        if version != VERSION:
            found = "no specversion" if version is None else f"specversion {version!r}"
            raise ValueError(
                f"The event has {found}. Send a CloudEvent of specversion '{VERSION}'."
            )
        if "data_base64" in members:
            if "data" in members:
                raise ValueError("The event has both data and data_base64. Send one of them.")
            try:
                members["data"] = base64.b64decode(members.pop("data_base64"), validate=True)
            except (TypeError, ValueError):
                raise ValueError("The event's data_base64 is not Base64 (RFC 4648).") from None
        if "time" in members:
            members["time"] = datetime.fromisoformat(str(members["time"]).upper())
        own = {name: members.pop(name, None) for name in _FIELDS - {"specversion"}}
        return cls(**own, extensions=members)

    def to_json(self) -> str:
        """The event in the JSON format, in ASCII; bytes as ``data_base64``.

        Raises:
            ValueError: the data is neither bytes nor what JSON can say, or the time is not in the
                years 1 to 9999 of UTC.
        """
        own = {name: getattr(self, name) for name in _TEXTS if getattr(self, name)}
        members = {"specversion": VERSION, **own, **self.extensions}
        if isinstance(self.data, bytes):
            members["data_base64"] = base64.b64encode(self.data).decode("ascii")
        elif self.data is not None:
            members["data"] = self.data
        try:
            if self.time:
                members["time"] = self.time.astimezone(UTC).isoformat().replace("+00:00", "Z")
            return json.dumps(members, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"The event's time or data is not JSON: {error}. Use strings, numbers, lists and "
                "dicts, or pass bytes."
            ) from None

    @property
    def caused_by(self) -> str:
        """The reference of its cause, in the extension ``causedby``; empty: it names none."""
        cause = self.extensions.get(CAUSED_BY, "")
        return str(cause) if is_reference(cause) else ""


def validate_nesting(what: str, value: Any) -> None:
    """Raise ``ValueError`` if there are too many lists and objects within one another.

    Args:
        what: what it is, for the error.
        value: the value.
    """
    within: list[Any] = [[value]]
    for _ in range(MAX_NESTING + 1):
        parts = (each.values() if isinstance(each, dict) else each for each in within)
        within = [each for part in parts for each in part if isinstance(each, dict | list | tuple)]
        if not within:
            return
    raise ValueError(
        f"{what} has more than {MAX_NESTING} nested lists and objects, which is the limit of a "
        "message."
    )


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number that JSON can say")
    return number


_loads = partial(
    json.loads,
    object_pairs_hook=fingerprints.unique_members,
    parse_constant=_finite,
    parse_float=_finite,
)
