"""Django REST framework: ``IdempotentViewMixin`` makes a view safe to retry.

It comes before ``APIView`` in the class's bases, and works on ``APIView``, generic views, viewsets
and their ``@action`` methods. Authentication, permissions and throttles run first, for every
request. Then the handler runs once per operation, and its response is finalised and rendered in the
transaction that stores it. A caller without permission for the object in the URL gets no replay.

::

    class ChargeViewSet(IdempotentViewMixin, viewsets.ModelViewSet):
        idempotency_policy = Policy(required=True)
        idempotency_policies = {"capture": PAYMENT, "preview": None}
"""

from typing import TYPE_CHECKING

from ..lazy import extra, lazily

with extra("drf"):
    import rest_framework  # noqa: F401

if TYPE_CHECKING:
    from .views import IdempotencyAPIException, IdempotentViewMixin, problem

__all__ = [
    "IdempotencyAPIException",
    "IdempotentViewMixin",
    "problem",
]

# Lazily: REST framework imports the renderers of its settings before its own views.
__getattr__ = lazily(
    __name__,
    globals(),
    {
        "IdempotencyAPIException": "views",
        "IdempotentViewMixin": "views",
        "problem": "views",
    },
)
