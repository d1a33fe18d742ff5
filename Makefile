# pgque: set-up, demo, tests, checks, packages. `make help` lists the targets.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# In the order of installation
PARTS   := $(addprefix sql/parts/,$(shell cat sql/parts/manifest))
TESTS   := tests
SUPPORT := tests/support
# The tests wait more than they compute: two processes a core, each with a server of its own.
JOBS    ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$((2 * n)) || echo 8)
PARALLEL = TMPDIR=$$($(SUPPORT)/tmpdir.sh) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --durations=25 --durations-min=15
# What make verify runs. With REST=1 test-all leaves it out, so that CI runs no slow test twice.
PROOF   := tests/faults tests/sql/test_model.py tests/sql/test_log_cost.py
REST    ?=
LEFT    := $(if $(REST),$(PROOF:%=--ignore=%))
# What of tests/bench is measured then: small in make verify, in full in make verify-long.
VERIFY_BENCH      ?= send,receive,late,nack,peers,drain,latency,idle,soak
VERIFY_LONG_BENCH ?= $(VERIFY_BENCH),workers-long
# What depends on the version of PySpark, and the main paths of that
SPARK_PATHS := $(addprefix tests/spark/test_,source.py sink.py once.py typed.py package.py)
SMOKE       := every_column or failed_is_read_again_as_it_was or available_now_reads or micro_batch or distinguished or finds or types_of_the_schema
# Markdown, and what make_sync.py generates
NOT_FORMATTED := --exclude '*.md' --exclude twins

.DEFAULT_GOAL := help
.PHONY: help demo pipeline test test-all test-long verify verify-long test-spark test-spark-long smoke-spark check lint bench sql schema reference \
        picture generate format docs install uninstall dist docker matrix cron clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## Run the demo; KEEP=1 leaves the server and its web page up, FILE=x.jsonl sends a file, SERVER=docker|local|embedded
	@$(BIN)/pgque demo $(if $(KEEP),--keep) $(if $(FILE),--file "$(FILE)") $(if $(SERVER),--server $(SERVER))

pipeline: ## 500,000 records through Spark, exactly once; KILL=2 kills the streaming job twice, KEEP=1, SERVER= as above
	@$(SUPPORT)/spark.sh newest
	@PYTHONPATH=$(CURDIR)/tests/examples $(VENV)/spark/bin/python -m pipeline --plot build/pipeline.svg \
	  $(if $(KILL),--kill $(KILL)) $(if $(KEEP),--keep) $(if $(SERVER),--server $(SERVER)) $(ARGS)

test: $(VENV)/.test ## Run the tests on whatever server is found (TESTS=folder, ARGS= for pytest, JOBS=processes)
	@$(PARALLEL) $(TESTS) -m "not slow and not long" $(ARGS)

test-all: $(VENV)/.test ## Run the slow tests too (REST=1: without what make verify runs)
	@$(PARALLEL) $(TESTS) -m "not long" $(LEFT) $(ARGS)

test-long: $(VENV)/.test ## Minutes of random work with every kind of fault, judged afterwards
	@$(BIN)/python -m pytest $(TESTS) -m long $(ARGS)

verify: $(VENV)/.test ## The proof, short: histories, models, races, attacks, fuzz, disasters, a small benchmark
	@$(PARALLEL) $(PROOF) -m "not long" $(ARGS)
	@PYTHONPATH=tests $(BIN)/python tests/bench/run.py --quick --minutes 0.2 --only $(VERIFY_BENCH)

verify-long: $(VENV)/.test ## The same for longer, and what only runs for minutes (an hour or two)
	@$(BIN)/python -m pytest $(PROOF) $(ARGS)
	@PYTHONPATH=tests $(BIN)/python tests/bench/run.py --only $(VERIFY_LONG_BENCH)

test-spark: ## Run the Spark tests on the newest PySpark, those of the main paths on 4.0 too (needs Java 17; ARGS= for pytest)
	@$(SUPPORT)/spark.sh newest && $(SUPPORT)/spark.sh 4.0
	@failed=0; \
	echo "--- PySpark, newest"; $(VENV)/spark/bin/python -m pytest tests/spark -m "not long" --durations=12 --durations-min=12 $(ARGS) || failed=1; \
	echo "--- PySpark 4.0"; $(VENV)/spark-4.0/bin/python -m pytest $(SPARK_PATHS) -m "not long and not slow" \
	  -k "$(SMOKE)" $(ARGS) || failed=1; \
	exit $$failed

test-spark-long: smoke-spark ## The long ones of the Spark tests: more rows, more kills, all on 4.0, the versions between
	@$(SUPPORT)/spark.sh newest
	@$(VENV)/spark/bin/python -m pytest tests/spark -m long $(ARGS)
	@$(SUPPORT)/spark.sh 4.0
	@$(VENV)/spark-4.0/bin/python -m pytest tests/spark -m "not long and not slow" $(ARGS)

smoke-spark: ## The main paths on PySpark 4.1 and 4.2 (the first time builds a wheel of 450 MB for each)
	@failed=0; for version in 4.1 4.2; do \
	  echo "--- PySpark $$version"; \
	  { $(SUPPORT)/spark.sh $$version && $(VENV)/spark-$$version/bin/python -m pytest $(SPARK_PATHS) -m "not long and not slow" -k "$(SMOKE)"; } \
	    || failed=1; \
	done; exit $$failed

check: $(VENV)/.lint ## Are the generated files current, do the linters find anything?
	@$(SUPPORT)/check.sh $(BIN)

# Beside other queues: ARGS="--only peers,drain,latency,idle,soak", and --save to keep the figures and plots
bench: $(VENV)/.test ## Measure against bare SQL in the same run (ARGS= for the script)
	@PYTHONPATH=tests $(BIN)/python tests/bench/run.py $(ARGS)

sql: ## Assemble sql/pgque.sql from sql/parts, in the order of sql/parts/manifest
	@cat $(PARTS) > sql/pgque.sql.new && mv sql/pgque.sql.new sql/pgque.sql

schema: $(VENV)/.test ## Write sql/schema.txt, the dump of what an install creates
	@PYTHONPATH=tests $(BIN)/python -m support.catalog schema > sql/schema.txt.new
	@mv sql/schema.txt.new sql/schema.txt

reference: $(VENV)/.test ## Write sql/REFERENCE.md, the function reference
	@PYTHONPATH=tests $(BIN)/python -m support.catalog reference > sql/REFERENCE.md.new
	@mv sql/REFERENCE.md.new sql/REFERENCE.md

picture: $(VENV)/.test ## Write sql/message.svg and sql/positions.svg, the pictures of the documents
	@for picture in message positions; do \
	  PYTHONPATH=tests $(BIN)/python -m support.picture $$picture > sql/$$picture.svg.new && mv sql/$$picture.svg.new sql/$$picture.svg || exit 1; \
	done

generate: sql ## Write every generated file: the SQL file, the dump, the reference, the picture, the sync Python modules
	@$(MAKE) --no-print-directory schema reference picture
	@for tool in python/tools/*.py; do [ ! -e "$$tool" ] || $(BIN)/python "$$tool"; done

format: $(VENV)/.lint ## Format the Python files
	@$(BIN)/ruff format --quiet $(NOT_FORMATTED) python tests
	@$(BIN)/ruff check --quiet --fix python tests

# The pages, and what they link to, in the folders that they have here
PAGES := README.md CHANGELOG.md LICENSE sql python/README.md python/SPARK.md python/docs \
         tests/bench/results tests/examples tests/image/compose.yaml tests/python/test_calls_pgbouncer.py tests/python/test_poolers.py $(addprefix tests/support/,documents.py reference_examples.sql)

docs: $(VENV)/docs/.ready ## Build the site of the documents in build/docs; fails for a link that leads nowhere
	@rm -rf build/pages && mkdir -p build/pages
	@tar -cf - --exclude __pycache__ --exclude sql/build $(PAGES) | tar -xf - -C build/pages
	@cp $(VENV)/docs/package/shim/index.js build/pages/iframe-worker.js
# The changelogs are found after all other pages
	@for page in CHANGELOG.md python/docs/changelog-before-0.8.md; do \
		printf -- '---\nsearch: {boost: 0.1}\n---\n' | cat - $$page > build/pages/$$page; done
	@PYTHONPATH=python/src NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs build --strict -f python/mkdocs.yml

$(VENV)/docs/.ready: $(SUPPORT)/requirements-docs.txt $(SUPPORT)/venv.sh
	@command -v npm >/dev/null || { echo "make docs needs npm. Debian and Ubuntu: sudo apt install npm" >&2; exit 1; }
	@$(SUPPORT)/venv.sh $(VENV)/docs "$(PYTHON)" -r $<
	@cd $(VENV)/docs && npm pack --silent iframe-worker@1.0.4 >/dev/null && tar -xzf iframe-worker-1.0.4.tgz
	@touch $@

install: ## Install the extension into the server of PG_CONFIG (PGXS); then `create extension pgque`
uninstall: ## Remove it again
install uninstall:
	@$(MAKE) --no-print-directory -C sql $@

dist: $(VENV)/dist/.ready ## Write packages into build/dist: wheel, sdist, PGXN zip, Debian packages, the image of the extension's files
	@$(SUPPORT)/dist.sh $(VENV)/dist/bin

$(VENV)/dist/.ready: $(SUPPORT)/requirements-dist.txt $(SUPPORT)/venv.sh
	@$(SUPPORT)/venv.sh $(VENV)/dist "$(PYTHON)" -r $<
	@touch $@

# The context is what the image needs, not the whole folder, which may hold .venv.
docker: ## Build the image pgque: PostgreSQL 17 with pg_cron and pgque, ticking
	@tar -cf - Dockerfile sql tests/image | docker build -t pgque --target database -

matrix: $(VENV)/.lint ## Run tests/sql on PostgreSQL 14 and 15, a part of it on 16 to 18, the programs behind the newest PgBouncer
	@$(SUPPORT)/matrix.sh $(BIN) $(ARGS)

cron: $(VENV)/.lint ## Run tests/cron on pg_cron 1.4 and 1.6 (Debian's packages)
	@$(SUPPORT)/cron.sh $(BIN) $(ARGS)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) build sql/build python/build python/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- The virtual environment, in three steps: to run, to test, to lint --------------------------------
INSTALL := $(SUPPORT)/venv.sh $(VENV) "$(PYTHON)"

# Made anew when it names another folder or Python: the checkout was copied or moved, or Python replaced.
ifneq ($(shell cat $(VENV)/.run 2>/dev/null),$(CURDIR) $(realpath $(BIN)/python))
.PHONY: $(VENV)/.run
endif

$(VENV)/.run: python/pyproject.toml $(SUPPORT)/venv.sh
	@$(INSTALL) -e "python[binary,embedded,web]"
	@$(BIN)/python -c 'import os; print(os.getcwd(), os.path.realpath("$(BIN)/python"))' > $@

$(VENV)/.test: $(VENV)/.run $(SUPPORT)/requirements.txt $(SUPPORT)/requirements-old.txt $(SUPPORT)/requirements-django.txt $(SUPPORT)/requirements-compared.txt
	@$(INSTALL) -r $(SUPPORT)/requirements.txt
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/old-client -r $(SUPPORT)/requirements-old.txt
	@$(INSTALL) --no-deps --upgrade --ignore-requires-python --target $(VENV)/django-6 -r $(SUPPORT)/requirements-django.txt
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/compared -r $(SUPPORT)/requirements-compared.txt
	@touch $@

$(VENV)/.lint: $(VENV)/.test $(SUPPORT)/requirements-lint.txt
	@$(INSTALL) -r $(SUPPORT)/requirements-lint.txt
	@touch $@
