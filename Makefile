# One environment in .venv; every target sets it up first if it is missing or out of date.
# The demo has flexcp alone in it; the other targets add what develops and tests it.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PACKAGE := $(VENV)/.package
STAMP   := $(VENV)/.installed
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Some CPUs advertise bfloat16 matrix units that trap; this keeps oneDNN to what always works.
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_FP16

# Where running flexcp keeps what it compiles: inside of this folder.
RUN := XDG_CACHE_HOME=$(CURDIR)/$(VENV)/cache $(BIN)/python

.PHONY: demo test test-latest check format bench site figures clean install

install: $(STAMP)

$(PACKAGE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flexcp needs Python 3.11 or newer")'
	@echo "Installing flexcp and what it imports (torch, numpy, typer, rich) into $(VENV)/; nothing outside of it changes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(STAMP): $(PACKAGE)
	$(PIP) --quiet --editable '.[dev]'
	touch $@

demo: $(PACKAGE)
	@echo "In $(VENV)/, by name and version:"
	@$(BIN)/python -m pip list --disable-pip-version-check --format=freeze | paste -sd ' ' - | fold -s -w 100
	$(RUN) examples/demo.py

# Tests wait for ranks and compilers: three workers keep two cores busy.
test: $(STAMP)
	$(RUN) -m pytest -n 3 --dist worksteal

# The same suite on the newest torch that pip finds, in an environment of its own.
LATEST := .venv-latest

$(LATEST)/.installed: pyproject.toml
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --upgrade torch
	$(LATEST)/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	touch $@

test-latest: $(LATEST)/.installed
	$(LATEST)/bin/python -c 'import torch; print("torch", torch.__version__)'
	XDG_CACHE_HOME=$(CURDIR)/$(LATEST)/cache $(LATEST)/bin/python -m pytest -n 3 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs benchmarks examples README.md DESIGN.md CONTRIBUTING.md CHANGELOG.md

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(RUN) benchmarks/block_masks.py --out out/benchmarks
	$(RUN) benchmarks/attention.py --out out/benchmarks
	$(RUN) benchmarks/planning.py --out out/benchmarks
	$(RUN) benchmarks/distributed.py --out out/benchmarks
	$(RUN) benchmarks/models.py --out out/benchmarks

$(VENV)/.docs: $(STAMP)
	$(PIP) --quiet --editable '.[docs]'
	touch $@

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open out/site/index.html"

figures: $(STAMP)
	$(BIN)/python scripts/figures.py --out docs/images

clean:
	rm -rf $(VENV) $(LATEST) out build dist
