"""One application per variant, for ``gunicorn benchmarks.wsgi:bare``."""

from __future__ import annotations

from benchmarks.project import BARE, MIXIN, OTHER, application

bare, mixin, other = (application(variant) for variant in (BARE, MIXIN, OTHER))
