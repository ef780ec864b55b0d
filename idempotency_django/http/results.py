"""What is kept of an answer, as the adapter's framework and the policy decide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from http.client import responses as reasons
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.forms import BaseForm, BaseFormSet
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import get_language

from ..engine import Result
from ..engine.failures import named
from ..policy import Policy
from ..records import REASON, Payload
from .adapter import Adapter
from .messages import rendered
from .negotiation import GIVEN_OUT, nonce_of, suited_to

LANGUAGE: Final = "Content-Language"

UNKNOWN_REASON: Final = "Unknown Status Code"
"""Django's reason phrase of a status that Python does not know."""

NEVER_KEPT: Final = frozenset(
    # Of one message or connection (RFC 9110, section 7.6.1) …
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    "transfer-encoding upgrade content-length date server age via "
    # … or of one request and its session.
    "set-cookie x-request-id request-id x-correlation-id traceparent tracestate server-timing "
    "x-runtime".split()
)
"""Response headers, in lower case, that are never stored; a replay gets its own."""


def result_of(adapter: Adapter, response: HttpResponseBase, policy: Policy) -> Result:
    """What the engine is to store of an answer, or why nothing."""
    status = response.status_code
    if status >= 500 or status in policy.never_store:  # not policy.keeps(status)
        return Result(response, None, error=f"The answer was {status}.", failed=status >= 500)
    if policy.stores is not None or getattr(response, "context_data", None):
        unwanted = _unwanted(adapter, response, policy)
        if unwanted:
            return Result(response, None, error=unwanted)
    return Result(response, _payload(adapter, response, policy))


def _payload(adapter: Adapter, response: HttpResponseBase, policy: Policy) -> Payload:
    """What is kept of an answer; a tombstone of a page that was made for one visitor."""
    meta = adapter.http_request.META
    lasting = response
    given_out = adapter.tokens or GIVEN_OUT in meta or nonce_of(adapter.http_request)
    if adapter.shows_page or given_out:
        suitable = adapter.lasting(response)
        if suitable is None:
            return replace(payload_of(response, policy), body=None)
        lasting = suitable
    payload = payload_of(lasting, policy)
    if hasattr(adapter.http_request, "LANGUAGE_CODE") and not lasting.has_header(LANGUAGE):
        # LocaleMiddleware would label a replay with the language of the retry.
        labels = [(LANGUAGE, language)] if (language := get_language()) else []
        payload = replace(payload, headers=(*payload.headers, *labels))
    if meta.get("HTTP_ACCEPT", "*/*") == "*/*":
        return payload  # any form suits
    return suited_to(adapter.http_request, payload, response.get("Content-Type", ""))


def payload_of(response: HttpResponseBase, policy: Policy) -> Payload:
    """What is kept of an answer; a tombstone if it was streamed or is too large."""
    unwanted: frozenset[str] = NEVER_KEPT
    if policy.exclude_headers:
        unwanted = unwanted.union(name.lower() for name in policy.exclude_headers)
    headers = []
    for pair in response.items():
        if pair[0].lower() not in unwanted:
            headers.append(pair)  # noqa: PERF401  # a comprehension would be another frame
    if response.reason_phrase != reasons.get(response.status_code, UNKNOWN_REASON):
        headers.append((REASON, response.reason_phrase))
    body = None
    if isinstance(response, HttpResponse) and policy.store_body:
        body = response.content if len(response.content) <= policy.max_response_bytes else None
    return Payload(response.status_code, tuple(headers), body)


def shows_refused_form(response: HttpResponseBase) -> bool:
    """Whether it is a page whose context contains a form, or a formset, with errors."""
    context = getattr(response, "context_data", None)
    return isinstance(context, Mapping) and any(map(_is_refused_form, context.values()))


def _is_refused_form(value: Any) -> bool:
    # The admin wraps its forms, and has a list of its formsets.
    if isinstance(value, list):
        return any(map(_is_refused_form, value))
    for form in (value, getattr(value, "form", None), getattr(value, "formset", None)):
        if isinstance(form, BaseForm | BaseFormSet) and form.is_bound and not form.is_valid():
            return True
    return False


def _unwanted(adapter: Adapter, response: HttpResponseBase, policy: Policy) -> str:
    """Why an answer is not stored although its status is; empty: it is stored."""
    if policy.stores is None:
        return "The answer shows a form with errors." if shows_refused_form(response) else ""
    wanted = policy.stores(adapter.http_request, response)
    if not isinstance(wanted, bool):
        raise ImproperlyConfigured(
            f"The stores of an idempotency policy returned a {type(wanted).__name__}, not a bool."
        )
    return "" if wanted else "The policy's stores= does not store this answer."


def result_of_error(
    adapter: Adapter, response: HttpResponseBase, error: Exception, policy: Policy
) -> Result:
    """The same of the answer to an error; its payload is made after the rollback."""

    def payload() -> Payload:
        with adapter.noticing():  # it may be called later than what recovers
            return _payload(adapter, rendered(response), policy)

    status = response.status_code
    keeps = policy.keeps_raised(status) and not _unwanted(adapter, response, policy)
    kept = payload if keeps else None
    return Result(response, kept, error=named(error), failed=kept is None and status >= 500)
