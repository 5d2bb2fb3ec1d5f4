# On a new machine, `make demo` or `make test` is enough: both build .venv from PyPI.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The newest torch that is published with CPU wheels for every supported Python.
TORCH ?= torch==2.13.0

.PHONY: demo test coverage lint types check format test-kills test-faults test-sanitizers test-soak fuzz test-interop test-trainers test-browser test-notebook test-train test-slurm test-ray test-ceph test-azure test-engines bench clean

demo: $(VENV)/base
	$(BIN)/tokenmill demo

test: $(VENV)/all .interop/moto/ready
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not interop"

# Lines and branches that `make test` runs, modules below 90% first.
coverage: $(VENV)/all .interop/moto/ready
	mkdir -p build/coverage
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not interop" --cov=tokenmill --cov-branch --cov-report=
	$(BIN)/python -m coverage report --sort=cover --skip-covered --show-missing

lint: $(VENV)/all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/all
	$(BIN)/mypy

check: lint types test

format: $(VENV)/all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# 200 runs killed at random instants, resumed, and compared byte by byte; prints a tally.
test-kills: $(VENV)/all
	$(BIN)/python tests/faults/kills.py --runs 200

# Every fault that a run or a loader must survive (tests/faults/README.md), under 30 minutes on 2 cores; prints a table.
test-faults: $(VENV)/all
	$(BIN)/python tests/faults/run.py

# The C code with AddressSanitizer and UndefinedBehaviorSanitizer compiled into it, in build/sanitizers; prints a tally.
test-sanitizers: $(VENV)/all
	$(BIN)/python tests/faults/sanitizers.py

# Hours of load: 50 GB of text with random kills, 10^9 rows with resumes; resumes after a stop, and keeps its figures.
test-soak: $(VENV)/all
	$(BIN)/python tests/faults/soak.py --text-gb 50 --rows 1e9

# Fuzz the readers of lines, streams, indices, manifests and states, and the C code, with atheris, each for MINUTES.
MINUTES ?= 10
fuzz: $(VENV)/all
	$(BIN)/python tests/faults/fuzz.py --minutes $(MINUTES)

# Stores and exports read by the other projects' own readers, and files that these write; an environment for each.
test-interop: $(VENV)/all
	$(BIN)/python tests/interop/run.py
	$(BIN)/python tests/interop/other_writers.py
	$(BIN)/python tests/interop/chat.py
	$(BIN)/python tests/interop/trl_templates.py
	$(BIN)/python tests/interop/preferences.py
	$(BIN)/python tests/interop/engines.py

# Recipes inside the trainers themselves, an environment for each: trained, killed, resumed; prints a table. TRAINERS
# names some of them.
test-trainers: $(VENV)/all
	$(BIN)/python tests/interop/run_trainers.py $(TRAINERS)

# The page of `report` in headless Chromium (Debian: chromium chromium-driver), driven by selenium.
test-browser: $(VENV)/all
	test -d .interop/selenium || $(BIN)/python -m pip install --quiet --target .interop/selenium "selenium>=4.20"
	PYTHONPATH="$(CURDIR)/.interop/selenium" REQUIRE_BROWSER=1 $(BIN)/python -m pytest tests/interop/test_browser.py

# Progress and results in the kernel of a real notebook, which starts in another directory.
test-notebook: $(VENV)/all
	test -d .interop/notebook || $(BIN)/python -m pip install --quiet --target .interop/notebook nbclient nbformat ipykernel
	PYTHONPATH="$(CURDIR)/.interop/notebook" $(BIN)/python -m pytest tests/interop/test_notebook.py

# The slow tests of the reference trainers: compiled models, their self-checks, waiting for data.
test-train: $(VENV)/all
	$(BIN)/python -m pytest -m slow tests/examples/test_train_torch.py tests/examples/test_train_jax.py

# Object stores against a real Ceph gateway on loopback (Debian: ceph-mon ceph-osd radosgw ceph-common); prints a tally.
test-ceph: $(VENV)/all
	$(BIN)/python tests/cluster/ceph.py

# A shorter version of these tests against Azurite, Microsoft's emulator (npm); prints a tally.
test-azure: $(VENV)/all
	$(BIN)/python tests/cluster/azure.py

# Job arrays on a real Slurm on loopback (Debian: slurm-wlm munge), a rank requeued and one killed; prints a tally.
test-slurm: $(VENV)/all
	$(BIN)/python tests/cluster/slurm.py

# A real Ray cluster of three nodes on loopback: workers, nodes and drivers killed, bytes compared; prints a tally.
test-ray: $(VENV)/all
	$(BIN)/python -m tests.cluster.ray_faults --rounds 3

# 100,000 fuzzed strings per tokenizer, and whole corpora where they are, against the reference libraries.
TOKENIZERS ?= $(wildcard ../shared/data/tokenizers/*)
test-engines: $(VENV)/all
	$(BIN)/python scripts/fuzz_engines.py $(TOKENIZERS) --structures build/structures
	$(BIN)/python scripts/fuzz_engines.py $(TOKENIZERS) --structures build/structures --parse-special

# CORPUS and TOKENIZER are NAME=FOLDER: JSON lines, and a tokenizer.json.
bench: $(VENV)/all
	$(BIN)/python benchmarks/tokenize.py --corpus "$(CORPUS)" --tokenizer "$(TOKENIZER)" --save tokenize
	$(BIN)/python benchmarks/memory.py --save

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

# The S3 server of the tests; if it cannot be installed, tests of object stores are skipped with a message.
.interop/moto/ready: | $(VENV)/all
	-$(BIN)/python -c "from tests.support.object_server import moto_server; moto_server()"

$(VENV)/base: pyproject.toml setup.py $(wildcard src/tokenmill/*/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/all: $(VENV)/base
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[all,dev]"
	touch $@
