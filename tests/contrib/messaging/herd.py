"""Processes of a command that are killed at random: ``python -m … NUMBER KILLS SEED COMMAND …``.

The first process loads everything. It forks the others, kills some of them, replaces each that has
died, and ends all of them when its standard input ends.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
from functools import partial

import django
from django.core.management import call_command, load_command_class

from tests.contrib.messaging.forks import forked


def main(number: int, kills: int, seed: int, *command: str) -> None:
    django.setup()
    load_command_class("idempotency_django.contrib.messaging", command[0])
    gc.freeze()
    chance, alive = random.Random(seed), set[int]()
    while True:
        while len(alive) < number:
            alive.add(forked(partial(call_command, *command)))
        if select.select([sys.stdin], [], [], chance.uniform(0.05, 0.3))[0]:
            break
        if kills > 0:
            kills -= 1
            os.kill(chance.choice(sorted(alive)), signal.SIGKILL)
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            alive.discard(ended)
    for process in alive:
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
