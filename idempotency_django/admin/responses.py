"""A stored response made readable, as text that is never taken for HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.client import responses as reasons
from typing import Any, Final

from django.contrib.admin import ModelAdmin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.http import parse_header_parameters
from django.utils.translation import gettext as _

from ..engine.steps import LONGEST_NAME
from ..models import IdempotencyStep
from ..stores.codec import decode
from ..stores.records import derived_key
from .text import indented, shortened

TEMPLATE: Final = "admin/idempotency_django/idempotencykey/derived_keys.html"


def derived_keys_page(
    model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any], record: Any
) -> HttpResponse:
    """The derived keys of the record, the one among the rows: of its steps, and of a name typed."""
    steps = IdempotencyStep.objects.using(rows.db).filter(record=record.pk).order_by("pk")
    name = request.GET.get("name", "")[:LONGEST_NAME]
    names = dict.fromkeys([*steps.values_list("name", flat=True), *filter(None, [name])])
    fingerprint = rows.values_list("fingerprint", flat=True).get()
    derive = partial(derived_key, scope=record.scope, key=record.key, fingerprint=fingerprint)
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": _("Derived keys"),
        "original": record,
        "derived": {name: derive(name=name) for name in names},
        "name": name,
        "longest": LONGEST_NAME,
    }
    return TemplateResponse(request, TEMPLATE, context)


LONGEST_DUMP: Final = 256
"""The number of bytes shown of a binary body."""

_TEXTUAL: Final = re.compile(
    r"text/.*|application/(json|xml|javascript|x-www-form-urlencoded|.*\+json|.*\+xml)"
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response of a record, or the error of its last attempt.

    Attributes:
        status: the status code and its name; ``Result`` where it is no response of HTTP; empty
            when there is no response.
        headers: as ``(name, value)`` pairs, in order.
        body: the exact bytes; ``None``: not kept.
        error: why the attempt was rolled back.
        is_response: whether it is one of HTTP, and not what a task, call or consumer returned.
    """

    status: str
    headers: Sequence[tuple[str, str]]
    body: bytes | None
    error: str
    is_response: bool = True

    @classmethod
    def of(cls, rows: Any) -> StoredResponse | None:
        """The response of the one record among ``rows``; ``None``: it has been purged since."""
        columns = ("response_status", "response_headers", "response_body", "error", "path")
        stored = rows.values_list(*columns).first()
        if stored is None:
            return None
        code, headers, body, error, path = stored
        payload = decode(code, headers, body)
        status = ""
        if code is not None:
            status = f"{code} {reasons.get(code, '')}".strip() if path else _("Result")
        return cls(status, payload.headers, payload.body, error, is_response=bool(path))

    @property
    def size(self) -> int:
        """Bytes in the body."""
        return len(self.body or b"")

    @property
    def text(self) -> str | None:
        """The body as text, JSON with one member per line; ``None`` if it is binary."""
        sent = {name.lower(): value for name, value in self.headers}
        media_type, parameters = parse_header_parameters(sent.get("content-type", ""))
        if "content-encoding" in sent or not _TEXTUAL.fullmatch(media_type):
            return None
        try:
            text = (self.body or b"").decode(parameters.get("charset", "utf-8"))
            text.encode()  # some charsets have characters that no page can show
        except (LookupError, ValueError):
            return None
        return indented(text) if media_type.endswith("json") else shortened([text])

    @property
    def dump(self) -> str:
        """The first bytes of the body, in hexadecimal and ASCII."""
        start = (self.body or b"")[:LONGEST_DUMP]
        lines = [_dumped(start[at : at + 16], at) for at in range(0, len(start), 16)]
        return "\n".join([*lines, "…"] if self.size > len(start) else lines)


def _dumped(line: bytes, at: int) -> str:
    legible = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
    return f"{at:08x}  {line.hex(' '):<47}  {legible}"
