# Everything works from a clean clone: each target makes .venv itself. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs
DYNAMO_VENV := .venv-dynamo
TOOLS_VENV := .venv-tools
BIN := $(VENV)/bin
# Elsewhere than where it was built, `pip install torch` may take a CUDA build of several gigabytes. To get the
# CPU build, name PyTorch's CPU wheel index:  make up TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(MAKEFILE_LIST))

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

up: $(VENV)/.local  ## start the demo cluster and an endpoint on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@$(BIN)/isthmus up $(ARGS)

down: $(VENV)/.local  ## stop the cluster that `make up` started in this folder
	@$(BIN)/isthmus down $(ARGS)

status: $(VENV)/.local  ## what the running cluster is doing
	@$(BIN)/isthmus status $(ARGS)

chat: $(VENV)/.local  ## talk to the running cluster
	@$(BIN)/isthmus chat $(ARGS)

# Two at a time; whole clusters (tests/e2e) share one of the two, so that only one of them runs.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test: $(VENV)/.dev  ## every test (ARGS="-k name")
	@$(PYTEST) -n 2 --dist loadgroup $(ARGS)

test-fast: $(VENV)/.dev  ## the tests that take under ten seconds each, without whole clusters
	@$(PYTEST) -m "not slow" $(ARGS)

lint: $(VENV)/.dev  ## style, layers, drift of generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@PYTHONPATH=$(SOURCES) $(BIN)/lint-imports --no-cache
	@$(BIN)/python tools/check_tidy.py
	@$(BIN)/python tools/gen_schemas.py --check
	@$(BIN)/python tools/gen_config_docs.py --check
	@$(BIN)/python tools/gen_cli_docs.py --check
	@$(BIN)/python tools/gen_dashboards.py --check

types: $(VENV)/.dev  ## mypy --strict
	@$(BIN)/mypy

format: $(VENV)/.dev  ## put the sources into their one form
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

schemas: $(VENV)/.dev  ## write what is generated from the code anew: schemas/, configuration, command, metrics, dashboards
	@$(BIN)/python tools/gen_schemas.py
	@$(BIN)/python tools/gen_config_docs.py
	@$(BIN)/python tools/gen_cli_docs.py
	@$(BIN)/python tools/gen_dashboards.py

docs: $(DOCS_VENV)/.made  ## the documentation as a site, site/index.html; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet $(ARGS)

sim: $(VENV)/.dev  ## the real services in virtual time, with seeded faults (ARGS="--seeds 1000")
	@$(PYTEST) tests/sim $(ARGS)

sim-seeds: $(VENV)/.dev  ## 10,000 seeds of the same over two processes, what fails made small (ARGS="--seeds 200 --first 50")
	@OMP_NUM_THREADS=1 $(BIN)/python -m isthmus_cli sim --seeds 10000 $(ARGS)

sim-mutants: $(VENV)/.dev  ## bugs put back on purpose, and the first seed that finds each (ARGS="--seeds 100 --only lost-cancel")
	@PYTHONPATH=$(SOURCES):tests/support OMP_NUM_THREADS=1 $(BIN)/python -m isthmus_testing.sim_mutants $(ARGS)

sim-agreement: $(VENV)/.dev  ## the real services in virtual time beside the planner's simulator, and paced beside unpaced (ARGS="--clients 1 8")
	@PYTHONPATH=$(SOURCES) OMP_NUM_THREADS=1 $(BIN)/python -m isthmus_sim.agreement $(ARGS)

relay-seeds: $(VENV)/.dev  ## 2,000 fault schedules over 16 simulated relays (ARGS="--seeds 20 --flows 1000 --slots 512 --at-once")
	@PYTHONPATH=$(SOURCES):tests/support $(BIN)/python -m isthmus_testing.relay_storm $(ARGS)

kv-forms: $(VENV)/.dev  ## 10,000 random crossings between KV layouts, shardings and FP8 flavours (ARGS="--cases 500 --first 7")
	@PYTHONPATH=$(SOURCES):tests/support OMP_NUM_THREADS=1 $(BIN)/python -m isthmus_testing.kv_crossings $(ARGS)

bench-kv: $(VENV)/.dev  ## KV conversions beside torch's own copies, on one core (docs/benchmarks.md)
	@PYTHONPATH=$(SOURCES) OMP_NUM_THREADS=1 $(BIN)/python bench/kv_forms.py $(ARGS)

relay-fuzz: $(VENV)/.dev  ## hostile messages and headers for ten minutes (ARGS="--seconds 60 --seed 1")
	@PYTHONPATH=$(SOURCES):tests/support $(BIN)/python -m isthmus_testing.relay_fuzz $(ARGS)

fuzz: $(VENV)/.dev  ## hostile bytes for every decoder, ten minutes, and as long for the relay's (ARGS="--seconds 60 --seed 1")
	@PYTHONPATH=$(SOURCES):tests/support $(BIN)/python -m isthmus_testing.door_fuzz $(ARGS)
	@PYTHONPATH=$(SOURCES):tests/support $(BIN)/python -m isthmus_testing.relay_fuzz $(ARGS)

schemathesis: $(VENV)/.dev  ## the endpoint against its own OpenAPI description, ten minutes (ARGS="--seconds 60 --seed 1")
	@$(PIP) 'schemathesis>=4.32,<5'
	@PYTHONPATH=$(SOURCES):tests/support $(BIN)/python -m isthmus_testing.schemathesis_run $(ARGS)

roles: $(VENV)/.dev  ## a load that turns, with roles that follow and roles that stay (docs/roles.md; ARGS="--scale 8")
	@$(PIP) --editable '.[bench]'
	@PYTHONPATH=$(SOURCES) OMP_NUM_THREADS=1 $(BIN)/python bench/roles.py $(ARGS)

bench: $(VENV)/.dev  ## time to first token and the relay's rate on this machine (docs/benchmarks.md)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/bench_main_job.py $(ARGS)

bench-sim: $(VENV)/.dev  ## the planner's simulator: requests per second, start, memory, on one core (docs/benchmarks.md)
	@PYTHONPATH=$(SOURCES) OMP_NUM_THREADS=1 $(BIN)/python bench/simulator.py $(ARGS)

bench-route: $(VENV)/.dev  ## how long a route takes, by size of the cluster, and routes per second over NATS (docs/routing.md)
	@PYTHONPATH=$(SOURCES) OMP_NUM_THREADS=1 $(BIN)/python bench/route $(ARGS)

bench-relay: $(VENV)/.dev  ## the relay's rate, latency, CPU, pacing and bursts beside raw sockets, with a plot
	@$(PIP) --editable '.[bench]'
	@$(BIN)/isthmus bench relay --out bench-relay.json --plot bench-relay.svg $(ARGS)

bench-peers: $(VENV)/.dev  ## the relay beside raw sockets, NIXL and Mooncake (installs those two; half a gigabyte)
	@$(PIP) --no-deps nixl-cu12 mooncake-transfer-engine-non-cuda
	@$(BIN)/python bench/compare_transfer.py --json bench-peers.json $(ARGS)

bench-door: $(VENV)/.dev $(DYNAMO_VENV)/.made  ## the front door beside NVIDIA Dynamo's, about four minutes (installs Dynamo, 700 MB)
	@PYTHONPATH=$(SOURCES):bench $(BIN)/python bench/front_door.py --dynamo $(DYNAMO_VENV) --json bench-door.json $(ARGS)

soak-streams: $(VENV)/.dev  ## 2,000 streams at once for ten minutes: memory, starvation (ARGS="--minutes 1 --streams 500")
	@PYTHONPATH=$(SOURCES):bench $(BIN)/python bench/soak_streams.py --json soak-streams.json $(ARGS)

soak-kills: $(VENV)/.dev  ## 200 kills and pauses of processes in 20 minutes under load (ARGS="--faults 20 --minutes 2 --seed 1")
	@PYTHONPATH=$(SOURCES):tests/support OMP_NUM_THREADS=1 $(BIN)/python bench/soak_kills.py --json soak-kills.json $(ARGS)

ui-test: $(VENV)/.dev  ## the operator's page in headless Chromium (Debian: apt install chromium chromium-driver)
	@$(PIP) 'selenium>=4.30'
	@$(PYTEST) tests/ui $(ARGS)

lock: $(TOOLS_VENV)/.made  ## write requirements/: each image's packages with the hashes of their files (ARGS=--upgrade, ARGS=--check)
	@PATH=$(TOOLS_VENV)/bin:$$PATH $(TOOLS_VENV)/bin/python tools/lock.py $(ARGS)

audit: $(TOOLS_VENV)/.made  ## known vulnerabilities of what requirements/ names (asks PyPI; fails where it cannot say)
	@for lock in $(LOCKS); do echo $$lock; $(TOOLS_VENV)/bin/pip-audit --strict --disable-pip --require-hashes \
	  --progress-spinner off -r requirements/$$lock.txt $(ARGS) || exit 1; done

sbom: $(TOOLS_VENV)/.made  ## a bill of materials of each image, CycloneDX, sbom/*.cdx.json
	@mkdir -p sbom
	@for lock in $(LOCKS); do $(TOOLS_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-file sbom/$$lock.cdx.json requirements/$$lock.txt || exit 1; done

compose-up:  ## the demo in containers (docs/containers.md)
	@cd compose && docker compose up --build $(ARGS)

compose-test: $(VENV)/.dev  ## build the containers, kill and cut off each of them under load (needs Docker; about ten minutes)
	@ISTHMUS_TEST_COMPOSE=1 $(PYTEST) tests/compose -v $(ARGS)

rdma-test: $(VENV)/.rdma  ## lanes over RDMA verbs, in a guest kernel with Soft-RoCE (docs/rdma.md)
	@OMP_NUM_THREADS=1 GUEST_TIMEOUT_S=1200 tools/rdma/guest.sh $(BIN)/python -m pytest -p no:cacheprovider \
	  tests/rdma tests/contract/transports/test_delivery.py -k verbs $(ARGS)

rdma-kernel:  ## build that guest kernel from Debian's source into your cache (about 15 CPU minutes, once)
	@tools/rdma/kernel.sh

clean:  ## remove what the targets made
	rm -rf $(VENV) $(DOCS_VENV) $(DYNAMO_VENV) $(TOOLS_VENV) sbom $(VLLM_VENV) site .isthmus .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build

comma := ,
empty :=
space := $(empty) $(empty)
SOURCES := $(subst $(space),:,shared kvrelay services/worker services/ingress services/planner services/prefill-worker services/decode-worker services/sim services/cli)

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Isthmus needs Python 3.11 or newer; '$(PYTHON)' is older or missing. Try: make PYTHON=python3.12 ..."; exit 1; }

$(VENV)/.made: | check-python
	@$(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV); on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.local: $(VENV)/.made pyproject.toml
	@echo "installing Isthmus into $(VENV) (once; torch's CPU build is the large part)"
	@$(PIP) --editable '.[local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	@echo "installing Isthmus and its test tools into $(VENV) (once; torch's CPU build is the large part)"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.local

# Dynamo has its own pins. One of its packages (aisimulate) is only a pointer to NVIDIA's index, hence --no-deps.
DYNAMO_PIP := $(DYNAMO_VENV)/bin/python -m pip install --disable-pip-version-check --quiet
$(DYNAMO_VENV)/.made: bench/door/requirements-dynamo.txt | check-python
	@$(PYTHON) -m venv $(DYNAMO_VENV)
	@$(DYNAMO_PIP) --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	@$(DYNAMO_PIP) -r bench/door/requirements-dynamo.txt
	@touch $@

# Not of .venv, so that what is locked and audited is not what locks and audits.
LOCKS = $(notdir $(basename $(wildcard requirements/*.txt)))
$(TOOLS_VENV)/.made: | check-python
	@$(PYTHON) -m venv $(TOOLS_VENV)
	@$(TOOLS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet 'uv>=0.13,<1' 'pip-audit>=2.10,<3' 'cyclonedx-bom>=7.5,<8'
	@touch $@

# Not of .venv: the site needs nothing of Isthmus, and this takes seconds.
$(DOCS_VENV)/.made: pyproject.toml | check-python
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet 'mkdocs-material>=9.6,<10'
	@touch $@

# vLLM wants its own pins, so it has a virtual environment of its own, with Isthmus taken from the source folders.
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= python3.11
PYTEST_VLLM := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=WARNING $(VLLM_VENV)/bin/python -m pytest
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
$(VLLM_VENV)/.made: tools/vllm/requirements-lean.txt tools/vllm/requirements-engine.txt
	@echo "installing vLLM's CPU build into $(VLLM_VENV) (once; two gigabytes, a few minutes)"
	@$(VLLM_PYTHON) -m venv $(VLLM_VENV) || { echo "vLLM's CPU build is pinned for Python 3.11. Try: make VLLM_PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(VLLM_PIP) -r tools/vllm/requirements-lean.txt
	@$(VLLM_PIP) --no-deps -r tools/vllm/requirements-engine.txt
	@touch $@

test-vllm: $(VLLM_VENV)/.made  ## everything on real vLLM, which is installed first (ARGS="-k llama")
	@$(PYTEST_VLLM) tests/vllm $(ARGS)
	@$(PYTEST_VLLM) -p no:warnings tests/contract/engines/test_tokens.py tests/contract/engines/test_endings.py tests/contract/engines/test_resuming.py --engines vllm $(ARGS)

test-vllm-part: $(VLLM_VENV)/.made  ## of that, what takes two minutes: the engine contract and the connector in vLLM's scheduler
	@$(PYTEST_VLLM) tests/vllm/test_connector_scheduler.py tests/vllm/test_metric_names.py $(ARGS)
	@$(PYTEST_VLLM) -p no:warnings tests/contract/engines/test_tokens.py tests/contract/engines/test_endings.py tests/contract/engines/test_resuming.py --engines vllm $(ARGS)

bench-vllm: $(VLLM_VENV)/.made  ## what arriving KV costs the sequences that a vLLM engine decodes; time in the connector's hooks
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python bench/vllm_connector.py --json bench-vllm.json $(ARGS)

vllm-up: $(VLLM_VENV)/.made  ## a cluster in which vLLM prefills and the reference engine decodes (examples/vllm-cluster.yaml)
	@$(VLLM_VENV)/bin/python tools/make_tiny_checkpoints.py .isthmus/models qwen3
	@PYTHONPATH=$(SOURCES) HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m isthmus_cli up examples/vllm-cluster.yaml $(ARGS)

gpu-check: $(VLLM_VENV)/.made  ## prefill on a GPU, decode on the CPU, in one machine (says what it would check where there is none)
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python tools/gpu_check.py $(ARGS)

vllm-venv: $(VLLM_VENV)/.made  ## install vLLM's CPU build, without what it does not need, into .venv-vllm

$(VENV)/.rdma: $(VENV)/.dev
	@$(PIP) --editable '.[rdma]'
	@touch $@

goodput: $(VENV)/.dev  ## the planner's goodput beside simple rules on simulated clusters (docs/routing-goodput.md)
	@PYTHONPATH=$(SOURCES) OMP_NUM_THREADS=1 $(BIN)/python -m isthmus_planner.evaluate --report docs/routing-goodput.md $(ARGS)
