"""``manage.py idempotency_report``: what is protected, for people and for CI."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.policy import keys
from tests.checks.test_inventory import router


def plain(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.path)


@idempotency_exempt
def exempt(request: HttpRequest) -> HttpResponse:
    return plain(request)


@require_http_methods(["GET", "POST"])
@idempotent(key=keys.instead_of_header(keys.natural("reference")))
def derived(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.path)


def broken(request: HttpRequest) -> HttpResponse:
    return plain(request)


broken.idempotency_policy = "strict"  # type: ignore[attr-defined]

urlpatterns = [
    path("api/", include(router.urls)),
    path("plain/", plain),
    path("safe/", require_safe(plain)),
    path("plain/again/", require_POST(plain)),
    path("exempt/", exempt),
    path("derived/", derived),
    path("optional/", require_http_methods(["PUT"])(idempotent(plain))),
    path("broken/", broken),
]
pytestmark = pytest.mark.urls(__name__)

FOUND = {
    "POST /api/charges/": "required",
    "POST /api/charges/preview/": "exempt",
    "DELETE /api/charges/{pk}/": "optional",
    "POST /api/charges/{pk}/pay/": "required",
    "* /plain/": "unprotected",
    "POST /plain/again/": "unprotected",
    "* /exempt/": "exempt",
    "POST /derived/": "derived",
    "PUT /optional/": "optional",
    "* /broken/": "broken",
}


def report(*arguments: str, stdout: StringIO | None = None, **options: Any) -> str:
    written = stdout or StringIO()
    call_command("idempotency_report", *arguments, stdout=written, **options)
    return written.getvalue()


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = ["idempotency_django.middleware.IdempotencyMiddleware"]
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": "with-policy"}


def test_statuses() -> None:
    """Each unsafe method of each route has one status; a view that only reads is left out."""
    document = json.loads(report("--format=json"))
    listed = {f"{each['method']} {each['route']}": each for each in document["endpoints"]}
    assert {name: each["status"] for name, each in listed.items()} == FOUND
    charge = listed["POST /api/charges/"]
    assert (charge["how"], charge["view"]) == ("mixin", "tests.checks.test_inventory.Charges")
    assert charge["lifetime"] == 30 * 24 * 3600
    assert "must be a Policy" in listed["* /broken/"]["problem"]
    assert document["header"] == "Idempotency-Key"


def test_table() -> None:
    """The table has a line for each endpoint, the problem of a broken one, and a sum."""
    lines = report().splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["POST", "/api/charges/", "required"],
        ["POST", "/api/charges/preview/", "exempt"],
    ]
    assert any("must be a Policy" in line for line in lines)
    assert lines[-1].startswith("10 endpoints: ")
    assert "2 unprotected" in lines[-1]


def test_views_of_others(settings: Any) -> None:
    """The views of Django and of this package are counted, and not listed."""
    settings.ROOT_URLCONF = "tests.urls"
    said = report()
    assert "of Django and this package are left out" in said
    assert "/admin/" not in said


def test_fail_on() -> None:
    """The command fails for the status that is asked for and worse ones, and names the
    endpoints.
    """
    with pytest.raises(CommandError, match=r"3 of 10 .* POST /plain/again/ \(unprotected\)"):
        report("--fail-on=unprotected")
    with pytest.raises(CommandError, match="5 of 10"):
        report("--fail-on=optional")
    with pytest.raises(CommandError, match=r"^1 of 10 endpoints needs attention: \* /broken/ "):
        report("--fail-on=broken")
    for unknown in ("required", ""):
        with pytest.raises(CommandError, match="invalid choice"):
            report(f"--fail-on={unknown}")


class Urls:
    """A URLconf."""

    def __init__(self, *urlpatterns: Any) -> None:
        self.urlpatterns = [*urlpatterns]


def test_nothing_to_check(settings: Any) -> None:
    """A gate that checks nothing fails, after the report; without a gate, it is no error."""
    settings.ROOT_URLCONF = Urls(path("safe/", require_safe(plain)))
    assert report().endswith("\n0 endpoints: none.\n")
    written = StringIO()
    with pytest.raises(CommandError, match="no endpoint that can change something, so --fail-on"):
        report("--fail-on=broken", stdout=written)
    assert "0 endpoints: none." in written.getvalue()


def test_refused_by_a_check(settings: Any) -> None:
    """A view that a system check refuses is in the report, which runs without the checks."""
    settings.IDEMPOTENCY = {}
    with pytest.raises(SystemCheckError):
        call_command("check")
    statuses = [each["status"] for each in json.loads(report("--format=json"))["endpoints"]]
    assert "broken" in statuses
