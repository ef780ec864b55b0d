"""The settings of the tests for another process, which uses the databases that they made."""

from __future__ import annotations

import ast
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

for _alias, _name in ast.literal_eval(os.environ["KILLED_DATABASES"]).items():
    DATABASES[_alias]["NAME"] = _name
