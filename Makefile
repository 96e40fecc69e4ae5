# Two commands do all set-up on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-fast lint format docs docs-check lock bench clean

setup: .venv/.ready
	$(BIN)/burst env > /dev/null

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cloud,dev]'
	touch $@

demo: setup
	$(BIN)/burst train examples/quickstart/burst.yaml --where local --again

test: setup
	$(BIN)/pytest

test-fast: setup
	$(BIN)/pytest -m 'not payload and not slow'

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.ready
	$(BIN)/python tools/generate_docs.py

docs-check: .venv/.ready
	$(BIN)/python tools/generate_docs.py --check

bench: setup
	$(BIN)/python benchmarks/launcher.py

# The payload's lock, for all Pythons and systems it supports. torch brings its own CUDA libraries, so they stay out:
# with them in the lock a CPU machine would download gigabytes. Needs uv.
lock:
	uv pip compile --universal --python-version 3.11 --no-header --no-annotate --quiet payload/requirements.in \
	  | grep -vE '^(nvidia-|cuda-|triton|setuptools)' > payload/requirements.lock
	$(BIN)/python tools/generate_docs.py

clean:
	rm -rf .venv
