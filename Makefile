# Each target sets up what it needs in .venv; the stamps in .venv say what is there already.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
DATA ?= ../shared/workloads
RATE ?= 0.5,1
OUT ?= build/loadtest
WORKERS ?= 2
BIN := .venv/bin
SERVE := .venv/.serve-ready
DEV := .venv/.dev-ready
LOAD := .venv/.loadtest-ready

.PHONY: serve doctor test test-slow check format eval loadtest clean

serve: $(SERVE)  ## serve the embedded model (or ARGS="model=... num_replicas=2") at PORT
	@$(BIN)/python -m deployments.local port=$(PORT) $(ARGS)

doctor: $(SERVE)  ## versions, kernels, what the options of ARGS come to, and what is wrong
	@$(BIN)/python -m deployments.doctor doctor port=$(PORT) $(ARGS)

test: $(DEV)  ## every test that needs neither a GPU nor much time
	@# Clusters, and what Serve keeps for the life of a process, want one process and both cores
	$(BIN)/python -m pytest -m "ray and not gpu and not slow"
	$(BIN)/python -m pytest -m "not ray and not gpu and not slow" -n $(WORKERS) --dist loadfile

test-slow: $(DEV)  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

check: $(DEV)  ## lint, types, tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MAKE) test

format: $(DEV)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

eval: $(SERVE)  ## accuracy of the embedded model on DATA; FULL=1 for everything
	$(BIN)/python -m benchmarks.tiny_model --data $(DATA) $(if $(FULL),--full)

loadtest: $(LOAD)  ## two minutes of mixed load on the embedded model, held to its counters; report in OUT
	$(BIN)/python -m loadtest --workload mixed --check --seconds 120 --rate $(RATE) --data $(DATA) --out $(OUT)

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@# what fails here leaves a folder that looks whole
	$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) cannot make an environment: install python3-venv, or set PYTHON=..."; exit 1; }

$(SERVE): pyproject.toml | .venv/bin/python
	@echo "Installing into .venv: torch 2.13, Ray Serve 2.60, transformers and what they need,"
	@echo "about 1.5 GB on disk with a CPU build of torch. The model comes with the project."
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV): pyproject.toml | .venv/bin/python
	@echo "Installing into .venv: what serving needs (about 1.5 GB) and the test tools."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(SERVE) $(LOAD)

$(LOAD): pyproject.toml | .venv/bin/python
	@echo "Installing into .venv: what serving needs (about 1.5 GB) and locust."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[loadtest]'
	@touch $@ $(SERVE)
