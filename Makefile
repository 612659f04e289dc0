# Needs Python 3.11 or later (with venv) and make; nothing else.
#
#   make setup    .venv with the pinned dependencies, and the models in the cache
#   make serve    setup, then the service on 127.0.0.1:8000 with the sample corpus and one question
#   make test     setup, then the tests (PYTEST_ARGS= runs the slow ones too)
#   make check    ruff, mypy, import-linter; `make fix` mends what can be mended by machine
#   make bench    every benchmark, quick; `make soak` one long run
#
# Another torch, for instance a CUDA build:
#   make setup TORCH_INDEX=<index of that build> [TORCH_SPEC=torch==2.13.0]

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?= -m "not slow"
SERVE_ARGS ?=
CORPUS ?= examples/corpus

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := rag_service deployments retrieval generation tests benchmarks examples k8s/tools

.PHONY: setup serve test fix check check-style check-types check-imports bench soak lock clean

setup: $(VENV)/.dependencies
	@$(BIN)/rag-service models fetch

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one: make setup PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "This Python has no venv module with pip (Debian: the package python3-venv)." >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, so that no other package's wish pulls in another build of it.
$(VENV)/.torch: $(VENV)/.created
	@echo "Installing $(TORCH_SPEC) ..."
	@$(PIP) install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_SPEC)"
	@touch $@

$(VENV)/.dependencies: pyproject.toml constraints.txt $(VENV)/.torch
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >> $(VENV)/constraints.txt
	@echo "Installing the other pinned dependencies (a minute or two) ..."
	@$(PIP) install -qq --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $@

serve: setup
	@$(BIN)/rag-service serve --corpus $(CORPUS) --demo $(SERVE_ARGS)

test: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

fix: $(VENV)/.dependencies
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

check: check-style check-types check-imports

check-style: $(VENV)/.dependencies
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

check-types: $(VENV)/.dependencies
	$(BIN)/mypy

check-imports: $(VENV)/.dependencies
	$(BIN)/lint-imports

bench: setup
	@for script in $$(ls benchmarks/*.py | grep -v soak); do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

soak: setup
	$(BIN)/python benchmarks/soak.py

# Pins what the environment holds now (LOCK_PYTHON names another one's interpreter).
LOCK_PYTHON ?= $(BIN)/python
lock:
	$(LOCK_PYTHON) -m pip --disable-pip-version-check freeze --exclude-editable --exclude rag-service \
		| sed -E 's/^(torch==[0-9.]+).*/\1/' | grep -E '^[A-Za-z0-9._-]+==' > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
