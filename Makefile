# The commands of this project: `make help` lists them. The first use installs what is needed, all inside this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .clients
NODE := tests/clients/node/node_modules
VLLM := .vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check
UV := $(BIN)/uv
UV_VERSION := 0.13.9
# uv installs from constraints.txt and checks its hashes. Where uv can't be had, pip installs the same versions without
# hashes, because pip can't check hashes when it installs a folder.
install = if [ -x $(UV) ]; then $(UV) pip install -q --python $(BIN)/python -c constraints.txt -b constraints.txt $(1); \
  else sed -e '/^ *--hash/d' -e 's/ *\\$$//' constraints.txt > $(VENV)/versions.txt && $(PIP) install -q -c $(VENV)/versions.txt $(1); fi
PYTEST := $(BIN)/python -m pytest
# Tests without the running service run by file, each process with one thread of torch. The service has the machine alone.
WORKERS ?= 2
PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile
# pytest's status for a folder without tests of one half.
MAY_BE_EMPTY := || [ $$? = 5 ]

.PHONY: help setup serve observe engine-vllm test test-affected test-fast test-slow test-long test-all test-vllm faults lint docs lock bench-ledger bench-engine bench-engine-peers bench-gateway bench-gateway-peer bench-quality bench-limits pictures bench-console bench-paint bench-pressure bench-overload bench-routing attack chaos drill clean bench-autoscaling healthy fuzz gpu-check
