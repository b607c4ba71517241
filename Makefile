# `make demo` and `make test` work on a fresh machine (python3, make, git), in either order, and again.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Threads that sleep while they wait: spinning ones stall each other as soon as another process wants a core.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint format types docs clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Make .venv and install qlightning with all that the recipes and the tests need

$(INSTALLED): pyproject.toml
	@echo "Installing into $(VENV): some minutes, gigabytes of torch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[recipes,dev]'
	@touch $@

demo: $(INSTALLED) ## Train a MobileNetV2 with quantization-aware training and evaluate it in int8 (minutes, offline)
	$(BIN)/python scripts/train.py +recipe=mobilenet_qat

test: $(INSTALLED) ## Run the tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4

test-all: $(INSTALLED) ## Run all tests, the slow ones too
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m 'slow or not slow'

lint: $(INSTALLED) ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## Mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## Check types
	$(BIN)/mypy

docs: $(INSTALLED) ## Write the documents as a site, to site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean: ## Remove .venv, run folders and caches
	rm -rf $(VENV) site outputs multirun lightning_logs *.egg-info .pytest_cache .mypy_cache .ruff_cache
