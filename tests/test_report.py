"""``manage.py idempotency_report``: what is protected, for people and for CI."""

from __future__ import annotations

import json
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.http import require_http_methods, require_safe

from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.management.commands.idempotency_report import REPORTED
from idempotency_django.policy import keys
from tests.test_inventory import router


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
    path("exempt/", exempt),
    path("derived/", derived),
    path("optional/", require_http_methods(["PUT"])(idempotent(plain))),
    path("broken/", broken),
]
pytestmark = pytest.mark.urls(__name__)

FOUND = {
    "POST /api/charges/": "required",
    "POST /api/charges/preview/": "unprotected",
    "DELETE /api/charges/{pk}/": "optional",
    "POST /api/charges/{pk}/pay/": "required",
    "* /plain/": "unprotected",
    "* /exempt/": "exempt",
    "POST /derived/": "derived",
    "PUT /optional/": "optional",
    "* /broken/": "broken",
}


def report(*arguments: str, **options: Any) -> str:
    written = StringIO()
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
    assert (charge["how"], charge["view"]) == ("mixin", "tests.test_inventory.Charges")
    assert charge["file"] == "tests/test_inventory.py"
    assert charge["lifetime"] == 30 * 24 * 3600
    assert "must be a Policy" in listed["* /broken/"]["problem"]
    assert document["header"] == "Idempotency-Key"


def test_table() -> None:
    """The table has a line for each endpoint, the problem of a broken one, and a sum."""
    lines = report().splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["POST", "/api/charges/", "required"],
        ["POST", "/api/charges/preview/", "unprotected"],
    ]
    assert any("must be a Policy" in line for line in lines)
    assert lines[-1].startswith("9 endpoints: ")
    assert "2 unprotected" in lines[-1]


@pytest.mark.parametrize("chosen", [(), ("--all",)], ids=["own", "all"])
def test_formats_agree(chosen: tuple[str, ...], settings: Any) -> None:
    """Each format has the same endpoints, with the same status, and the same number of them."""
    settings.ROOT_URLCONF = "tests.urls" if chosen else __name__
    document = json.loads(report("--format=json", *chosen))
    listed = [(each["method"], each["route"], each["status"]) for each in document["endpoints"]]
    lines = report(*chosen).splitlines()
    rows = [tuple(line.split()[:3]) for line in lines[1:-1] if line and not line.startswith(" ")]
    assert rows == listed
    assert lines[-1].startswith(f"{len(listed)} endpoints: ")
    [run] = json.loads(report("--format=sarif", *chosen))["runs"]
    results = Counter(
        (each["partialFingerprints"]["endpoint/v1"], each["ruleId"]) for each in run["results"]
    )
    assert results == Counter(
        (f"{method} {route}", f"idempotency/{status}")
        for method, route, status in listed
        if status in REPORTED
    )


def test_views_of_others(settings: Any) -> None:
    """The views of Django and of this package are counted, and listed with --all."""
    settings.ROOT_URLCONF = "tests.urls"
    few, everything = report(), report("--all")
    assert "of Django and this package are left out" in few
    assert "django.contrib.admin" not in few
    assert "/admin/" in everything


def test_fail_on() -> None:
    """The command fails for the statuses that are asked for, and names the endpoints."""
    report("--fail-on=")
    with pytest.raises(CommandError, match=r"2 of 9 .* POST /api/charges/preview/ \(unprotected\)"):
        report("--fail-on=unprotected")
    with pytest.raises(CommandError, match="5 of 9"):
        report("--fail-on=unprotected,optional,broken")
    with pytest.raises(CommandError, match="not one of broken, unprotected, observed"):
        report("--fail-on=required")


def test_baseline(tmp_path: Path) -> None:
    """What the baseline lists is accepted; what is new, or has become worse, is not."""
    file = tmp_path / "baseline.json"
    chosen = ["--fail-on=unprotected,broken", f"--baseline={file}"]
    with pytest.raises(CommandError, match="Write it with --update-baseline"):
        report(*chosen)
    report(*chosen, "--update-baseline")
    report(*chosen)
    accepted = json.loads(file.read_text())
    assert accepted == {
        "* /broken/": "broken",
        "* /plain/": "unprotected",
        "POST /api/charges/preview/": "unprotected",
    }
    accepted["* /broken/"] = "unprotected"
    accepted["POST /gone/"] = accepted.pop("* /plain/")
    file.write_text(json.dumps(accepted))
    errors = StringIO()
    with pytest.raises(CommandError, match=r"2 of 9 .* \* /plain/ .* \* /broken/ \(broken\)"):
        report(*chosen, stderr=errors)
    assert "POST /gone/" in errors.getvalue()


@pytest.mark.parametrize("text", ["[]", "{", '{"POST /": "nice"}'])
def test_unreadable_baseline(tmp_path: Path, text: str) -> None:
    """A baseline that is none is an error that names the file."""
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(CommandError, match=r"baseline\.json"):
        report("--fail-on=broken", f"--baseline={file}")


def test_update_without_file() -> None:
    """A baseline can only be written to a file, and of a status."""
    with pytest.raises(CommandError, match="needs --baseline"):
        report("--update-baseline")


def test_sarif(tmp_path: Path) -> None:
    """SARIF has a result for each finding, with its place, and marks those of the baseline."""
    file = tmp_path / "baseline.json"
    file.write_text('{"* /plain/": "unprotected"}')
    document = json.loads(report("--format=sarif", f"--baseline={file}"))
    [run] = document["runs"]
    assert document["version"] == "2.1.0"
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    found = {each["partialFingerprints"]["endpoint/v1"]: each for each in run["results"]}
    assert {name: each["ruleId"] for name, each in found.items()} == {
        name: f"idempotency/{status}"
        for name, status in FOUND.items()
        if f"idempotency/{status}" in rules
    }
    assert [name for name, each in found.items() if "suppressions" in each] == ["* /plain/"]
    [location] = found["* /plain/"]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "tests/test_report.py"
    assert location["physicalLocation"]["region"]["startLine"] > 1


def test_refused_by_a_check(settings: Any) -> None:
    """A view that a system check refuses is in the report, which runs without the checks."""
    settings.IDEMPOTENCY = {}
    with pytest.raises(SystemCheckError):
        call_command("check")
    statuses = [each["status"] for each in json.loads(report("--format=json"))["endpoints"]]
    assert "broken" in statuses
