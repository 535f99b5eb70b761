# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes .venv first; the second time is quick.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint ledger bench clean

demo: $(READY)
	$(BIN)/clearhead demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ledger: $(READY)
	$(BIN)/python tools/ledger.py

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clearhead needs Python 3.11 or newer: make PYTHON=python3.11 demo")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
