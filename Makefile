# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make train    sets up .venv and trains a small GPT (a minute and a half on two cores)
#   make test     sets up .venv and runs the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONFIG ?= gpt_stdlib
ARGS   ?=
PROCESSES ?= 2

.PHONY: help setup train train-ddp test test-slow lint format bench constraints e2e e2e-full clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | column -t -s "$$(printf '\t')"

setup: $(STAMP)  ## make .venv with llmtrain and every extra

# PIP_NO_INPUT: a CI job has no standard input to answer a question with.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "llmtrain needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_NO_INPUT=1 $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[mlflow,hf,k8s,tensorboard,etcd,s3,dev]'
	touch $(STAMP)

train: setup  ## train a small GPT on Python's own source files; CONFIG=preset or file, ARGS="--set ..."
	$(BIN)/llmtrain train --config $(CONFIG) $(ARGS)

train-ddp: setup  ## the same with two processes; CONFIG=preset or file (default ddp_smoke), PROCESSES=2
	$(BIN)/llmtrain train --config $(if $(filter file,$(origin CONFIG)),ddp_smoke,$(CONFIG)) --processes $(PROCESSES) $(ARGS)

test: setup  ## the tests, without the slow ones
	$(BIN)/python -m pytest -n 2 -m "not slow" --ignore tests/end_to_end

test-slow: setup  ## the slow tests: real text, long fault sweeps
	$(BIN)/python -m pytest -m slow --timeout 1800 --ignore tests/end_to_end

lint: setup  ## ruff, format check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: setup  ## end to end: a wheel; every launch kind on a real cluster (../shared/kube, or LLMTRAIN_E2E_KUBECONFIG)
	$(BIN)/python -m pytest tests/end_to_end -m "not slow" --timeout 1200 --durations 10 -rs

e2e-full: setup  ## the same with the long ones: LoRA of a real model, deleted pods on every kind
	LLMTRAIN_E2E_EXTRAS=hf,mlflow,s3 $(BIN)/python -m pytest tests/end_to_end --timeout 1800 --durations 20 -rs

bench: setup  ## side-by-side measurements; needs ../shared/data
	for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

constraints: setup  ## write constraints.txt anew from pyproject.toml (and uv's copy of it)
	$(BIN)/python tools/constraints.py

clean:  ## remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
