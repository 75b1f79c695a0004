# make venv   the environment of a build, from pinned and hashed lock files
# make run    that, and the default build
# make test   that, linters and tests; starts the servers that it needs by itself
# The rest: help, lint, soak, test-sglang, sglang-venv, sharegpt, bench, docs, locks, clean

PYTHON ?= python3
VENV ?= .venv
CORES ?= 7
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps
HERE := PATH="$(abspath $(BIN)):$$PATH"

.PHONY: help venv run test pytest lint soak test-sglang sglang-venv sharegpt bench docs locks clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -4

venv: $(VENV)/.runtime

run: venv
	$(HERE) snakemake --cores $(CORES)

test: lint pytest

pytest: $(VENV)/.dev
	$(HERE) python -m pytest -n 3 --dist worksteal

lint: $(VENV)/.dev
	$(HERE) ruff check --no-cache workflow tests benchmarks
	$(HERE) ruff format --check --no-cache workflow tests benchmarks
	$(HERE) mypy
	$(HERE) snakefmt --check Snakefile workflow/rules
	$(HERE) python tests/lint_workflow.py

# The long loops (kills, mutations, faults) in full: hours.
soak: $(VENV)/.dev
	$(HERE) SHARDMILL_SOAK=1 python -m pytest --timeout 0

# A real SGLang on this CPU, in the folder that SHARDMILL_SGLANG names (made there when it is empty).
test-sglang: $(VENV)/.dev
	@test -n "$$SHARDMILL_SGLANG" || { echo "Set SHARDMILL_SGLANG to a folder made by sglang-cpu/install.sh."; exit 2; }
	$(HERE) python -m pytest tests/test_real_sglang.py tests/test_real_sglang_prompts.py

sglang-venv: envs/sglang.lock
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r envs/sglang.lock

# The real dataset of config/sharegpt.yaml. It states no licence: it stays on the machine that installed it.
sharegpt: $(VENV)/.sharegpt

bench: $(VENV)/.dev $(VENV)/.sharegpt
	$(HERE) sh -c 'for bench in benchmarks/*.py; do echo "== $$bench"; python $$bench || exit 1; done'

docs: venv
	$(HERE) python -m shardmill.config_docs > config/README.md

# Needs uv. Run it after a change of envs/*.in.
locks:
	for part in runtime dev; do \
	  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	    --no-emit-index-url envs/$$part.in -o envs/$$part.lock; done
	for part in model sharegpt; do \
	  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	    --no-emit-index-url --no-deps envs/$$part.in -o envs/$$part.lock; done

clean:
	rm -rf $(VENV) .snakemake results

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardmill needs Python 3.11 or newer.")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: envs/runtime.lock envs/model.lock pyproject.toml | $(VENV)/bin/python
	$(PIP) --require-hashes -r envs/runtime.lock -r envs/model.lock
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: envs/dev.lock $(VENV)/.runtime
	$(PIP) --require-hashes -r envs/dev.lock
	@touch $@

$(VENV)/.sharegpt: envs/sharegpt.lock $(VENV)/.runtime
	$(PIP) --require-hashes -r envs/sharegpt.lock
	@touch $@
