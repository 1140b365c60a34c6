# The two commands to know: `make demo` and `make test`. Both set up their own environment in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint soak bench clean

KERNEL := setup.py src/penstock/load/kernel.c

$(VENV)/.demo: pyproject.toml $(KERNEL)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(KERNEL)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: $(VENV)/.demo            ## build a dataset from Python's own standard library and look at it
	$(BIN)/python examples/demo.py

lint: $(VENV)/.dev             ## style, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint                     ## everything that must hold
	$(BIN)/pytest -n 2 -m "not soak"

soak: $(VENV)/.dev             ## the long runs
	$(BIN)/pytest -m soak --timeout 1800

bench: $(VENV)/.dev            ## measure; results go to benchmarks/results/
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt datasets grain trl torchdata numba prtpy binpacking
	for question in open build ordering limit loading packing overlap resume dataloader; do $(BIN)/python benchmarks/$$question.py; done

clean:
	rm -rf $(VENV) .demo
