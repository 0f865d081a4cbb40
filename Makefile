# `make test` and `make demo` do the whole set-up in .venv first, on a machine that has only Python 3.11.

VENV := .venv
BIN := $(VENV)/bin
# Touched after an installation, which is repeated when the requirements change.
STAMP := $(VENV)/.installed
CODE := $(wildcard *.py keras_monitored tests benchmarks notebooks)

export TF_CPP_MIN_LOG_LEVEL := 2

.PHONY: test demo bench lint format clean

test: lint
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest --doctest-modules keras_monitored

demo: $(STAMP)
	$(BIN)/python -m keras_monitored demo

bench: $(STAMP)
	$(BIN)/python -m benchmarks

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy keras_monitored

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The interpreter is tried, not only looked for: a version manager's shim can exist and still not run.
$(STAMP): setup.cfg setup.py
	@test -x $(BIN)/python || { \
	  for python in $(PYTHON) python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "$$python -m venv $(VENV)"; $$python -m venv $(VENV); exit; \
	    fi; \
	  done; \
	  echo "Python 3.11 or newer is needed and was not found; name it with: make PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --editable '.[test,demo]'
	@touch $@
