"""How Sphinx builds the documentation: ``sphinx-build -W --keep-going -b html docs …``."""

# ruff: noqa: INP001  # a folder of documents, no package

from __future__ import annotations

import os
import sys
from pathlib import Path

import django
from django.conf import settings

import idempotency_django

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "rest_framework",
        "idempotency_django",
        "idempotency_django.contrib.messaging",
    ],
)
django.setup()

project = "idempotency_django"
author = "idempotency_django contributors"
copyright = f"2026, {author}"  # noqa: A001  # Sphinx's name
version = release = idempotency_django.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "example_project",
    "policy_fields",
    "search_words",
    "sequences",
]
exclude_patterns = ["_build", "project"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True  # attributes are no targets: several classes have a "type"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"{project} {release}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

# Read the Docs says which repository it builds: pages then have a link to it, and an edit link.
if repository := os.environ.get("READTHEDOCS_GIT_CLONE_URL"):
    html_theme_options = {
        "source_repository": repository.removesuffix(".git") + "/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
