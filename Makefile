# `make quickstart` trains a policy, `make test` runs the tests; each sets up .venv first, and a second call skips that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# threads that wait must not spin on cores that something else needs
export OMP_WAIT_POLICY := passive
SETUP_FILES := pyproject.toml plugins/algos/pyproject.toml plugins/optims/pyproject.toml constraints.txt

.PHONY: help quickstart smollm2 test lint docs clean

help:  ## Show the targets
	@grep -E '^[a-z0-9]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

quickstart: $(VENV)/.installed  ## Train a tiny policy from scratch on the CPU, about a minute
	$(BIN)/rlplug fit --config configs/quickstart.yaml

smollm2: $(VENV)/.installed models/SmolLM2-135M-Instruct/config.json  ## Three GRPO steps of a real model on the CPU
	$(BIN)/rlplug fit --config configs/smollm2.yaml

test: $(VENV)/.installed-dev models/SmolLM2-135M-Instruct/config.json  ## Run the tests
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy rlplug
	$(BIN)/mypy plugins/algos/src
	$(BIN)/mypy plugins/optims/src

docs: $(VENV)/.installed-dev  ## Rewrite what the documentation takes from the code
	$(BIN)/python scripts/write_configuration_reference.py
	$(BIN)/python scripts/write_optimization_table.py

clean:  ## Remove what the targets above made, runs excepted
	rm -rf $(VENV) build dist models *.egg-info plugins/*/src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SETUP_FILES) | $(VENV)/bin/python
	@echo "installing rlplug, rlplug-algos and rlplug-optims into $(VENV): a few minutes the first time"
	$(INSTALL) torch
	$(INSTALL) --editable '.[report,tensorboard,reasoning]' --editable plugins/algos --editable plugins/optims
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

models/SmolLM2-135M-Instruct/config.json: | $(VENV)/.installed-dev
	$(BIN)/python scripts/fetch_smollm2.py models/SmolLM2-135M-Instruct
