# Every target installs what it needs into .venv; none needs an activated environment.

# The first Python of at least 3.11. Another one: make install PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed
# Several small processes are faster than one with many threads, on models this small
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install test test-slow lint format quickstart bench clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED)  ## Create .venv and install the package in its tested versions

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python of at least 3.11 found. Give one: make install PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

test: $(INSTALLED)  ## Run the tests
	$(PYTEST) -n auto --maxprocesses 8

test-slow: $(INSTALLED)  ## Run the slow tests
	$(PYTEST) -n auto --maxprocesses 8 -m slow

lint: $(INSTALLED)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quickstart: $(INSTALLED)  ## Train a small model with TROLL in a few minutes, on a CPU
	$(BIN)/python scripts/quickstart.py

bench: $(INSTALLED)  ## Time the LM head against TRL's
	$(BIN)/python benchmarks/head.py

clean:  ## Remove .venv and what tools have cached (outputs/ stays)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
