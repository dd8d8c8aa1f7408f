# demo   sets up and runs the main job on real input     test   sets up, checks and runs the tests that are not slow
# test-all  these, and the slow ones: whole demos, servers, compilers, simulations
# check  format, lint, types, import rules, links, prose, sizes  bench  ratios against peers, measured in one run
# site   docs/ as a site in build/site                    docs   the pages that are generated from the code
#                                                        hunt   random examples, and many, for every property test
# chart  what is generated from the Helm chart           clean  removes what these made
# chart-package  the chart as an archive in build/chart, signed with the OpenPGP key KEY of the file KEYRING
# conformance  installs every compiler that pip has, holds all to one suite, and writes what came out into docs/reference/conformance.md
# node-tests   ONNX's own 1,900 backend node tests through the CPU engine, and built by TensorRT-RTX; the same page
# proof  plants every fault over networks, seeds and precisions, counts false alarms and the canary's errors; the tables of the docs
# zoo    graphs out of packages, and seeded modules, built, proven, beside other quantizers; docs/zoo.md
# site-check  the registry's site in Chromium, with axe-core from npm
# simulate  a million interleavings of the registry's writers and readers; goes on where it was stopped
# gpu-check  the GPU kit on this machine's GPU, with PYTHON and what it has installed
# cluster-test  the chart on a real Kubernetes control plane on loopback, of the programs in the folder KUBE_ASSETS
# azurite  installs Azure's emulator into build/azurite (npm), and runs what is skipped without it
# demo-cluster  Prefect, a worker and a Ray of five generations on loopback: an event builds a model
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Compiled modules are kept in build/bytecode. With PYTHONDONTWRITEBYTECODE, each of a demo's twenty
# processes compiles all that it imports.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode
unexport PYTHONDONTWRITEBYTECODE
# What pip does is shown on one line; all that it prints is in the log.
# Python compiles a module when it is first imported, and most of what is installed never is.
PIP = $(BIN)/pip install --progress-bar off --disable-pip-version-check --no-compile --constraint constraints.txt
LOGGED = $(BIN)/python examples/logged.py $(VENV)/pip.log
INSTALL = $(LOGGED) $(PIP) --editable
# One pip unpacks on one core: half of all on each of two, and the last one adds what these leave out, or fails as they did.
TWO_PIPS = $(LOGGED) sh -c "$(PIP) --no-deps torch ray & $(PIP) boto3 matplotlib onnx onnxruntime prefect; wait"
SOURCES := builders validation pipeline enginesmith tests benchmarks examples charts docs
# Whose prose is checked, and by which of Harper's rules: its own, and those of docs/prose.
PROSE := README.md AGENTS.md CONTRIBUTING.md docs/index.md docs/getting-started docs/guides docs/concepts
PROSE_RULES := LongSentences,RepeatedWords,Dangling,OurWords
SPHINX = $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs auto

.PHONY: demo demo-cluster test test-rest test-all check format bench proof docs site chart hunt simulate zoo conformance node-tests gpu-check cluster-test azurite site-check clean chart-package \
  check-style check-types check-imports check-links check-prose check-size
.DEFAULT_GOAL := test

# $(1): the extras of the package.
define set_up
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Enginesmith needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@$(TWO_PIPS) || true
	@$(INSTALL) ./enginesmith --editable '.[$(1)]'
endef

# All that runs, without what tests it.
$(VENV)/.runs: pyproject.toml enginesmith/pyproject.toml constraints.txt
	$(call set_up,full)
	@touch $@

$(VENV)/.installed: pyproject.toml enginesmith/pyproject.toml constraints.txt
	$(call set_up,test)
	@touch $(VENV)/.runs $@

demo: $(VENV)/.runs
	@$(BIN)/python examples/demo.py

demo-cluster: $(VENV)/.runs
	$(BIN)/python examples/demo_cluster.py

test: check
	$(BIN)/python -m pytest -n auto

test-rest: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto -m slow

test-all: test test-rest

# Two at a time; where make can, what each prints in one piece.
check: $(VENV)/.installed
	@$(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),-O) check-types check-imports check-links check-prose check-size check-style

check-style:
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

check-types:
	$(BIN)/mypy -n 2

check-imports:
	$(BIN)/lint-imports

check-links:
	$(SPHINX) --tag links --conf-dir docs --builder dummy . build/links

check-size:
	$(BIN)/python -m docs.size

check-prose:
	@mkdir -p build && rm -f build/prose.weirpack
	@cd docs/prose && $(abspath $(BIN))/python -m zipfile -c $(CURDIR)/build/prose.weirpack *
	@for rule in docs/prose/*.weir; do $(BIN)/harper test $$rule >&2 || exit 1; done
	@RUST_BACKTRACE=0 $(BIN)/harper lint --quiet --no-color --format compact --user-dict-path /dev/null --weirpacks build/prose.weirpack --only $(PROSE_RULES) $(PROSE)

format: $(VENV)/.installed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/python -m docs.wrap

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.figures

proof: $(VENV)/.installed
	$(BIN)/python -m tests.faults --write
	$(BIN)/python -m benchmarks.bench_proof --write
	$(BIN)/python -m benchmarks.bench_canary --write

zoo: $(VENV)/.installed
	$(BIN)/python -m benchmarks.zoo; $(BIN)/python -m benchmarks.zoo --write

simulate: $(VENV)/.installed
	$(BIN)/python -m tests.simulation

hunt: $(VENV)/.installed
	ENGINESMITH_HOSTILE_EXAMPLES=$${ENGINESMITH_HOSTILE_EXAMPLES:-1000} $(BIN)/python -m pytest -n auto \
	  -m '' --hypothesis-profile hunt $$(grep -rl --include='test_*.py' hypothesis tests)

conformance: $(VENV)/.installed
	@$(INSTALL) ./enginesmith --editable '.[test,tvm,iree,xla]'
	rm -rf build/conformance
	ENGINESMITH_CONFORMANCE=all ENGINESMITH_CONFORMANCE_FOUND=build/conformance $(BIN)/python -m pytest -n 2 -m '' --dist worksteal --timeout 3600 tests/conformance \
	  tests/builders/backends/test_iree.py tests/builders/backends/test_tvm.py tests/builders/backends/test_xla.py
	$(BIN)/python -m tests.conformance.page --found build/conformance

node-tests: $(VENV)/.installed
	$(BIN)/python -m tests.conformance.node_tests

docs: $(VENV)/.installed
	$(BIN)/enginesmith debug schema > docs/reference/spec.schema.json
	$(BIN)/enginesmith debug schema --ensemble > docs/reference/ensemble.schema.json
	$(BIN)/python -m docs.commands > docs/reference/commands.md

site: $(VENV)/.installed
	$(SPHINX) docs build/site
	@echo build/site/index.html

chart: $(VENV)/.installed
	$(BIN)/python -m charts.regenerate

chart-package: $(VENV)/.installed
	$(BIN)/python -m charts.package build/chart $(if $(KEY),--key '$(KEY)' --keyring '$(KEYRING)')

cluster-test: $(VENV)/.installed
	$(BIN)/python -m pytest -p no:xdist -m '' --log-cli-level=INFO --log-cli-format='%(asctime)s %(message)s' --log-cli-date-format=%H:%M:%S tests/cluster

azurite: $(VENV)/.installed
	npm install --no-audit --no-fund --prefix build/azurite azurite@3
	$(BIN)/python -m pytest -n 2 -m '' tests/enginesmith -k az

site-check: $(VENV)/.installed
	npm install --silent --no-fund --no-audit --prefix build/site-check axe-core@4.14.1
	$(BIN)/python -m pytest -n 0 -m '' tests/pipeline/site/test_browser.py

gpu-check:
	$(PYTHON) -m validation.gpu --out gpu-results.json

clean:
	rm -rf $(VENV) build dist registry
