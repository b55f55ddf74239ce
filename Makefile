# Everything a contributor runs. Each target makes the virtual environment first when pyproject.toml or constraints.txt
# changed.
#
# Torch is installed first, alone, in a plain environment, and at the version the tests are written for. Where the
# package index would send the CUDA build, ask for the small one:
#     make drill TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
VENV ?= .venv
# Modules are compiled when they are first imported: most of them never are.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile
STAMP = $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-12)

.DEFAULT_GOAL := help
# Most tests start processes of their own and wait for them: three at a time keep four cores busy. (nproc takes
# OMP_NUM_THREADS for the number of cores.)
PYTESTS := $(shell test "$$(env -u OMP_NUM_THREADS nproc)" -ge 4 && echo 3 || echo 2)
# All of them take two hours of processor time; what shows each thing once takes two cores half an hour.
SHOWN := $(if $(filter 2,$(PYTESTS)),-m "not more")

# The tests start a thousand processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Without those that are refused by name, and the one that ends its training early.
CHAOS_SCRIPTS = $(addprefix --script ,$(filter-out %/prefetch.py %/tensor_parallel.py %/early_stop.py,$(wildcard $(CURDIR)/tests/others/adapted/*.py)))

.PHONY: help venv constraints drill test more check gpu frameworks torches matrix flips s3 soak memory soak-hang spares soak-store soak-s3 fuzz-store chaos samples partitions nemesis lost-nodes slurm ray bench bench-plots clean storm sim-night

help:  ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

venv: $(STAMP)  ## make .venv (nothing to do when pyproject.toml and constraints.txt did not change)

$(STAMP):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH_ARGS) '$(TORCH)'
	$(PIP) -c constraints.txt -e '.[dev]'
	rm -f $(VENV)/.installed-*
	touch $@

constraints:  ## pin today's newest versions in constraints.txt; then run the tests
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	.venv-newest/bin/python -m pip install --quiet -e '.[dev]'
	.venv-newest/bin/python scripts/constraints.py >.venv-newest/constraints.txt
	mv .venv-newest/constraints.txt constraints.txt
	rm -rf .venv-newest

drill: venv  ## a real training job, undisturbed and with injected faults, compared bit for bit (under 5 minutes)
	$(VENV)/bin/holdfast drill

test: venv  ## the test suite (a quarter to half an hour on 2 cores, without the repetitions: make more)
	$(VENV)/bin/python -m pytest -n $(PYTESTS) $(SHOWN) --dist loadfile --no-loadscope-reorder

more: venv  ## the repetitions: more places, layouts and moments of faults (half an hour)
	$(VENV)/bin/python -m pytest -n $(PYTESTS) -m more

check: venv  ## lint, format, types, rings
	VENV=$(VENV) scripts/check

gpu: venv  ## on a machine with a GPU: NCCL with one rank, and four ranks that share the device
	HOLDFAST_GPU=1 $(VENV)/bin/python -m pytest tests/gpu

frameworks:  ## tests with Hugging Face, Lightning, Megatron, MindSpore, ...: each in an environment of its own
	PYTHON=$(PYTHON) TORCH_ARGS='$(TORCH_ARGS)' scripts/frameworks

torches:  ## everything for PyTorch on 2.12, 2.13, 2.14 and 2.15, one environment at a time (2 hours; TORCHES="2.15", KEEP=1)
	PYTHON=$(PYTHON) TORCH_ARGS='$(TORCH_ARGS)' scripts/torches $(TORCHES)

matrix: venv  ## every phase x victim x way to die x layout, compared bit for bit (3 minutes; LAYOUT=tp, pp or pp-tp: that one)
	$(VENV)/bin/python -m tests.soak.matrix $(if $(LAYOUT),--layout $(LAYOUT))

flips: venv  ## bits flipped in weights and optimizer state of live ranks, 2 to 6 holders (3 minutes)
	HOLDFAST_FLIPS=1 $(VENV)/bin/python -m pytest tests/drill/test_flips.py tests/nodes/test_nodes.py

soak: venv  ## 50 kills at random moments and some around the vote, compared bit for bit (5 minutes)
	$(VENV)/bin/python -m tests.soak.matrix --soak 50

soak-hang: venv  ## an unsteady job that does not hang, 10 minutes: no rank may be killed
	$(VENV)/bin/python bench/soak_hang.py

chaos: venv  ## 500 random faults of workers, agent, controller, zygote and launcher, three layouts, and as many in scripts of common styles (an hour and a half)
	$(VENV)/bin/python -m tests.soak.chaos --faults 500
	mkdir -p runs
	cd runs && TIMES=60 PYTHONPATH=$(CURDIR) $(abspath $(VENV))/bin/python -m tests.soak.chaos --faults 500 --run-dir . $(CHAOS_SCRIPTS)

samples:  ## kills of random ranks and stops over the samples of the documents, MindSpore and Megatron (hours on 2 cores)
	scripts/frameworks --build mindspore faces
	mkdir -p runs
	cd runs && PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 ../.venv-faces/bin/python -m tests.soak.samples megatron --run-dir .
	cd runs && PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 ../.venv-mindspore/bin/python -m tests.soak.samples mindspore --run-dir .

storm: venv  ## second and third kills inside every phase of a recovery, then a kill every 2 s for 5 minutes (15 minutes)
	$(VENV)/bin/python -m tests.soak.storm

partitions: venv  ## several hosts as network namespaces: cables cut, cut one way, 30 % loss, a witness (a quarter of an hour, root)
	HOLDFAST_PARTITIONS=1 $(VENV)/bin/python -m pytest tests/nodes -s

nemesis: venv  ## three hosts with ranks: cut, slow and torn networks, stopped and killed processes, full and frozen disks (30 minutes, root; MINUTES=5, SEED=2)
	mkdir -p runs
	cd runs && PYTHONPATH=$(CURDIR) $(abspath $(VENV))/bin/python -m tests.soak.nemesis --run-dir . --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1)

lost-nodes: venv  ## seconds from the loss of a node to the next step at full size, a spare waits (3 minutes, root)
	$(VENV)/bin/python -m tests.nodes.lost

slurm: venv  ## a real Slurm of four slurmd here: the queue again, a lost node, scancel (5 minutes, root, slurm-wlm)
	HOLDFAST_SLURM=1 $(VENV)/bin/python -m pytest -o faulthandler_timeout=900 tests/schedulers/test_slurm.py

ray:  ## a real Ray cluster of three and more nodes here: lost nodes, actors, drivers (15 minutes; its own environment)
	PYTHON=$(PYTHON) TORCH_ARGS='$(TORCH_ARGS)' scripts/frameworks ray

memory: venv  ## the memory tier: lost shards, torn and damaged states, lost hosts; each compared bit for bit (3 minutes)
	HOLDFAST_MEMORY=1 $(VENV)/bin/python -m pytest tests/session/test_memory_tier.py tests/nodes/test_memory.py

spares: venv  ## spares in every kind of script, killed, stopped, orphaned (2 minutes)
	HOLDFAST_SPARES=1 $(VENV)/bin/python -m pytest tests/session/test_spares.py

s3: venv  ## all tests with a real S3 server on loopback: races, kills in the middle of uploads, memory (1 minute)
	HOLDFAST_S3=1 $(VENV)/bin/python -m pytest tests/store/test_s3_store.py tests/store/test_s3_job.py

sim-night: venv  ## a million fresh seeds of the simulator, every second one on several hosts (12 core-hours; RUNS=20000 or MINUTES=5: fewer)
	$(VENV)/bin/python -m tests.sim.night $(if $(RUNS),--runs $(RUNS)) $(if $(MINUTES),--minutes $(MINUTES))

soak-store: venv  ## 1000 kills of workers and of their writer processes at random moments of a save (6 minutes)
	$(VENV)/bin/python -m tests.store.soak --kills 1000

soak-s3: venv  ## 200 of them with a server of objects (5 minutes)
	$(VENV)/bin/python -m tests.store.soak --kills 200 --s3

fuzz-store: venv  ## 20,000 changes of each kind to the files of a checkpoint: refused, or without effect (12 minutes)
	MALLOC_ARENA_MAX=1 $(VENV)/bin/python -m tests.hostile.fuzz --examples 20000

bench: venv  ## what it costs and how fast it recovers, beside torchrun (30 minutes); markdown tables
	$(VENV)/bin/python bench/startup.py
	$(VENV)/bin/holdfast run --nproc-per-node 4 bench/breakdown.py
	$(VENV)/bin/python bench/overhead.py
	$(VENV)/bin/python bench/recovery.py
	$(VENV)/bin/python bench/watching.py
	$(VENV)/bin/python bench/hangs.py
	$(VENV)/bin/python bench/store.py
	$(VENV)/bin/python bench/store_load.py
	$(VENV)/bin/python bench/planning.py

bench-plots: venv  ## draw bench/history.csv as bench/history.svg
	$(VENV)/bin/python scripts/bench_plots.py

clean:  ## remove caches and build outputs (never runs/ or .venv)
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +
