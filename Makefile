# make setup | demo | test | lint | bench | validate | gpu - each sets up what it needs on a fresh machine.
# make gpu PARTS="test verify calibrate compare" - some of it, for a GPU that is there for minutes only.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test lint bench validate gpu

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m experiments.recipes demo

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m experiments.recipes bench

validate: $(READY)
	$(BIN)/longstep validate --cases all
	$(BIN)/longstep validate --ranks 2,4 --schedules ring,ulysses

gpu: $(READY)
	$(BIN)/python -m experiments.recipes gpu $(PARTS)
