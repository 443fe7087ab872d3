# Everything starts from here: `make sweep RECIPE=tiny` and `make test` set up what they need by themselves.
RECIPE ?= tiny
ARGS ?=
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed
# Processes that run the tests: one more than there are cores, since tests also wait for processes of their own.
WORKERS ?= $(shell expr $$(nproc) + 1)
# Where trials and trainings run, for the targets that run some: EXECUTOR=slurm or local.
LAUNCH := $(if $(EXECUTOR),launch.executor=$(EXECUTOR))
CLUSTER_PROGRAM := slurm/dev-cluster/cluster.py $(if $(FOLDER),--folder $(FOLDER))

.PHONY: help setup sweep tune plan train table profile test test-quick soak parity zoo bench lint clean
.PHONY: cluster-up cluster-down cluster-status

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 19
	@echo
	@echo '  RECIPE=name     a recipe of recipes/, or a path to one (now: $(RECIPE))'
	@echo '  ARGS="..."      more arguments: overrides such as training.global_batch=32, or options such as --json'
	@echo '  EXECUTOR=slurm  where trials run: slurm, local, or auto (the default): on SLURM where it answers'
	@echo '  NODES=4 CLUSTER=mixed FOLDER=/path  of the SLURM cluster: how many nodes, of which description, with its files where'

setup: $(INSTALLED)  ## make .venv and install everything (again only if pyproject.toml or constraints.txt change)

sweep: $(INSTALLED)  ## run every plan of RECIPE's search space and print the table
	@$(BIN)/auto3d sweep $(RECIPE) $(LAUNCH) $(ARGS)

tune: $(INSTALLED)  ## search RECIPE's space, try the best plans, and print predicted beside measured
	@$(BIN)/auto3d tune $(RECIPE) $(LAUNCH) $(ARGS)

plan: $(INSTALLED)  ## print RECIPE's candidates, fastest first by prediction, and why the best is; trains nothing
	@$(BIN)/auto3d plan $(RECIPE) $(ARGS)

train: $(INSTALLED)  ## train RECIPE under its plan, or under ARGS="--plan plan.json"
	@$(BIN)/auto3d train $(RECIPE) $(LAUNCH) $(ARGS)

table: $(INSTALLED)  ## print the table of the trials of RECIPE that are done
	@$(BIN)/auto3d table $(RECIPE) $(ARGS)

profile: $(INSTALLED)  ## measure this machine for RECIPE, for predictions, and print what was measured
	@$(BIN)/auto3d profile $(RECIPE) $(ARGS)

test: $(INSTALLED)  ## run all tests (10 minutes on 2 cores); ARGS="tests/capture -x" for some
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(ARGS)

test-quick: $(INSTALLED)  ## run the tests that start no processes and take no SLURM (2 minutes), while you edit
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m 'not soak and not parity and not processes' $(ARGS)

soak: $(INSTALLED)  ## run the long tests (40 minutes) and, where a SLURM cluster is up, 34 faults (half an hour)
	$(BIN)/python -m pytest -m soak $(ARGS)
	$(BIN)/python -m tests.slurm.faults

parity: $(INSTALLED)  ## every schedule on every model against one process, and results/parity.md (most of an hour)
	$(BIN)/python -m pytest -m parity $(ARGS)
	$(BIN)/python -m tests.distributed.parity_report

zoo: $(INSTALLED)  ## 400 other models against plain PyTorch, and results/zoo.md (20 minutes); ARGS="--only llama" for some
	$(BIN)/python -m tests.zoo $(if $(ARGS),$(ARGS),--write)

bench: $(INSTALLED)  ## run all benchmarks of tests/benchmarks/ (minutes)
	@for file in $(filter-out %/__init__.py,$(wildcard tests/benchmarks/*.py)); do \
		name=$$(basename $$file .py); echo "== $$name"; $(BIN)/python -m tests.benchmarks.$$name || exit 1; \
	done

lint: $(INSTALLED)  ## check the code's style and its types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

cluster-up: $(INSTALLED)  ## start, or mend, a SLURM cluster on this machine (as root): docs/slurm.md
	@$(BIN)/python $(CLUSTER_PROGRAM) up $(if $(NODES),--nodes $(NODES)) $(if $(CLUSTER),--description $(CLUSTER))

cluster-down:  ## end that cluster and remove all that belongs to it
	@$(PYTHON) $(CLUSTER_PROGRAM) down

cluster-status:  ## print what of that cluster runs
	@$(PYTHON) $(CLUSTER_PROGRAM) status

clean:  ## remove the environment; runs/ and results/ stay
	rm -rf .venv build *.egg-info

# The pinned torch comes first: any other way to it takes a build with gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo 'make: no virtual environment: on Debian, apt-get install python3-venv'; exit 1; }
	@echo 'installing into .venv (about a minute; once)'
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[development]'
	@touch $@
