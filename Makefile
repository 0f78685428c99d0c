# make demo | test | soak | check | bench | bench-gpu | honesty | wheel | clean. Needs python3 (3.11 or newer) with pip, and nothing else.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
PY     := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test soak check bench bench-gpu honesty wheel clean

help:
	@echo 'make demo    install into $(VENV); a network before and after optimisation, measured and checked'
	@echo 'make test    all tests, short forms'
	@echo 'make soak    all tests with full counts'
	@echo 'make check   ruff, mypy --strict, the layers of the code: what CI runs before the tests'
	@echo 'make bench   Tunewright and other engines, interleaved: 15 minutes (ARGS=--quick: 3; ARGS=--help)'
	@echo 'make bench-gpu  Tunewright and torch on an NVIDIA GPU, with the torch of PYTHON (ARGS=--help)'
	@echo 'make honesty is tuning honest? A/A and repeatability, half an hour on a quiet machine (ARGS=--short)'
	@echo 'make wheel   the wheel, in dist/'
	@echo 'make clean   remove what the above made'

# Stamps: a target installs again only when pyproject.toml has changed. The package is installed in place, so that the
# checkout is what runs; that a wheel works outside of it is a test of its own.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tunewright needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install pip; }
	@touch $@

$(VENV)/.base: $(VENV)/.made pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

# Intel's OpenCL runtime is not to be had everywhere: tests that need one are skipped then.
$(VENV)/.test: $(VENV)/.base
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,peers]'
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[intel]' || echo 'no OpenCL runtime: its tests are skipped'
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[peers,plot]'
	@touch $@

$(VENV)/.check: $(VENV)/.base
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[check,test]'
	@touch $@

demo: $(VENV)/.base
	$(PY) bench/demo.py

# Hundreds of tests start a Python: it must not compile the package anew, whatever the caller's environment says. Each
# worker has a stretch of the tests, and half of another's rest when it is through: neighbours use the same kernels.
PYTEST = OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(JOBS) --dist worksteal

test: $(VENV)/.test
	$(PYTEST) -m 'not soak'

soak: $(VENV)/.test
	$(PYTEST)

check: $(VENV)/.check
	$(PY) -m ruff check .
	$(PY) -m mypy --strict src
	$(PY) -m pytest tests/arch

bench: $(VENV)/.bench
	$(PY) bench/run.py $(ARGS)

bench-gpu:
	PYTHONPATH=src $(PYTHON) bench/gpu.py $(ARGS)

honesty: $(VENV)/.base
	OPENBLAS_NUM_THREADS=1 $(PY) bench/aa.py $(ARGS)
	OPENBLAS_NUM_THREADS=1 $(PY) bench/isolation.py

wheel: $(VENV)/.base
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
