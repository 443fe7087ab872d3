# Everything starts from here: `make sweep RECIPE=tiny` and `make test` set up what they need by themselves.
RECIPE ?= tiny
ARGS ?=
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed
# The environment of `make cuda`, with the CUDA build of torch that PyPI has: === takes no build of another index.
CUDA := .venv-cuda
CUDA_TORCH ?= torch===2.13.0
# Number of processes that run tests: one more than there are cores, because tests also wait for processes that they start.
WORKERS ?= $(shell expr $$(nproc) + 1)
# Where trials and trainings run: EXECUTOR=slurm or local. For the targets that run any.
LAUNCH := $(if $(EXECUTOR),launch.executor=$(EXECUTOR))
CLUSTER_PROGRAM := slurm/dev-cluster/cluster.py $(if $(FOLDER),--folder $(FOLDER))

.PHONY: help setup sweep tune plan train table reference report paper papers alternatives profile test test-quick promises soak parity release zoo cuda bench lint clean
.PHONY: cluster-up cluster-down cluster-status

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 23
	@echo
	@echo '  RECIPE=name     a recipe of recipes/, or a path to one (now: $(RECIPE))'
	@echo '  ARGS="..."      further arguments: overrides such as training.global_batch=32, or options such as --json'
	@echo '  EXECUTOR=slurm  where trials run: slurm, local, or auto (the default), which takes SLURM if it answers'
	@echo '  NODES=4 CLUSTER=mixed FOLDER=/path  the SLURM cluster: number of nodes, description, and folder for its files'

setup: $(INSTALLED)  ## create .venv and install everything; again only if pyproject.toml or constraints.txt change

sweep: $(INSTALLED)  ## run every plan of RECIPE's search space and print the table
	@$(BIN)/auto3d sweep $(RECIPE) $(LAUNCH) $(ARGS)

tune: $(INSTALLED)  ## search RECIPE's space, run the best plans, and print predicted beside measured times
	@$(BIN)/auto3d tune $(RECIPE) $(LAUNCH) $(ARGS)

plan: $(INSTALLED)  ## rank RECIPE's candidates by predicted time and explain the best; trains nothing
	@$(BIN)/auto3d plan $(RECIPE) $(ARGS)

train: $(INSTALLED)  ## train RECIPE under its own plan, or under ARGS="--plan plan.json"
	@$(BIN)/auto3d train $(RECIPE) $(LAUNCH) $(ARGS)

table: $(INSTALLED)  ## print the table of RECIPE's last sweep again
	@$(BIN)/auto3d table $(RECIPE) $(ARGS)

reference: $(INSTALLED)  ## run RECIPE's sweep and write its table to results/RECIPE, to be committed
	@$(BIN)/auto3d sweep $(RECIPE) $(LAUNCH) $(ARGS)
	@$(BIN)/auto3d table $(RECIPE) $(LAUNCH) $(ARGS) --output results/$(RECIPE)

report: $(INSTALLED)  ## write one HTML page about RECIPE's last sweep or tune, or about its search
	@$(BIN)/auto3d report $(RECIPE) $(ARGS)

paper: $(INSTALLED)  ## make a table or figure of a paper again: ITEM=merak-fig10a; auto3d paper --list has all
	@$(BIN)/auto3d paper $(ITEM) $(ARGS)

papers: $(INSTALLED)  ## make all of them, and results/papers/README.md with every claim beside ours (half an hour)
	@$(BIN)/auto3d paper --all $(ARGS)

alternatives: $(INSTALLED)  ## try other assumptions about the papers' clusters on all claims that make papers has made
	@$(BIN)/auto3d paper --alternatives amp --alternatives chimera --alternatives merak --alternatives rannc

profile: $(INSTALLED)  ## measure this machine with RECIPE's model, for predictions, and print the measurements
	@$(BIN)/auto3d profile $(RECIPE) $(ARGS)

test: $(INSTALLED)  ## run all tests but the long ones, on WORKERS processes; ARGS="tests/capture -x" selects some
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(ARGS)

test-quick: $(INSTALLED)  ## run only the tests that need no processes and no SLURM, for the edit loop
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m 'not soak and not parity and not processes' $(ARGS)

promises: $(INSTALLED)  ## try what README and its pages promise: commands, recipes, papers, the wheel, counts (5 minutes)
	$(BIN)/python -m pytest --numprocesses $(shell nproc) -m promises $(ARGS)

soak: $(INSTALLED)  ## run the long tests and further cases (an hour) and, if a SLURM cluster is up, inject 34 faults (half an hour)
	$(BIN)/python -m pytest --numprocesses $(shell nproc) -m soak $(ARGS)
	$(BIN)/python -m tests.slurm.faults

parity: $(INSTALLED)  ## compare every schedule on every model with one process; writes results/parity.md (most of an hour)
	$(BIN)/python -m pytest -m parity $(ARGS)
	$(BIN)/python -m tests.distributed.parity_report

release: $(INSTALLED)  ## run all parts of a release that are out of date, for hours, or PART="parity zoo"; writes results/README.md
	$(BIN)/python -m tests.release $(PART)

zoo: $(INSTALLED)  ## compare 400 other models with plain PyTorch; writes results/zoo.md (20 minutes); ARGS="--only llama" selects
	$(BIN)/python -m tests.zoo $(if $(ARGS),$(ARGS),--write)

cuda:  ## train plans on simulated GPUs under torch's CUDA build, plant faults, measure memory (7 GB; 4 minutes), or PART=grid or scale
	@$(MAKE) --silent $(CUDA)/.installed || echo "skipped: torch's CUDA build cannot be installed here"
	@test ! -f $(CUDA)/.installed || $(CUDA)/bin/python -m tests.cuda.simulated $(PART) $(ARGS)

bench: $(INSTALLED)  ## run all benchmarks in tests/benchmarks/ (minutes)
	@for file in $(filter-out %/__init__.py,$(wildcard tests/benchmarks/*.py)); do \
		name=$$(basename $$file .py); echo "== $$name"; $(BIN)/python -m tests.benchmarks.$$name || exit 1; \
	done

lint: $(INSTALLED)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

cluster-up: $(INSTALLED)  ## start or repair a SLURM cluster on this machine (as root); see docs/slurm.md
	@$(BIN)/python $(CLUSTER_PROGRAM) up $(if $(NODES),--nodes $(NODES)) $(if $(CLUSTER),--description $(CLUSTER))

cluster-down:  ## stop that cluster and remove everything that belongs to it
	@$(PYTHON) $(CLUSTER_PROGRAM) down

cluster-status:  ## print the state of that cluster
	@$(PYTHON) $(CLUSTER_PROGRAM) status

clean:  ## remove .venv, .venv-cuda and build files; runs/ and tables/ stay
	rm -rf .venv $(CUDA) build *.egg-info

# The pinned torch is installed first: otherwise pip takes a build with gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo 'make: no virtual environment: on Debian, apt-get install python3-venv'; exit 1; }
	@echo 'installing into .venv (about a minute; once)'
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[development]'
	@touch $@

$(CUDA)/.installed: pyproject.toml constraints.txt
	@test -x $(CUDA)/bin/pip || $(PYTHON) -m venv $(CUDA)
	@echo 'installing into $(CUDA) (7 GB; minutes; once)'
	@$(CUDA)/bin/pip install --quiet --disable-pip-version-check '$(CUDA_TORCH)'
	@$(CUDA)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[development]'
	@touch $@
