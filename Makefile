PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# make test SLOW=1 runs the slow tests too; make test PYTEST_ARGS="-k ngram" passes further options to pytest.
# WORKERS processes (auto: one per processor, at most 8) share the test files, and each computes with THREADS threads;
# tests of threads set the number themselves. Files are taken in alphabetical order: xdist would take those with few tests
# last, and the longest tests are in such files, so one process would be left with them. PYTEST_ARGS="-n 0" runs all tests
# in one process.
SLOW ?=
PYTEST_ARGS ?=
WORKERS ?= auto
THREADS ?= 1
# make demo MODEL=models/SmolLM2-135M-Instruct.Q4_1.gguf: a file, directory or hub id instead of the embedded pair.
MODEL ?=

.DELETE_ON_ERROR:
.PHONY: help setup demo models test check format clean

help:
	@echo "make demo     speculative decoding with the embedded pair of models (MODEL=...: with that model)"
	@echo "make models   fetch two real models into models/ (or \$$FOREDRAFT_REAL_MODELS), 350 MB"
	@echo "make test     the tests (SLOW=1: the slow ones too; WORKERS=...: processes; PYTEST_ARGS=...: options for pytest)"
	@echo "make check    formatting, lint and types"
	@echo "make format   format, and fix what can be fixed automatically"
	@echo "make setup    only the virtual environment, $(VENV)"
	@echo "make clean    remove $(VENV), caches and build outputs"

setup: $(STAMP)

# torch is installed first and alone, so that the pinned version satisfies the range in pyproject.toml.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("foredraft needs Python 3.11 or newer; this is %s (choose another: make PYTHON=...)" % sys.version.split()[0])'
	@echo "Setting up $(VENV): a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt torch==2.13.0
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/foredraft demo $(if $(MODEL),--model '$(MODEL)')

models: $(STAMP)
	@$(BIN)/python recipes/real_models.py

test: $(STAMP)
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		$(if $(SLOW),,-m "not slow") $(PYTEST_ARGS)

check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict

format: $(STAMP)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
