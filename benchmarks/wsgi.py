"""One application per variant, for ``gunicorn benchmarks.wsgi:bare``."""

from __future__ import annotations

from benchmarks.project import SERVED, application

bare, mixin, leased, redis, cached, other = map(application, SERVED)
