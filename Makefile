# Everything runs from a virtual environment that `make setup` makes.
#   VENV=...    where it lies           PYTHON=...  what it is made from
#   ARGS=...    options for `epd demo`, or for pytest in `test`, `unit` and `soak`
#   BENCH=quick                         less of `bench`, in a few minutes
#   SIM_STEPS=... SIM_SEED=...          how much `sim` plays, and from which seed on

VENV ?= .venv
PYTHON ?= python3
ARGS ?=
SIM_STEPS ?= 50000
SIM_SEED ?= 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
SETUP_SOURCES := pyproject.toml $(wildcard scripts/* scripts/devhooks/*)

.DEFAULT_GOAL := help
.PHONY: help setup lint format unit test sim soak bench demo clean

help: ## Say what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(STAMP) ## Make or refresh the environment, from nothing

$(STAMP): $(SETUP_SOURCES)
	PYTHON="$(PYTHON)" scripts/setup "$(VENV)"
	@touch $@

lint: setup ## Style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Rewrite files to the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: setup ## The tests that start no engine
	$(BIN)/python -m pytest tests --ignore=tests/engine --ignore=tests/soak --timeout=120 $(ARGS)

test: lint ## Everything: lint, and the whole suite
	$(BIN)/python -m pytest tests --ignore=tests/soak $(ARGS)

soak: setup ## What takes too long for `test`: real engines killed, stopped, cut off, crowded
	$(BIN)/python -m pytest tests/soak --timeout=1200 $(ARGS)

sim: setup ## Whole fleets in virtual time, in all weathers, from seed SIM_SEED on
	$(BIN)/python -m tests.sim --steps $(SIM_STEPS) --seed $(SIM_SEED)

bench: setup ## Measure; the figures go to benchmarks/results/latest.json
	$(BIN)/epd bench $(if $(filter quick,$(BENCH)),--quick) $(ARGS)

demo: setup ## Two engines and a picture on this machine's CPU
	$(BIN)/epd demo $(ARGS)

clean: ## Remove what was made, the environment too
	rm -rf "$(VENV)" build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find benchmarks epd_connector entry_points scripts tests -name __pycache__ -prune -exec rm -rf {} +
