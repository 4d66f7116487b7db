# On a machine with Python 3.11 or newer and make:
#   make train    creates .venv with what training needs, and trains a small GPT (a minute and a half on two cores)
#   make test     installs the rest into .venv and runs the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Installs with uv if it is on the PATH, else with pip. `make UV= train` uses pip: uv does not read pip.conf and PIP_*.
UV     ?= $(shell command -v uv 2>/dev/null)
# Written after each install: only the dependencies, and everything.
TRAIN_STAMP := $(VENV)/.installed-train
STAMP       := $(VENV)/.installed
EXTRAS      := mlflow,hf,gguf,eval,k8s,tensorboard,wandb,prometheus,etcd,s3,optuna,page,dev
CONFIG ?= gpt_stdlib
ARGS   ?=
PROCESSES ?= 2

# Kubernetes (docs/local-cluster.md). Empty KIND_CLUSTER: use the current context instead of a kind cluster.
KIND_CLUSTER  ?= llmtrain
K8S_IMAGE     ?= llmtrain:dev
K8S_BUILD     ?= docker build
K8S_CONFIG    ?= k8s_indexed_job
# Name of the run. Empty: k8s-train generates one and stores it in K8S_LAST for the other targets.
K8S_RUN       ?=
K8S_LAST       = .k8s-run
K8S_CLAIM     ?= runs
K8S_NAMESPACE ?=
# K8S_ARGS: another cluster (--kubeconfig FILE, --context NAME). K8S_SET: options for launch (--set launch.nodes=1).
K8S_ARGS      ?=
K8S_SET       ?=
K8S_PLACE      = $(K8S_ARGS) $(if $(K8S_NAMESPACE),--namespace $(K8S_NAMESPACE))
K8S_NEW        = $(or $(K8S_RUN),k8s-demo-$$(date +%m%d-%H%M%S))
K8S_NAME       = $(or $(K8S_RUN),$$(cat $(K8S_LAST)))
K8S_HAS_NAME   = $(if $(K8S_RUN),,@test -s $(K8S_LAST) || { echo "No run yet. Run make k8s-train, or set K8S_RUN=name." >&2; exit 64; })

# make release: IMAGES= builds none; the arguments name the package index that has the torch build of a variant.
IMAGES         ?= cpu
IMAGE_BUILD    ?= docker build -t {tag} -f {dockerfile} {context}
CPU_ARGUMENTS  ?=
CUDA_ARGUMENTS ?=
RELEASE_DIR    ?= dist/release

.PHONY: help setup setup-train train train-ddp test test-slow test-gpu lint format bench wheels release constraints e2e e2e-full clean
.PHONY: k8s-cluster k8s-build k8s-train k8s-logs k8s-clean k8s-cluster-delete k8s-full

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | column -t -s "$$(printf '\t')"

setup: $(STAMP)  ## create .venv with llmtrain and all extras except qlora

setup-train: $(TRAIN_STAMP)  ## create .venv with llmtrain and what training needs, no extras

# Python compiles a module at its first import, so installing compiles none. PIP_NO_INPUT: fail instead of prompting.
ifeq ($(UV),)
  CREATE  = $(PYTHON) -m venv $(VENV)
  INSTALL = PIP_NO_INPUT=1 $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
else
  CREATE  = $(UV) venv -q --seed --python $(PYTHON) $(VENV)
  INSTALL = $(UV) pip install -q --python $(BIN)/python -c constraints.txt
endif

define CREATE_VENV
$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "llmtrain needs Python 3.11 or newer; set PYTHON=python3.11")'
test -x $(BIN)/python || $(CREATE)
endef

$(TRAIN_STAMP): pyproject.toml constraints.txt
	@echo "Installing llmtrain and what training needs into $(VENV): 1.1 GB with the CPU build of torch, several GB with CUDA."
	$(CREATE_VENV)
	$(INSTALL) -e .
	touch $@

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing llmtrain with all extras into $(VENV): 2.2 GB with the CPU build of torch. This takes some minutes."
	$(CREATE_VENV)
	$(INSTALL) -e '.[$(EXTRAS)]'
	touch $(TRAIN_STAMP) $@

train: setup-train  ## train a small GPT on Python's standard library; CONFIG=preset or file, ARGS="--set ..."
	$(BIN)/llmtrain train --config $(CONFIG) $(ARGS)

train-ddp: setup-train  ## train with two processes; CONFIG=preset or file (default ddp_smoke), PROCESSES=2
	$(BIN)/llmtrain train --config $(if $(filter file,$(origin CONFIG)),ddp_smoke,$(CONFIG)) --processes $(PROCESSES) $(ARGS)

k8s-cluster: setup  ## create a local Kubernetes cluster with Docker and kind; runs are in ./runs
	$(BIN)/llmtrain cluster up --name $(KIND_CLUSTER)

k8s-build: setup  ## build the image, and load it if the current context is the cluster of k8s-cluster
	$(K8S_BUILD) -t $(K8S_IMAGE) -f docker/Dockerfile .
	$(if $(KIND_CLUSTER),$(BIN)/llmtrain cluster load-image $(K8S_IMAGE) --name $(KIND_CLUSTER) --if-reached $(K8S_ARGS))

# Store the name first: launch blocks until the run finishes, and k8s-logs may be called meanwhile.
k8s-train: setup  ## train on the cluster of the kubeconfig; K8S_RUN=name (default generated), K8S_CONFIG=preset or file, K8S_SET="--set ..."
	@echo "$(K8S_NEW)" > $(K8S_LAST)
	$(BIN)/llmtrain launch --config $(K8S_CONFIG) --name "$$(cat $(K8S_LAST))" --image $(K8S_IMAGE) \
	  --set launch.runs_volume.claim=$(K8S_CLAIM) $(K8S_SET) $(K8S_PLACE)

k8s-logs: setup  ## show the logs of the last run, or of K8S_RUN
	$(K8S_HAS_NAME)
	$(BIN)/llmtrain logs "$(K8S_NAME)" $(K8S_PLACE)

k8s-clean: setup  ## delete the last run, or K8S_RUN, from the cluster; its files stay
	$(K8S_HAS_NAME)
	$(BIN)/llmtrain delete "$(K8S_NAME)" $(K8S_PLACE)

k8s-cluster-delete: setup  ## delete the cluster of k8s-cluster; runs stay
	$(BIN)/llmtrain cluster down --name $(KIND_CLUSTER)

k8s-full: setup  ## k8s-cluster, k8s-build, k8s-train and k8s-logs
	$(if $(KIND_CLUSTER),$(MAKE) k8s-cluster)
	$(MAKE) k8s-build
	$(MAKE) k8s-train
	$(MAKE) k8s-logs

# Four workers also on two cores: many tests wait for other processes. worksteal: neighbors stay together, and share the
# fixtures of their module.
test: setup  ## run the tests, except slow ones
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow" --durations 20 --ignore tests/end_to_end

test-slow: setup  ## run the slow tests: real text, long fault sweeps
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow --timeout 600 --durations 20 --ignore tests/end_to_end

test-gpu: setup  ## run the tests that need a GPU (one of them needs pip install '.[qlora]')
	$(BIN)/python -m pytest tests/gpu -rs --timeout 600 --durations 10

lint: setup  ## run ruff, the format check and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## format and fix with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: setup  ## run the end-to-end tests: wheel, every launch kind on a real cluster (../shared/kube or LLMTRAIN_E2E_KUBECONFIG)
	$(BIN)/python -m pytest tests/end_to_end -m "not slow" --timeout 1200 --durations 10 -rs

e2e-full: setup  ## run all end-to-end tests, including slow ones: LoRA of a real model, deleted pods on every kind
	LLMTRAIN_E2E_EXTRAS=hf,mlflow,s3,k8s $(BIN)/python -m pytest tests/end_to_end --timeout 1800 --durations 20 -rs

bench: setup  ## run the benchmarks; needs ../shared/data
	for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

wheels: setup  ## build the wheels of llmtrain and llmtrain-client (the commands without torch) in dist/
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist . ./client

release: setup  ## build and check both wheels, the sdist, images (IMAGES="cpu cuda"), notes and checksums in dist/release/
	$(BIN)/python tools/release.py --to $(RELEASE_DIR) --images $(IMAGES) --image-build "$(IMAGE_BUILD)" \
	  --image-arguments "cpu=$(CPU_ARGUMENTS)" --image-arguments "cuda=$(CUDA_ARGUMENTS)"

constraints: setup  ## regenerate constraints.txt (and uv's copy in pyproject.toml)
	$(BIN)/python tools/constraints.py

clean:  ## delete .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
