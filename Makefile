# make chat    set up and start the terminal chat on the embedded model
# make test    set up and run all tests
# make lint    set up and run the linters and the type checker
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# mypy does not see through editable installs: the packages under their own names.
TYPES := $(VENV)/types
ARGS ?=

.PHONY: chat test lint clean

chat: $(VENV)/.app
	@$(BIN)/mlx-spec chat $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p $(TYPES)
	@ln -sfn $(CURDIR)/mlx_spec $(TYPES)/mlx_spec
	@ln -sfn $(CURDIR)/app $(TYPES)/mlx_spec_app
	@ln -sfn $(CURDIR)/models $(TYPES)/mlx_spec_models
	MYPYPATH=$(TYPES) $(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info

$(VENV)/.app: pyproject.toml | $(VENV)/bin/python
	@echo "Installing, once …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing with test tools, once …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@ $(VENV)/.app

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; \
	install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
