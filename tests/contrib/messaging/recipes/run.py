"""A recipe of the documentation in a process of its own, started with its name.

What it imports from ``shop.consumers`` is the tests' consumer, whose process may be killed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import django

RECIPES = Path(__file__).parents[4] / "docs" / "messages" / "recipes"


def main(name: str) -> None:
    """Run it."""
    django.setup()
    from tests.contrib.messaging.transports import consumers

    sys.modules["shop.consumers"] = consumers
    run("settling", "shop.settling")
    if name == "celery":
        from celery import Celery

        app = Celery("recipe")
        app.config_from_object("tests.contrib.messaging.recipes.celeryconfig")
        run("tasks", "shop.tasks")
        app.worker_main(["worker", "--pool=solo", "--loglevel=WARNING"])
    else:
        run(f"consume_{name}", "__main__")


def run(file: str, name: str) -> None:
    """Run a file of the recipes as this module, with a queue of its own and shorter waits."""
    queue = os.environ["QUEUE"]
    text = (RECIPES / f"{file}.py").read_text()
    for shown, used in {
        "PAUSE = 5": "PAUSE = 1",
        'Queue("billing"': f'Queue("{queue}"',
        'subscribe(["billing"]': f'subscribe(["{queue}"]',
        '"group.id": "billing",': f'"group.id": "{queue}", "session.timeout.ms": 3000,'
        '"heartbeat.interval.ms": 500,',
        '"visibility_timeout": 60': '"visibility_timeout": 2',
    }.items():
        text = text.replace(shown, used)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"{file}.py", "exec"), vars(module))


if __name__ == "__main__":
    main(sys.argv[1])
