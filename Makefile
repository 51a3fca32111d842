# Every target but test-gpu works as the very first command in a fresh clone: it makes .venv when that is missing or stale.
# BENCH_OUT: where `make bench` leaves its figures. bench/results holds those that were published; git keeps them.
# Needs python3 (3.11 to 3.13, with venv), make and gcc.

PYTHON ?= python3
BIN := .venv/bin
BENCH_OUT ?= bench/out
NATIVE := $(wildcard kernels/csrc/*.[ch] kernels/csrc/*/*.[ch])
# Tests start hundreds of Python processes. Without cached bytecode each one would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Tests marked full repeat what others show for more cases; `make test-all` empties this, runs them too, and gives
# property tests more examples.
SAMPLE := and not full
ifeq ($(SAMPLE),)
export TEST_ALL := 1
endif
# Triton 3.6's interpreter breaks on numpy 2.4.
FLOOR := 'torch==2.11.*' 'triton==3.6.*' 'transformers==5.17.*' 'numpy==2.3.*'
# Packages whose versions depend on FLOOR, so that constraints.txt must not fix them.
FLOOR_BRINGS := torch|triton|transformers|numpy|setuptools|tokenizers|huggingface_hub|hf-xet|safetensors

.PHONY: demo test test-all test-floor test-gpu tests-together tests-ray programs bench lint types clean

demo: .venv/installed
	$(BIN)/python demo/demo.py

# Runs lint, types, tests-together and tests-ray, says how long they will take and how far they are, and sums up what was
# skipped and what failed.
test: programs
	@$(BIN)/python -m tests.run

test-all: programs
	@$(BIN)/python -m tests.run SAMPLE=

# Tests that do not start Ray, two at a time.
tests-together: programs
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not ray $(SAMPLE)'

# Tests that start Ray, two at a time beside the others, because they mostly wait for processes. Three at a time made a
# load of 35, at which Ray's own nodes fail to start.
tests-ray: programs
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'ray $(SAMPLE)'

# A browser, Redis, helm and Prometheus for the tests. Tests whose program cannot be installed are skipped.
programs: .venv/installed
	@$(BIN)/python -m tests.programs.install

# Workers and kernels at the oldest versions that GPU hosts may have.
test-floor: .venv-floor/installed
	.venv-floor/bin/python -m pytest tests/kernels tests/workers

# Kernels and tiny models on an NVIDIA GPU, beside the CPU's results. Installs nothing: it runs with the torch of .venv if
# there is one, else of $(PYTHON).
test-gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tests/gpu/run.py --out $(BENCH_OUT)/gpu

bench: .venv/installed
	$(BIN)/python bench/engine.py --json $(BENCH_OUT)/engine.json
	$(BIN)/python bench/serve.py --json $(BENCH_OUT)/serve.json

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

# torch is installed first and alone, so that no version range of another package decides its build. Most installed
# modules are never imported, so pip compiles nothing. The last command compiles the modules that ranks, routers and the
# supervisor import: otherwise several processes that start at once would each compile all of these modules.
# mypy does not follow an editable install's finder, so a link gives the root its import name.
.venv/installed: pyproject.toml constraints.txt $(wildcard setup.py) $(NATIVE)
	@echo "Installing into .venv, which takes a few minutes: 2.8 GB with PyTorch's CPU build, several GB more with CUDA's."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt torch
	$(BIN)/pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt -e '.[dev]'
	mkdir -p .venv/import && ln -sfn ../.. .venv/import/coatcheck
	$(BIN)/python -c 'import coatcheck.workers.rank, coatcheck.router.actor, coatcheck.cluster.supervision.supervisor'
	touch $@

# On x86 these releases of torch come with CUDA alone, several GB, and do not load without it.
.venv-floor/installed: pyproject.toml constraints.txt $(wildcard setup.py) $(NATIVE)
	test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	grep -vE '^($(FLOOR_BRINGS))==' constraints.txt > .venv-floor/constraints.txt
	.venv-floor/bin/pip install --disable-pip-version-check --quiet -c .venv-floor/constraints.txt $(FLOOR) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-floor build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
