"""The business logic, such as it is: one request, one row. It knows nothing of idempotency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .faults import Faults
from .serializers import EffectSerializer

if TYPE_CHECKING:
    from django.http import HttpRequest
    from rest_framework.request import Request

    from .models import Kind


@dataclass(frozen=True)
class Receipt:
    """What the caller is told of the effect: a response in no framework's terms."""

    body: dict[str, Any]
    status: int
    headers: dict[str, str]


def perform(request: HttpRequest | Request, kind: Kind, data: Any) -> Receipt:
    """Make the row that the data asks for.

    Raises:
        ValidationError: of DRF, when the data asks for nothing that can be made.
    """
    asked = EffectSerializer(data=data)
    asked.is_valid(raise_exception=True)
    faults = Faults(request)
    faults.before_effect()
    effect = asked.save(kind=kind, owner=request.user)
    faults.after_effect()
    return Receipt(dict(asked.data), faults.status(201), {"Location": effect.get_absolute_url()})
