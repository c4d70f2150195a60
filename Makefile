# Everything a contributor runs. A fresh machine needs Python >= 3.11, a C compiler and make; the rest is installed
# into .venv from the lock files or built into build/.
#
#   make demo    the main job, end to end, on a simulated node (no GPU needed)
#   make test    unit, property and integration tests, the C tests and the fuzz targets (bounded) among them
#   make lint    ruff, mypy --strict, import-linter, clang's warnings as errors
#   make san     the C tests under ASan/UBSan and TSan
#   make soak    the long forms of the chaos, fault, model-checking and fuzz tests (libFuzzer where clang has it), and make san
#   make bench   the benchmarks; figures with ratios
#   make e2e     the suite on real Kubernetes components
#   make e2e-build  what make e2e would build first: those components and the images
#   make helm    Helm and kustomize (needs Go), with which make test also compares the chart with the kustomizations
#   make sbom    what the images hold, in CycloneDX's form, into build/sbom
#   make lock    resolve the lock files again after editing pyproject.toml

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: demo test soak lint san e2e e2e-build helm bench lock sbom build native clean

demo: native $(VENV)/.runtime
	$(BIN)/aliquot demo $(ARGS)

# Integration tests mostly wait for processes; too many at once would wait for cores, and some of them watch how GPU time is shared.
test: native $(VENV)/.dev
ifeq ($(ARGS),)
	$(BIN)/python -m pytest -n auto tests/unit tests/property
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile tests/integration
else
	$(BIN)/python -m pytest $(ARGS)
endif

soak: native $(VENV)/.dev
	$(BIN)/python -m pytest -m soak --timeout=7200 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory -C cuda_shim lint CLANG_TIDY=$(abspath $(BIN)/clang-tidy)

san: $(VENV)/.dev
	$(MAKE) -C cuda_shim check SAN=asan
	$(MAKE) -C cuda_shim check SAN=tsan

# Root and a Go toolchain; what else is missing is installed, or named and the suite skipped. KUBECONFIG=… runs it on any cluster.
e2e: native $(VENV)/.dev
	$(BIN)/python -m pytest tests/e2e -m e2e --tb=short $(ARGS)

e2e-build: native $(VENV)/.dev
	$(BIN)/python -m tests.e2e.cluster build

helm: $(VENV)/.dev
	$(BIN)/python -m tests.e2e.cluster helm

bench: native $(VENV)/.dev
	$(BIN)/python -m tests.bench $(ARGS)

# C side, without output when there is nothing to do.
native:
	@$(MAKE) --no-print-directory -s -C cuda_shim

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

# From the lock files alone; `docker buildx build --sbom=true` adds the base image's packages.
SBOM ?= build/sbom
SBOM_FLAGS := --pyproject pyproject.toml --mc-type application --output-reproducible

sbom: $(VENV)/.dev
	@mkdir -p $(SBOM)
	$(BIN)/cyclonedx-py requirements $(SBOM_FLAGS) --output-file $(SBOM)/aliquot-agent.cdx.json requirements.lock
	$(BIN)/cyclonedx-py requirements $(SBOM_FLAGS) --output-file $(SBOM)/aliquot-scheduler.cdx.json requirements-scheduler.lock

lock: $(VENV)/.dev
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra scheduler pyproject.toml -o requirements-scheduler.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml -o requirements-dev.lock

clean:
	rm -rf build $(VENV)
