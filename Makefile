# make demo          train the example's vision transformer on two processes
# make compare       the same in four precisions, side by side
# make test          run the tests
# make coverage      run them and print what they reach, which takes longer
# make slow          run the tests that `make test` leaves out, such as those on eight processes
# make kernels       run the Triton kernels interpreted, without a GPU; installs Triton, which is large
# make integrations  run the slow tests of other libraries and launchers, with all of them that pip installs
# make fuzz          compare random programs with hand-written ones: PROGRAMS= of each placement, from SEED= on, ARGS=--placement DDP
# make docs          build the documentation into site/ and check it; make docs-serve shows it while you write
# make docs-version  put the site of VERSION= into the branch gh-pages of this repository; nothing is pushed
# make figures       draw the figures of the documentation again
# make lint          ruff, mypy, and the lines of each room
# make dist          build the wheel and the source distribution into dist/, and check them
# make versions      run the tests on every Python and torch of noxfile.py that this machine can get
# make clean         remove all that these make
# Each target makes its virtual environment on first use, from constraints.txt.

PYTHON ?= python3
NPROC ?= 2
WORKERS ?= 3
PROGRAMS ?= 1000
SEED ?= 0
DEMO := .venv-demo
TEST := .venv-test
DOCS := .venv-docs
CONSTRAINTS ?= constraints.txt
# What is imported is compiled then, and once: compiling all that is installed takes longer.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)
PYTEST := OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest

.PHONY: demo compare test coverage slow kernels integrations fuzz docs docs-version docs-serve figures lint dist versions clean

demo: $(DEMO)/.installed
	$(DEMO)/bin/booster run --nproc_per_node $(NPROC) examples/vit/train.py $(ARGS)

compare: $(DEMO)/.installed
	$(DEMO)/bin/booster run --nproc_per_node $(NPROC) examples/vit/train.py --compare fp32,bf16,fp16,bf16_naive $(ARGS)

# More workers than cores: ranks and launched jobs wait for each other much of the time. A file is dealt whole.
DEALT := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(TEST)/.installed
	$(PYTEST) -m "not slow" $(DEALT) $(ARGS)

coverage: $(TEST)/.installed
	tools/coverage.sh $(TEST)/bin/python $(WORKERS) $(ARGS)

slow: $(TEST)/.installed
	$(PYTEST) -m slow $(DEALT) $(ARGS)

kernels: $(TEST)/.triton
	tools/kernels.sh $(TEST)/bin/python $(WORKERS) $(ARGS)

OF_OTHERS := $(addprefix tests/unit/test_,integrations.py notebook.py adapters_peft.py serving.py lora.py trainer.py trl.py trl_scripts.py trainer_scripts.py)
OF_OTHERS += $(addprefix tests/distributed/test_,lora_ranks.py trainer_ranks.py real_launchers.py)

integrations: $(TEST)/.integrations
	$(PYTEST) -m slow $(ARGS) $(OF_OTHERS)

fuzz: $(TEST)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(TEST)/bin/python tests/fuzz/run.py --programs $(PROGRAMS) --seed $(SEED) $(ARGS)

# Signatures and docstrings are read from the source: nothing is imported.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)
	$(DOCS)/bin/codespell
	$(DOCS)/bin/python tools/prose.py
	$(DOCS)/bin/python tools/searched.py
	$(DOCS)/bin/python tools/length.py

docs-version: $(DOCS)/.installed
	@test -n "$(VERSION)" || { echo "which version? make docs-version VERSION=0.1"; exit 2; }
	PATH="$$PWD/$(DOCS)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve $(ARGS)

figures: $(DOCS)/.installed
	for name in formats weight_bits step map pipeline curves long_run planted communication guides; do \
	$(DOCS)/bin/python benchmarks/figures/$$name.py || exit 1; done

lint: $(TEST)/.installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/python tests/support/typed.py
	$(TEST)/bin/python tests/support/room_lines.py

dist: $(TEST)/.release
	rm -rf dist build
	$(TEST)/bin/python -m build
	$(TEST)/bin/python -m twine check --strict dist/*
	BOOSTER_DIST=dist $(TEST)/bin/python -m pytest tests/unit/test_distribution.py

versions: $(TEST)/.release
	$(TEST)/bin/python -m nox $(ARGS)

clean:
	rm -rf $(DEMO) $(TEST) $(DOCS) site runs dist build .nox .coverage .coverage.*

$(DEMO)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python $(INSTALL) --editable ".[examples]"
	touch $@

$(TEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python $(INSTALL) --editable ".[examples,test,dev]"
	touch $@

# Of the extra alone: the package, and torch with it, is not installed.
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(TEST)/.%: $(TEST)/.installed
	$(TEST)/bin/python $(INSTALL) --editable ".[$*]"
	touch $@
