"""This package speaks the dialects as the runner knows them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, JsonResponse
from django.urls import path
from rest_framework.authentication import TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.exceptions import ValidationError
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.conformance import catalogue, runner
from idempotency_django.conformance.runner import Count, Runner, Target
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from idempotency_django.policy.dialects import DIALECTS, Dialect
from tests.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

KNOWN = {"stripe": {"IDEM-063"}}  # a 5xx is rolled back, so its retry is executed
SLUGS = {
    "missing": "key-missing",
    "malformed": "key-malformed",
    "mismatch": "mismatch",
    "in_progress": "in-progress",
    "too_old": "key-too-old",
}
USUAL = {"key-missing": 400, "key-malformed": 400, "mismatch": 422, "in-progress": 409}


class Charges(IdempotentViewMixin, APIView):
    """An endpoint in a dialect."""

    authentication_classes: ClassVar[list[Any]] = [TokenAuthentication]
    permission_classes: ClassVar[list[Any]] = [IsAuthenticated]

    def post(self, request: Request) -> Response:
        if not isinstance(request.data["amount"], int):
            raise ValidationError("The amount is a number.")
        effect = Effect.objects.create(reference=request.data["reference"])
        status = int(request.headers.get("X-Fail", 201))
        return Response({"id": effect.pk}, status, headers={"Location": f"/effects/{effect.pk}"})


def count(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"n": Effect.objects.filter(reference=request.GET["reference"]).count()})


urlpatterns = [
    path("effects/", count),
    *(
        path(f"{place}/{name}/", Charges.as_view(idempotency_policy=policy))
        for name in DIALECTS
        for policy in [Policy(dialect=name, required=True)]
        for place in ("charges", "refunds")
    ),
]


@pytest.mark.parametrize("name", DIALECTS)
def test_what_it_says(name: str) -> None:
    """Keys, statuses and marks are those of the policy's dialect."""
    theirs, ours = catalogue.dialects()[name], DIALECTS[name]

    key = theirs.key
    names = {ours.header or "Idempotency-Key"} if key["in"] == "header" else {*ours.members}
    assert key["name"] in names
    assert (key["in"] == "body") == bool(ours.members)
    assert (key["form"] == "quoted") == ours.quotes_key
    assert key.get("first_sent", "") == ours.sent_header
    assert key.get("max", 255) == longest(ours)
    statuses = USUAL | {"key-too-old": 412} | dict(ours.statuses)
    for each, allowed in theirs.statuses.items():  # none: its documents do not say
        assert statuses[SLUGS[each]] in allowed or not allowed
    replayed = ours.result_header or ours.replayed_header
    if replayed is None:
        replayed = "Idempotent-Replayed" if name in {"ietf", "stripe", "acp"} else None
    if theirs.marker.get("value") == "key":
        assert ours.echoes_key
    else:
        assert theirs.marker.get("header", "") == (replayed or "")


def longest(dialect: Dialect) -> int:
    uuids = dialect.defaults.get("key_format") in {"uuid", "uuid7"}
    return 36 if uuids else dialect.max_length


def test_all_are_known() -> None:
    """The runner knows each dialect of a policy, and no other."""
    assert set(catalogue.dialects()) == set(DIALECTS)


OFTEN = {"ietf", "oasis", "square", "stripe"}  # quoted, with two headers, in the body, bare


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in OFTEN else pytest.mark.soak) for each in DIALECTS],
)
def test_what_it_does(name: str, live_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view in a dialect meets its requirements."""
    monkeypatch.setattr(runner, "SETTLING", 0.0)
    for user in ("alice", "bob"):
        Token.objects.create(user=User.objects.create_user(user), key=user)
    url, dialect = live_server.url, catalogue.dialects()[name]
    target = Target(
        f"{url}/charges/{name}/",
        body={"amount": 5, "reference": "{unique}"},
        other_body={"amount": 6, "reference": "{unique}"},
        invalid_body={"amount": "x", "reference": "{unique}"},
        headers={"Authorization": "Token alice"},
        other_headers={"Authorization": "Token bob"},
        failing_headers={"X-Fail": "503"},
        other_url=f"{url}/refunds/{name}/",
        count=Count(f"{url}/effects/?reference={{unique}}", "/n"),
        required=True,
    )
    tested = Runner(target, dialect)
    found = [tested.verdict(each) for each in catalogue.requirements() if each.applies_to(dialect)]

    unmet = {each.requirement.id: each.reason for each in found if each.result == "failed"}
    assert unmet.keys() <= KNOWN.get(name, set()), unmet
