# Set-up, checks, tests, demo and benchmarks. Everything runs in .venv, which is made on first use and reused.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo federation test test-all check bench clean

help:
	@echo "make demo      train FedAvg on non-IID MNIST and write a report"
	@echo "make federation two hospitals and a server, each a process, over TLS"
	@echo "make test      the tests (some minutes on two quiet cores)"
	@echo "make test-all  the tests and the slow proofs: published results, kill -9, memory"
	@echo "make check     formatting, lint, types and import rules"
	@echo "make bench     speed, side by side with a plain PyTorch loop, pfl and Flower; codecs beside a copy of memory"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@$(BIN)/python examples/demo.py

federation: install
	@$(BIN)/python examples/hospitals/run.py

test: install
	$(BIN)/pytest -n auto -m "not slow"

test-all: install
	$(BIN)/pytest -n auto -m "not slow"
	$(BIN)/pytest -m slow

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/codecs.py

clean:
	rm -rf .venv benchmarks/.venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
