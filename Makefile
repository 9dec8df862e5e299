# Every target sets up what it needs in .venv (11 GB: SGLang brings its whole GPU stack; minutes once).
PYTHON ?= python3
PORT ?= 30000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Without these SGLang compiles small helpers at the first request and oversubscribes a container's cores.
export TORCHDYNAMO_DISABLE := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY := PASSIVE

NPU_VENV := .venv-npu
NPU_BIN := $(NPU_VENV)/bin
NPU_STAMP := $(NPU_VENV)/.installed

NPU_COMPILER := .npu-compiler

.PHONY: help setup serve demo doctor ablation lint test test-npu npu-compiler verify clean

help:
	@echo "make serve    serve examples/tiny-k3, a small trained Kimi K3, on this CPU (PORT, ARGS)"
	@echo "make demo     start that server with its draft, complete code, chat, measure it, stop it"
	@echo "make doctor   say whether the installation is sound"
	@echo "make ablation measure what each piece adds, once, with a plot (a quarter of an hour; ARGS for more)"
	@echo "make test     format, lint and type checks, then every test"
	@echo "make test-npu the Ascend backend on an emulated NPU, in an environment of its own (.venv-npu, 2 GB)"
	@echo "make npu-compiler  what compiles our Triton kernels for NPUs without one (make verify asks for it; 700 MB)"
	@echo "make verify   make test and test-npu, then the full matrices (hours)"
	@echo "make clean    remove .venv, .venv-npu, .npu-compiler and .cache"

setup: $(STAMP)

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --prefer-binary --editable '.[cpu,test]'
	@touch $(STAMP)

# bfloat16, as the checkpoint is stored. Room for 16 requests and their cached prefixes: it would take most of the
# machine's memory otherwise. The parsers split an answer of the chat interface into reasoning, text and tool calls.
FLAGS := --model-path examples/tiny-k3 --device cpu --dtype bfloat16 --page-size 16 \
	--max-running-requests 16 --max-mamba-cache-size 128 --max-total-tokens 32768 --mamba-track-interval 64 \
	--reasoning-parser kimi_k3 --tool-call-parser kimi_k3

serve: $(STAMP)
	$(BIN)/python -m sglang.launch_server $(FLAGS) --host 127.0.0.1 --port $(PORT) $(ARGS)

demo: $(STAMP)
	$(BIN)/python -m sglang_k3.testing.demo --draft examples/tiny-k3-dspark $(FLAGS) $(ARGS)

doctor: $(STAMP)
	$(BIN)/sglang-k3 doctor

# Once over the stages, into a folder of its own: the figures in docs are those of longer runs.
ablation: $(STAMP)
	$(BIN)/python -m benchmarks.ablation --kind stages --repeats 1 --out .cache/ablation $(ARGS)
	@echo "The plot is .cache/ablation/ablation-tiny.png (another --model or --out in ARGS: there)."

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Our Triton kernels are compiled for NPUs by it. Where it is not to be had (anything but x86-64 and Python 3.11), the
# tests that need it say so and the others run; where it could be and is not, those tests fail.
npu-compiler: $(STAMP)
	@[ -e $(NPU_COMPILER)/.installed ] || { $(BIN)/python -m pip install --quiet --no-deps --target $(NPU_COMPILER) \
		--requirement tests/kernels/triton/requirements.txt && touch $(NPU_COMPILER)/.installed; } || \
		echo "No compiler for NPUs: triton-ascend or ascendnpu-ir is not to be had here; kernels are not compiled."

# Two files of tests at a time, which the two cores of a small machine take; what measures times runs alone.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/benchmarks
	$(BIN)/python -m pytest tests/benchmarks

# torch_npu loads CANN, which a stand-in built by gcc takes the place of; pip must not import it meanwhile.
$(NPU_STAMP): tests/npu/requirements.txt requirements-npu.txt
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_BIN)/python -m pip download --quiet --no-deps --dest $(NPU_VENV)/wheels torch==2.13.0+cpu || { \
		echo "The NPU tier stops: no CPU build of torch 2.13.0 is to be had here, only a CUDA build at most," \
			"and torch_npu aborts beside one. Point pip at an index or folder with torch-2.13.0+cpu."; exit 1; }
	$(NPU_BIN)/python -m pip install --no-deps --find-links $(NPU_VENV)/wheels --requirement tests/npu/requirements.txt
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_BIN)/python -m pip install --no-deps --editable .
	rm -rf $(NPU_VENV)/wheels
	@touch $@

# SGLang keeps one configuration a process: files that share one are a group. Two groups at a time.
NPU_GROUPS := "serving streams" "vendor" "operators environment bytes" "decode" "triton" "triton_decode"

test-npu: $(NPU_STAMP)
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_BIN)/python -m tests.npu.cann.build $(NPU_VENV)/cann
	printf '%s\n' $(NPU_GROUPS) | LD_LIBRARY_PATH=$(CURDIR)/$(NPU_VENV)/cann TASK_QUEUE_ENABLE=0 OMP_NUM_THREADS=1 \
		xargs -P 2 -I '{}' sh -c 'set --; for name in {}; do set -- "$$@" tests/npu/cases_$$name.py; done; \
		exec $(NPU_BIN)/python -m pytest -o python_files="cases_*.py" "$$@"'

verify: test test-npu npu-compiler
	$(BIN)/python -m pytest -m verify

clean:
	rm -rf $(VENV) $(NPU_VENV) $(NPU_COMPILER) .cache
