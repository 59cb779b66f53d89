# SPDX-License-Identifier: Apache-2.0
# make setup | test | test-slow | test-releases | test-clients | lint | finetune | report. Each sets up what it needs
# in $(VENV) first.
#   PYTHON      the interpreter to start from; if its torch sees a GPU, that torch is kept and used
#   VENV        the virtual environment that is made
#   TORCH       the release of torch to install, by default the newest that the package was tested with
#   DEEPSPEED   the release of DeepSpeed to install
#   PINS        more releases, as in PINS="triton==3.6.0 transformers==5.17.0"
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: setup test test-slow test-releases test-clients lint finetune report

PYTHON ?= python3
# Its path is looked up here, before the new environment's python3 comes first on PATH.
override PYTHON := $(or $(shell command -v $(PYTHON)),$(error there is no $(PYTHON): name an interpreter by PYTHON=))
VENV ?= .venv
DEEPSPEED ?= 0.19.8
TORCH ?= 2.15.0
PINS ?=
RUN := $(VENV)/bin/python

# DeepSpeed looks for ninja and mpirun on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)
# Its CPU extension is built on first use, against this environment's DeepSpeed and torch: a cache shared with another
# environment would be built anew at every change between the two.
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
# Where it is set, every process would compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

setup: $(VENV)/ready

# DeepSpeed's build imports torch, so it builds in this environment, and builds no CUDA op in advance.
INSTALL := DS_BUILD_OPS=0 $(RUN) -m pip install -q --no-compile --no-build-isolation
# pip would compile on one core: this takes all. Left out: what few import. Some packages carry templates that are no
# Python.
COMPILE := $(RUN) -m compileall -q -j 0 -x 'transformers/models|/tests/' $(VENV)/lib >/dev/null || true

$(VENV)/ready: Makefile setup.py pyproject.toml
	@ask='import pathlib, torch; torch.cuda.is_available() or exit(1); print(pathlib.Path(torch.__file__).parents[1])'
	if kept=$$($(PYTHON) -c "$$ask" 2>/dev/null); then
	  echo "setup: keeping the torch of $(PYTHON), which sees a GPU"
	  $(PYTHON) -m venv --clear --system-site-packages $(VENV)
	  # Where $(PYTHON) is itself a virtual environment, its packages are not the system's: name their folder.
	  echo "$$kept" > "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kept.pth"
	  $(RUN) -c 'import torch; print(f"torch=={torch.__version__}")' > $(VENV)/constraints.txt
	else
	  $(PYTHON) -m venv --clear $(VENV)
	  printf '%s\n' torch==$(TORCH) $(PINS) > $(VENV)/constraints.txt
	  # A CPU build under that name where the package index has one; else the index's own build of that release.
	  $(RUN) -m pip install -q --no-compile torch==$(TORCH)+cpu 2>/dev/null || \
	    $(RUN) -m pip install -q --no-compile torch==$(TORCH)
	  $(COMPILE) &  # while pip brings the rest
	fi
	echo deepspeed==$(DEEPSPEED) >> $(VENV)/constraints.txt
	if [ -e $(VENV)/lib/python3*/site-packages/kept.pth ] && compgen -G '.whl/*.whl' >/dev/null; then
	  # A GPU machine without a package index: what it lacks was brought along in .whl.
	  $(INSTALL) --no-index --no-deps .whl/*.whl
	  $(INSTALL) --no-index --no-deps -e .
	else
	  $(RUN) -m pip install -q 'setuptools>=77' wheel
	  $(INSTALL) -c $(VENV)/constraints.txt -e '.[test]'
	fi
	$(COMPILE) &
	# The extension of DeepSpeed's CPU ranks, now and by one process: a build cut short in a run would leave a lock
	# behind that all later runs wait for.
	DS_ACCELERATOR=cpu $(RUN) -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()'
	wait
	touch $@

# Tests mostly wait: for ranks, deadlines and compilers. A file stays in one process, with its ranks. Short files come
# last, so that both processes end at about the same time.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
FOLDERS := tests/unit tests/kernels tests/examples tests/ranks tests/gpu
# What takes longest is listed at the end. With REPORT=report.xml, tests/durations.py can keep all of it.
DURATIONS := --durations=25 --durations-min=2 $(if $(REPORT),--junit-xml=$(REPORT))

# CI runs these and most of the slow tests at once, by WHICH='not wide'.
WHICH ?= not slow
test: $(VENV)/ready
	@$(RUN) -m pytest $(SIDE_BY_SIDE) $(DURATIONS) -m '$(WHICH)' $(FOLDERS)

# Packaging, compilation ahead of time, launchers, benchmarks, long examples, and all cases of wide matrices.
test-slow: $(VENV)/ready
	@$(RUN) -m pytest $(SIDE_BY_SIDE) $(DURATIONS) -m slow $(FOLDERS)

# The tests with the oldest and the newest releases, and ahead-of-time compilation with each Triton: tests/releases.py.
test-releases:
	@$(PYTHON) tests/releases.py

# TRL, Accelerate and others, each in an environment of its own, with nothing but the JSON section: tests/clients.
test-clients: $(VENV)/ready
	@$(RUN) tests/clients

report: $(VENV)/ready
	@$(RUN) examples/benchmarks/report.py

lint: $(VENV)/ready
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

finetune: $(VENV)/ready
	@$(RUN) examples/gpt_moe/finetune.py
