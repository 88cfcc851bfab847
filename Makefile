# Everything a person runs. Each target installs what it needs into .venv and nothing elsewhere.

PYTHON ?= python3
NODES ?= 4
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m simulation

.PHONY: help bench docs install install-dev run deploy-local test test-all test-latest docker-up docker-down docker-test lint types clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

# constraints.txt has the exact versions that the tests are run with.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable .
	touch $@

# The tests start some hundred processes: each would compile torch and Flower anew where Python
# may not write bytecode. Some packages ship templates that are not valid Python.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $@

install: $(VENV)/.installed  ## make .venv and install the app
install-dev: $(VENV)/.installed-dev  ## the same with what the tests need

run: install  ## train FedPSA with 50 simulated clients on handwritten digits
	$(RUN) run --clients 50 --set virtual-days=0.25

deploy-local: install  ## the same app on real processes: SuperLink and NODES SuperNodes over gRPC
	$(RUN) deploy --nodes $(NODES) --set num-server-rounds=6 --set buffer-size=2 \
	    --set queue-size=4 --set fraction-train=0.5 --set evaluate-every=1

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

test: lint types  ## lint, types and tests, with one run on each of Flower's engines
	$(BIN)/python -m pytest

test-all: lint types  ## all tests, also those that take minutes
	$(BIN)/python -m pytest -m 'slow or not slow'

# A Flower whose nodes talk HTTP, with what it needs; the app and the strategies are the same. 1.42
# asks for a certifi that not every index has yet, and runs with what 1.41 needs.
LATEST := .venv-latest
$(LATEST)/.installed: pyproject.toml constraints.txt
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(LATEST)/bin/python $(PIP_INSTALL) 'flwr[simulation]==1.41.0'
	$(LATEST)/bin/python $(PIP_INSTALL) --no-deps 'flwr==1.42.0'
	touch $@

test-latest: $(LATEST)/.installed  ## the engine tests on Flower 1.42, in an environment of its own
	$(LATEST)/bin/python -m pytest tests/engines tests/simulation tests/node -m 'engine and not slow'

# Material prints an advertisement of its successor unless it is told not to.
docs: install-dev  ## the documentation as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser."

# The quick ones; each module of benchmarks/ is a command of its own with more options.
bench: install  ## what things cost: pages and JSON in benchmarks/results
	$(BIN)/python -m benchmarks.server --sizes 1e4 1e5 1e6 1e7 --repeats 3
	$(BIN)/python -m benchmarks.sketch --models digits fmnist mnist --size 1e7 --repeats 3
	$(BIN)/python -m benchmarks.engines --datasets fmnist --repeats 3
	$(BIN)/python -m benchmarks.traffic --datasets digits fmnist
	$(BIN)/python -m benchmarks.superlink --idle 20 --updates 2 12
	$(BIN)/python -m benchmarks.nodes --datasets digits --updates 4

docker-up:  ## SuperLink, NODES SuperNodes and a run in containers, with TLS and node keys
	docker/up.sh $(NODES)

docker-down:  ## end them; keys, data and state stay in volumes
	cd docker && docker compose down

docker-test: install-dev  ## build, run, check and tear down (skipped without a Docker engine)
	$(BIN)/python -m pytest tests/docker -m docker

clean:  ## remove .venv and caches (not runs/)
	rm -rf $(VENV) .venv-latest .pytest_cache .mypy_cache .ruff_cache .hypothesis
