"""What is kept of an answer, as the adapter's framework and the policy decide it."""

from __future__ import annotations

from dataclasses import replace

from django.core.exceptions import ImproperlyConfigured
from django.http.response import HttpResponseBase

from ..engine import Result
from ..policy import Policy
from ..records import Payload
from .adapter import Adapter
from .messages import payload_of, rendered, shows_refused_form
from .negotiation import suited_to


def _payload(adapter: Adapter, response: HttpResponseBase, policy: Policy) -> Payload:
    """What is kept of an answer; a tombstone of a page that was made for one visitor."""
    lasting = adapter.lasting(response)
    payload = payload_of(response if lasting is None else lasting, policy)
    if lasting is None:
        return replace(payload, body=None)
    return suited_to(adapter.http_request, payload, response.get("Content-Type", ""))


def result_of(adapter: Adapter, response: HttpResponseBase, policy: Policy) -> Result:
    """What the engine is to store of an answer, or why nothing."""
    status = response.status_code
    if not policy.keeps(status):
        return Result(response, None, error=f"The answer was {status}.", failed=status >= 500)
    unwanted = _unwanted(adapter, response, policy)
    if unwanted:
        return Result(response, None, error=unwanted)
    return Result(response, _payload(adapter, response, policy))


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
        with adapter.tokens.noticed():  # it may be called later than what recovers
            return _payload(adapter, rendered(response), policy)

    status = response.status_code
    keeps = policy.keeps_raised(status) and not _unwanted(adapter, response, policy)
    kept = payload if keeps else None
    reason = f"{type(error).__name__}: {error}"
    return Result(response, kept, error=reason, failed=kept is None and status >= 500)
