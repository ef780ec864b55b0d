"""What can be imported from the top of the package, and what that does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.utils.module_loading import import_string

import idempotency_django
from idempotency_django.contrib import messaging
from idempotency_django.contrib.messaging import Consumer, Publisher
from idempotency_django.contrib.messaging.outbox.topics import PUBLISHERS, Topic

PACKAGES = (idempotency_django, messaging)
OFFERED = [(package, name) for package in PACKAGES for name in package.__all__]

bookkeeping = Consumer("bookkeeping")


@pytest.mark.parametrize(("package", "name"), OFFERED, ids=str)
def test_offered(package: object, name: str) -> None:
    """Each name is there, and is the one of its module."""
    offered = getattr(package, name)
    if hasattr(offered, "__name__"):
        assert offered.__name__ == name


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown(package: object) -> None:
    """Any other name is missing, with Python's own words."""
    with pytest.raises(AttributeError, match="has no attribute 'polcy'"):
        package.polcy  # type: ignore[attr-defined]  # noqa: B018


def test_listed() -> None:
    """An interpreter offers the public names of the package, and nothing else."""
    assert dir(idempotency_django) == sorted(idempotency_django.__all__)


def test_no_settings() -> None:
    """Policies, decorators and consumers are imported without Django's settings."""
    program = (
        "from idempotency_django import Policy, idempotent, idempotency_exempt\n"
        "from idempotency_django.contrib.messaging import Consumer, Event\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("configured", [False, True])
def test_tools_that_read_each_name(configured: bool) -> None:
    """What pytest loads of this package lets tools such as freezegun read each module's names, in
    projects without Django, or without the app of messaging.
    """
    program = (
        "import sys\n"
        "import idempotency_django.testing.plugin, idempotency_django.client\n"
        f"if {configured}:\n"
        "    import django\n"
        "    from django.conf import settings\n"
        "    settings.configure(INSTALLED_APPS=['idempotency_django'])\n"
        "    django.setup()\n"
        "for name, module in [*sys.modules.items()]:\n"
        "    if name.startswith('idempotency_django'):\n"
        "        [getattr(module, each) for each in dir(module)]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", PUBLISHERS)
def test_short_names(name: str) -> None:
    """Each short name of a ``BACKEND`` is that of a publisher of this package."""
    publisher = import_string(PUBLISHERS[name])
    assert issubclass(publisher, Publisher)
    assert publisher.__module__.split(".")[-1] == name


@pytest.mark.parametrize(
    "backend", ["local", "idempotency_django.contrib.messaging.LocalPublisher"]
)
def test_short_name_in_a_topic(backend: str) -> None:
    """A topic takes it like the path."""
    options = {"consumers": [f"{__name__}.bookkeeping"]}
    topic = Topic(name="orders", backend=backend, options=options)
    assert type(topic.publisher()).__name__ == "LocalPublisher"
