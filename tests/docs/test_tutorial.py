"""The tutorial is followed to the letter, in an empty folder, with a shell and a real server."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution, files, requires
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from sybil import Document
from sybil.parsers.myst import CodeBlockParser

from tests.docs.examples import ROOT, commands, difference
from tests.support.machine import patience
from tests.support.servers import free_port

TUTORIAL = ROOT / "docs" / "tutorial.md"
PATIENCE = 60  # seconds


def pack(archive: Path) -> None:
    """Make the zip file that the documentation offers."""
    spec = spec_from_file_location("packed", ROOT / "docs" / "_ext" / "packed.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.pack(archive)


def installed(requirement: str, folder: Path) -> None:
    """Link what ``pip install`` of this requirement would bring into a folder."""
    wanted = Requirement(requirement)
    for extra in wanted.extras or {""}:
        for line in requires(wanted.name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                installed(line, folder)
    if wanted.name == "idempotency-django":
        names, where = {"idempotency_django"}, ROOT
    else:
        names = {file.parts[0] for file in files(wanted.name) or []} - {"..", "__pycache__"}
        where = Path(str(distribution(wanted.name).locate_file("")))
    for name in names:
        if not (folder / name).exists():
            (folder / name).symlink_to(where / name)


class Reader:
    """A reader with an empty folder, and with nothing installed."""

    def __init__(self, folder: Path) -> None:
        self.packages, programs = folder / "packages", folder / "bin"
        self.folder = folder / "here"
        for each in (self.packages, programs, self.folder):
            each.mkdir()
        self.port = free_port()
        self.server: subprocess.Popen[bytes] | None = None
        python = programs / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no other packages
        python.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.packages),
        }
        del self.environment["DJANGO_SETTINGS_MODULE"]
        pack(self.folder / "shop.zip")  # downloaded

    def type(self, command: str) -> str:
        """Run a command and return what it shows; ``runserver`` goes on running."""
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        if command.startswith("pip install"):
            installed(shlex.split(command)[-1], self.packages)
            return ""
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
            return ""
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
            timeout=patience(PATIENCE),
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
        deadline = time.monotonic() + patience(PATIENCE)
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
            reader.server.wait(patience(PATIENCE))


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial needs curl")
def test_the_tutorial(tmp_path: Path) -> None:
    """A reader who follows the tutorial sees what it shows."""
    parser = CodeBlockParser("console", lambda _: None)
    with a_reader(tmp_path) as reader:
        for example in Document.parse(str(TUTORIAL), parser):
            for command, output in commands(example.parsed):
                shown = reader.type(command)
                wrong = difference(output, shown) if output.strip() else None
                assert wrong is None, f"{TUTORIAL.name}:{example.line}\n$ {command}\n{wrong}"
        # The example project needs no more than the tutorial installs.
        reader.type("python manage.py check --fail-level WARNING")
        reader.type("python manage.py makemigrations --check")
        reader.type("python manage.py run_messaging --once")
