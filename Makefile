# Start with `make demo` and `make test`. Both set up their own environment in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Without compiled files, every child process of the tests would compile everything it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := demo
.PHONY: demo test quick test-flaky test-pythons lint soak bench peers clean

KERNEL := setup.py $(wildcard src/headrace/rows/kernel*.[ch])

$(VENV)/.demo: pyproject.toml $(KERNEL)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(KERNEL)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: $(VENV)/.demo            ## build a dataset from Python's own standard library, then inspect, load and measure it
	$(BIN)/python examples/demo.py

lint: $(VENV)/.dev             ## check style, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Threads of OpenBLAS that wait for work keep a core busy, and every fork ends and starts them.
test: lint                     ## run the linters and all ordinary tests
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not soak"

quick: $(VENV)/.dev            ## run the tests of what has changed since main, in about a minute; QUICK_SINCE=commit compares with another commit
	$(BIN)/python -m tests.quick

test-flaky: $(VENV)/.dev       ## run the tests five times in fresh clones, and every test file alone; RUNS="busy random" runs only some of these
	$(BIN)/python -m tests.flaky $(if $(RUNS),--runs $(RUNS))

test-pythons: $(VENV)/.dev     ## run the core's tests on every Python from 3.11 to 3.14 found on this machine
	$(BIN)/python -m tests.pythons

soak: $(VENV)/.dev             ## run the long tests, and every property test with twenty times the examples
	$(BIN)/pytest -m soak --timeout 1800
	EXAMPLES=20 $(BIN)/pytest -n 2 -m "hypothesis and not soak" --timeout 1800

bench: $(VENV)/.dev            ## run the benchmarks; results go to benchmarks/results/
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt datasets grain trl torchdata numba prtpy binpacking
	for question in open build ordering limit loading packing overlap resume dataloader measuring defaults remote scale serve; do $(BIN)/python benchmarks/$$question.py; done

PEERS := .venv-peers
TFDATA := .venv-tfdata

$(PEERS)/.ready: pyproject.toml constraints.txt $(KERNEL) $(wildcard benchmarks/peers/requirements*.txt)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -e '.[torch,pictures,s3,ray,serve]' -c constraints.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt -c constraints.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements-no-deps.txt
	touch $@

# TensorFlow asks for other versions of what the others need.
$(TFDATA)/.ready: benchmarks/peers/requirements-tfdata.txt
	$(PYTHON) -m venv $(TFDATA)
	$(TFDATA)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements-tfdata.txt
	touch $@

peers: $(PEERS)/.ready $(TFDATA)/.ready  ## compare Headrace with other loaders, in a separate environment; writes the results and docs/peers.svg
	$(PEERS)/bin/python benchmarks/peers/run.py
	$(PEERS)/bin/python benchmarks/peers/remote_run.py
	$(PEERS)/bin/python benchmarks/peers/serve_run.py
	$(PEERS)/bin/python benchmarks/peers/chart.py

clean:
	rm -rf $(VENV) $(PEERS) $(TFDATA) .venv-pythons .demo
