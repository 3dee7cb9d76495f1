# Everything runs in .venv, made here from pyproject.toml and constraints.txt.
PYTHON ?= python3
BIN ?= .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint docs clean

# CI has made its environment already and names it: make test BIN=/path/to/bin READY=
READY ?= .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,lint,examples,docs]"
	@touch $@

demo: $(READY)  ## train a small language model on 4 processes of this machine under HSDP 2 x 2
	$(BIN)/python examples/train.py parallelism=hsdp parallelism.dp_replicate=2 parallelism.dp_shard=2

# Half of the suite's time is spent waiting for processes to start or to end, so two tests run at once.
test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(TESTS)

lint: $(READY)  ## style and types, changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation site, in site/; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs site

clean:
	rm -rf .venv outputs multirun dist site docs/reference
