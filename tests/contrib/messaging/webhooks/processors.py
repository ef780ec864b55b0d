"""Processes that process the inbox, started with ``NUMBER KILLS SEED``.

The first process loads everything. It forks the others, kills some of them at random, replaces
each that has died, and ends them all when its standard input ends.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
from collections import Counter
from datetime import timedelta
from functools import partial

import django


def main(number: int, kills: int, seed: int) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.contrib.messaging.webhooks.settings"
    django.setup()
    from idempotency_django.contrib.messaging.inbox import process_batch
    from idempotency_django.contrib.messaging.loops import Part, run
    from tests.contrib.messaging.webhooks import striking

    assert striking
    chance, alive = random.Random(seed), set[int]()
    while True:
        while len(alive) < number:
            pid = os.fork()
            if pid == 0:
                stop = threading.Event()
                work = partial(process_batch, 5, stop, Counter())
                run([Part("inbox", work, timedelta(seconds=0.02))], stop)
            alive.add(pid)
        if select.select([sys.stdin], [], [], chance.uniform(0.05, 0.3))[0]:
            break
        if kills > 0:
            kills -= 1
            os.kill(chance.choice(sorted(alive)), signal.SIGKILL)
        while True:
            ended, _status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            alive.discard(ended)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
