# Everything runs in a virtual environment of the checkout, made on first use: `make quickstart`, `make test`.
#   make test PYTHON=python3.12       another Python (3.11 or newer) for the environment
#   make test JOBS=8                  more workers, where there are more than two cores
#   make test TORCH=torch==2.11.0     another PyTorch; or install one into .venv first, it is left alone
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
CHECKERS := $(VENV)/.checkers
# Tests that compile no model, or tiny ones in a second.
UNIT_TESTS := tests/ir tests/passes/golden $(addprefix tests/passes/test_,pipeline.py batch_rules.py canonical.py find_blocks.py \
	orders.py verify.py) $(addprefix tests/frontend/test_,guard_failures.py propagation.py) tests/devices/test_registry.py \
	tests/devices/test_cuda_device.py tests/lowering/test_widening.py

# An environment of its own: PyTorch's CUDA build, some gigabytes, without a GPU.
CUDA_VENV := .venv-cuda
CUDA_TORCH ?= torch
CUDA_READY := $(CUDA_VENV)/.ready

.PHONY: help quickstart check test slow bench gpu cuda-dry cuda-kernels clean

help:
	@echo "make quickstart   train a small language model, layer by layer (about two minutes)"
	@echo "make check        in about a minute: format, lint, types, layers of imports, unit tests"
	@echo "make test         the tests, without cases that are marked slow (about half an hour on two cores)"
	@echo "make slow         those cases: further models, optimizers, update modes, ranks (about as long)"
	@echo "make bench        the benchmarks; figures go to runs/"
	@echo "make gpu          nine minutes on a GPU: numbers, memory, races, speed (small sizes without one)"
	@echo "make cuda-dry     without a GPU: PyTorch's CUDA build on a CUDA runtime that computes nothing (downloads gigabytes)"
	@echo "make cuda-kernels the same, compiling the blocks of fourteen models for GPUs of four architectures (half an hour)"
	@echo "make clean        remove the virtual environment, caches and runs"

quickstart: $(READY)
	$(RUN) examples/quickstart.py

check: $(CHECKERS)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy --cache-dir build/types -p l2l_compile
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) $(UNIT_TESTS)

# One thread a worker: two workers that fight for two cores are slower than one.
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist worksteal --durations=10 -m "not slow"

slow: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist worksteal --durations=10 -m slow

bench: $(READY)
	@failed=; for name in depth starts compile_time speed overhead update overlap host_memory ranks; do \
		$(RUN) examples/benchmarks/$$name.py || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "over the limit:$$failed"; exit 1; }

gpu: $(READY)
	$(RUN) examples/benchmarks/gpu.py --minutes 9

FAKE_CUDA := env OMP_NUM_THREADS=1 L2L_CACHE=0 $$($(CUDA_VENV)/bin/python tests/fake_cuda/build.py build/fake_cuda) \
	$(CUDA_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal tests/fake_cuda

cuda-dry: $(CUDA_READY)
	$(FAKE_CUDA) -m "not slow"

cuda-kernels: $(CUDA_READY)
	$(FAKE_CUDA) -m slow

clean:
	rm -rf $(VENV) $(CUDA_VENV) runs build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed; choose one: make PYTHON=python3.12' if sys.version_info < (3, 11) else 0)"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -c "import torch" 2>/dev/null || $(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet -e ".[test]"
	@touch $@

$(CUDA_READY): pyproject.toml
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet $(CUDA_TORCH)
	$(CUDA_VENV)/bin/python -m pip install --quiet -e ".[test]"
	@touch $@

$(CHECKERS): $(READY)
	$(RUN) -m pip install --quiet -e ".[test,check]"
	@touch $@
