# `make setup`, `make demo`, `make test` and `make quality` each work alone on a fresh machine with Python 3.11+, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One GiB of KV cache is plenty for the bundled model.
export VLLM_CPU_KVCACHE_SPACE ?= 1

.PHONY: setup demo test quality clean

setup:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "error: '$(PYTHON)' not found; install Python 3.11 or newer, or run: make $@ PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed: make $@ PYTHON=python3.11"; exit 1; }
	@$(PYTHON) scripts/setup.py --venv $(VENV)

demo: setup
	@$(BIN)/sjd-pac generate "a red apple on grass" --seed 7 -o apple.png

test: setup
	@$(BIN)/python -m pytest

quality: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
