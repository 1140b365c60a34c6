# The two commands to know: `make demo` and `make test`. Both set up their own environment in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Without compiled files, every child of the tests would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := demo
.PHONY: demo test quick test-flaky test-pythons lint soak bench peers clean

KERNEL := setup.py src/headrace/rows/kernel.c

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

quick: $(VENV)/.dev            ## the tests of what has changed since main, in about a minute; QUICK_SINCE=commit for another start
	$(BIN)/python -m tests.quick

test-flaky: $(VENV)/.dev       ## the ordinary run five times in fresh clones, and every test file alone; RUNS="busy random" for some
	$(BIN)/python -m tests.flaky $(if $(RUNS),--runs $(RUNS))

test-pythons: $(VENV)/.dev     ## the core's tests on every Python from 3.11 to 3.14 that is on this machine
	$(BIN)/python -m tests.pythons

soak: $(VENV)/.dev             ## the long runs, and twenty times the examples of every property
	$(BIN)/pytest -m soak --timeout 1800
	EXAMPLES=20 $(BIN)/pytest -n 2 -m "hypothesis and not soak" --timeout 1800

bench: $(VENV)/.dev            ## measure; results go to benchmarks/results/
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt datasets grain trl torchdata numba prtpy binpacking
	for question in open build ordering limit loading packing overlap resume dataloader measuring defaults; do $(BIN)/python benchmarks/$$question.py; done

PEERS := .venv-peers

$(PEERS)/.ready: pyproject.toml constraints.txt $(KERNEL) $(wildcard benchmarks/peers/requirements*.txt)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -e '.[torch,pictures]' -c constraints.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt -c constraints.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements-no-deps.txt
	touch $@

peers: $(PEERS)/.ready         ## Headrace beside its peers, in an environment of its own: results and docs/peers.svg
	$(PEERS)/bin/python benchmarks/peers/run.py
	$(PEERS)/bin/python benchmarks/peers/chart.py

clean:
	rm -rf $(VENV) $(PEERS) .venv-pythons .demo
