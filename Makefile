# Every target sets up what it needs in .venv (11 GB: SGLang brings its whole GPU stack; minutes once).
PYTHON ?= python3
PORT ?= 30000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKPOINT := .cache/k3-random

# Without these SGLang compiles small helpers at the first request and oversubscribes a container's cores.
export TORCHDYNAMO_DISABLE := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help setup serve demo doctor lint test verify clean

help:
	@echo "make serve    start SGLang with a generated Kimi K3 checkpoint on this CPU (PORT, ARGS)"
	@echo "make demo     start a server, complete a prompt, print text and timings, stop it"
	@echo "make doctor   say whether the installation is sound"
	@echo "make test     format, lint and type checks, then every test"
	@echo "make verify   make test, then the full matrices (hours)"
	@echo "make clean    remove .venv and .cache"

setup: $(STAMP)

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --prefer-binary --editable '.[cpu,test]'
	@touch $(STAMP)

# Written under another name first: an interrupted run leaves no half checkpoint behind.
$(CHECKPOINT)/config.json: $(STAMP) sglang_k3/testing/random_checkpoint.py
	rm -rf $(CHECKPOINT) $(CHECKPOINT).partial
	$(BIN)/python -m sglang_k3.testing.random_checkpoint k3 $(CHECKPOINT).partial --experts mxfp4
	mv $(CHECKPOINT).partial $(CHECKPOINT)
	@touch $(CHECKPOINT)/config.json

# float32 said aloud: SGLang takes float16 for a float32 checkpoint, which is refused. Room for 8 requests and
# their cached prefixes: it would take most of the machine's memory otherwise.
FLAGS := --model-path $(CHECKPOINT) --device cpu --dtype float32 \
	--max-running-requests 8 --max-mamba-cache-size 64 --max-total-tokens 32768

serve: $(CHECKPOINT)/config.json
	$(BIN)/python -m sglang.launch_server $(FLAGS) --host 127.0.0.1 --port $(PORT) $(ARGS)

demo: $(CHECKPOINT)/config.json
	$(BIN)/python -m sglang_k3.testing.demo $(FLAGS) $(ARGS)

doctor: $(STAMP)
	$(BIN)/sglang-k3 doctor

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest

verify: test
	$(BIN)/python -m pytest -m verify

clean:
	rm -rf $(VENV) .cache
