"""Events: messages in the envelope of CloudEvents 1.0."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Self

from ..records import is_reference
from . import envelopes

CAUSED_BY: Final = "causedby"
"""The extension attribute that names the message or operation that an event comes from."""

_NAME: Final = re.compile(r"[a-z0-9]+", re.ASCII)
_OWN: Final = ("id", "source", "type", "subject", "time", "datacontenttype", "dataschema")
_REQUIRED: Final = ("id", "source", "type")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, as a message tells it (CloudEvents 1.0).

    The source and the id together name the event: whoever sends it again sends the same two.

    Attributes:
        id: which event of its source it is; any text that is not empty.
        source: where it happened, a URI reference such as ``"/shops/17"``.
        type: what happened, such as ``"order.paid"``.
        data: the details: what JSON can say, or bytes.
        subject: what of the source it is about.
        time: when it happened, with a time zone.
        datacontenttype: the media type of the data; JSON if it is empty.
        dataschema: the URI of a schema of the data.
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
    datacontenttype: str | None = None
    dataschema: str | None = None
    extensions: Mapping[str, str | int | bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _OWN:
            value = getattr(self, name)
            if name == "time" or (value is None and name not in _REQUIRED):
                continue
            if not (isinstance(value, str) and value):
                raise ValueError(_not_a_text(name, value))
        if self.time is not None and (
            not isinstance(self.time, datetime) or self.time.utcoffset() is None
        ):
            raise ValueError(
                f"The event's time is {self.time!r}. Give a datetime with a time zone, such as "
                "django.utils.timezone.now()."
            )
        for name, value in self.extensions.items():
            _refuse_extension(name, value)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The event in a message of the JSON format (``application/cloudevents+json``).

        Raises:
            ValueError: it is no such event; the text says why.
        """
        return cls._of(envelopes.read_json(text))

    def to_json(self) -> str:
        """The event in the JSON format; bytes as ``data_base64``.

        Raises:
            ValueError: the data is neither bytes nor what JSON can say.
        """
        return envelopes.write_json(self._attributes(), self.data)

    @classmethod
    def from_http(cls, headers: Mapping[str, str], body: bytes) -> Self:
        """The event in an HTTP message: in the structured mode, or in the binary mode.

        A body of type ``application/json`` without headers that begin with ``ce-`` is read as the
        JSON format too.

        Args:
            headers: the message's headers, such as ``request.headers``.
            body: the message's body.

        Raises:
            ValueError: it is no such event; the text says why.
        """
        return cls._of(envelopes.read_http(headers, body))

    @property
    def caused_by(self) -> str:
        """The reference of its cause, in the extension ``causedby``; empty: it names none."""
        cause = self.extensions.get(CAUSED_BY, "")
        return str(cause) if is_reference(cause) else ""

    def to_http(self) -> tuple[dict[str, str], bytes]:
        """The headers and the body of an HTTP message in the binary mode.

        Raises:
            ValueError: the data is neither bytes nor what JSON can say.
        """
        return envelopes.write_http(self._attributes(), self.data)

    def to_binary(self, prefix: str) -> tuple[dict[str, str], str, bytes]:
        """The headers, the content type and the body of a message in the binary mode of a broker.

        Args:
            prefix: what the names of the headers begin with: ``"ce_"`` for Kafka,
                ``"cloudEvents_"`` for AMQP.

        Raises:
            ValueError: the data is neither bytes nor what JSON can say.
        """
        attributes, content_type, body = envelopes.write_binary(self._attributes(), self.data)
        return {f"{prefix}{name}": text for name, text in attributes.items()}, content_type, body

    @classmethod
    def _of(cls, members: dict[str, Any]) -> Self:
        own = {name: members.pop(name, None) for name in (*_OWN, "data")}
        return cls(**own, extensions=members)

    def _attributes(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN}
        if self.time is not None:
            own["time"] = envelopes.write_time(self.time)
        return {name: value for name, value in own.items() if value is not None} | {
            **self.extensions
        }


def _not_a_text(name: str, value: object) -> str:
    if value is None:
        found = f"no {name}"
    else:
        found = f"an empty {name}" if value == "" else f"the {name} {value!r}, which is not a text"
    return (
        f"The event has {found}. A CloudEvent needs id, source and type, and each of its "
        f"attributes is a text that is not empty. Have its sender set {name}."
    )


def _refuse_extension(name: str, value: object) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)) or name in {
        *_OWN,
        "data",
        "specversion",
    }:
        raise ValueError(
            f"The event has an attribute {name!r}. The names of CloudEvents' attributes have "
            "lower-case letters from a to z and digits only. Put it into data."
        )
    if not isinstance(value, str | int):
        raise ValueError(  # noqa: TRY004  # of a message, not of an argument
            f"The event's attribute {name!r} is {value!r}. An attribute is a text, a whole number "
            "or a boolean. Put it into data."
        )
