# Every target works in .venv, which `make setup` makes and keeps up to date.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.set-up
DOCS   := $(VENV)/.docs
IN     := $(VENV)/bin
SEEDS  ?= 0-1000

.DEFAULT_GOAL := help
.PHONY: help setup torch browser demo test test-all fuzz lint check docs golden gpu bench tuned clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv: fusegen, its tools, and hiprtc where it is to be had

# The environment is made anew, so that nothing left over from an older pyproject.toml hides a missing dependency.
$(STAMP): pyproject.toml scripts/install-hiprtc.sh
	$(PYTHON) -m venv --clear $(VENV)
	$(IN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@scripts/install-hiprtc.sh $(VENV) || { \
	  status=$$?; \
	  [ $$status -eq 2 ] || printf '\n*** hiprtc could not be installed: HIP sources will not compile here. ***\n\n' >&2; \
	  [ $$status -eq 2 ] || [ -z "$$CI" ]; \
	}
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  echo "no C++ compiler here: the emulator needs one, g++ or, from pip, $(IN)/pip install -e '.[emulator]'"
	@touch $@

torch: setup ## torch for the CPU in .venv, for the tests of its operators
	@scripts/install-torch.sh $(VENV)

browser: setup ## what drives Chromium, for the tests of reports; Chromium itself: apt-get install chromium
	$(IN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'

demo: setup ## a fused kernel from spec to checked result, for both vendors
	$(IN)/python scripts/demo.py

# As many workers as processors: numpy's own threads would only wait for one another, and spin meanwhile.
test test-all: export OPENBLAS_NUM_THREADS = 1

test: setup ## all tests that are cheap, and a sixth of the dear ones, each day another; GPU's are skipped where there is none
	$(IN)/python -m pytest -n auto --dist worksteal

test-all: setup ## every test, with every case of the grids of which `test` runs those that show every pair of values
	$(IN)/python -m pytest -n auto --dist worksteal --all

fuzz: setup ## random chains, judged independently: SEEDS=0-2000, ANY=1 for candidates of any rank, JOBS=2
	$(IN)/python -m tests.fuzzing --seeds $(SEEDS) $(if $(ANY),--any) $(if $(JOBS),--jobs $(JOBS))

lint: setup ## lint, format, types
	$(IN)/ruff check
	$(IN)/ruff format --check
	$(IN)/mypy

check: lint ## the same, and that generated/ is what fusegen emits, as the tests ask too
	$(IN)/fusegen emit --check

docs: $(DOCS) ## build the documents into site/; what mkdocs warns of is an error
	$(IN)/mkdocs build --strict # not --quiet, which hides what strict counts

$(DOCS): $(STAMP)
	$(IN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

golden: setup ## write generated/ anew, and what README.md and docs/ quote of it
	$(IN)/fusegen emit
	$(IN)/python -m pytest -q --update-golden tests/test_docs.py -k quotes
	git --no-pager diff --stat -- generated README.md docs

gpu: setup ## the tests that need a GPU, one at a time
	$(IN)/python -m pytest -m gpu

bench: setup ## measure the table of rows in docs/measured.md on this GPU; with torch in .venv, also against it
	$(IN)/python benchmarks/table.py --again
	$(IN)/python benchmarks/table.py --print

tuned: setup ## measure the database that comes with fusegen anew, on this GPU
	$(IN)/python benchmarks/tune_shipped.py

clean: ## remove .venv and what the tools left
	rm -rf $(VENV) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
