"""The configuration of gunicorn for the reference app."""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings

from testproject.greeting import charge_command

if os.environ.get("ASGI") == "1":
    wsgi_app = "testproject.asgi"
    worker_class = "uvicorn_worker.UvicornWorker"
else:
    wsgi_app = "testproject.wsgi"
    threads = 8
# Reachable from this machine alone: its passwords are known to everybody.
bind = os.environ.get("BIND") or f"127.0.0.1:{os.environ.get('PORT', '8000')}"
workers = int(os.environ.get("WORKERS", "2"))
# Loaded once and forked, so that a worker that was killed is replaced at once.
preload_app = True
graceful_timeout = 5
control_socket_disable = True


def when_ready(server: Any) -> None:
    """Print the greeting when the server is ready."""
    host, port = server.LISTENERS[0].sock.getsockname()
    address = f"http://{host}:{port}"
    print(f"WEBHOOK_SECRET={settings.WEBHOOK_SECRET}")
    print(f"STRIPE_WEBHOOK_SECRET={settings.STRIPE_WEBHOOK_SECRET}")
    print(f"Try it:\n\n  {charge_command(address)}\n\nMore is at {address}/.", flush=True)
