# make demo        create .venv, install, solve and train the main job
# make test        create .venv, install, run every test but the slow ones, minutes
# make test-long   the same with the slow ones and 25 times the examples: before a release
# make test-oldest the tests with the lowest versions that pyproject.toml allows, in .venv-oldest
# make docs        build the documentation, strict, into out/site
# make fuzz        judge random tiny instances by brute force, read damaged files of all kinds, send
#                  requests made from the OpenAPI page: make fuzz COUNT=100000 TIME=3600 SEED=0
# make mutants     put small faults into the verifier, its tests must notice every one
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-long test-oldest fuzz mutants lint smoke docs clean

demo: $(READY)
	@mkdir -p out
	$(BIN)/python examples/main_job.py --out out
	$(BIN)/optsched arraypipe demo -o out

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-long: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile long

test-oldest: oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint oldest.txt --editable ".[dev]"
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

# the lowest versions that pyproject.toml allows and that run on this Python; torch is pinned
oldest.txt: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet uv
	grep ^torch== constraints.txt | .venv-uv/bin/uv pip compile --quiet --resolution lowest-direct \
	  --only-binary :all: --python $(PYTHON) --extra dev --constraint - pyproject.toml --output-file $@

COUNT ?= 200
TIME ?= 20
SEED ?= 0
fuzz: $(READY)
	$(BIN)/python tests/fuzz.py --count $(COUNT) --seed $(SEED)
	$(BIN)/python tests/fuzz_readers.py --seconds $(TIME) --seed $(SEED)
	$(BIN)/python -m pytest -q -k schemathesis tests/service/test_service_process.py

mutants: $(READY)
	$(BIN)/python tests/mutants.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(BIN)/sphinx-build
	$(BIN)/sphinx-build -W --keep-going --quiet -d out/doctrees docs out/site

# the built wheel in an environment of its own, far from the checkout
smoke: $(READY)
	PYTHON=$(PYTHON) BIN=$(abspath $(BIN)) bash .ci/smoke

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "optsched needs Python >= 3.11: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(BIN)/sphinx-build: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-uv oldest.txt out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
