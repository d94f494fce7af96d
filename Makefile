# `make` prints this help. Each target does all the set-up it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
PACKAGES := vm_lab/packages.txt tools/packages.txt
EXTRAS := host,control,etcd,rebalancer,lab,native,dev

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(MAKEFILE_LIST))

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup ## three real VMs, the control plane, a job that runs on them
	$(SUDO) $(BIN)/python -m vm_lab.demo

demo-delivery: setup ## three real VMs, and a pipeline that delivers a good version and stops two bad ones
	$(SUDO) $(BIN)/python -m vm_lab.delivery_demo
demo-release: setup ## three real VMs: a release of Twine itself by a pipeline, and a broken one that is rolled back (root)
	$(SUDO) $(BIN)/python -m vm_lab.release_demo
demo-elastic: setup ## three real VMs: a job follows its requests, a machine is lent and comes back (root)
	$(SUDO) $(BIN)/python -m vm_lab.elastic_demo
demo-ha: setup ## five real VMs and etcd: the leader of each role is killed in turn while clients send requests (root)
	$(SUDO) $(BIN)/python -m vm_lab.demo_ha

dev: setup ## a control plane and ten agents in memory, no VM; AGENTS=30 for more
	$(BIN)/twine-lab dev --agents $(or $(AGENTS),10)

test: setup ## every check and suite, the booted VMs too; not those of test-lab-long
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" tools/run-suites all

check: setup ## formatting, lint, names, commits, types, import contracts
	tools/run-suites check

unit: setup ## unit tests of what changed; ROOM=allocator for a room
	@tests=$$($(BIN)/python tools/unit-tests $(ROOM)); \
	if [ -z "$$tests" ]; then echo "no unit test imports what changed"; else $(BIN)/pytest -q $$tests; fi

one: setup ## one test: T=tests/unit/agent/tasks/test_exec.py::test_name
	$(BIN)/pytest -q $(T)

behaviours: setup ## which tests show which behaviour, into build/behaviours.md
	$(BIN)/python tools/behaviours

test-unit: setup ## all unit and property tests, and three planted bugs
	tools/run-suites unit

test-simulation: setup ## the simulated region: seeds in which no rule may be broken
	tools/run-suites simulation

seeds: setup ## 2,000 new seeds of the simulated region; SEEDS=5001..7000 for others
	$(BIN)/twine-lab region run everything --seeds $(or $(SEEDS),1001..3000) --jobs 2

role-seeds: setup ## 500 seeds with roles in replicas and shards as processes; SEEDS=501..2500
	$(BIN)/twine-lab region run roles --seeds $(or $(SEEDS),1..500) --jobs 2

composed: setup ## 1,000 seeds that combine every kind of event with every other; SEEDS=1001..2000
	$(BIN)/twine-lab region run composed --seeds $(or $(SEEDS),1..1000) --jobs 2

test-root: setup ## loop-mounted btrfs and real sockets (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" tools/run-suites root

test-lab: setup ## booted VMs, through public interfaces only (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" tools/run-suites lab

test-lab-long: setup ## the tests that wait for minutes: network cuts, a stopped control plane, clock jumps (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" tools/run-suites lab_long

power-cuts: setup ## 50 power cuts of a guest at random moments; a second run continues; CUTS=10 SEED=2 for others (root)
	$(SUDO) $(BIN)/twine-lab power-cuts --name cuts --cuts $(or $(CUTS),50) --seed $(or $(SEED),1)

soak-sessions: setup ## 5,000 sessions of each long-lived kind: none leaves an object in memory
	TWINE_SESSIONS=$(or $(SESSIONS),5000) $(BIN)/pytest -q tests/integration/attack/test_session_leaks.py

soak: setup ## 10,000 starts and stops with faults in between; CYCLES=2000 SEED=2 for others (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" TWINE_SOAK=$(or $(CYCLES),10000) TWINE_SOAK_SEED=$(or $(SEED),1) \
		$(BIN)/pytest -q tests/integration/agent/test_soak.py

fuzz: setup ## new random input for every parser of foreign bytes; EXAMPLES=20000 for more (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" TWINE_RANDOM=1 TWINE_FUZZ=$(or $(EXAMPLES),5000) \
		$(BIN)/pytest -q tests/integration/fuzz

store-faults: setup ## faults of etcd and its control planes; leaders are paused for PAUSE=60 s (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" TWINE_PAUSE_S=$(or $(PAUSE),60) TWINE_HISTORIES=5 \
		$(BIN)/pytest -q tests/integration/etcd

million-shards: setup ## 1,000,000 machines in 20 shards: one free pool, and Figure 13; needs 4 GiB
	$(BIN)/python -m tests.bench.shared_pool
shard-figures: setup ## Figures 11 and 12: computing against machines of a shard, into docs/images
	$(BIN)/python -m tests.bench.figure_11 --out docs/images
compat: setup ## runs images like well-known public ones on a guest, into docs/compatibility.md; IMAGES="nginx redis" for some (root)
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.compat.run $(IMAGES)

package: setup ## the agent as a Debian package, into dist/ (root)
	$(SUDO) $(BIN)/twine-lab package --into dist

bench: setup ## every file of tests/bench, into tests/bench/RESULTS.md (root)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS),bench]'
	$(SUDO) env PATH="$(CURDIR)/$(BIN):$$PATH" tools/run-suites bench

pictures: setup ## make the pictures of docs/web.md again, with Debian's Chromium
	$(BIN)/python -m tests.integration.web.pictures docs/images

mutants: setup ## planted bugs and 200 random mutants, one at a time: do tests fail? SEED=2 COUNT=50
	$(BIN)/python tools/mutants
	$(BIN)/python tools/mutants --seed $(or $(SEED),1) --count $(or $(COUNT),200)

proto: setup ## generate the messages of etcd's interface again, with the oldest protobuf that is supported
	$(BIN)/python -m venv $(VENV)/proto && $(VENV)/proto/bin/pip install -q 'grpcio-tools==1.74.0'
	cd control_plane/store && ../../$(VENV)/proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. etcd.proto

fmt: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(VENV)/.installed ## Debian packages and the virtual environment

$(VENV)/.packages: $(PACKAGES) tools/install-packages
	$(SUDO) tools/install-packages $(PACKAGES)
	mkdir -p $(VENV)
	touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.packages
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

clean: ## remove the virtual environment (the lab: twine-lab down)
	rm -rf $(VENV) build *.egg-info
