# Targets for a user and for a developer; `make help` lists them. Everything is installed into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# On two cores the third computes while the others wait.
WORKERS ?= 3
# The variable, unlike -c, also limits what packages need for their own build.
PIP_INSTALL := PIP_CONSTRAINT=$(abspath constraints.txt) $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)
# DeepSpeed builds its CPU operators with the ninja of the environment.
export PATH := $(abspath $(BIN)):$(PATH)
# Tests start hundreds of processes: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install operators pretrain downstream babylm test test-fast test-pythons test-slurm mutants check soak bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP) ## create .venv with the tested versions (once)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "installing into $(VENV) (about 2 GB, some minutes, once): 1 of 2: $$(grep '^torch==' constraints.txt)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) setuptools wheel $$(grep '^torch==' constraints.txt)
	@echo "2 of 2: deepspeed, transformers and what tests and checks need"
	@$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@
	@echo "installed; to type its commands: source $(BIN)/activate"

pretrain: install ## text to a model that fills masks, on two CPU cores; FAMILY=gpt2 continues text; CORPUS=path: your text
	@$(BIN)/python tools/pretrain_default.py $(if $(FAMILY),--family '$(FAMILY)') $(if $(CORPUS),--corpus '$(CORPUS)') $(ARGS)

downstream: install ## make pretrain's model fine-tuned on two tasks, next to random weights: a table of scores
	@$(BIN)/python tools/downstream_default.py $(if $(FAMILY),--family '$(FAMILY)') $(ARGS)

babylm: install ## a BabyLM model of CORPUS=path (file or folder), its checkpoints for the challenge; BLIMP=path: a table of pairs
	@$(BIN)/python tools/train_babylm.py --corpus $(CORPUS) $(if $(BLIMP),--blimp '$(BLIMP)') $(ARGS)

operators: install ## build the CPU operators of DeepSpeed that tests use (minutes, once)
	@$(BIN)/python tools/build_operators.py --only CPUAdam FusedAdam

test: operators ## every test but the long ones, WORKERS=3 files at a time; ARGS are passed on to pytest
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: install ## unit tests of one process that take no seconds, in some minutes; ARGS are passed on to pytest
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m 'not dist and not long and not soak and not slurm' tests/unit $(ARGS)

mutants: operators ## break the package in 60 places, one at a time: do the tests notice? (half an hour)
	@$(BIN)/python -m tests.mutants $(ARGS)

PYTHONS ?= 3.12 3.13
test-pythons: ## `make test-fast` under PYTHONS="3.12 3.13", each in .venv-VERSION; a missing interpreter is skipped
	@for version in $(PYTHONS); do \
		python$$version --version >/dev/null 2>&1 || { echo "Python $$version is not installed: skipped"; continue; }; \
		$(MAKE) --no-print-directory test-fast PYTHON=python$$version VENV=.venv-$$version || exit 1; \
	done

test-slurm: operators ## the tests that need a Slurm cluster; each worker starts one (root, slurm-wlm, munge)
	@$(BIN)/python -m pytest -m 'slurm and not soak' -n $(WORKERS) --dist loadfile tests/slurm $(ARGS)

check: install ## lint, types, the order of imports, docs/config.md, docs/parts.md, names of families, wording
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/write_config_docs.py --check
	@$(BIN)/python -m tools.write_parts_docs --check
	@$(BIN)/python tools/check_names.py
	@$(BIN)/python tools/check_words.py
	@$(BIN)/python tools/check_structure.py

soak: install ## the long tests; NVMe offload, for which an operator is built (minutes, once), and mteb
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("mteb"))' || $(PIP_INSTALL) -e '.[mteb]'
	@$(BIN)/python tools/build_operators.py
	@$(BIN)/python -m pytest -m soak $(ARGS)

bench: install ## measure what this machine can show and write the tables of docs/benchmarks.md (15 minutes)
	@$(BIN)/python tools/benchmark document --write docs/benchmarks.md

docs: install ## write docs/config.md and docs/parts.md from the code, and build the site of docs/ into site/
	@$(BIN)/python tools/write_config_docs.py
	@$(BIN)/python -m tools.write_parts_docs
	@$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || $(PIP_INSTALL) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; to read it at http://localhost:8000: $(BIN)/mkdocs serve"

clean: ## remove .venv and what checks and tests leave; runs/ stays
	rm -rf $(VENV) .venv-3.* build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
