"""Work that a request leaves to a Celery task."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotency_exempt
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy

from .effects import understood
from .faults import Faults
from .tasks import book, book_unprotected


class JobView(IdempotentViewMixin, APIView):
    """A retry enqueues no second task: its response is replayed. If there is none because the
    server died, it sends the task again with the same id, and the task is executed once.
    """

    # Its effect, a message, is not in the database, so no transaction can hold it.
    idempotency_policy = Policy(store="database", mode="leased")

    def post(self, request: Request) -> Response:
        execution = request.idempotency
        return _enqueued(request, book, execution.derive_key("job") if execution else str(uuid4()))


@idempotency_exempt
class UnprotectedJobView(APIView):
    """A task without protection, to see what that is like."""

    def post(self, request: Request) -> Response:
        return _enqueued(request, book_unprotected, str(uuid4()))


def _enqueued(request: Request, task: Any, task_id: str) -> Response:
    asked = dict(understood(request.data).validated_data)
    faults = Faults(request)
    faults.before_effect()
    task.apply_async((request.user.pk, asked, faults.seconds), task_id=task_id)
    faults.after_effect()
    return Response({**asked, "task": task_id}, faults.status(202))
