"""Real servers for the inbox: gunicorn that receives, and processes that process."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from django.conf import settings

from idempotency_django.contrib.messaging import StandardWebhooks
from idempotency_django.testing import eventually
from testproject.ledger import end
from tests.support.outside import ROOT, environment, running

WORKERS = 4
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
verifier = StandardWebhooks([SECRET])


class Site:
    """A receiver at an address."""

    def __init__(self, port: int, master: subprocess.Popen[bytes]) -> None:
        self._port = port
        self._master = master

    def deliver(self, message_id: str, body: bytes, **headers: str) -> int:
        """The status; 0 where no response came."""
        signed = verifier.sign(body, message_id=message_id)
        return self.post(body, {"Content-Type": "application/json", **signed, **headers})

    def post(self, body: bytes, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("POST", "/hook/", body, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def until_accepted(self, message_id: str, body: bytes) -> list[int]:
        """Deliver as senders do, until it gets a 2xx; the statuses."""
        statuses = [self.deliver(message_id, body)]
        while not 200 <= statuses[-1] < 300:
            statuses.append(self.deliver(message_id, body))
        return statuses

    def kill_worker(self, chance: random.Random) -> None:
        """Kill one of the processes that receive."""
        pid = self._master.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            os.kill(int(chance.choice(children)), signal.SIGKILL)


@contextmanager
def site(name: str, log: Path, *, kills: int = 0, **more: str) -> Iterator[Site]:
    """Receive and process in real processes, on one of the tests' databases."""
    variables = {
        "DJANGO_SETTINGS_MODULE": "tests.contrib.messaging.webhooks.settings",
        "STRUCK": str(log),
        **more,
    }
    env = environment(settings.ALIASES[name], **variables)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        handed = listener.fileno()
        gunicorn = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--preload", "--graceful-timeout", "1"),
                *("--workers", str(WORKERS), "--bind", f"fd://{handed}", "--no-control-socket"),
                *("--log-level", "critical", "django.core.wsgi:get_wsgi_application()"),
            ],
            cwd=ROOT,
            env=env,
            pass_fds=[handed],
        )
        stack.callback(end, gunicorn)
        port = listener.getsockname()[1]
        listener.close()  # if the server dies, a client is refused and need not wait
        herd = ("-m", "tests.contrib.messaging.herd", "3", str(kills), "1", "run_messaging")
        stack.enter_context(running(*herd, env=env, stdin=subprocess.PIPE))
        made = Site(port, gunicorn)
        eventually(lambda: made.post(b"", {}) == 401)
        yield made
