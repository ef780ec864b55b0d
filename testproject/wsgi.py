from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application

# The admin's style sheets, without a web server in front that would serve them.
application = StaticFilesHandler(get_wsgi_application())

# Before gunicorn forks. Django would import it in each worker's first request: a retry that
# meets the replacement of a killed worker would wait for that.
import_module(settings.ROOT_URLCONF)
