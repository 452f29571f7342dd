# make setup | demo | quick | test | test-all | lint | bench | validate | evidence - each sets up what it needs on a fresh machine.
# make quick: the inner loop, without processes; test: what must hold; test-all: the same at large.
# make gpu PARTS="verify calibrate layers" OUT=FOLDER LIMIT=SECONDS - all or some parts, with the torch that is here:
# it installs nothing and needs no network; what was ended goes on when it is begun again. make lab - as root, 15 minutes on an idle machine: links of set rates. make carry CARRY="--python 3.12" - what it needs beside torch, in build/carry.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOFTWARE := .venv/.software
# Each interpreter that tests start would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: setup demo quick test test-all lint bench validate evidence lab gpu carry

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m experiments.recipes demo

quick: $(READY)
	$(PYTEST) -m "not (sweep or gloo or slow)"

test: $(READY)
	$(PYTEST)

# What is counted of other software; 119 MB, and 20 seconds to install, which make test does without.
$(SOFTWARE): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[software]'
	touch $(SOFTWARE)

test-all: $(READY) $(SOFTWARE)
	$(PYTEST) -m ""

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# LARGE=yes times whole answers of many GPUs instead, each in a process of its own.
bench: $(READY)
	$(BIN)/python -m experiments.recipes bench $(if $(LARGE),--large)

validate: $(READY)
	$(BIN)/longstep evaluate all
	$(BIN)/longstep validate --ranks 2,4 --schedules ring,ulysses

# Writes experiments/results/README.md, the table of README.md, and sim/step_errors.json.
evidence: $(READY)
	$(BIN)/python -m experiments.recipes evidence

# OUT=FOLDER keeps the records and the pages.
LAB_OUT = $(if $(OUT),--out $(OUT)/$(1).json --page $(OUT)/$(1).html --figure $(OUT)/$(1).svg)

LAB_CALIBRATED = build/lab-calibration.json

lab: $(READY)
	mkdir -p build $(OUT) && rm -f $(LAB_CALIBRATED)
	$(BIN)/longstep lab --calibration $(LAB_CALIBRATED) $(call LAB_OUT,flat)
	$(BIN)/longstep lab --calibration $(LAB_CALIBRATED) --network thin --rates 50,200 --schedule usp --seq 1K \
		$(call LAB_OUT,thin)
	$(BIN)/longstep lab --calibration $(LAB_CALIBRATED) --rates 200 --schedule ring,ulysses --seq 1K \
		--fault slow-nic,slow-rank $(call LAB_OUT,faults)

# By the first Python whose torch sees a GPU: the machine's own, or that of make setup.
gpu:
	@for python in $(PYTHON) $(BIN)/python; do \
		if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
			exec $$python -m experiments.recipes gpu $(PARTS) $(if $(OUT),--out $(OUT)) $(if $(PROFILE),--profile $(PROFILE)) \
				$(if $(LIMIT),--seconds $(LIMIT)); \
		fi; \
	done; \
	echo "make gpu: neither $(PYTHON) nor $(BIN)/python has a torch that sees a GPU: name one that has, as" \
		"make gpu PYTHON=python3.12, or run make setup where there is a network" >&2; exit 2

carry:
	$(PYTHON) -m experiments.recipes.carry $(CARRY)
