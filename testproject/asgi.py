from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

# As in wsgi.py.
application = ASGIStaticFilesHandler(get_asgi_application())
import_module(settings.ROOT_URLCONF)
