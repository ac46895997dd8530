# `make help` lists what there is. Everything works from a bare clone with Python >= 3.11 and make.

PYTHON ?= python3
VENV ?= .venv
#: A hashed requirements file to install from instead of the newest versions (CI sets it).
REQUIREMENTS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help

.PHONY: help
help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[onnx]'
	@touch $@

$(VENV)/.test: pyproject.toml $(REQUIREMENTS) | $(VENV)/bin/python
ifdef REQUIREMENTS
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(REQUIREMENTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
else
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
endif
	@touch $@

# magika is installed for its model alone: its own dependencies are not needed.
$(VENV)/.demo: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'magika==1.0.3'
	@touch $@

.PHONY: setup
setup: $(VENV)/.test ## make the development environment in .venv

.PHONY: demo
demo: $(VENV)/.demo ## run the three services with a real model, kill one, count the answers (EXIT=1 ends it)
	$(BIN)/python examples/demo.py $(if $(EXIT),--exit)

.PHONY: test
test: $(VENV)/.test ## set up and run the tests (ARGS="-k name" picks some)
	$(BIN)/python -m pytest $(ARGS)

.PHONY: check
check: $(VENV)/.test ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.test ## mend what lint and format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(VENV)/.test ## write the generated pages: settings, metrics, errors, commands
	$(BIN)/python docs/generate.py

.PHONY: bench
bench: $(VENV)/.test ## run the three benchmarks (the long road needs redis-server for the peers)
	$(BIN)/python benchmarks/long_road.py
	$(BIN)/python benchmarks/backlog.py
	$(BIN)/python benchmarks/short_road.py

.PHONY: clean
clean: ## remove what the other commands made
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
