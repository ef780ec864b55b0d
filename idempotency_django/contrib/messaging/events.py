"""Events: messages in the envelope of CloudEvents 1.0."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from ...policy import fingerprints
from ...stores import is_reference

CAUSED_BY: Final = "causedby"
"""The extension attribute with the message or operation that caused an event."""

VERSION: Final = "1.0"
STRUCTURED: Final = "application/cloudevents+json"
"""The media type of an event whose attributes and data are one JSON object."""

MAX_NESTING: Final = 100
"""The deepest nesting of lists and objects in the data of an event."""

_ENVELOPE: Final = "application/cloudevents"
_PREFIX: Final = "ce-"
_SENT_AS_THEY_ARE: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
_TEXTUAL: Final = re.compile(r"text/.+|application/xml|.+\+xml")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):(\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)", re.IGNORECASE | re.ASCII
)

_NAME: Final = re.compile(r"[a-z0-9]+", re.ASCII)
_OWN: Final = ("id", "source", "type", "subject", "time", "datacontenttype", "dataschema")
_REQUIRED: Final = ("id", "source", "type")


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
                f"The event's time is {self.time!r}. Use a datetime with a time zone, such as "
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
        members = _loaded(text, "The event")
        if not isinstance(members, dict):
            raise ValueError(  # noqa: TRY004  # of a message, not of an argument
                f"The event is a JSON {_kind(members)}, not an object with the attributes of a "
                "CloudEvent. If it is a batch (an array of events), read the events one by one."
            )
        encoded = members.pop("data_base64", None)
        if encoded is not None:
            if members.get("data") is not None:
                raise ValueError("The event has both data and data_base64. Send one of them.")
            members["data"] = _unbased(encoded)
        return cls._of({name: value for name, value in members.items() if value is not None})

    def to_json(self) -> str:
        """The event in the JSON format, in ASCII; bytes as ``data_base64``.

        Raises:
            ValueError: the data is neither bytes nor what JSON can say.
        """
        members = self._attributes()
        if isinstance(self.data, bytes):
            members["data_base64"] = base64.b64encode(self.data).decode("ascii")
        elif self.data is not None:
            members["data"] = self.data
        return _dumped(members)

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
        lowered = {name.lower(): value for name, value in headers.items()}
        content_type = lowered.get("content-type", "")
        media_type = fingerprints.media_type_of(content_type)
        if media_type == STRUCTURED:
            return cls.from_json(body)
        if media_type.startswith(_ENVELOPE):
            raise ValueError(
                f"The event is sent as {media_type}, which is not supported. Send {STRUCTURED}, "
                "with one event in each message, or send the attributes as headers with the "
                "prefix 'ce-'."
            )
        attributes: dict[str, Any] = {
            name.removeprefix(_PREFIX): _decoded(name, value)
            for name, value in lowered.items()
            if name.startswith(_PREFIX)
        }
        if not attributes and media_type == "application/json":
            return cls.from_json(body)  # an event by its content, from a sender that sets no type
        if content_type:
            attributes["datacontenttype"] = content_type
        return cls._of({**attributes, "data": _parsed(body, media_type)})

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
        texts, content_type, body = self.to_binary("")
        headers = {
            f"{_PREFIX}{name}": quote(text, safe=_SENT_AS_THEY_ARE) for name, text in texts.items()
        }
        return headers | ({"content-type": content_type} if content_type else {}), body

    def to_binary(self, prefix: str) -> tuple[dict[str, str], str, bytes]:
        """The headers, the content type and the body of a message in the binary mode of a broker.

        Args:
            prefix: what the names of the headers begin with: ``"ce_"`` for Kafka,
                ``"cloudEvents_"`` for AMQP.

        Raises:
            ValueError: the data is neither bytes nor what JSON can say.
        """
        texts = {name: _text(value) for name, value in self._attributes().items()}
        data, content_type = self.data, texts.pop("datacontenttype", "")
        if not content_type and data is not None and not isinstance(data, bytes):
            content_type = "application/json"
        if data is None:
            body = b""
        elif isinstance(data, bytes):
            body = data
        elif isinstance(data, str) and not _is_json(fingerprints.media_type_of(content_type)):
            body = data.encode()
        else:
            body = _dumped(data).encode()
        return {f"{prefix}{name}": text for name, text in texts.items()}, content_type, body

    @classmethod
    def from_cloudevent(cls, event: Any) -> Self:
        """The same event, of the ``cloudevents`` package (the extra ``[cloudevents]``).

        Args:
            event: an event of that package.

        Raises:
            ValueError: it is of another version than 1.0, or an attribute is missing.
        """
        attributes = {"specversion": VERSION, **event.get_attributes()}
        return cls._of({**attributes, "data": event.get_data()})

    def to_cloudevent(self) -> Any:
        """The same event as a ``CloudEvent`` of the ``cloudevents`` package."""
        from cloudevents.core.v1.event import CloudEvent  # noqa: PLC0415  # an extra

        time = {} if self.time is None else {"time": self.time}
        return CloudEvent({**self._attributes(), **time}, self.data)

    @classmethod
    def _of(cls, members: dict[str, Any]) -> Self:
        """The event with these members, if it is of the version that is known."""
        version = members.pop("specversion", None)
        if version != VERSION:
            found = "no specversion" if version is None else f"specversion {version!r}"
            raise ValueError(
                f"The event has {found}. Send a CloudEvent of specversion '{VERSION}'."
            )
        own = {name: members.pop(name, None) for name in (*_OWN, "data")}
        if own["time"] is not None and not isinstance(own["time"], datetime):
            own["time"] = read_time(own["time"])
        return cls(**own, extensions=members)

    def _attributes(self) -> dict[str, Any]:
        """The attributes and the version, as JSON can say them."""
        own = {name: getattr(self, name) for name in _OWN}
        if self.time is not None:
            own["time"] = write_time(self.time)
        known = {name: value for name, value in own.items() if value is not None}
        return {"specversion": VERSION, **known, **self.extensions}


def _not_a_text(name: str, value: object) -> str:
    if value is None:
        found = f"no {name}"
    else:
        found = (
            f"an empty {name}" if value == "" else f"the {name} {value!r}, which is not a string"
        )
    return (
        f"The event has {found}. A CloudEvent needs id, source and type, and each must be a "
        f"non-empty string. Its sender must set {name}."
    )


def _refuse_extension(name: str, value: object) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)) or name in {
        *_OWN,
        "data",
        "specversion",
    }:
        raise ValueError(
            f"The event has an attribute {name!r}. The names of CloudEvents attributes have only "
            "lower-case letters (a to z) and digits. Move it into data."
        )
    if not isinstance(value, str | int):
        raise ValueError(  # noqa: TRY004  # of a message, not of an argument
            f"The event's attribute {name!r} is {value!r}. An attribute must be a string, an "
            "integer or a boolean. Move it into data."
        )


def read_time(text: Any) -> datetime:
    """A timestamp of RFC 3339; what is finer than a microsecond is cut off.

    Raises:
        ValueError: it is none.
    """
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    try:
        if match is None:
            raise ValueError
        day, minute, second, fraction, zone = match.groups(default="")
        second = min(second, "59")  # Python's days have no leap seconds
        return datetime.fromisoformat(f"{day}T{minute}:{second}{fraction}{zone.upper()}")
    except ValueError:
        raise ValueError(
            f"The event's time is {text!r}. Send an RFC 3339 timestamp, such as "
            "'2031-05-07T09:30:00Z'."
        ) from None


def write_time(time: datetime) -> str:
    """A timestamp of RFC 3339."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _loaded(text: str | bytes, what: str) -> Any:
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        loaded = _loads(decoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON in UTF-8: {error}.") from None
    validate_nesting(what, decoded, loaded, MAX_NESTING + 1)  # the envelope may be one of them
    return loaded


def validate_nesting(what: str, text: str, value: Any, at_most: int = MAX_NESTING) -> None:
    """Raise ``ValueError`` if there are too many lists and objects within one another.

    Args:
        what: what it is, for the error.
        text: the value as JSON.
        value: the value.
        at_most: how many there may be.
    """
    if text.count("[") + text.count("{") <= at_most:
        return
    within = [value]
    for _ in range(at_most):
        parts = (each.values() if isinstance(each, dict) else each for each in within)
        within = [each for part in parts for each in part if isinstance(each, dict | list | tuple)]
        if not within:
            return
    raise ValueError(
        f"{what} has more than {at_most} nested lists and objects, which is the limit of a message."
    )


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


_loads = partial(
    json.loads, object_pairs_hook=fingerprints.unique_members, parse_constant=_no_constant
)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The event's data is not JSON: {error}. Use strings, numbers, lists and dicts, or "
            "pass bytes."
        ) from None


def _unbased(encoded: Any) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError("The event's data_base64 is not Base64 (RFC 4648).") from None


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _is_json(media_type: str) -> bool:
    return media_type.endswith(("/json", "+json"))


def _parsed(body: bytes, media_type: str) -> Any:
    """The data of a body: the same that the JSON format would carry."""
    if not body:
        return None
    if _is_json(media_type):
        return _loaded(body, "The event's data")
    if _TEXTUAL.fullmatch(media_type):
        try:
            return body.decode()
        except UnicodeDecodeError:
            pass  # in another charset: its own business
    return body


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decoded(name: str, value: str) -> str:
    """A header's value as text; some senders quote it, which earlier versions of the spec allowed.

    Bytes that are not UTF-8 are refused, not replaced: two ids would become one.
    """
    value = value.strip(" \t")
    if len(value) > 1 and value.startswith('"') and value.endswith('"'):
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise ValueError(
            f"The header {name} is not percent-encoded UTF-8. Encode its value as in the HTTP "
            "binding of CloudEvents (section 3.1.3.2)."
        ) from None
