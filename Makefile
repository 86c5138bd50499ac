# make demo: set up, train every method on built-in data, leave a report. make test: set up, lint, types, tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
OUT ?= runs/demo

.PHONY: setup demo test test-slow bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev,metrics,search]'
	touch $@

demo: setup
	$(BIN)/glasu demo --out $(OUT)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2

test-slow: setup $(VENV)/.flower
	$(BIN)/pytest -q -m slow

$(VENV)/.flower: $(VENV)/.ready
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[flower]'
	touch $@

bench: setup
	$(BIN)/glasu bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
