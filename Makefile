# `make quickstart` trains a policy, `make test` runs the tests; each sets up .venv first, and a second call skips that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles the modules that it imports; pip would compile all, which takes it longer than the rest
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/$(PIP_INSTALL) --constraint constraints.txt
# threads that wait must not spin on cores that something else needs
export OMP_WAIT_POLICY := passive
PLUGINS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
QUICKSTART_PLUGINS := plugins/algos plugins/optims plugins/plan plugins/watch
WRITERS := $(sort $(wildcard scripts/write_*.py))
SETUP_FILES := pyproject.toml $(PLUGINS:=/pyproject.toml) constraints.txt
# vLLM pins other versions than the rest of the tools: it has an environment of its own
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# tests of Triton kernels, which its interpreter runs on a CPU
KERNEL_TESTS := tests/unit/weight_sync/test_fp8_kernel.py $(sort $(wildcard plugins/*/tests/test_*_kernels.py))
# a file of tests stays with one worker; tests/conftest.py puts the longest first
WORKERS := 2
RUN_TESTS := python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/$(RUN_TESTS)
# the oldest and the newest SGLang whose sources the tests read
SGLANG_WHEELS := models/sglang-wheels
SGLANG_VERSIONS := 0.5.13 0.5.23

.PHONY: help install quickstart smollm2 test test-all test-vllm test-oldest test-newest tested-oldest tested-newest sglang-wheels lint docs clean mypy check-docs site serve-docs dist try-dist hooks

help:  ## Show the targets
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

quickstart: $(VENV)/.installed  ## Train a tiny policy from scratch on the CPU, about a minute
	$(BIN)/rlplug fit --config configs/quickstart.yaml

smollm2: $(VENV)/.installed-dev models/SmolLM2-135M-Instruct/config.json  ## Three GRPO steps of a real model on the CPU
	$(BIN)/rlplug fit --config configs/smollm2.yaml

test: $(VENV)/.installed-dev models/SmolLM2-135M-Instruct/config.json  ## Run the tests of every push
	$(PYTEST) --changed

test-all: $(VENV)/.installed-dev $(VLLM_VENV)/.installed models/SmolLM2-135M-Instruct/config.json sglang-wheels  ## Run all tests, the nightly ones too
	$(INSTALL) ray  # 240 MiB that only nightly tests need
	$(INSTALL) wandb mlflow-skinny sqlalchemy alembic  # 220 MiB; mlflow itself asks for an older pyarrow
	$(PYTEST) -m "nightly or not nightly" --hypothesis-profile=nightly
	$(VLLM_BIN)/python -m pytest -m "nightly or not nightly" plugins/rollout_vllm/tests

# the oldest of what all pyproject.toml claim, and the newest that the index has; each in an environment of its own
test-oldest: tested-oldest  ## Run the tests of every push with the oldest libraries that are claimed
test-newest: tested-newest  ## Run them with the newest that the index has
tested-oldest tested-newest: tested-%:
	$(PYTHON) -m venv --clear .venv-$*
	$(BOUNDS_PIP) torch 'setuptools>=77'
	$(BOUNDS_PIP) --no-build-isolation --editable . $(PLUGINS:%=--editable %)
	$(BOUNDS_PIP) 'rlplug[test,tensorboard]'
	.venv-$*/bin/$(RUN_TESTS)
	.venv-$*/bin/rlplug fit --config configs/quickstart.yaml

tested-oldest: BOUNDS_PIP = .venv-oldest/bin/$(PIP_INSTALL) --constraint constraints-oldest.txt
tested-newest: BOUNDS_PIP = .venv-newest/bin/$(PIP_INSTALL) --upgrade

test-vllm: $(VLLM_VENV)/.installed models/SmolLM2-135M-Instruct/config.json  ## Run those tests of every push that need vLLM, on the CPU
	$(VLLM_BIN)/python -m pytest --changed plugins/rollout_vllm/tests
	TRITON_INTERPRET=1 $(VLLM_BIN)/python -m pytest $(KERNEL_TESTS)

install: $(VENV)/.installed-dev $(VLLM_VENV)/.installed  ## Install what lint and all tests need

lint: mypy  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(VENV)/.installed-dev
	$(BIN)/mypy rlplug $(PLUGINS:=/src)

docs: $(VENV)/.installed-dev  ## Rewrite what the documentation takes from the code
	@for script in $(WRITERS); do $(BIN)/python $$script || exit; done

check-docs: $(VENV)/.installed-dev  ## Compare what `make docs` writes with the code, and versions with each other
	@for script in $(WRITERS) scripts/set_version.py; do $(BIN)/python $$script --check || exit; done

site: $(VENV)/.installed-dev  ## Build the documentation as a site in build/site; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -d build/doctrees docs build/site

serve-docs: site  ## Show the site on http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

dist: $(VENV)/.installed-dev  ## Build sdists and wheels of all distributions in dist
	rm -rf dist
	$(BIN)/python scripts/build_distributions.py dist

try-dist: dist  ## Install the wheels of dist in a new environment and train with them
	$(BIN)/python scripts/try_distributions.py dist

hooks: $(VENV)/.installed-dev  ## Have git check each commit: see .pre-commit-config.yaml
	$(INSTALL) pre-commit
	$(BIN)/pre-commit install

clean:  ## Remove what the targets above made, runs excepted
	rm -rf $(VENV) $(VLLM_VENV) .venv-oldest .venv-newest build dist docs/api/plugins models *.egg-info plugins/*/src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SETUP_FILES) | $(VENV)/bin/python
	@echo "installing rlplug, $(subst plugins/,rlplug-,$(QUICKSTART_PLUGINS)) into $(VENV): two minutes the first time"
	$(INSTALL) torch 'setuptools>=77'
	$(INSTALL) --no-build-isolation --editable . $(QUICKSTART_PLUGINS:%=--editable %)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing all plugins and the test tools into $(VENV): two minutes the first time"
	$(INSTALL) --no-build-isolation $(PLUGINS:%=--editable %)
	$(INSTALL) 'rlplug[dev,docs,tensorboard]'
	$(INSTALL) --no-deps torchtitan  # last: pip complains of it when it installs more (what it asks for contradicts constraints.txt)
	@touch $@

$(VLLM_VENV)/.requirements: plugins/rollout_vllm/requirements-cpu.txt
	@echo "installing vLLM for the CPU into $(VLLM_VENV): two minutes the first time"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/$(PIP_INSTALL) --no-deps -r plugins/rollout_vllm/requirements-cpu.txt
	@touch $@

# after the other environment, since two builds in one folder would overwrite each other's files
$(VLLM_VENV)/.installed: $(VLLM_VENV)/.requirements $(SETUP_FILES) | $(VENV)/.installed-dev
	$(VLLM_BIN)/$(PIP_INSTALL) --no-deps --editable . $(PLUGINS:%=--editable %)
	@touch $@

sglang-wheels: $(SGLANG_VERSIONS:%=$(SGLANG_WHEELS)/%)  ## Download the versions of SGLang that test-all reads

$(SGLANG_WHEELS)/%: | $(VENV)/.installed-dev
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --python-version 3.12 --only-binary=:all: \
		--platform manylinux_2_34_x86_64 --dest $(SGLANG_WHEELS) sglang==$*
	@touch $@

models/SmolLM2-135M-Instruct/config.json: | $(VENV)/.installed-dev
	$(BIN)/python scripts/fetch_smollm2.py models/SmolLM2-135M-Instruct
