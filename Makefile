# Everything runs in .venv, which is created on first use. `make PYTHON=python3.13 …` chooses its
# Python.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Without MariaDB, its code cannot run.
GATE := $(if $(TEST_MARIADB_URL)$(shell PATH="$$PATH:/usr/sbin" command -v mariadbd),99,98)
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo $(VENV)/bin/uv)

# Tests and demo start hundreds of processes. They share compiled files, so that each process does
# not compile Django again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

# The parts of the tests, the longest first: each is one process on one core. Many parts mostly
# wait, so one more runs than there are cores.
PARTS := $(addprefix test-,inside outside rooms faults psycopg2 naive)
SOAKS := $(addprefix soak-,outside faults inside)
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo serve quick quick-stores quick-adapters test coverage $(PARTS) soak $(SOAKS) lint types imports docs screenshots bench ci clean

help:  ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

install: $(VENV)/.installed-dev  ## Create .venv with all development dependencies.

demo: $(VENV)/.installed-app  ## Show retries, races and crashes, on SQLite.
	@$(PY) -m testproject.demo

serve: $(VENV)/.installed-app  ## Run the reference app; settings: PORT, WORKERS, DATABASE_URL, REDIS_URL, ASGI …
	@$(PY) -m testproject.server

quick: $(VENV)/.installed-test  ## Run the most useful tests, on PostgreSQL and SQLite: under two minutes on two cores.
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target quick-stores quick-adapters

# Tests with database code run on both; all others on SQLite, which starts at once. Slow tests
# (races, processes, clocks) run in `make test` only.
QUICK_STORES := contract/test_stores.py \
    $(patsubst %,engine/test_%.py,atomic_requests calls engine executions failed_records leases) \
    $(patsubst %,stores/test_%.py,database_store dialects migrations purge statements stores) \
    $(patsubst %,contrib/messaging/%.py,outbox/test_publishing outbox/test_relay \
    streams/test_sequences webhooks/test_processing)
QUICK_ADAPTERS := docs/test_completeness.py docs/test_guarantees.py checks/test_checks.py \
    $(patsubst %,test_%.py,conf decorators errors house middleware project) drf/test_drf.py \
    $(patsubst %,http/test_%.py,adapters conformance http replay_authorization status uploads) \
    $(patsubst %,policy/test_%.py,fingerprints keys policy scopes secrets) \
    $(patsubst %,contrib/messaging/%.py,test_consumers transports/test_loop webhooks/test_receiving)
QUICKLY := -m pytest -m "not e2e and not soak" -q -rNfE  # MariaDB is not missed here

quick-stores:
	@TEST_DATABASES=postgres,sqlite $(PY) $(QUICKLY) $(QUICK_STORES:%=tests/%)

quick-adapters:
	@TEST_DATABASES=sqlite $(PY) $(QUICKLY) $(QUICK_ADAPTERS:%=tests/%)

test: $(VENV)/.installed-test  ## Run all tests on all databases, and those of the driver on psycopg2.
	$(if $(COVERAGE),@$(PY) -m coverage erase)
	@$(MAKE) --no-print-directory --jobs=$(JOBS) $(PARTS)
	$(if $(COVERAGE),@$(PY) -m coverage combine --quiet && $(PY) -m coverage report --fail-under=$(GATE))

coverage:  ## Run the same tests, and measure how many branches they cover.
	@$(MAKE) --no-print-directory test COVERAGE=1

# A part writes whole lines, because the others write at the same time.
PYTEST := -m pytest -qq -p tests.support.progress -o console_output_style=classic
PART = @TEST_PART=$@ $(PY) $(PYTEST)
COVERED = @TEST_PART=$@ $(PY) $(if $(COVERAGE),-m coverage run) $(PYTEST)

# Only these files: collecting all tests is slow.
files_with = $(shell grep -rlE --include='test_*.py' '$(1)' tests)
FAULTS := tests/faults
ROOMS := $(addprefix tests/,client contract contrib docs testing)
INSIDE := tests/test_*.py $(addprefix tests/,admin checks drf engine http management policy stores)
OUTSIDE = $(filter-out $(FAULTS)/%,$(call files_with,mark\.e2e))

DRIVER = $(call files_with,mark\.driver)

test-inside:
	$(COVERED) -m "not e2e and not soak" $(INSIDE)

test-rooms:
	$(COVERED) -m "not e2e and not soak" $(ROOMS)

test-psycopg2: export TEST_DATABASES := postgres
test-psycopg2: export TEST_PSYCOPG := 2
test-psycopg2:
	$(COVERED) -m "driver and not e2e and not soak" $(DRIVER)

# Projects with USE_TZ=False: tests of code that writes and compares times in messages.
NAIVE := $(addprefix tests/contrib/,timeline/test_chains.py $(addprefix messaging/, \
    outbox/test_local.py outbox/test_outages.py outbox/test_publishing.py outbox/test_records.py \
    outbox/test_relay.py publishing/test_after_commit.py publishing/test_http.py \
    publishing/test_relayed.py transports/test_published.py webhooks/test_processing.py))

test-naive: export TEST_DATABASES := postgres,sqlite
test-naive: export TEST_USE_TZ := 0
test-naive:
	$(PART) -m "not e2e and not soak" $(NAIVE)

test-outside:
	$(PART) -m "e2e and not soak" $(OUTSIDE)

test-faults:
	$(PART) -m "e2e and not soak" $(FAULTS)

soak: $(VENV)/.installed-test  ## Run the long versions of storms, races and random walks, with all combinations.
	@$(MAKE) --no-print-directory --jobs=$(JOBS) $(SOAKS)

soak-inside:
	$(PART) -m "soak and not e2e"

soak-outside:
	$(PART) -m "soak and e2e" $(OUTSIDE)

soak-faults:
	$(PART) -m soak $(FAULTS)

lint: $(VENV)/.installed-lint  ## Check style, formatting and English.
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) docs/prose.py

types: $(VENV)/.installed-lint  ## Check the types.
	$(PY) -m mypy

imports: $(VENV)/.installed-lint  ## Check the layers of modules.
	$(VENV)/bin/lint-imports

docs: $(VENV)/.installed-docs  ## Build the documentation into docs/_build/html; test its links, search and Markdown.
	$(PY) -m sphinx -E -W --keep-going -b html docs docs/_build/html
	DOCS_SITE=docs/_build/html $(PY) -m pytest -q tests/docs/test_site.py tests/docs/test_markdown.py

screenshots: $(VENV)/.installed-docs  ## Take the screenshots of the admin for the documentation; Chromium is needed.
	$(PY) docs/screenshots.py

bench: $(VENV)/.installed-bench  ## Measure, and write docs/benchmarks.md; QUICK=1 measures little and writes nothing.
	$(PY) -m benchmarks $(if $(QUICK),--quick)

ci:  ## Run the same checks as continuous integration.
	.ci/run

clean:  ## Remove .venv and all other generated files.
	rm -rf $(VENV) .tox build dist docs/_build .coverage* .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache testproject/db.sqlite3*

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is required; '$(PYTHON)' is older. Run: make PYTHON=python3.13 …"; \
	    exit 1; }
	@$(PYTHON) -m venv $(if $(filter uv,$(UV)),--without-pip) $(VENV)

$(VENV)/bin/uv: | $(PY)
	@$(PY) -m pip install --quiet --disable-pip-version-check uv

# One stamp for each dependency group of pyproject.toml.
$(VENV)/.installed-%: pyproject.toml | $(PY) $(filter-out uv,$(UV))
	@echo "Installing into $(VENV): $*"
	@$(UV) pip install --quiet --python $(PY) --editable . --group $*
	@touch $@
