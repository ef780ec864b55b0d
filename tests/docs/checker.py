"""Checks projects, each in a process of its own: ``[folder, modules]`` in, what is wrong out.

What all of them import, and no setting changes, is imported once, before a project has its process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from importlib import import_module

sys.path.pop(0)  # the folder of this file

import celery  # noqa: F401
import django
import django.core.management
import django.db.models
import django.forms
import django.urls
import httpx  # noqa: F401


def check(folder: str, modules: list[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    django.setup()
    for module in modules:
        import_module(module)
    django.core.management.call_command("check")


for line in sys.stdin:
    folder, modules = json.loads(line)
    with tempfile.TemporaryFile("w+") as said:
        if (child := os.fork()) == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                check(folder, modules)
            except BaseException:  # noqa: BLE001  # reported
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        _, code = os.waitpid(child, 0)
        said.seek(0)
        sys.stdout.write(json.dumps(said.read() or "It ended." if code else "") + "\n")
        sys.stdout.flush()
