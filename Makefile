# The README's commands. Each makes the environment it needs, from nothing, the first time it is run:
#   make demo        a tour in the terminal, on a real model
#   make test        checkers and tests
#   make test-all    the slow tests too: more ways in which processes end, long runs, notebooks; then `make topologies`
#   make topologies  the contract on engines of several workers: TP 2, PP 2, both, DP 2, and workers in Ray
#   make lint        ruff, mypy, pyright, import-linter
#   make notebooks   runs every notebook again, in place
#   make bench       the benchmarks, docs/performance.md and its picture
#   make bench-gpu   those of a GPU, with DEVICE=cuda
#   make format      lets ruff rewrite the sources
#   make clean       removes the environment and everything built
# `make DEVICE=cuda ...` does it with the CUDA build of vLLM, `make PYTHON=python3.13 ...` with another Python,
# `make test ARGS="tests/unit -k skip"` hands arguments to pytest; `make topologies TOPOLOGIES="tp2 pp2"` runs some.

PYTHON ?= python3
DEVICE ?= cpu
VENV   ?= .venv
ARGS   ?=

TOPOLOGIES ?= tp2 pp2 tp2pp2 dp2 ray raypp2

SHELL  := /bin/bash -o pipefail
RUN    := $(VENV)/bin
say    := @printf '\033[1m==> %s\033[0m\n'

pinned  := $(VENV)/.pinned-$(DEVICE)
package := $(VENV)/.package
ray     := $(VENV)/.ray

.PHONY: demo test test-all topologies lint ruff mypy pyright imports notebooks bench bench-gpu format env install model clean
.DEFAULT_GOAL := test

demo: env model
	$(RUN)/python scripts/demo.py

test: lint model
	$(say) "tests"
	$(RUN)/pytest -m "not slow and not gpu" $(ARGS)

test-all: lint model $(ray)
	$(say) "all tests"
	$(RUN)/pytest $(if $(filter cuda,$(DEVICE)),,-m "not gpu") $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory topologies)

# All of them, also when one fails; pytest says why it skips one that this machine cannot have.
topologies: model $(ray)
	$(say) "the contract on several workers"
	@failed=; for topology in $(TOPOLOGIES); do \
	    printf '\033[1m==> %s\033[0m\n' "$$topology"; \
	    $(RUN)/pytest -m "not gpu" --timeout 600 --topology $$topology $(or $(ARGS),tests/contract) \
	        || failed="$$failed $$topology"; \
	done; [ -z "$$failed" ] || { echo "failed on:$$failed"; exit 1; }

# The checkers run two at a time; each one's words come out together.
lint: env
	@$(MAKE) --no-print-directory -k -j2 --output-sync=target pyright mypy ruff imports

ruff:
	$(say) "ruff"
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .

mypy:
	$(say) "mypy"
	@$(RUN)/mypy -p invivo | $(real_paths)
	@$(RUN)/mypy scripts benchmarks tests/static

pyright:
	$(say) "pyright"
	@$(RUN)/pyright --pythonpath $(RUN)/python

imports:
	$(say) "import-linter"
	@$(RUN)/lint-imports --no-cache

notebooks: env model
	$(RUN)/python scripts/notebooks.py $(ARGS)

bench: env model
	$(RUN)/python benchmarks/run.py $(ARGS)

bench-gpu: env model
	$(RUN)/python benchmarks/gpu.py $(ARGS)

format: env
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# The checkers read the link tree of the editable install; their messages shall name the files of the checkout.
tree       := build/__editable__[^/]*/invivo/
real_paths := sed -E 's,([^ ]*/)?$(tree)(envoy|tracer|interleaver|vllm_backend)/,\2/,; s,([^ ]*/)?$(tree),api/,'

# The environment: the pinned packages first, then invivo itself, each only when what it is made from has changed.
env: $(package)
install: $(package)

model: env
	@$(RUN)/python scripts/smollm2.py

$(RUN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	    { echo "invivo needs Python 3.11 to 3.14; name one, as in: make PYTHON=python3.12 test"; exit 1; }
	$(say) "creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(pinned): requirements/$(DEVICE).txt requirements/dev.txt | $(RUN)/python
	$(say) "installing the pinned packages into $(VENV): some minutes the first time"
	@$(RUN)/python scripts/environment.py $(DEVICE)
	@touch $@

# A file that is added to api/ later, or a build/ that was removed, needs the links made again.
$(package): pyproject.toml scripts/link.py $(pinned) $(wildcard api/*.py) $(if $(wildcard build/__editable__*),,missing)
	$(say) "installing invivo as an editable package"
	@$(RUN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
	    --config-settings editable_mode=strict --editable .
	@$(RUN)/python scripts/link.py
	@touch $@

# Only tests of engines with workers in Ray need it, and they are skipped where it cannot be installed.
$(ray): requirements/ray.txt | $(package)
	$(say) "installing Ray"
	@if $(RUN)/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/ray.txt; \
	    then touch $@; else echo "Ray cannot be installed here: tests with workers in Ray are skipped"; fi

.PHONY: missing
missing:

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
