"""The conditional headers of a request (RFC 9110, section 13) and what they are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.utils.http import parse_http_date_safe
from django.utils.translation import get_language

from ..errors import PreconditionFailed
from ..policy.canonical import digest
from .versions import VersionField

SAFE: Final = frozenset({"GET", "HEAD"})
ANY: Final = "*"

_ETAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'  # section 8.8.3
_IS_ETAG: Final = re.compile(_ETAG)
# Whatever stands between two of them: the list is forgiving, what counts are the tags in it.
_ETAGS: Final = re.compile(rf"(?:^|(?<=[,\s])){_ETAG}")
_FORM: Final = re.compile(r';as=[0-9a-f]{8}"')


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditional headers of a request; ``None``: it has no such header."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since: str | None = None
    if_unmodified_since: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Conditions:
        """Those of a request with these headers."""
        names = ("If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since")
        return cls(*(headers.get(name) for name in names))

    def for_change(self) -> bool:
        """Whether a change is conditional."""
        given = (self.if_match, self.if_none_match, self.if_unmodified_since)
        return any(header is not None for header in given)

    def protects(self, *, creates: bool) -> bool:
        """Whether a change on these conditions overwrites nothing that the client has not read.

        A date does not: it has whole seconds, and what has changed within the last one is not
        told from what the client has read (RFC 9110, section 8.8.2.2).

        Args:
            creates: whether the request creates what is not there.
        """
        return self.if_match is not None or (creates and (self.if_none_match or "").strip() == ANY)


def evaluate(
    conditions: Conditions,
    etag: str | None,
    modified: float | None = None,
    *,
    exists: bool,
    safe: bool,
) -> bool:
    """Evaluate the conditions in the order of RFC 9110, section 13.2.2.

    Args:
        conditions: what the request asks for.
        etag: the current ETag, of the representation that a safe method would send, and of the
            resource's state for any other method; ``None``: it has none.
        modified: when it was last changed, in seconds since the epoch; ``None``: nobody knows,
            and conditions on dates are ignored.
        exists: whether there is anything at this URL now.
        safe: whether the request only reads.

    Returns:
        ``True``: go on. ``False``: the client has it already (304).

    Raises:
        PreconditionFailed: the request must not be executed.
    """
    if_match, if_none_match = conditions.if_match, conditions.if_none_match
    if not safe:  # it is about the state, whichever representation the client has read
        if_match, if_none_match = _without_form(if_match), _without_form(if_none_match)
    if if_match is not None:
        if not _matches(if_match, etag, exists=exists, strong=True):
            raise _failed(if_match, etag)
    elif not _unmodified(conditions.if_unmodified_since, modified):
        raise PreconditionFailed
    if if_none_match is not None:
        if not _matches(if_none_match, etag, exists=exists, strong=False):
            return True
        if safe:
            return False
        raise PreconditionFailed
    since = conditions.if_modified_since
    return not (safe and modified is not None and _date(since) and _unmodified(since, modified))


def equal_strongly(one: str, other: str) -> bool:
    """The strong comparison of two ETags (section 8.8.3.2): equal, and neither is weak."""
    return one == other and not one.startswith("W/")


def equal_weakly(one: str, other: str) -> bool:
    """The weak comparison of two ETags: equal, whether weak or not."""
    return one.removeprefix("W/") == other.removeprefix("W/")


def version_etag(obj: Any, *, named_by_key: bool = True) -> str | None:
    """The strong ETag of an object's version, ``"3"``; ``None``: it has no version.

    Args:
        obj: the object.
        named_by_key: whether the URL holds the object's primary key. If not, it may lead to another
            object later, so the ETag holds the key: ``"17.3"``.
    """
    if not isinstance(obj, models.Model):
        return None
    key = "" if named_by_key else f"{quote(str(obj.pk), safe='')}."
    for field in obj._meta.concrete_fields:
        if isinstance(field, VersionField):
            return f'"{key}{getattr(obj, field.attname)}"'
    return None


def representation_etag(etag: str | None, form: str) -> str | None:
    """The ETag of one representation, made of the ETag of the state that it shows.

    Args:
        etag: that of the state, which the usual form has in the project's own language.
        form: which representation it is, apart from its language; empty: the usual one.
    """
    language = get_language() or settings.LANGUAGE_CODE
    if etag is None or (not form and language == settings.LANGUAGE_CODE):
        return etag
    return f'{etag[:-1]};as={digest(form, language)[:8]}"'


def checked_etag(etag: str | None, source: str) -> str | None:
    """The ETag, if it is one.

    Raises:
        ImproperlyConfigured: it is not quoted, or holds a character that an ETag cannot hold.
    """
    if etag is None or _IS_ETAG.fullmatch(etag):
        return etag
    raise ImproperlyConfigured(
        f"{source} returned {etag!r}, which is not an ETag. Return it in quotation marks and "
        "without spaces: '\"3\"', or 'W/\"3\"' for a weak one."
    )


def _without_form(header: str | None) -> str | None:
    return None if header is None else _FORM.sub('"', header)


def _matches(header: str, etag: str | None, *, exists: bool, strong: bool) -> bool:
    if header.strip() == ANY:
        return exists
    if etag is None:
        return False
    compare = equal_strongly if strong else equal_weakly
    return any(compare(given, etag) for given in _ETAGS.findall(header))


def _failed(if_match: str, etag: str | None) -> PreconditionFailed:
    if etag is not None and any(equal_weakly(tag, etag) for tag in _ETAGS.findall(if_match)):
        return PreconditionFailed(
            "If-Match compares ETags strongly, and a weak one (W/) never matches, so the request "
            "was not executed. "
            + (
                "The ETag of this resource is weak: its server must give it a strong one."
                if etag.startswith("W/")
                else 'Send it without the W/, such as If-Match: "3". If you received it with the '
                "W/, what compresses the answers has added it."
            )
        )
    if if_match.strip() == ANY or _ETAGS.search(if_match):
        return PreconditionFailed()
    return PreconditionFailed(
        "If-Match holds no ETag, so the request was not executed. Send the ETag as you received "
        'it, with its quotation marks: If-Match: "3".'
    )


def _unmodified(since: str | None, modified: float | None) -> bool:
    date = _date(since)
    return date is None or modified is None or int(modified) <= date


def _date(header: str | None) -> int | None:
    """The header's date; ``None``: there is none, or it is malformed and so ignored."""
    return parse_http_date_safe(header) if header else None
