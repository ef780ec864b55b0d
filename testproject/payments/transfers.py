"""A transfer: a debit here, a booking in an external ledger, a credit here.

No transaction spans all three. So each is a step, done once to a stored result: a retry after a
crash continues after the last stored one. What no database can tell is whether a call was
made whose response was never stored; the ledger can, by the key that is the same on every attempt.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httpx
from django.conf import settings
from rest_framework.exceptions import APIException

from .effects import Receipt, make, understood
from .faults import Faults
from .models import Kind, Posting, Side

if TYPE_CHECKING:
    from rest_framework.request import Request

    from idempotency_django.engine.context import ExecutionContext

    from .serializers import EffectSerializer

LEDGER_TIMEOUT = httpx.Timeout(10, connect=2)  # seconds


class LedgerUnavailable(APIException):
    """The ledger did not respond, or not as it should; a retry calls it again."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_detail = "The ledger cannot be reached. Retry with the same key."


def transfer(request: Request, data: Any) -> Receipt:
    """Make the transfer that the data asks for, or what is left to be made of it.

    Raises:
        ValidationError: of DRF, when the data asks for nothing that can be made.
        LedgerUnavailable: the debit is made, and a retry continues after it.
    """
    asked, faults = understood(data), Faults(request)
    execution: ExecutionContext = request.idempotency
    execution.step("debit", _post, request, Side.DEBIT, asked)
    faults.reached("after-debit")
    execution.step("ledger", _book, request, asked, execution.derive_key("ledger"))
    faults.reached("after-ledger")
    faults.sleep()
    receipt: Receipt = execution.step("credit", _credit, request, asked)
    return receipt


def _post(request: Request, side: Side, asked: EffectSerializer) -> None:
    Posting.objects.create(side=side, owner=request.user, **asked.validated_data)


def _book(request: Request, asked: EffectSerializer, key: str) -> int:
    headers = {"Idempotency-Key": key}
    try:
        response = _ledger().post("/bookings", json=asked.validated_data, headers=headers)
        booking: int = response.raise_for_status().json()["booking"]
    except httpx.HTTPError as error:
        raise LedgerUnavailable from error
    Faults(request).reached("during-ledger")
    return booking


def _credit(request: Request, asked: EffectSerializer) -> Receipt:
    _post(request, Side.CREDIT, asked)
    return make(request, Kind.TRANSFER, asked)


@cache  # at the first transfer, which is after gunicorn has forked
def _ledger() -> httpx.Client:
    return httpx.Client(base_url=settings.LEDGER_URL, timeout=LEDGER_TIMEOUT)
