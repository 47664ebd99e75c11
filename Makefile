# Every target does its own set-up: Python 3.11, make and git are all a machine needs.

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
BIN := .venv/bin
READY := .venv/.ready
# The oldest tensordict we promise to work with, for the tests that run beside the pinned one.
OLDER_TENSORDICT := 0.14.3

# Tests wait for processes and sockets a sixth of their time: one more worker than processors takes four fifths of the
# time that as many as processors take.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
# One thread a process: tests and type checks already run side by side.
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept, whatever the shell says: without them each of the hundreds of processes that the tests
# start compiles the package, which takes a second.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-browser test-newest test-oldest test-peer test-pythons test-ray coverage lint pictures release docs bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

# Set-up -------------------------------------------------------------------------------------------

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later with venv was found; name one with PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq -c constraints.txt setuptools
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target .venv/older 'tensordict==$(OLDER_TENSORDICT)'
# Type checkers do not look behind an editable install. A package of stubs they do see, and Python never imports it.
	cd .venv/lib/python3*/site-packages && mkdir -p rbtool-stubs && \
		ln -sf $(addprefix ../../../../../,__init__.pyi py.typed cli converters core) rbtool-stubs
	@touch $@

# Ray is large and slow to start: an extra, with tests of its own.
RAY_READY := .venv/.ray-ready
RAY_TESTS := tests/core/buffers/test_ray_buffer.py tests/core/preprocess/test_ray.py tests/core/verbs/test_convert_ray.py

$(RAY_READY): $(READY)
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[ray]'
	@touch $@

# TorchRL asks for an older tensordict and changes how processes start, and d3rlpy asks for an older gymnasium: other
# libraries lie beside, for the tests that ask them.
PEER_READY := .venv/.peer-ready
PEERS := 'torchrl==0.14.1' 'hoptorch==0.1.4' 'tensordict==$(OLDER_TENSORDICT)' 'stable-baselines3==2.9.2' \
	'd3rlpy==2.8.1' 'dataclasses-json==0.6.7' 'gym==0.26.2' 'gym-notices==0.1.0' 'joblib==1.6.0' 'marshmallow==4.4.0' \
	'narwhals==2.29.0' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'structlog==26.1.0' 'threadpoolctl==3.8.0' \
	'typing-inspect==0.9.0'

$(PEER_READY): $(READY) Makefile
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target .venv/peer $(PEERS)
	@touch $@

# What people run ----------------------------------------------------------------------------------

demo: $(READY) ## see rbtool at work on data made on the spot
	$(BIN)/rbtool demo

test: $(READY) ## run the tests but the slow ones, and try the wheel in an empty environment
	@echo "make test: about 10 minutes on 2 cores"
	tests/tools/run_tests.sh $(BIN)/python -n $(WORKERS) --dist worksteal -m "not slow and not peer"

test-ray: $(RAY_READY) ## run the tests that need Ray, but the slow ones
	$(BIN)/python -m pytest -m "not slow" $(RAY_TESTS)

test-peer: $(PEER_READY) ## compare with other libraries, which this installs beside the environment
	PYTHONPATH=.venv/peer $(BIN)/python -c "import torchrl.data, stable_baselines3, d3rlpy" # without, tests are skipped
	PYTHONPATH=.venv/peer $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m peer

# Each has an environment of its own. CONSTRAINTS=torch==2.13.0 takes that version, PYTHON=python3.12 that interpreter.
test-oldest: ## run the tests but the slow ones with the oldest versions of dependencies that are allowed
test-newest: ## run them with the newest
test-oldest test-newest:
	rm -rf build/$@
	tests/tools/environment.sh $(@:test-%=%) $(PYTHON) build/$@ $(CONSTRAINTS)
	build/$@/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not peer"

test-pythons: $(READY) ## try what needs no torch with the other versions of Python that are here
	tests/tools/try_pythons.sh $(BIN)/python 3.12 3.13

# Ray leaves threads behind, after which no process forks by default: its tests run in a process of their own.
test-all: $(RAY_READY) ## run every test, with other random examples each time, and try the wheel
	tests/tools/run_tests.sh $(BIN)/python -n $(WORKERS) --dist worksteal --hypothesis-profile=random \
		--timeout 7200 $(addprefix --ignore=,$(RAY_TESTS))
	$(BIN)/python -m pytest --hypothesis-profile=random --timeout 7200 $(RAY_TESTS)

# The tracer of coverage fails now and then where a thread starts: "Cannot install a trace function".
coverage: $(READY) ## run the tests but the slow ones, and list the lines that none of them runs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not peer" --cov --cov-report=term-missing \
		-W "ignore:Exception ignored in thread started by:pytest.PytestUnraisableExceptionWarning"

AXE := build/npm/node_modules/axe-core/axe.min.js

$(AXE):
	npm install --silent --no-fund --no-audit --prefix build/npm axe-core@4.14.1

test-browser: $(READY) $(AXE) ## test the page of a report in a Chromium that is installed
	$(BIN)/python -m pytest tests/core/report/test_browser.py

# mypy sees the package as installed: in place, its name would be that of the clone's folder.
lint: $(READY) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/check_sizes.py
	@rm -rf build/lint
	@tests/tools/build_wheel.sh $(BIN)/python build/lint/wheel
	@$(BIN)/python -m pip install -qq --no-deps --target build/lint/installed build/lint/wheel/*.whl
	cd build/lint/installed && ../../../$(BIN)/mypy --strict --config-file ../../../pyproject.toml \
		--python-executable ../../../$(BIN)/python --cache-dir ../../../.mypy_cache -p rbtool

release: $(READY) ## build the wheel and the source distribution, check and tag them; DRY=--dry-run tags nothing
	.ci/release $(DRY)

pictures: $(READY) ## draw the picture of the README from real runs
	$(BIN)/python docs/tools/pictures.py

docs: $(READY) ## build the documentation in build/docs; warnings are errors
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@! grep -rlE '<(script|link|img)[^>]+(src|href)="https?://' build/docs --include='*.html' \
		|| { echo "error: these pages make requests to another host" >&2; exit 1; }
	@echo "build/docs/index.html"

bench: $(READY) ## measure what is promised of speed, next to TorchRL where it is installed
	$(BIN)/python benchmarks/table.py --json build/bench.json

clean: ## remove what the targets made, but for .venv
	rm -rf build dist *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
