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

# Each part of the tests is one process on one core, the longest first. Most parts wait for other
# processes half of their time, so two more run than there are cores.
PARTS := $(addprefix test-,inside ring outside faults databases)
NIGHTLY := $(addprefix nightly-,outside inside ring faults psycopg2 naive)
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 2)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo serve quick quick-stores quick-adapters test nightly mutants parts $(PARTS) $(NIGHTLY) lint types imports messages docs screenshots bench ci clean

help:  ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

install: $(VENV)/.installed-dev  ## Create .venv with all development dependencies.

demo: $(VENV)/.installed-app  ## Show retries, races and crashes, on SQLite.
	@$(PY) -m testproject.demo

serve: $(VENV)/.installed-app  ## Run the reference app; settings: PORT, WORKERS, DATABASE_URL, REDIS_URL, ASGI …
	@$(PY) -m testproject.server

quick: $(VENV)/.installed-test  ## Run the most useful tests: under a minute on two cores.
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target quick-stores quick-adapters

# Tests with database code run on PostgreSQL; all others on SQLite, which starts at once. Slow tests
# (races, processes, clocks) run in `make test` only.
QUICK_STORES := contract/test_stores.py \
    $(patsubst %,engine/test_%.py,atomic_requests calls engine executions) \
    $(patsubst %,stores/test_%.py,database_store dialects migrations purge stores) \
    $(patsubst %,contrib/messaging/%.py,outbox/test_publishing outbox/test_relay \
    webhooks/test_processing)
QUICK_ADAPTERS := docs/test_completeness.py docs/test_guarantees.py checks/test_checks.py \
    $(patsubst %,test_%.py,conf decorators errors house middleware project) drf/test_drf.py \
    $(patsubst %,http/test_%.py,adapters problems replay_authorization status) \
    $(patsubst %,policy/test_%.py,keys policy secrets) \
    $(patsubst %,contrib/messaging/%.py,test_consumers transports/test_loop webhooks/test_receiving)
QUICKLY := -m pytest -m "not e2e and not nightly" -q -rNfE  # MariaDB is not missed here

quick-stores:
	@TEST_DATABASES=postgres $(PY) $(QUICKLY) $(QUICK_STORES:%=tests/%)

quick-adapters:
	@TEST_DATABASES=sqlite $(PY) $(QUICKLY) $(QUICK_ADAPTERS:%=tests/%)

# The parts of a run, and then what all of them have shown; that is said when one fails, too.
REPORTS := $(VENV)/tests
run = rm -rf $(REPORTS) && mkdir -p $(REPORTS); failed=0; \
    $(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) $(1) || failed=1; \
    $(PY) -m tests.support.summary $(REPORTS) || failed=1

test: $(VENV)/.installed-test  ## Run the tests: those above the database on PostgreSQL, the others on all.
	$(if $(COVERAGE),@$(PY) -m coverage erase)
	@$(call run,$(PARTS)); exit $$failed

nightly: $(VENV)/.installed-test  ## Run `make test`, then the rest on all databases and drivers: storms, matrices; measure coverage.
	@$(MAKE) --no-print-directory test COVERAGE=1
	@$(call run,$(NIGHTLY)); $(PY) -m coverage combine --quiet || failed=1; \
	    $(PY) -m coverage report --fail-under=$(GATE) || failed=1; \
	    $(MAKE) --no-print-directory mutants || failed=1; exit $$failed

mutants: $(VENV)/.installed-test  ## Break the code in 60 places, and see whether the tests notice; COUNT, SEED.
	$(PY) -m tests.support.mutants --count=$(or $(COUNT),60) --seed=$(or $(SEED),1)

parts: $(PARTS) $(NIGHTLY)

# A part writes whole lines, because the others write at the same time.
PYTEST := -m pytest -qq -p tests.support.progress -o console_output_style=classic
PART = @TEST_PART=$@ TEST_REPORTS=$(REPORTS) $(PY) $(PYTEST)
COVERED = @TEST_PART=$@ TEST_REPORTS=$(REPORTS) $(PY) $(if $(COVERAGE),-m coverage run) $(PYTEST)

# Only these files: collecting all tests is slow.
files_with = $(shell grep -rlE --include='test_*.py' '$(1)' tests)
INSIDE := tests/test_*.py \
    $(addprefix tests/,admin checks client drf engine http management policy stores support testing)
RING := tests/contrib tests/contract tests/docs
FAULTS := tests/faults
OUTSIDE = $(filter-out $(FAULTS)/%,$(call files_with,mark\.e2e))
DRIVER = $(call files_with,mark\.driver)

test-inside test-ring test-outside test-faults: export TEST_DATABASES := postgres
test-inside:
	$(COVERED) -m "not e2e and not nightly" $(INSIDE)

test-ring:
	$(COVERED) -m "not e2e and not nightly" $(RING)

# The tests of SQL, on the databases that the other parts leave out.
test-databases: export TEST_DATABASES := mariadb,sqlite
test-databases:
	$(COVERED) -m "driver and not e2e and not nightly" $(DRIVER)

test-outside:
	$(PART) -m "e2e and not nightly" $(OUTSIDE)

test-faults:
	$(PART) -m "e2e and not nightly" $(FAULTS)

# What `make test` has not run.
nightly-inside nightly-ring nightly-outside nightly-faults: export TEST_LEFT_OUT := 1
$(NIGHTLY): export COVERAGE := 1
nightly-inside:
	$(COVERED) -m "not e2e" $(INSIDE)

nightly-ring:
	$(COVERED) -m "not e2e" $(RING)

nightly-outside:
	$(PART) -m "e2e" $(OUTSIDE)

nightly-faults:
	$(PART) -m "e2e" $(FAULTS)

nightly-psycopg2: export TEST_DATABASES := postgres
nightly-psycopg2: export TEST_PSYCOPG := 2
nightly-psycopg2:
	$(COVERED) -m "driver and not e2e" $(DRIVER)

# Projects with USE_TZ=False: tests of code that writes and compares times in messages.
NAIVE := $(addprefix tests/contrib/,timeline/test_chains.py $(addprefix messaging/, \
    outbox/test_local.py outbox/test_outages.py outbox/test_publishing.py outbox/test_records.py \
    outbox/test_refusals.py outbox/test_relay.py publishing/test_after_commit.py \
    publishing/test_http.py webhooks/test_processing.py))

nightly-naive: export TEST_DATABASES := postgres,sqlite
nightly-naive: export TEST_USE_TZ := 0
nightly-naive:
	$(PART) -m "not e2e and not nightly" $(NAIVE)

lint: $(VENV)/.installed-lint  ## Check style, formatting and English.
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) docs/prose.py

types: $(VENV)/.installed-lint  ## Check the types.
	$(PY) -m mypy

imports: $(VENV)/.installed-lint  ## Check the layers of modules.
	$(VENV)/bin/lint-imports

messages: $(VENV)/.installed-test  ## Find the texts that people read, and compile their translations.
	$(PY) -m tests.support.translations

docs: $(VENV)/.installed-docs  ## Build the documentation into docs/_build/html; test its links and search.
	$(PY) -m sphinx -E -W --keep-going -b html docs docs/_build/html
	DOCS_SITE=docs/_build/html $(PY) -m pytest -q tests/docs/test_site.py

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
