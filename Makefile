# `make demo` and `make test` do all their set-up, in .venv. They need Linux, Python 3.10 or newer and a C compiler.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint

demo: $(INSTALLED)
	$(VENV)/bin/python -m perf.demo

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest --quiet --numprocesses auto

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@command -v "$${CC:-gcc}" cc clang >/dev/null || { echo "a C compiler is needed to link kernels: install gcc" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing the exact versions of constraints.txt into $(VENV); the first time takes minutes"
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,perf]"
	@touch $@
