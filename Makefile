# Everything uses one virtual environment; `make VENV=/elsewhere check` uses another.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: check test bench format docs

check:  ## lint, format, types, import rules, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py tests/test_docs.py tests/test_conformance.py::test_the_page_is_current

test:  ## the default suite; `$(BIN)/pytest -m thorough` runs the heavier profiles
	$(BIN)/pytest

bench:  ## one prompt through the packaged checkpoint, with its table of stages
	$(BIN)/mini-deepinfer generate --model tiny --max-tokens 64

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs:  ## rewrite the generated pages
	$(BIN)/python -m minideepinfer.config.reference > docs/config.md
	$(BIN)/python -m minideepinfer.testing.tolerances docs/conformance.md
	$(BIN)/mini-deepinfer bench report benchmarks/results/2026-11-30-h200-ladder.json --out docs
