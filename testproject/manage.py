"""Django's commands, however it is called: ``python testproject/manage.py migrate``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from django.core.management import execute_from_command_line

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run the command that was asked for."""
    # Called by its path, Python imports from this folder, whose celery.py would hide Celery.
    others = [place for place in sys.path if Path(place).resolve() != FOLDER]
    sys.path[:] = [str(FOLDER.parent), *others]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
