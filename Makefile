# Two commands: `make demo` and `make test`. Both set up .venv first, once.
#
#   make demo     environment, model, post-training on this machine, evaluation, report
#   make test     everything that proves it works (format, lint, types, doctests, tests)
#   make check    the static half of `make test`
#   make bench    every measurement; rewrites the tables of docs/BENCHMARKS.md
#   make soak     the long checks that `make test` leaves out (POSTTRAIN_SOAK_LEASES=2000 for fewer)
#   make setup    only the environment
#
# Switches:
#   TORCH_INDEX=URL   take torch, and torch alone, from the package index at URL (a CUDA or ROCm build)
#   PYTHON=python3.12 the interpreter that makes .venv (3.11 or newer)

PYTHON ?= python3
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

# One thread and no spinning: on few cores the threads of torch else disturb one another.
TEST_THREADS := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test check bench soak setup install
.DEFAULT_GOAL := test

demo: setup
	$(BIN)/posttrain models fetch smollm2-135m
	$(BIN)/posttrain train --preset demo

test: check
	$(TEST_THREADS) $(BIN)/pytest tests --ignore=tests/test_architecture.py --durations=10
	$(TEST_THREADS) $(BIN)/posttrain domains check --sample --per-level 1

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TEST_THREADS) $(BIN)/pytest tests/test_architecture.py
	$(TEST_THREADS) $(BIN)/pytest --doctest-modules posttrain

bench: setup
	$(BIN)/python -m bench --all

soak: setup
	$(BIN)/posttrain domains check --all
	$(TEST_THREADS) $(BIN)/pytest tests -m soak

# Installs only where the pins, or the index of torch, differ from what was installed last.
setup:
	@wanted="$$(cat pyproject.toml constraints.txt | cksum) $(TORCH_INDEX)"; \
	if [ "$$wanted" != "$$(cat $(STAMP) 2>/dev/null)" ]; then \
		$(MAKE) --no-print-directory install && echo "$$wanted" > $(STAMP); \
	fi

install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "posttrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
		"Next: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH_INDEX),$(BIN)/pip install --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
