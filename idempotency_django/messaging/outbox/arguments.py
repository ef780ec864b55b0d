"""What a message may be published with: the rest is refused before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from ...policy import keys

LONGEST: Final = timedelta(days=3660)
"""The longest delay and window."""

MAX_PAYLOAD: Final = 4 * 1024 * 1024
"""How many characters the data of a message may have, as JSON or Base64: a transport takes 5 MiB,
and the envelope needs some."""

MAX_HEADERS: Final = 32 * 1024
"""How many characters the names and values of its headers may have: a transport takes 64 KiB, and
the envelope needs some."""

_TYPE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,255}")
_GROUP: Final = re.compile(r"[!-~]([ -~]{0,148}[!-~])?", re.ASCII)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)  # RFC 9110's token
_VALUE: Final = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*")


def as_json(value: Any) -> str:
    """The value as JSON.

    Raises:
        ValueError: it has none, or would read back as something else.
    """
    try:
        text = json.dumps(value, allow_nan=False)
        same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not same:
        raise ValueError("it would read back as something else")
    return text


def refuse_unfit(
    kind: Any,
    group: Any,
    headers: Any,
    message_id: Any,
    durations: Mapping[str, timedelta | None],
) -> None:
    """Refuse what cannot be stored, or what no broker could be given.

    Args:
        kind: the type of the message.
        group: its group; ``None`` or empty: it has none.
        headers: its headers.
        message_id: its id, where the program gives one.
        durations: its delay and its window, by the name of the argument.

    Raises:
        ValueError: one of them cannot be used.
    """
    if not _is(kind, _TYPE):
        raise ValueError(
            f"A message cannot have the type {kind!r}. Name what happened in 1 to 255 printable "
            "characters, such as 'order.paid'."
        )
    if group and not _is(group, _GROUP):
        raise ValueError(
            f"A message cannot be published to the group {group!r}. Name it with up to 150 "
            "printable ASCII characters, such as 'order-17'."
        )
    is_mapping = isinstance(headers, Mapping)
    if not is_mapping or not all(_is(k, _NAME) and _is(v, _VALUE) for k, v in headers.items()):
        raise ValueError(
            f"A message cannot have the headers {headers!r}. Pass a dict of texts: names as in "
            "HTTP, and values without control characters."
        )
    if message_id is not None and not _is(message_id, keys.VALID):
        raise ValueError(
            f"A message cannot have the message_id {message_id!r}. Give it 1 to 255 visible ASCII "
            "characters, or leave it out."
        )
    for name, duration in durations.items():
        if duration is not None and not _is_duration(duration):
            raise ValueError(
                f"A message cannot have {name}={duration!r}. Pass a timedelta from 0 to "
                f"{LONGEST.days} days."
            )


def refuse_large(payload: str, headers: Mapping[str, str]) -> None:
    """Refuse what the transports of the other side would set aside.

    Args:
        payload: the data, as it is stored.
        headers: the headers.

    Raises:
        ValueError: it is too large.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"The data of the message has {len(payload):,} characters; {MAX_PAYLOAD:,} is the most "
            "that can be published. Store it elsewhere, and publish where it is."
        )
    size = sum(len(name) + len(value) for name, value in headers.items())
    if size > MAX_HEADERS:
        raise ValueError(
            f"The headers of the message have {size:,} characters; {MAX_HEADERS:,} is the most "
            "that can be published. Put them into the data."
        )


def _is(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


def _is_duration(value: Any) -> bool:
    return isinstance(value, timedelta) and timedelta(0) <= value <= LONGEST
