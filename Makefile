#: make quickstart   train a small GPT-2, look at it, sample from it (a minute and a half on 2 quiet cores, after the install)
#: make test         the tests
#: make test-long    all tests, every tensor layout for 20 steps, 2000 drawn runs: two hours or three on 2 cores
#: make check        what CI runs: format, lint, types, the rehearsal, tests
#: make rehearsal    the tests that compile a fake GPU, with a CPU build of torch if .venv has one for CUDA
#: make test-versions VERSIONS=oldest   the tests with the oldest releases that are promised, or the newest that exist
#: make validate     the planner's predictions beside published results (2 minutes)
#: make packages   the distributions in dist/: meshwright, and its boxes meshwright-ranks and meshwright-parity
#: make lock         packaging/requirements.lock anew, where uv is installed
#: make site         the docs as a site in out/site, every link checked; make site-serve shows it while you write
#:
#: PYTHON=python3.12        another interpreter (>= 3.11)
#: PIP_ARGS="..."           more words for `pip install`: an index with CPU builds of torch, a proxy
#: PYTEST_ARGS="-n 2 -k x"  other words for pytest (four files of tests at a time, some of which only wait)

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
OUT := out/quickstart
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -c constraints.txt

# A stamp says that an install ended well; it is done again when what it was made from is newer than the stamp.
CREATED := $(VENV)/.created
RUNNABLE := $(VENV)/.runnable
TESTABLE := $(VENV)/.testable
SITED := $(VENV)/.sited
PICTURE := docs/course/layout.html
CPU := $(VENV)-cpu/.made
CPU_TORCH ?= torch==2.13.0

VERSIONS ?= oldest
INSTALL_oldest := -c packaging/constraints-oldest.txt
INSTALL_newest := --upgrade --upgrade-strategy eager

.PHONY: help quickstart test test-long test-versions rehearsal rehearsal-on-cpu check validate packages lock site site-serve format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#: //p' Makefile

$(CREATED):
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; name a Python >= 3.11: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), and Meshwright needs 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNNABLE): pyproject.toml constraints.txt | $(CREATED)
	@echo "Installing Meshwright and its pinned dependencies into $(VENV) (torch is large: some minutes the first time)"
	$(PIP) -e '.[mpi,pictures,tensorboard]'
	@touch $@

$(TESTABLE): pyproject.toml constraints.txt | $(CREATED)
	@echo "Installing Meshwright, its pinned dependencies and the tests' tools into $(VENV) (some minutes the first time)"
	$(PIP) -e '.[dev,templates]'
	@touch $(RUNNABLE) $@

# The site's tools read the package's sources and import nothing of it; the course's picture is Meshwright's own page.
$(SITED): pyproject.toml constraints.txt | $(CREATED)
	@echo "Installing the site's tools into $(VENV) (a minute the first time)"
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["site"])')
	@touch $@

# It starts from nothing each time, so that what it prints is what a newcomer sees.
quickstart: $(RUNNABLE)
	@rm -rf $(OUT)
	$(BIN)/meshwright train quickstart --out $(OUT)
	$(BIN)/meshwright eval $(OUT) --task perplexity --stride 64
	$(BIN)/meshwright generate $(OUT) --prompt "LATIN SMALL LETTER A" --tokens 120 --temperature 0.8 --top-k 40 --seed 1 > $(OUT)/sample.txt
	@$(BIN)/python examples/new_names.py $(OUT)/sample.txt
	@echo
	@echo "Done. The loss curve is $(OUT)/loss.png, the numbers are $(OUT)/metrics.jsonl. What to try next:"
	@echo "  $(BIN)/meshwright verify quickstart                                  do two processes compute what one does?"
	@echo "  $(BIN)/meshwright train quickstart layout.data.sync=ring --out out/ring"
	@echo "  $(BIN)/meshwright generate $(OUT) --prompt 'MUSICAL SYMBOL' --temperature 0.8 --seed 2   another sample"
	@echo "  $(BIN)/meshwright doctor                                                        what this machine can run"

# Tests start many processes: where bytecode is not kept, each of them compiles the package again.
test: $(TESTABLE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(TESTABLE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --long $(PYTEST_ARGS)

# The quick checks first; then the tests by the README's own command, so that there is one list of them.
check: $(TESTABLE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory rehearsal
	@$(MAKE) --no-print-directory test

# A build of torch for CUDA registers the hooks that the fake GPU registers: `make test` skips these tests with one, and
# here they run with a CPU build next to the other packages of .venv. Without one to be had, this says so.
rehearsal: $(TESTABLE)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
		$(MAKE) --no-print-directory rehearsal-on-cpu; \
	else echo "make: torch is built for CPUs in $(VENV): make test has the rehearsal"; fi

rehearsal-on-cpu: $(CPU)
	$(VENV)-cpu/bin/python -m pytest -q tests/rehearsal

$(CPU): constraints.txt | $(TESTABLE)
	$(PYTHON) -m venv $(VENV)-cpu
	$(VENV)-cpu/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(PIP_ARGS) "$(CPU_TORCH)"
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV)-cpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
	$(VENV)-cpu/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda and "make: no CPU build of $(CPU_TORCH) is to be had here")'
	@touch $@

# Each in an environment of its own. What fails is printed as a promise of docs/reliability.md.
test-versions: | $(CREATED)
	$(PYTHON) -m venv $(VENV)-$(VERSIONS)
	$(VENV)-$(VERSIONS)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) $(INSTALL_$(VERSIONS)) -e '.[dev]'
	$(VENV)-$(VERSIONS)/bin/python -m tests.versions $(PYTEST_ARGS)

validate: $(RUNNABLE)
	$(BIN)/python -m validation

packages: $(CREATED)
	$(PIP) build
	$(BIN)/python -m build --sdist --outdir dist
	MESHWRIGHT_APART=1 $(BIN)/python -m build --wheel --outdir dist
	$(BIN)/python -m build --outdir dist packaging/ranks
	$(BIN)/python -m build --outdir dist packaging/parity

# The head of the file, which says how to use it, stays. No index is named: whoever installs has one.
lock:
	@command -v uv >/dev/null || { echo "make: no uv here: pip install uv" >&2; exit 1; }
	@grep '^#' packaging/requirements.lock > packaging/.lock
	uv pip compile pyproject.toml -c constraints.txt --universal --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --python-version 3.11 --quiet >> packaging/.lock
	@mv packaging/.lock packaging/requirements.lock

# A page that a command writes is in no clone. It is written anew if the package has changed.
$(PICTURE): docs/course/index.md $(shell find meshwright -name '*.py' -o -path '*/explain/*') | $(RUNNABLE)
	$(BIN)/python docs/site/pictures.py

site: $(SITED) $(PICTURE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Done: out/site/index.html"

site-serve: $(SITED) $(PICTURE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(TESTABLE)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Runs that you trained yourself under out/ stay.
clean:
	rm -rf $(VENV) $(VENV)-* $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find meshwright tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
