"""Checks projects, each in a process of its own: ``[folder, modules]`` in, what is wrong out.

What all of them import, and no setting changes, is imported once, before a project has its process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module

sys.path.pop(0)  # the folder of this file

import django
from django.core.management import call_command

NO_SETTINGS_READ = """
    celery.app.base celery.app.task celery.app.trace dateutil.parser httpx kombu psycopg requests
    docutils.core docutils.parsers.rst.roles jinja2 http_sf
    django.contrib.admin.options django.contrib.admindocs.utils django.contrib.auth.hashers
    django.contrib.messages.api django.contrib.postgres.fields django.contrib.sessions.backends.base
    django.core.handlers.asgi django.db.backends.sqlite3.base django.template.backends.jinja2
    django.test django.views.debug rest_framework.serializers
    idempotency_django.checks.configuration
    idempotency_django.http.responses
    idempotency_django.contrib.messaging.consumers
""".split()
for name in NO_SETTINGS_READ:
    with suppress(ModuleNotFoundError):  # some come with the documentation's packages only
        import_module(name)


def check(folder: str, modules: list[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    django.setup()
    for module in modules:
        import_module(module)
    call_command("check")


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
