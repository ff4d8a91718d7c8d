# Everything runs from a bare checkout on Linux with Python 3.11 or newer and gcc: each target first makes the
# environment that it needs, and finds it ready the next time. ARGS are appended to the command, for instance
#   make demo ARGS="--stage 2 --ranks 3"      make test ARGS="tests/test_layout.py -x"
# TORCHINDUCTOR_CACHE_DIR is honoured where it is set.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
OLDEST_VENV := .venv-oldest
# Little of what is installed is ever imported, and Python compiles that then.
PIP_INSTALL := -m pip install -q --no-compile
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# An interpreter with the oldest supported PyTorch and the test extra; without one, a second environment is made.
OLDEST_PYTHON ?= $(OLDEST_VENV)/bin/python
# `make gpu` tests the environment of the machine as it is.
GPU_PYTHON ?= python3
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Several ranks share the cores: more threads each would only get in each other's way.
test matrix test-oldest: export OMP_NUM_THREADS := 1
# Of the many processes of a run each would compile what it imports, where bytecode is not kept.
demo test matrix test-oldest: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test matrix test-oldest gpu lint format site clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.ready-run ## train a small language model under ZeRO on two processes
	$(VENV)/bin/zeroweave demo $(ARGS)

# Three processes for two cores: some tests wait, for a deadline or a process that starts.
test: $(VENV)/.ready-test ## the daily tests, within five minutes on two cores
	$(VENV)/bin/python -m pytest -m "not matrix" -n 3 --dist loadfile $(ARGS)

matrix: $(VENV)/.ready-matrix ## all other tests, hours; ARGS="--minutes 40 --shuffle SEED" runs a share of them
	$(VENV)/bin/python -m pytest -m matrix $(ARGS)

test-oldest: $(if $(filter $(OLDEST_VENV)/%,$(OLDEST_PYTHON)),$(OLDEST_VENV)/.ready-test) ## a subset on the oldest PyTorch
	$(OLDEST_PYTHON) -m pytest -m oldest $(ARGS)

# Two ranks share a machine's only GPU: with more than four workers (-n 4) steps of some tests pass their deadline there.
gpu: ## the GPU tests, with the current python
	$(GPU_PYTHON) -m pytest tests/gpu $(ARGS)

lint: $(VENV)/.ready-lint ## style, types and the floors of the design
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python tools/wiring.py zeroweave

format: $(VENV)/.ready-lint ## rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

site: $(VENV)/.ready-docs ## the documentation as a site, in site/; ARGS go to mkdocs build
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)

clean: ## remove the environments, the site and caches
	rm -rf $(VENV) $(OLDEST_VENV) site .mypy_cache .ruff_cache .import_linter_cache

# One environment; a stamp for each set of packages in it, so that the demo needs no test or lint tools.
$(VENV)/.ready-run: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with the venv module is needed (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt torch
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-test $(VENV)/.ready-matrix $(VENV)/.ready-lint $(VENV)/.ready-docs: $(VENV)/.ready-%: $(VENV)/.ready-run
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[$*]'
	@touch $@

$(OLDEST_VENV)/.ready-test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	sed 's/^torch==.*/torch==2.11.0/' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) -c $(OLDEST_VENV)/constraints.txt torch
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) -c $(OLDEST_VENV)/constraints.txt -e '.[test]'
	@touch $@
