# make quickstart   sets up, then trains a small Llama with EDiT on this machine's CPU (no GPU, no download of data)
# make test         sets up, then runs the fast tests, which guard correctness: 10 to 15 minutes on two cores
# make test-deep    full matrices, real schedulers, true timeouts, emulated GPUs: about an hour
# make test-gpu     the tests that need a GPU, which the above skip
# make gpu-kit      collects what a GPU machine without a network lacks (benchmarks/GPU_DAY.md)
# make mutants      breaks the code on purpose, one line at a time, and sees that tests fail; ARGS="--area sync" for a part
# make coverage     branches of llmtrain/ that make test reaches, by package; coverage-deep after it adds the deep tests
# make chaos        100 SIGKILLs at random moments of real runs, and what became of them; about an hour
# make peers        benchmarks/peers.py: our methods next to torch's and torchft's, in an environment with torchft (.venv-peers)
# make study        the next runs of the study of all methods (benchmarks/study/PROTOCOL.md); ARGS="--hours 2"
# make lint         ruff and hadolint, as CI does
# make clean        removes what the above made here, but not runs/ and data/, which have hours of work and your own text

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TOOLS  := $(VENV)/.ready-tools
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check

PEERS  := .venv-peers
PEERS_PIP := $(PEERS)/bin/pip install --quiet --disable-pip-version-check
TORCHFT := torchft==0.2.0

TWO_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test test-deep test-gpu gpu-kit chaos mutants coverage coverage-deep peers study lint format docs clean

quickstart: $(READY)
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m llmtrain launch recipes/quickstart.yaml $(ARGS)

test: $(TOOLS)
	$(BIN)/python -m pytest $(TWO_WORKERS) $(ARGS)

test-deep: $(TOOLS)
	$(BIN)/python -m pytest $(TWO_WORKERS) -m deep $(ARGS)

test-gpu: $(TOOLS)
	$(BIN)/python -m pytest --gpu $(ARGS)

gpu-kit: $(READY)
	$(BIN)/python benchmarks/gpu_pack.py $(ARGS)

chaos: $(TOOLS)
	$(BIN)/python -m pytest tests/chaos -m chaos -s $(ARGS)

mutants: $(TOOLS)
	$(BIN)/python -m tests.mutation $(ARGS)

coverage: $(TOOLS)
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(TWO_WORKERS) --cpu-limit-test=60 --cpu-limit-all=6000 $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	mv .coverage .coverage_fast
	rm -f .coverage_both
	$(BIN)/python -m tests.coverage_table

coverage-deep: $(TOOLS)
	$(BIN)/python -m coverage run -m tests.deep --all --seconds=7200 $(ARGS)
	$(BIN)/python -m coverage combine --quiet --keep --data-file=.coverage_both .coverage_fast .coverage.*
	rm -f .coverage.*
	$(BIN)/python -m tests.coverage_table

peers: $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/peers.py $(ARGS)

study: $(READY)
	$(BIN)/python benchmarks/study/study_runs.py $(ARGS)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m docs.reference

$(READY): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11; choose another: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch -c constraints.txt
	$(PIP) -r requirements.txt -c constraints.txt
	$(PIP) --no-deps --editable .
	@touch $(READY)

# what tests and developers need beside it; lm-eval among it, for llmtrain eval
$(TOOLS): $(READY)
	$(PIP) --editable '.[dev,eval,wandb]' -c constraints.txt
	@touch $(TOOLS)

# all that we need ourselves, in the same versions, and torchft
$(PEERS)/.ready: Makefile requirements.txt constraints.txt
	@test -x $(PEERS)/bin/pip || $(PYTHON) -m venv --clear $(PEERS)
	$(PEERS_PIP) torch -c constraints.txt
	$(PEERS_PIP) -r requirements.txt $(TORCHFT) -c constraints.txt
	$(PEERS_PIP) --no-deps --editable .
	@touch $(PEERS)/.ready

clean:
	rm -rf $(VENV) $(PEERS) *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(PEERS)/*' -prune -exec rm -rf {} +
