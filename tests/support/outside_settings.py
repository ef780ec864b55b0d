"""The settings of a process that a test starts: one test database, under the alias ``default``."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403  # these are its settings

DATABASES = {"default": json.loads(os.environ["TEST_DATABASE"])}
