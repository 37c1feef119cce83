# Habits of the house. Needs make and python3 (3.10 or later, with venv); everything else goes into $(VENV).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  := smollm2-135m
LOADS  ?= 1,4,8,16,32

.PHONY: help setup demo test test-full lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       serve $(MODEL) on this machine and print the table of policies by load"
	@echo "make test       the tests, in under ten minutes on two cores"
	@echo "make test-full  the same and the long forms"
	@echo "make lint       ruff and mypy"
	@echo "make format     ruff, in place"
	@echo "make bench      the numbers of the README, as JSON in benchmarks/out/"
	@echo "make clean      remove $(VENV) and caches (models stay where FORESPARK_HOME keeps them)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	  "trtllm-forespark needs Python 3.10 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev,cpu,train]" -c constraints.txt
	@touch $@

demo: setup
	$(BIN)/forespark pull $(MODEL)
	$(BIN)/forespark demo

test: setup
	$(BIN)/forespark pull $(MODEL)
	$(BIN)/python -m pytest -m "not full and not gpu"

test-full: setup
	$(BIN)/forespark pull $(MODEL)
	$(BIN)/python -m pytest -m "not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/forespark pull $(MODEL)
	@mkdir -p benchmarks/out
	$(BIN)/forespark bench scheduler --requests 192 --block 15 --json benchmarks/out/scheduler.json
	$(BIN)/forespark bench forward --tokens 1,8,32,64,128 --json benchmarks/out/forward.json
	$(BIN)/forespark bench decode --policies ar,full,batchwise,adaptive,wcs --loads $(LOADS) --json benchmarks/out/decode.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
