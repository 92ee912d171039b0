# Set-up, checks, tests, demo and benchmarks. Everything runs in .venv, which is made on first use and reused.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Under coverage tests take half as long again, so that a fast part is measured; COVERED=tests measures all.
COVERED := tests/core tests/ledger tests/secagg tests/laws/test_golden.py tests/cli/test_bad_input.py \
	tests/cli/test_cli_ledger.py tests/cli/test_result_api.py tests/network/test_admin.py \
	tests/network/test_network_ends.py tests/network/test_serving.py tests/network/test_web.py

.PHONY: help install demo federation banks test test-all coverage check bench bench-gpu ui clean

help:
	@echo "make demo      train FedAvg on non-IID MNIST and write a report"
	@echo "make federation two hospitals and a server, each a process, over TLS"
	@echo "make banks     four banks and a server, likewise, with secure aggregation: credit risk"
	@echo "make test      the tests (some minutes on two quiet cores)"
	@echo "make test-all  the tests and the slow proofs: published results, kill -9, memory"
	@echo "make coverage  which lines a fast part of the tests reaches, as a table and in htmlcov"
	@echo "make check     formatting, lint, types and import rules"
	@echo "make ui        build the live page from frontend/ (needs node 20); what it writes is committed"
	@echo "make bench     speed, side by side with a plain PyTorch loop, pfl and Flower; codecs beside a copy of memory"
	@echo "make bench-gpu  what only a real accelerator can show: speed, memory, repetition, lower precision"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip # groups need pip 25.1
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ckks,frames,llm,objects,server]' --group dev
	$(BIN)/python -m pip install --quiet --no-deps openmined.psi==2.0.6 # pins a protobuf that TensorBoard is too new for
	-@$(BIN)/python -m atoll.train.kernels.build # faster where there is a C compiler, never needed
	@touch $@

demo: install
	@$(BIN)/python examples/demo.py

federation: install
	@$(BIN)/python examples/hospitals/run.py

banks: install
	@$(BIN)/python examples/banks/run.py

test: install
	$(BIN)/pytest -n auto -m "not slow"

test-all: install
	$(BIN)/pytest -n auto -m "not slow"
	$(BIN)/pytest -m slow

coverage: install
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n auto -m "not slow" $(COVERED)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/codecs.py

bench-gpu: install
	$(BIN)/python benchmarks/gpu.py

ui:
	cd frontend && npm ci --ignore-scripts && npm run check && npm test && npm run build

clean:
	rm -rf .venv benchmarks/.venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* htmlcov frontend/node_modules frontend/build
