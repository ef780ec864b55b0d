"""Authentication that looks into the form before the key does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import path
from rest_framework import renderers
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.parsers import FileUploadParser, FormParser, JSONParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, effects, is_replay, new_key

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


class Signed(BaseAuthentication):
    """Takes the caller from the body, as providers of webhooks have it."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        if request.data.get("signature", "yes") != "yes":
            raise AuthenticationFailed
        return SimpleNamespace(is_authenticated=True, is_active=True, pk=1), None


class Uploads(IdempotentViewMixin, APIView):
    """Makes an effect of a form, with or without a file."""

    idempotency_policy = Policy(required=True)
    authentication_classes: ClassVar[list[Any]] = [Signed]
    parser_classes: ClassVar[list[Any]] = [MultiPartParser, FormParser, JSONParser]
    renderer_classes: ClassVar[list[Any]] = [
        renderers.JSONRenderer,
        renderers.BrowsableAPIRenderer,
    ]

    def post(self, request: Request) -> Response:
        """Note what came."""
        files = sorted((file.name, file.read().decode()) for file in request.FILES.values())
        Effect.objects.create(reference="a")
        return Response({"reference": request.data.get("reference"), "files": files}, status=201)


class Files(Uploads):
    """Takes nothing but a file."""

    parser_classes: ClassVar[list[Any]] = [FileUploadParser]


urlpatterns = [path("uploads/", Uploads.as_view()), path("files/", Files.as_view())]


def form(reference: str = "a", file: str = "one", **fields: str) -> dict[str, Any]:
    return {"reference": reference, "scan": SimpleUploadedFile("scan", file.encode()), **fields}


@pytest.mark.parametrize("other", [form("b"), form(file="two")], ids=["field", "file"])
def test_form_that_was_read_is_part_of_the_fingerprint(client: Client, other: Any) -> None:
    """The retry is replayed; another field or file under the same key is refused."""
    headers = {"Idempotency-Key": new_key()}
    first, retry = (client.post("/uploads/", form(), headers=headers) for _ in range(2))
    assert (first.status_code, first.json()["files"]) == (201, [["scan", "one"]])
    assert is_replay(retry)
    assert retry.content == first.content
    assert_problem(client.post("/uploads/", other, headers=headers), 422, "mismatch")
    assert effects() == 1


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
def test_body_without_files_that_was_read(client: Client, kind: str) -> None:
    """JSON and plain forms are compared by what the parser made of them."""
    is_json = kind.endswith("json")
    one, other = ('{"a": 1}', '{"a": 2}') if is_json else ("a=1", "a=2")
    headers = {"Idempotency-Key": new_key()}
    first, retry = (client.post("/uploads/", one, kind, headers=headers) for _ in range(2))
    assert first.status_code == 201
    assert is_replay(retry)
    assert_problem(client.post("/uploads/", other, kind, headers=headers), 422, "mismatch")
