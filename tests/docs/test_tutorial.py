"""The tutorial is followed to the letter, in an empty folder, with a shell and a real server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.myst import CodeBlockParser

from tests.docs.examples import ROOT, commands, difference
from tests.servers import free_port

TUTORIAL = ROOT / "docs" / "tutorial.md"
PATIENCE = 60  # seconds


class Reader:
    """Somebody who does what the tutorial says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.server: subprocess.Popen[bytes] | None = None
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        del self.environment["DJANGO_SETTINGS_MODULE"]

    def write(self, name: str, text: str) -> None:
        name, _, where = name.removeprefix("# ").partition(", ")
        path = self.folder / name
        path.write_text(path.read_text() + text if where == "at the end" else text)

    def type(self, command: str) -> str:
        """Run a command and return what it shows; ``runserver`` goes on running."""
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        if command.startswith("pip install"):
            return ""  # it is what is being tested
        if command.endswith("runserver"):
            self._serve(f"exec {command} --noreload {self.port}")
            return ""
        done = subprocess.run(
            command,
            check=False,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, command: str) -> None:
        self.server = subprocess.Popen(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("The server of the tutorial did not start.")


@contextmanager
def a_reader(folder: Path) -> Iterator[Reader]:
    reader = Reader(folder)
    try:
        yield reader
    finally:
        if reader.server:
            reader.server.terminate()
            reader.server.wait(PATIENCE)


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial needs curl")
def test_the_tutorial(tmp_path: Path) -> None:
    """Whoever follows the tutorial sees what it shows."""
    parsers = [
        CodeBlockParser("python", lambda _: None),
        CodeBlockParser("console", lambda _: None),
    ]
    with a_reader(tmp_path) as reader:
        for example in Document.parse(str(TUTORIAL), *parsers):
            if example.region.lexemes["arguments"] == "python":
                reader.write(example.parsed.partition("\n")[0], example.parsed)
                continue
            for command, output in commands(example.parsed):
                shown = reader.type(command)
                wrong = difference(output, shown) if output.strip() else None
                assert wrong is None, f"{TUTORIAL.name}:{example.line}\n$ {command}\n{wrong}"
