# make demo: set up, train every method on built-in data, write a report.
# make test: set up, then run ruff, mypy and pytest. This is all that CI runs.
# make bench: list the benchmarks. make bench NAME=round ARGS=--quick: run one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
OUT ?= runs/demo
NAME ?=
ARGS ?=
INSTALL = $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt

.PHONY: setup demo test check-types run-tests test-slow bench clean

# Tests start many processes. Without bytecode on disk, each process would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

setup: $(VENV)/.ready

# pip supports dependency groups since version 25.1. torch is installed first, with the version in constraints.txt,
# because another version may install gigabytes of GPU packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) 'pip>=25.1'
	$(INSTALL) torch
	$(INSTALL) --group dev -e '.[ckks,dp,metrics,psi,search]'
	touch $@

demo: setup
	$(BIN)/glasu demo --out $(OUT)

# mypy uses one core, and the tests wait now and then, so both run at the same time.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 check-types run-tests

check-types: setup
	$(BIN)/mypy

# Network tests spend much of their time waiting for time limits, so four workers keep two cores busy.
run-tests: setup
	$(BIN)/pytest -q -n 4 --dist worksteal

test-slow: setup $(VENV)/.flower
	$(BIN)/pytest -q -m slow

$(VENV)/.flower: $(VENV)/.ready
	$(INSTALL) -e '.[flower]'
	touch $@

ifeq ($(NAME),)
bench:
	@for script in $$(grep -l '^def main' benchmarks/*.py); do \
		printf '%-18s %s\n' "$$(basename "$$script" .py)" "$$(sed -n '1s/^"""//p' "$$script")"; \
	done
else
bench: setup
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)
endif

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
