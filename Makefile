# make quickstart   sets up, then trains a small Llama with EDiT on this machine's CPU (no GPU, no download of data)
# make test         sets up, then runs all tests
# make lint         ruff, as CI does
# make clean        removes what the above made here (not runs/)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: quickstart test lint format docs clean

quickstart: $(READY)
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m llmtrain launch recipes/quickstart.yaml $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m llmtrain.plan.reference

$(READY): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11; choose another: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt jsonschema pytest pytest-timeout ruff -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(READY)

clean:
	rm -rf $(VENV) data *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
