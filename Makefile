# The commands of this project: `make help` lists them. The first use installs what is needed, all inside this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .clients
PROGRAMS := .programs
NODE := tests/clients/node/node_modules
AGENTS := tests/clients/programs
VLLM := .vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check
UV := $(BIN)/uv
UV_VERSION := 0.13.9
# uv installs from constraints.txt and checks its hashes. If uv is not available, pip installs the same versions without
# checking hashes, because pip can't check them when it installs a folder.
install = if [ -x $(UV) ]; then $(UV) pip install -q --python $(BIN)/python -c constraints.txt -b constraints.txt $(1); \
  else sed -e '/^ *--hash/d' -e 's/ *\\$$//' constraints.txt > $(VENV)/versions.txt && $(PIP) install -q -c $(VENV)/versions.txt $(1); fi
PYTEST := $(BIN)/python -m pytest
# Tests without the running service run in parallel by file, each process with one torch thread. Service tests use the
# whole machine.
WORKERS ?= 2
PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile
# pytest exits with 5 if a folder has no tests for one of the two commands.
MAY_BE_EMPTY := || [ $$? = 5 ]

.PHONY: help setup serve observe engine-vllm test test-affected test-fast test-slow test-long test-all test-vllm faults lint docs lock bench-ledger bench-engine bench-engine-peers bench-gateway bench-gateway-peer bench-stream bench-quality bench-limits pictures bench-console bench-paint bench-pressure bench-overload bench-routing attack chaos drill clean bench-autoscaling healthy fuzz gpu-check console-assets

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(VENV)/.base ## install what `serve run config.yaml` needs: virtual environment, dependencies, bundled model
	@$(BIN)/python -m serve_app.model.bundled --home "$${SERVE_APP_HOME:-.serve-app}"

# MODEL (a folder, or a name on the hub) replaces the models of config.yaml. GPUS, ENGINE, CONTEXT
# and QUANTIZATION change what the launcher chooses (.venv/bin/python -m serve_app.launch --help).
ONE_MODEL = $(if $(MODEL),--model '$(MODEL)' $(if $(ENGINE),--engine '$(ENGINE)') $(if $(GPUS),--gpus '$(GPUS)') \
  $(if $(CONTEXT),--context '$(CONTEXT)') $(if $(QUANTIZATION),--quantization '$(QUANTIZATION)'))

serve: $(VENV)/.base ## start the service (PORT=8000, SERVE_APP_HOME=.serve-app, TLS=1, MODEL=org/name, GPUS=2); Ctrl-C stops it
	@exec $(BIN)/python -m serve_app.launch $(ONE_MODEL) $(ARGS)

observe: $(VENV)/.base ## run a Prometheus for the running service, with its rules (ARGS='--port 9090 --grafana URL --token-file FILE')
	@exec $(BIN)/python -m serve_app.launch.observe $(ARGS)

engine-vllm: $(VENV)/.base ## install vLLM into .vllm, for backends with the setting engine: vllm; six minutes, 3 GB (ARGS='--device cuda' for GPUs)
	@$(BIN)/python -m serve_app.launch.vllm_environment --folder $(VLLM) $(ARGS)

test: $(VENV)/.test $(NODE)/.installed ## run the everyday tests (ARGS=tests/limiter for one layer; docs/testing.md)
	$(PARALLEL) -m "not slow and not service" $(ARGS) $(MAY_BE_EMPTY)
	$(PYTEST) -m "not slow and service" $(or $(ARGS),tests/service) $(MAY_BE_EMPTY)

test-affected: $(VENV)/.lint ## run the everyday tests that your change can break, without the running service (BASE=origin/main)
	@tests=$$($(BIN)/python -m tests.affected $(BASE)) && if [ -z "$$tests" ]; then echo "your change affects no test"; \
	  else $(PARALLEL) -m "not slow and not service" $(ARGS) $$tests $(MAY_BE_EMPTY); fi

test-fast: $(VENV)/.test $(NODE)/.installed ## run the everyday tests without the running service
	$(PARALLEL) -m "not service and not slow" $(ARGS)

test-slow: $(VENV)/.test $(CLIENTS)/.installed $(NODE)/.installed ## run the slower tests: kill -9, PostgreSQL, a browser, more clients
	$(PARALLEL) -m "slow and not long and not service" $(ARGS) $(MAY_BE_EMPTY)
	$(PYTEST) -m "slow and not long and service" $(or $(ARGS),tests/service) $(MAY_BE_EMPTY)

test-long: $(VENV)/.test $(CLIENTS)/.installed $(PROGRAMS)/.installed $(NODE)/.installed ## run the tests that .ci/run leaves out: all on PostgreSQL, each alert, scaling, fuzzers, agents, 17,000 tokens
	$(PARALLEL) -m "long and not service" $(ARGS) $(MAY_BE_EMPTY)
	$(PYTEST) -m "long and service" $(or $(ARGS),tests/service) $(MAY_BE_EMPTY)

test-all: test test-slow test-long ## run every test, for a release

test-vllm: $(VENV)/.test engine-vllm ## run the tests of the engine's contract and of the SDK on vLLM, 20 minutes
	@$(UV) pip install -q --python $(VLLM)/bin/python -c constraints.txt pytest pytest-asyncio hypothesis
	$(VLLM)/bin/python -m pytest tests/engine_contract tests/launch/test_vllm_arguments.py $(ARGS)
	SERVE_APP_TEST_CONFIG=tests/service/vllm.yaml $(BIN)/python -m pytest -m "not slow" tests/clients/test_openai_*.py
	SERVE_APP_TEST_CONFIG=tests/service/vllm.yaml $(BIN)/python -m pytest tests/service/test_clients.py tests/service/test_vllm.py

faults: $(VENV)/.test ## plant faults in copies of the tree and check that the tests catch them, some minutes (ARGS='--only NAME')
	$(BIN)/python -m tests.faults $(ARGS)

lint: $(VENV)/.lint ## run ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) -s docs

docs: $(VENV)/.lint ## build the documentation as a site in .docs, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: $(VENV)/.base ## update constraints.txt after a change of pyproject.toml (ARGS=--upgrade for newer versions)
	@$(UV) pip compile -q pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" -o constraints.txt $(ARGS)

# Without .venv, as on a bare CUDA machine, use a Python that has torch: make gpu-check PYTHON=python3.
gpu-check: ## check correctness, speed and kill -9 on one GPU, eleven minutes at most, without network (ARGS='--only engine')
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench.gpu_check --json .bench/gpu-check.json $(ARGS)

bench-ledger: $(VENV)/.test ## measure settlements per second, on a new SQLite file or on URL=postgresql+psycopg://…
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  $(BIN)/python -m bench.ledger "$${URL:-sqlite:///$$folder/ledger.db}" $(ARGS)

bench-engine: $(VENV)/.bench ## compare the whole service with other servers, 20 minutes (ARGS=--quick; docs/benchmarks.md)
	@$(BIN)/python -m bench.engine --json .bench/results.json $(ARGS)

bench-engine-peers: $(VENV)/.base ## install the servers that bench-engine compares with, into .bench (ARGS='--only vllm')
	@$(BIN)/python -m bench.engine.setup_peers $(ARGS)

bench-gateway: $(VENV)/.bench ## measure the service around a model that replies immediately, 15 minutes (ARGS=--without for each speed-up; needs wrk)
	@$(BIN)/python -m bench.gateway --json .bench/gateway/results.json $(ARGS)

bench-stream: $(VENV)/.bench ## measure when streamed tokens arrive and the cost of each, eight minutes (ARGS='--only full --loads 64x50')
	@$(BIN)/python -m bench.stream --json .bench/stream.json $(ARGS)

bench-gateway-peer: $(VENV)/.base ## install the LiteLLM proxy that bench-gateway compares with, into .bench
	@$(BIN)/python -m bench.gateway.setup_peer $(ARGS)

bench-quality: $(VENV)/.base ## compare the perplexity of int8 and float32
	@$(BIN)/python -m bench.perplexity $(ARGS)

pictures: $(VENV)/.test ## take the pictures of the console in README.md, one minute (ARGS=--all: every page; needs chromium and chromium-driver)
	@$(BIN)/python -m bench.console.pictures $(if $(ARGS),$(ARGS) --to .bench/pictures,--to docs/console)

bench-console: $(VENV)/.base ## measure how much 50 users of the console slow down chat, six minutes (ARGS='--rounds 2')
	@$(BIN)/python -m bench.console $(ARGS)

bench-paint: $(VENV)/.test ## measure how fast a browser shows the console's pages, and their sizes, six minutes (needs chromium and chromium-driver)
	@$(BIN)/python -m bench.console.paint $(ARGS)

console-assets: $(VENV)/.base ## fetch the style sheet, scripts, icons and typeface of the console from their npm packages (needs npm)
	@$(BIN)/python -m serve_app.console.assets

bench-limits: $(VENV)/.base ## measure the cost of one admission
	$(BIN)/python bench/limits.py

bench-pressure: $(VENV)/.bench ## simulate a day of thousands of accounts under pressure, some minutes (docs/benchmarks.md)
	@$(BIN)/python -m bench.pressure --json .bench/pressure.json $(ARGS)

bench-autoscaling: $(VENV)/.bench ## simulate days under the scaling rule and other policies, ten minutes (docs/benchmarks.md)
	@$(BIN)/python -m bench.autoscaling --json .bench/autoscaling.json $(ARGS)

bench-overload: $(VENV)/.bench ## measure the service with the bundled model at three times its capacity, two minutes; stop other programs first
	@$(BIN)/python -m bench.overload --json .bench/overload.json $(ARGS)

bench-routing: $(VENV)/.bench ## compare routers that divide conversations between two replicas, 20 minutes; stop other programs first
	@$(BIN)/python -m bench.routing --json .bench/routing.json $(ARGS)

fuzz: $(VENV)/.bench ## send 20,000 random requests while another account streams, half an hour (ARGS='--requests 1000')
	@$(BIN)/python -m bench.fuzz $(ARGS)

healthy: $(VENV)/.test $(VENV)/.bench ## send ordinary traffic for ten minutes and fail if an alert fires (ARGS='--minutes 2 --pictures FOLDER'; needs prometheus)
	@$(BIN)/python -m bench.healthy $(ARGS)

attack: $(VENV)/.base ## attack the service with hostile clients while ordinary clients measure, ten minutes (ARGS=--quick: two minutes); stop other programs first
	@$(BIN)/python -m bench.attack --json .bench/attack.json $(ARGS)

chaos: $(VENV)/.test ## kill processes at random under load for five minutes, then check the books (ARGS='--database postgresql')
	@$(BIN)/python -m tests.service.chaos $(ARGS)

drill: $(VENV)/.test ## kill and drain whole nodes of a cluster under load, as root (ARGS='--rounds 1 --kinds head gateway')
	@$(BIN)/python -m tests.service.drill $(ARGS)

clean: ## remove the virtual environment and caches; the state folder stays
	rm -rf $(VENV) $(VLLM) $(CLIENTS) $(PROGRAMS) $(NODE) $(AGENTS)/node_modules .pytest_cache .ruff_cache .mypy_cache .import_linter_cache *.egg-info build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "serve-app: Python 3.11 or newer is needed, $$($(PYTHON) -V 2>&1) is too old or missing: run make with PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "serve-app: the venv module is missing (on Debian: apt install python3-venv)" >&2; exit 1; }

# pip installs torch, in the build that the machine is configured for. This must happen before uv resolves.
$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "serve-app: installing dependencies into $(VENV), once; this takes a minute" >&2
	@$(PIP) install -q uv==$(UV_VERSION) || echo "serve-app: can't install uv: pip installs the dependencies, more slowly" >&2
	@$(PIP) install -q --progress-bar on --no-compile --no-deps "$$(grep -om1 '^torch==[^ ]*' constraints.txt)"
	@$(call install,-e .)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.base
	@$(call install,-e '.[test]')
	@touch $@

# Clients for the tests, in a separate environment: they need other package versions than the service.
$(CLIENTS)/.installed: tests/clients/apart/requirements.txt | $(VENV)/.base
	@echo "serve-app: installing clients into $(CLIENTS), once; this takes a minute" >&2
	@$(BIN)/python -m venv --clear $(CLIENTS)/venv
	@if [ -x $(UV) ]; then $(UV) pip install -q --python $(CLIENTS)/venv/bin/python -r $<; \
	  else $(CLIENTS)/venv/bin/python -m pip --disable-pip-version-check install -q --no-compile -r $<; fi
	@touch $@

# Programs in the form that users install: 2 GB, for the longest tests only. Their lock file has no packages of other
# platforms, which `npm ci` would require.
$(PROGRAMS)/.installed: $(AGENTS)/requirements.txt $(AGENTS)/package.json $(AGENTS)/package-lock.json | $(VENV)/.base
	@echo "serve-app: installing programs into $(PROGRAMS), once; this takes some minutes" >&2
	@$(BIN)/python -m venv --clear $(PROGRAMS)/venv
	@if [ -x $(UV) ]; then $(UV) pip install -q --python $(PROGRAMS)/venv/bin/python -r $<; \
	  else $(PROGRAMS)/venv/bin/python -m pip --disable-pip-version-check install -q --no-compile -r $<; fi
	@if command -v npm >/dev/null; then cd $(AGENTS) && npm install --no-save --no-audit --no-fund --loglevel=error; \
	  else echo "serve-app: npm is not installed, so the tests of coding agents are skipped" >&2; fi
	@touch $@

$(NODE)/.installed: tests/clients/node/package.json tests/clients/node/package-lock.json
	@if command -v npm >/dev/null; then cd tests/clients/node && npm ci --no-audit --no-fund --loglevel=error && touch node_modules/.installed; \
	  else echo "serve-app: npm is not installed, so the tests of the SDK for Node are skipped" >&2; fi

$(VENV)/.bench: pyproject.toml constraints.txt $(VENV)/.base
	@$(call install,-e '.[bench]')
	@touch $@

$(VENV)/.lint: pyproject.toml constraints.txt $(VENV)/.test
	@$(call install,-e '.[lint]')
	@touch $@
