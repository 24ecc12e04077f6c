# Each target works alone on a machine that has only Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MNIST := build/mnist
# Environments of peers get the same torch: without a pin pip may take a CUDA build of several GB.
TORCH := $(shell grep -m1 '^torch==' constraints.txt)

.PHONY: run test lint test-slow bench clean

run: $(READY)  ## The main job: the MNIST example, from training to an engine.
	@test -f $(MNIST)/pipe.yaml || $(BIN)/pipe init $(MNIST) --template mnist
	$(BIN)/pipe run all --project $(MNIST)

test: $(READY) lint  ## Static checks and the tests, in up to four processes.
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(READY)  ## The tests that take longer than about ten seconds each, and those of MLflow (40 packages, 105 MB).
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[track]'
	$(BIN)/pytest -m "slow and not gpu"

bench: $(READY)  ## Every benchmark; each ends in one JSON line: ours, the peer's, the ratio.
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench,demo,dev,openvino,qat]'
	-$(PYTHON) -m venv build/nncf && build/nncf/bin/pip install --quiet $(TORCH) nncf onnx onnxruntime
	-$(PYTHON) -m venv build/modelopt && build/modelopt/bin/pip install --quiet $(TORCH) 'nvidia-modelopt[onnx]'
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,dev,openvino,qat]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
