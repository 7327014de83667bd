# gradsum: the whole work flow. Needs Python 3.11+ (PYTHON=... chooses one) and a package index.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
DEMO   := examples/digits.py --compare

.PHONY: help install demo test test-long oracle bench lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, then train a model by 2 workers and 2 summation servers"
	@echo "make test       install, check types and imports, run the tests, try the built wheel"
	@echo "make test-long  the tests that take minutes"
	@echo "make oracle     PyTorch's own tests of torch.distributed, on gloo and on gradsum"
	@echo "make bench      all measurements; those of shaped links need root"
	@echo "make install    only install, into $(VENV)"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make clean      remove everything that make made"

install: $(VENV)/.installed

demo: $(VENV)/.installed-examples
	$(BIN)/gradsum launch --standalone --nproc-per-node 2 --servers 2 -- python $(DEMO)

test: lint
	$(BIN)/python .ci/try_wheel.py
	$(BIN)/python -m pytest -q

test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m long

oracle: $(VENV)/.installed-test
	$(BIN)/python -m tests.oracle.run

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks run --all --out benchmarks.json

lint: $(VENV)/.installed-test
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }

clean:
	rm -rf $(VENV) build dist gradsum.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is as old as the files it depends on: change one of them and the next make installs anew.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gradsum needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no venv module: install python3-venv, or set PYTHON"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (torch is large)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-examples: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (torch is large)"
	@$(PIP) -e '.[examples]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (torch is large)"
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.installed $(VENV)/.installed-examples $@
