"""The benchmarks: the relay counts what it hands on, and the page says what a run has shown."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import inprocess, project
from benchmarks.chart import Bar, Chart, Row
from benchmarks.comparison import Comparison, Limit
from benchmarks.report import CHART, PAGE, Section, Target, write
from benchmarks.site import DISTANCES, FAR, LOCAL, Counts, Probe, Process, Traffic
from benchmarks.timing import Measured, Sample, Series, interleave

DELAY = 0.01  # seconds, in each direction
NAMES = [f"{variant} {kind}" for variant in project.LABELS for kind in ("first", "replay")]
FIRST, ATOMIC = f"{project.MIXIN} first", f"{project.ATOMIC} first"


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that replies to each line, of however many parts, with the same line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted, accepted.makefile("rwb", buffering=0) as stream:
                for line in stream:
                    stream.write(line)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.fixture
def relay(echo: int) -> Iterator[tuple[Process, int]]:
    """A relay to the server, and its port."""
    with closing(Process("benchmarks.relay", str(DELAY), f"127.0.0.1:{echo}", urls={})) as process:
        (port,) = process.reply()
        yield process, port


def sample_run(ratios: dict[str, float], far: dict[str, float] | None = None) -> Comparison:
    """A run in which all took 1 ms, but for those that took a multiple of it."""

    def measured(multiples: dict[str, float]) -> dict[str, Measured]:
        series = {name: Series([multiples.get(name, 1) / 1000] * 3) for name in NAMES}
        return {name: Measured(one, one) for name, one in series.items()}

    counts = Counts(1, Traffic(3, 1234), Traffic(2, 99))
    places = {LOCAL: measured(ratios), FAR: measured(far or ratios)}
    return Comparison(project.LABELS, NAMES[0], places, dict.fromkeys(NAMES, counts))


def sample_section(ratios: dict[str, float], far: dict[str, float] | None = None) -> Section:
    probes = dict.fromkeys(DISTANCES, Probe(0.0001, 0.0002))
    return inprocess.section(sample_run(ratios, far), probes, rounds=3, requests=5)


def test_relay_counts(relay: tuple[Process, int]) -> None:
    """What a client sends until it gets a reply is one message; the bytes are those it sent."""
    process, port = relay
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"one\n")
        assert client.recv(100) == b"one\n"
        client.sendall(b"in two ")
        time.sleep(3 * DELAY)  # which the relay gets, and hands on, in two parts
        client.sendall(b"parts\n")
        assert client.recv(100) == b"in two parts\n"
        assert process.ask("traffic") == [{"messages": 2, "bytes": 4 + 13}]


def test_relay_delays(relay: tuple[Process, int]) -> None:
    """A round trip takes twice the delay, at the least."""
    _, port = relay
    with socket.create_connection(("127.0.0.1", port)) as client:
        started = time.monotonic()
        client.sendall(b"one\n")
        client.recv(100)
        assert time.monotonic() - started >= 2 * DELAY


def test_relay_closes(relay: tuple[Process, int]) -> None:
    """The end of one side is the end of the other, after all that both still say."""
    process, port = relay
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"last\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b"last\n"
        assert client.recv(100) == b""
        assert process.ask("traffic") == [{"messages": 1, "bytes": 5}]


def test_worker_ends() -> None:
    """A process that ends instead of replying is named."""
    with (
        closing(Process("benchmarks.no_such_module", urls={})) as process,
        pytest.raises(RuntimeError, match=r"`python -m benchmarks\.no_such_module` ended"),
    ):
        process.reply()


def test_interleaved() -> None:
    """Each round runs every block once, and the first round is not counted."""
    order = []

    def block(name: str, *walls: float) -> Callable[[], list[Sample]]:
        def run() -> list[Sample]:
            order.append(name)
            return [Sample(wall, 2 * wall) for wall in walls]

        return run

    measured = interleave({"a": block("a", 1, 2, 9), "b": block("b", 4, 4)}, rounds=2)
    assert "".join(order) == "ababab"
    assert measured["a"].wall.medians == [2, 2]
    assert measured["a"].cpu.medians == [4, 4]
    assert str(measured["b"].wall.over(measured["a"].wall)) == "2.00 (2.00–2.00)"


def test_ratio_within_rounds() -> None:
    """A round in which all was slow changes no ratio."""
    assert str(Series([3, 30, 3]).over(Series([2, 20, 1]))) == "1.50 (1.50–3.00)"


@pytest.mark.parametrize(("ratio", "met"), [(1.25, True), (1.254, True), (1.256, False)])
def test_target(ratio: float, met: bool) -> None:
    """A target is met or missed by the number that the page shows."""
    limit = Limit("first ≤ 1.25", FIRST, 1.25, ATOMIC)
    assert limit.target(sample_run({FIRST: ratio})) == Target(
        f"first ≤ 1.25: {round(ratio, 2):.2f}", met
    )


def test_section() -> None:
    """The tables have a row for each kind of request: times, ratios, messages and bytes."""
    section = sample_section({FIRST: 1.5}, {FIRST: 2.25})
    text = str(section)
    label = project.LABELS[project.MIXIN]
    times = "1.50 ms | 1.50 (1.50–1.50) | 2.25 ms | 2.25 (2.25–2.25)"
    assert f"| {label} | first | {times} |" in text
    assert f"| {label} | first | 1.50 ms | 1.50 (1.50–1.50) | 3 (1,234) | 1 | 2 (99) |" in text
    assert "- **missed**: first request ≤ 1.40 × `atomic()`: 1.50" in text
    assert "`SELECT 1` took 0.10 ms locally" in text
    assert "{" not in text
    assert "- met: replay on `CachedStore` ≤ 0.35 × bare: 0.30" in str(
        sample_section({f"{project.CACHED} replay": 0.3})
    )


def test_page(tmp_path: Path) -> None:
    """The page opens with a paragraph and the chart, and ends with what was missed anywhere."""
    other = Section("Growth", [], [Target("a good one: 1", True), Target("a bad one: 2", False)])
    section = sample_section({FIRST: 1.5, f"{project.CACHED} first": 1.5}, {FIRST: 2.25})
    path = write(tmp_path, [section, other], "a machine")
    assert path == tmp_path / PAGE
    text = path.read_text()
    opening, rest = text.split("## How to read this page")
    assert "**1.50 ×** as long" in opening
    assert "**2.25 ×** as long" in opening
    assert re.search(r"!\[[^\[\]\n]+\]\(_static/benchmarks\.svg\)", opening)
    targets = text.split("## Targets")[1]
    listed = [line for line in targets.splitlines() if line.startswith("- ")]
    assert "- first request ≤ 1.40 × `atomic()`: 1.50" in listed
    assert "- a bad one: 2" in listed
    assert len(listed) == sum(not t.met for t in [*section.targets, *other.targets])
    assert f"{len(listed)} of the {len(section.targets) + 2} targets" in targets
    assert "a machine" in rest
    assert (tmp_path / CHART).read_text() == section.opening.chart


def test_page_without_misses(tmp_path: Path) -> None:
    """A run that meets all targets says so."""
    ratios = dict.fromkeys(NAMES, 0.1)
    ratios |= {f"{project.BARE} first": 1, ATOMIC: 1, f"{project.OTHER} first": 1}
    section = sample_section(ratios)
    text = write(tmp_path, [section], "").read_text()
    assert f"All {len(section.targets)} targets" in text.split("## Targets")[1]
    assert "misses" not in text.split("## ")[0]


def test_chart_of_run() -> None:
    """The chart marks which bars miss their targets, and where the targets are."""
    missed = sample_section({FIRST: 1.5}, {FIRST: 1.2, f"{project.OTHER} first": 2}).opening
    assert missed is not None
    words = missed.alternative
    assert "IdempotentViewMixin 1.50 (misses its target) and 1.20;" in words


def test_chart() -> None:
    """All is within the chart's borders, said in words, and visible on light and on dark."""
    rows = [Row("one", [Bar(2.5, 3.0), Bar(0.5, 0.4, missed=True)]), Row("a < b", [Bar(9), Bar(1)])]
    chart = Chart("How long & why", ["here", "there"], [("first", rows), ("again", rows[1:])])
    text = chart.svg()
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        x, y = (float(element.get(name, 0)) for name in "xy")
        assert 0 <= x <= x + float(element.get("width", 0)) <= width
        assert 0 <= y <= y + float(element.get("height", 0)) <= height
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"How long & why", "here", "there", "first", "again", "one", "a < b"} <= set(texts)
    assert {"2.50", "0.50 (misses its target)", "9.00"} <= set(texts)
    targets = [e for e in root.iter(f"{space}path") if e.get("class") == "target"]
    assert len(targets) == 1 + 2  # the legend's
    named = {root.find(f"{space}{name}").attrib["id"] for name in ("title", "desc")}
    assert set(root.attrib["aria-labelledby"].split()) == named
    assert root.find(f"{space}desc").text == chart.words()
    assert "first: one 2.50 and 0.50 (misses its target);" in chart.words()
    assert "prefers-color-scheme: dark" in text
