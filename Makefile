# make demo     train the example's vision transformer on two processes
# make test     run the tests
# make coverage  run them and print what they reach, which takes longer
# make slow     run the tests that `make test` leaves out, such as those on eight processes
# make kernels  install Triton, which is large, and run its kernels interpreted; no GPU is needed
# make integrations  run the slow tests of other libraries and launchers, with all of them installed that pip gets
# make fuzz     run random programs against hand-written ones: PROGRAMS= of each placement, from SEED= on, ARGS=--placement DDP
# make docs     build the documentation as a site, in site/; make docs-serve shows it while you write
# make figures  draw the figures of the documentation again
# make dist     build the wheel and the source distribution into dist/, and check them
# make versions  run the tests on every Python and torch of noxfile.py that this machine can get
# Each makes its own virtual environment on first use, from constraints.txt; later runs start at once.

PYTHON ?= python3
NPROC ?= 2
WORKERS ?= 4
DEMO := .venv-demo
TEST := .venv-test
DOCS := .venv-docs
CONSTRAINTS ?= constraints.txt
# Python reads again what it has compiled, also in a shell that has forbidden it to keep that: each process would compile
# the library, and each worker of pytest rewrite 60,000 lines of tests, which takes 10 seconds.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS)
# All cores compile what was installed, where pip has one do it; a file that is of a later Python is left as it is. What no
# test imports, or few of hundreds, is half of it, and compiled by who imports it first.
SELDOM := /(tests?|pip|fontTools|pygments|mypyc?|virtualenv|pydantic|sympy/physics|torch/testing|transformers/models)/
COMPILE := -m compileall -q -j 0 -x "$(SELDOM)"

.PHONY: demo compare test coverage slow kernels integrations fuzz docs docs-version docs-serve figures lint dist versions clean

demo: $(DEMO)/.installed
	$(DEMO)/bin/booster run --nproc_per_node $(NPROC) examples/vit/train.py $(ARGS)

compare: $(DEMO)/.installed
	$(DEMO)/bin/booster run --nproc_per_node $(NPROC) examples/vit/train.py --compare fp32,bf16,fp16,bf16_naive $(ARGS)

# Files of tests are dealt to WORKERS processes: more than cores, since ranks and launched jobs wait for each other much of the time.
DEALT := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(TEST)/.installed
	OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest -m "not slow" $(DEALT) $(ARGS)

# Parallel mode gives every process that is measured a file of its own; `combine` adds them up. The report is printed also
# when tests fail, and the tests' own exit code is what make sees.
coverage: $(TEST)/.installed
	$(TEST)/bin/python -m coverage erase
	OMP_NUM_THREADS=1 $(TEST)/bin/python -m coverage run --parallel-mode -m pytest -m "not slow" $(DEALT) $(ARGS); code=$$?; \
	$(TEST)/bin/python -m coverage combine --quiet; $(TEST)/bin/python -m coverage report; exit $$code

slow: $(TEST)/.installed
	OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest -m slow $(DEALT) $(ARGS)

# First what is about kernels; then other tests, whose steps they make wherever they can: of half weights, packed states and
# resumes, and cells of the matrix, on ranks too.
BY_KERNELS := $(addprefix tests/unit/,test_naive_model.py test_naive_strategy.py test_packed_states.py test_masters_resume.py test_resume.py)
CELLS := $(foreach cell,fp32-single bf16-single fp16-single fp16_naive-single bf16_naive-single fp16-DDP bf16_naive-DDP bf16_naive-FSDP fp16-ZeRO-2,tests/distributed/test_matrix.py::test_cell[$(cell)])

kernels: $(TEST)/.triton
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest -n $(WORKERS) --timeout 1800 $(ARGS) $(wildcard tests/unit/test_kernels*.py tests/distributed/test_kernels*.py) tests/unit/test_launches.py tests/unit/test_gpu_benchmark.py
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest -n $(WORKERS) --timeout 1800 --kernels -m "not slow" $(ARGS) $(BY_KERNELS) $(foreach cell,$(CELLS),"$(cell)")

integrations: $(TEST)/.integrations
	OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest -m slow $(ARGS) tests/unit/test_integrations.py tests/unit/test_notebook.py \
	tests/unit/test_adapters_peft.py tests/unit/test_serving.py tests/unit/test_lora.py tests/distributed/test_lora_ranks.py tests/unit/test_trainer.py tests/unit/test_trl.py tests/unit/test_trl_scripts.py tests/unit/test_trainer_scripts.py tests/distributed/test_trainer_ranks.py tests/distributed/test_real_launchers.py

PROGRAMS ?= 1000
SEED ?= 0

fuzz: $(TEST)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(TEST)/bin/python tests/fuzz/run.py --programs $(PROGRAMS) --seed $(SEED) $(ARGS)

# Nothing is imported for it: signatures and docstrings are read from the source.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)
	$(DOCS)/bin/codespell
	$(DOCS)/bin/python tools/prose.py
	$(DOCS)/bin/python tools/searched.py
	$(DOCS)/bin/python tools/length.py

# The site of a version goes into the branch gh-pages of this repository, beside those of others; nothing is pushed.
docs-version: $(DOCS)/.installed
	@test -n "$(VERSION)" || { echo "which version? make docs-version VERSION=0.1"; exit 2; }
	PATH="$$PWD/$(DOCS)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve $(ARGS)

figures: $(DOCS)/.installed
	for name in formats weight_bits step map pipeline curves long_run planted communication guides; do $(DOCS)/bin/python benchmarks/figures/$$name.py || exit 1; done

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
	$(DEMO)/bin/python $(INSTALL) --no-compile --editable ".[examples]"
	$(DEMO)/bin/python $(COMPILE) $(DEMO)/lib > /dev/null 2>&1 || true
	touch $@

$(TEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python $(INSTALL) --no-compile --editable ".[examples,test,dev]"
	$(TEST)/bin/python $(COMPILE) $(TEST)/lib > /dev/null 2>&1 || true
	touch $@

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(TEST)/.integrations: $(TEST)/.installed
	$(TEST)/bin/python $(INSTALL) --editable ".[integrations]"
	touch $@

$(TEST)/.triton: $(TEST)/.installed
	$(TEST)/bin/python $(INSTALL) --editable ".[triton]"
	touch $@

$(TEST)/.release: $(TEST)/.installed
	$(TEST)/bin/python $(INSTALL) --editable ".[release]"
	touch $@
