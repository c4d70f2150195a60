# SPDX-License-Identifier: Apache-2.0
# Everything a contributor runs. A fresh machine needs Python >= 3.11, a C compiler and make; the rest is installed
# into .venv from the lock files or built into build/.
#
#   make demo    the main job, end to end, on a simulated node (no GPU needed)
#   make test    unit, property and integration tests, the C tests and the fuzz targets (bounded) among them
#   make lint    ruff, mypy --strict, import-linter, plain English, C style, clang's warnings as errors
#   make san     the C tests under ASan/UBSan and TSan
#   make soak    the long forms of the chaos, fault, property, model and fuzz tests (libFuzzer where clang has it), of make e2e, and make san
#   make clients programs of others, such as nvidia-smi and numba, on the simulated driver and under the shim
#   make bench   the benchmarks; figures with ratios
#   make e2e     the suite on real Kubernetes components
#   make e2e-build  what make e2e would build first: those components and the images
#   make helm    Helm and kustomize (needs Go), with which make test also compares the chart with the kustomizations
#   make sbom    what the images hold, in CycloneDX's form, into build/sbom
#   make release everything that a release publishes, into build/release; make release-check builds it again offline and compares
#   make lock    resolve the lock files again after editing pyproject.toml

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
JOBS   := $(shell nproc)

# Where it is set, every process would compile all modules again: half of an agent's start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test clients soak lint san e2e peers-dra peers-autoscaler e2e-build helm bench lock sbom release release-check build native clean

demo: native $(VENV)/.runtime
	$(BIN)/aliquot demo $(ARGS)

# Workers by how much the tests wait: unit tests for a fourth of their time, integration tests for half. Those that watch how GPU time is
# shared only wait, for seconds: many of them run at once, and nothing else beside them, because a busy core would change what they see.
FEW  := $(shell expr $(JOBS) \* 3 / 2)
MANY := $(shell expr $(JOBS) \* 2)
MOST := $(shell expr $(JOBS) \* 4)
WATCHES_TIME := $(patsubst %,tests/integration/test_shim_%.py,compute in_flight priority sync turns)

test: native $(VENV)/.dev
ifeq ($(ARGS),)
	$(BIN)/python -m pytest -n $(FEW) tests/unit tests/property
	$(BIN)/python -m pytest -n $(MANY) --dist worksteal $(WATCHES_TIME:%=--ignore=%) tests/integration
	$(BIN)/python -m pytest -n $(MOST) --dist worksteal $(WATCHES_TIME)
else
	$(BIN)/python -m pytest $(ARGS)
endif

# Installs each client into build/clients. Without ARGS it writes the page of results; ARGS="--light" leaves large packages out.
clients: native $(VENV)/.dev
	$(BIN)/python -m pytest tests/clients $(or $(ARGS),--clients-page docs/measurements/clients.md)

soak: native $(VENV)/.dev
	$(BIN)/python -m pytest -m soak --timeout=7200 $(ARGS)
	$(BIN)/python -m pytest -m "hypothesis and not soak" --hypothesis-profile=soak --timeout=7200 $(ARGS)
	$(BIN)/python -m pytest tests/e2e -m soak -n 0 --tb=short $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/development/plain_english.py
	$(MAKE) --no-print-directory -C cuda_shim lint CLANG_TIDY=$(abspath $(BIN)/clang-tidy) CLANG_FORMAT=$(abspath $(BIN)/clang-format)

# ThreadSanitizer lets a second pass when a process ends, for threads that still run; the tests end hundreds. The fuzz targets have one
# thread, so they get fewer of their inputs there.
FOR_TSAN := TSAN_OPTIONS=atexit_sleep_ms=50 FUZZ_RUNS=300

san: $(VENV)/.dev
	$(MAKE) -j$(JOBS) -C cuda_shim check SAN=asan
	$(FOR_TSAN) $(MAKE) -j$(JOBS) -C cuda_shim check SAN=tsan

# Root and a Go toolchain; what else is missing is installed, or named and the suite skipped. KUBECONFIG=… runs it on any cluster.
e2e: native $(VENV)/.dev
	$(BIN)/python -m pytest tests/e2e -m e2e -n auto --dist loadfile --no-loadscope-reorder --tb=short --durations=30 --durations-min=5 $(ARGS)

# The examples of other DRA drivers, from checkouts: make peers-dra EXAMPLES="/src/dra-example-driver /src/dra-driver-nvidia-gpu"
peers-dra: native $(VENV)/.dev
	ALIQUOT_PEER_EXAMPLES="$(EXAMPLES)" $(BIN)/python -m pytest tests/e2e/peers_dra.py -m e2e --tb=short $(ARGS)

# The real cluster autoscaler, built from a checkout: make peers-autoscaler AUTOSCALER=/src/cluster-autoscaler-kwok
peers-autoscaler: native $(VENV)/.dev
	ALIQUOT_AUTOSCALER="$(AUTOSCALER)" $(BIN)/python -m pytest tests/e2e/peers_autoscaler.py -m e2e -n 0 --tb=short $(ARGS)

e2e-build: native $(VENV)/.dev
	$(BIN)/python -m tests.e2e.cluster build

helm: $(VENV)/.dev
	$(BIN)/python -m tests.e2e.cluster helm

bench: native $(VENV)/.dev
	$(BIN)/python -m tests.bench $(ARGS)

# C side, without output when there is nothing to do.
native:
	@$(MAKE) --no-print-directory -s -j$(JOBS) -C cuda_shim

build: native $(VENV)/.runtime

# Two stamps for one environment: the demo needs the runtime packages only, tests and lint need the rest.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Aliquot needs Python >= 3.11, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements-dev.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@ $(VENV)/.runtime

# From the lock files alone; those of `make release` have the base image's packages too.
SBOM ?= build/sbom
SBOM_FLAGS := --pyproject pyproject.toml --mc-type application --output-reproducible

sbom: $(VENV)/.dev
	@mkdir -p $(SBOM)
	$(BIN)/cyclonedx-py requirements $(SBOM_FLAGS) --output-file $(SBOM)/aliquot-agent.cdx.json requirements.lock
	$(BIN)/cyclonedx-py requirements $(SBOM_FLAGS) --output-file $(SBOM)/aliquot-scheduler.cdx.json requirements-scheduler.lock

# Root, for the images; what this machine cannot build is left out and named. RELEASE_URL: where the files will be (docs/development/release.md).
release: $(VENV)/.dev
	$(BIN)/python -m release $(ARGS)

# The second build has no network, starts from the fetched inputs alone, and must write the same bytes.
release-check: $(VENV)/.dev
	unshare --net sh -ec 'ip link set lo up; exec $(BIN)/python -m release --offline --out build/release-again --work build/release-work-again $(ARGS)'
	cmp build/release/SHA256SUMS build/release-again/SHA256SUMS
	cd build/release && sha256sum --check --quiet SHA256SUMS
	rm -rf build/release-again build/release-work-again

lock: $(VENV)/.dev
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra scheduler pyproject.toml -o requirements-scheduler.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml -o requirements-dev.lock
	echo 'setuptools>=77' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate -c requirements-dev.lock - -o requirements-build.lock

clean:
	rm -rf build $(VENV)
