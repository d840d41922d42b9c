# Every target works alone in a fresh clone: the environment is made on the way, once.
# Another SGLang: make demo SGLANG=<version that has requirements/sglang-<version>.txt>
# Another Python: make demo PYTHON=/path/to/python3.12

SGLANG_DEFAULT := 0.5.23
SGLANG ?= $(SGLANG_DEFAULT)
VENV = .venv$(if $(filter-out $(SGLANG_DEFAULT),$(SGLANG)),-$(SGLANG))
RUN = $(VENV)/bin/python
# Extra arguments for the command behind a target: make test ARGS="-k dump -x"
ARGS ?=
PYTHON ?=
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test matrix soak healthy fuzz history versions lint site dist laptop beside env clean distclean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "They run on SGLang $(SGLANG_DEFAULT)."
	@echo "Another release: make demo SGLANG=<version in requirements/>"

demo: env ## Show the crash, the diagnosis and the fix on real SGLang, no GPU needed
	@exec "$(RUN)" repro/e4b_trtllm_mtp.py $(ARGS)

# A file's tests share their engines, so a file stays with one worker; each takes some 3 GB.
# The order is tests/conftest.py's: by number of tests, xdist's own, engines would come last.
test: env ## Run the tests (ARGS="-k name" goes to pytest)
	@exec "$(RUN)" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

versions: env ## Check every fix and hook site on each SGLang release that is supported
	@exec "$(RUN)" -m pytest tests/versions --versions $(ARGS)

matrix: env ## Every fault against every tracer, on real SGLang; writes docs/matrix-*.md
	@exec "$(RUN)" repro/matrix.py $(ARGS)

soak: env ## 2,000 requests with aborts, retractions and evictions: no finding, the same tokens
	@exec "$(RUN)" repro/soak.py $(ARGS)

healthy: env ## Healthy servers do what production does, armed: no finding; writes docs/healthy-*.md
	@exec "$(RUN)" repro/healthy.py $(ARGS)

fuzz: env ## Healthy servers drawn at random: no finding; ARGS=--corrupt strikes them: all is told
	@exec "$(RUN)" repro/fuzz.py $(ARGS)

# Each case names the releases that have its bug and that do not, so several environments are made.
history: env ## SGLang's own bugs against every tool; writes docs/history.md. Six releases, hours
	@for release in $$("$(RUN)" repro/history_suite.py --releases); do \
	  make --no-print-directory env SGLANG="$$release" || exit; \
	done; \
	exec "$(RUN)" repro/history_suite.py --write $(ARGS)

lint: env ## ruff check, ruff format --check, mypy --strict
	@"$(RUN)" -m ruff check . && "$(RUN)" -m ruff format --check . && "$(RUN)" -m mypy

dist: env ## Build the release of the last commit into dist/, twice, and check it
	@exec "$(RUN)" scripts/release/dist.py $(ARGS)

laptop: ## Install the wheel in dist/ into an empty environment, and open a dump there
	@exec "$${PYTHON:-python3}" scripts/release/laptop.py

beside: env ## Install the wheel in dist/ beside this SGLang, without the clone, and run doctor there
	@exec "$(RUN)" scripts/release/beside.py

site: env ## Build the documentation as a site, in build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 "$(RUN)" -m mkdocs build --strict -f docs/site/mkdocs.yml
	@echo "build/site/index.html; the search needs a server: $(RUN) -m http.server -d build/site"

env: ## Only make the environment that the others use
	@for p in python3 python3.11 python3.12 python3.13 python; do \
	  "$$p" -c 0 >/dev/null 2>&1 && exec "$$p" scripts/bootstrap.py "$(VENV)" "$(SGLANG)"; \
	done; \
	echo "g4debug set-up: no python3 was found: install Python 3.11 or newer" >&2; exit 1

clean: ## Remove caches and what tools left behind
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .g4debug build dist *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## The same, and the environments (2.6 GB each)
	@rm -rf .venv .venv-* .venv*.lock
