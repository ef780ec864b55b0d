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
from django.views.decorators.http import require_http_methods, require_POST, require_safe

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
        ["POST", "/api/charges/preview/", "exempt"],
    ]
    assert any("must be a Policy" in line for line in lines)
    assert lines[-1].startswith("10 endpoints: ")
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
    report("--fail-on=observed")
    with pytest.raises(CommandError, match=r"2 of 10 .* POST /plain/again/ \(unprotected\)"):
        report("--fail-on=unprotected")
    with pytest.raises(CommandError, match="5 of 10"):
        report("--fail-on=unprotected,optional,broken")
    with pytest.raises(CommandError, match=r"^1 of 10 endpoints needs attention: \* /broken/ "):
        report("--fail-on=broken")
    with pytest.raises(CommandError, match="not one of broken, unprotected, observed"):
        report("--fail-on=required")
    for nothing in ("", " , "):
        with pytest.raises(CommandError, match="needs at least one of broken, unprotected"):
            report(f"--fail-on={nothing}")


class Urls:
    """A URLconf."""

    def __init__(self, *urlpatterns: Any) -> None:
        self.urlpatterns = [*urlpatterns]


@pytest.mark.parametrize("chosen", [(), ("--update-baseline",)], ids=["check", "update"])
def test_nothing_to_check(chosen: tuple[str, ...], tmp_path: Path, settings: Any) -> None:
    """A gate that checks nothing fails, after the report; without a gate, it is no error."""
    file = tmp_path / "baseline.json"
    file.write_text("{}")
    settings.ROOT_URLCONF = Urls(path("safe/", require_safe(plain)))
    assert report().endswith("\n0 endpoints: none.\n")
    written = StringIO()
    with pytest.raises(CommandError, match="no endpoint that can change something, so --fail-on"):
        report("--fail-on=broken", f"--baseline={file}", *chosen, stdout=written)
    assert "0 endpoints: none." in written.getvalue()
    assert file.read_text() == "{}"


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
        "POST /plain/again/": "unprotected",
    }
    accepted["* /broken/"] = "unprotected"
    accepted["POST /gone/"] = accepted.pop("* /plain/")
    file.write_text(json.dumps(accepted))
    errors = StringIO()
    with pytest.raises(CommandError, match=r"2 of 10 .* \* /plain/ .* \* /broken/ \(broken\)"):
        report(*chosen, stderr=errors)
    assert "POST /gone/" in errors.getvalue()


def test_equal_findings(tmp_path: Path, settings: Any) -> None:
    """A baseline accepts as many equal findings as it lists: the second one is new."""
    file = tmp_path / "baseline.json"
    chosen = ["--fail-on=unprotected,broken", f"--baseline={file}"]
    first = path("orders/<int:pk>/", plain)
    second, third = path("orders/<slug:pk>/", plain), path("orders/<uuid:pk>/", broken)
    settings.ROOT_URLCONF = Urls(first)
    report(*chosen, "--update-baseline")
    assert json.loads(file.read_text()) == {"* /orders/{pk}/": "unprotected"}
    settings.ROOT_URLCONF = Urls(first, second, third)
    with pytest.raises(CommandError) as failed:
        report(*chosen)
    assert str(failed.value).startswith(
        "2 of 3 endpoints need attention: "
        "* /orders/{pk}/ (unprotected, one more than in the baseline), "
        "* /orders/{pk}/ (broken). Protect"
    )
    [run] = json.loads(report("--format=sarif", chosen[1]))["runs"]
    assert ["suppressions" in each for each in run["results"]] == [True, False, False]

    report(*chosen, "--update-baseline")
    statuses = ["broken", "unprotected", "unprotected"]
    assert json.loads(file.read_text()) == {"* /orders/{pk}/": statuses}
    report(*chosen)
    settings.ROOT_URLCONF = Urls(first, third)
    errors = StringIO()
    report(*chosen, stderr=errors)
    assert errors.getvalue().startswith(f"Remove from {file}: * /orders/{{pk}}/. They are")


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"POST /": "nice"}',
        b'{"POST /": ["broken", "nice"]}',
        b'{"POST /": {"status": "broken"}}',
        b'{"POST /": null}',
        b'{"header": "Idempotency-Key", "endpoints": [{"route": "/"}]}',
    ],
)
def test_unreadable_baseline(tmp_path: Path, content: bytes) -> None:
    """A baseline that is none, such as another report, is an error that names the file."""
    file = tmp_path / "baseline.json"
    file.write_bytes(content)
    with pytest.raises(CommandError, match=r"The baseline .*baseline\.json (cannot|must) be"):
        report("--fail-on=broken", f"--baseline={file}")


def test_baseline_that_is_a_folder(tmp_path: Path) -> None:
    """So is one that cannot be read or written."""
    chosen = ["--fail-on=broken", f"--baseline={tmp_path}"]
    with pytest.raises(CommandError, match=r"cannot be read: .* directory"):
        report(*chosen)
    with pytest.raises(CommandError, match=r"cannot be written: .* directory"):
        report(*chosen, "--update-baseline")


class TestURLconfs:
    """``--urlconf``: for projects that choose a URLconf for each host or request."""

    def test_others(self, settings: Any) -> None:
        """The report is that of the URLconf, whatever ROOT_URLCONF is."""
        usual = json.loads(report("--format=json"))["endpoints"]
        settings.ROOT_URLCONF = Urls()
        found = json.loads(report("--format=json", f"--urlconf={__name__}"))["endpoints"]
        assert {each.pop("urlconf") for each in usual} == {""}
        assert {each.pop("urlconf") for each in found} == {__name__}
        assert found == usual

    def test_several(self) -> None:
        """The endpoints of several have one report, which says where each is."""
        named = [f"--urlconf={__name__}", "--urlconf=tests.test_hosts", f"--urlconf={__name__}"]
        document = json.loads(report("--format=json", *named))
        counts = Counter(each["urlconf"] for each in document["endpoints"])
        assert counts[__name__] == len(FOUND)
        assert counts["tests.test_hosts"] == 2
        rows = [line.split() for line in report(*named).splitlines()]
        assert rows[0][-1] == "URLconf"
        assert Counter(row[-1] for row in rows if row) >= counts

    def test_baseline(self, tmp_path: Path) -> None:
        """An endpoint of one URLconf is not accepted for another with the same route."""
        file = tmp_path / "baseline.json"
        chosen = ["--fail-on=broken", f"--baseline={file}"]
        report(*chosen, "--update-baseline")
        with pytest.raises(CommandError) as failed:
            report(*chosen, f"--urlconf={__name__}", stderr=StringIO())
        assert f"needs attention: * /broken/ in {__name__} (broken)." in str(failed.value)
        report(*chosen, f"--urlconf={__name__}", "--update-baseline")
        assert json.loads(file.read_text()) == {f"* /broken/ in {__name__}": "broken"}

    @pytest.mark.parametrize(
        "name", ["", "nowhere", ".urls", "tests.nowhere", "json", "a b", "tests/urls.py"]
    )
    @pytest.mark.parametrize("more", [(), ("--shadow",)], ids=["report", "shadow"])
    def test_bad_name(self, name: str, more: tuple[str, ...]) -> None:
        """A URLconf that cannot be loaded is one clear error."""
        with pytest.raises(CommandError, match=rf"The URLconf '{name}' cannot be loaded: \S"):
            report(f"--urlconf={name}", *more)


@pytest.mark.django_db
@pytest.mark.parametrize("shadow", [(), ("--shadow",)], ids=["report", "shadow"])
def test_switched_off(shadow: tuple[str, ...], settings: Any) -> None:
    """With ENABLED=False, each format says first that nothing is enforced."""
    texts = {}
    for enabled in (True, False):
        settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": "with-policy", "ENABLED": enabled}
        table = report(*shadow)
        document = json.loads(report("--format=json", *shadow))
        [run] = json.loads(report("--format=sarif", *shadow))["runs"]
        assert document.pop("enabled") is enabled
        texts[enabled] = table, document, run.pop("invocations", None), run
    warning = texts[False][0].splitlines()[0]
    assert warning.startswith("WARNING: IDEMPOTENCY['ENABLED'] is False. Nothing is enforced")
    assert texts[False][0] == f"{warning}\n\n{texts[True][0]}"
    assert texts[False][1] == texts[True][1]
    assert texts[True][2] is None
    [invocation] = texts[False][2]
    [told] = invocation["toolConfigurationNotifications"]
    assert (told["level"], told["message"]["text"]) == ("warning", warning)
    assert invocation["executionSuccessful"] is True
    assert texts[False][3] == texts[True][3]


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
