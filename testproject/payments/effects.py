"""The business logic, such as it is: one request, one row. It knows nothing of idempotency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from django.db import transaction

from .faults import Faults
from .serializers import EffectSerializer

if TYPE_CHECKING:
    from django.http import HttpRequest
    from rest_framework.request import Request

    from .models import Kind


class Receipt(TypedDict):
    """The response to the caller, as framework-free JSON."""

    body: dict[str, Any]
    headers: dict[str, str]


def perform(request: HttpRequest | Request, kind: Kind, data: Any) -> Receipt:
    """Make the row that the data asks for.

    Raises:
        ValidationError: of DRF, when the data asks for nothing that can be made.
    """
    asked = understood(data)
    Faults(request).sleep()
    return make(request, kind, asked)


def understood(data: Any) -> EffectSerializer:
    """The validated data of the request.

    Raises:
        ValidationError: of DRF, when that is nothing that can be made.
    """
    asked = EffectSerializer(data=data)
    asked.is_valid(raise_exception=True)
    return asked


@transaction.atomic
def make(request: HttpRequest | Request, kind: Kind, asked: EffectSerializer) -> Receipt:
    """Make the row."""
    faults = Faults(request)
    faults.before_effect()
    effect = asked.save(kind=kind, owner=request.user)
    faults.after_effect()
    return {"body": dict(asked.data), "headers": {"Location": effect.get_absolute_url()}}
