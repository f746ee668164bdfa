# make demo    Llama-3-8B on 8 devices, then a small plan with everything shown, then a buggy one (core dependencies only)
# make test    everything that must hold: lint, types, the whole test suite (installs PyTorch as the reference)
# make test-jax  JAX code, in an environment of its own (.venv-jax): a part of make test
# make check   a slice of it for daily work, under two minutes: lint, types, the core and one plan of each kind
# make campaign  tests that take long, thousands of random plans, of random PyTorch and JAX steps and of random mistakes in them (hours on 2 cores)
# make capture  PyTorch and JAX code of all kinds, captured, proved and replayed, and with planted bugs (about 40 minutes)
# make frameworks  torchtitan, Megatron-core, Transformers and DeepSpeed from pip, each in an environment of its own (.venv-torchtitan,
#              .venv-megatron, .venv-transformers, .venv-deepspeed): proved, and refuted with edits in a copy of it
# make versions  a few captures with the other versions of PyTorch that are supported, each in an environment of its own (.venv-torch-2.15.0
#              and its like: they come with CUDA's libraries, 5 GB each)
# make clean   remove the virtual environment and what was built

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
TORCH := torch==2.13.0
OTHER_TORCHES := torch==2.14.1 torch==2.15.0
WITH_OTHERS := $(addprefix tests/capture/,test_private_names.py test_door.py test_found_steps.py test_cuda.py test_complete.py)
JAX := .venv-jax
TITAN := .venv-torchtitan
MEGATRON := .venv-megatron
TRANSFORMERS := .venv-transformers
DEEPSPEED := .venv-deepspeed

# Tests start many processes: each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-jax check capture frameworks versions campaign clean

demo: $(VENV)/core.stamp
	@mkdir -p $(DEMO)
	$(BIN)/python examples/mlp.py $(DEMO)
	$(BIN)/python examples/llama.py $(DEMO) 2
	@echo
	@echo "--- Llama-3-8B, 32 layers, whole training step on 8 devices: PROVED, exit code 0."
	$(BIN)/trainverify verify --zoo llama3-8b --dp 2 --tp 2 --pp 2 --sp --microbatches 2 --points 1 > $(DEMO)/llama.txt; code=$$?; head -1 $(DEMO)/llama.txt; exit $$code
	@echo
	@echo "--- Two layers of it, and the gradient of one norm is not added up over the tensor-parallel ranks: REFUTED, exit code 1, with the place."
	$(BIN)/trainverify verify $(DEMO)/llama.logical.json.gz $(DEMO)/llama.buggy.json.gz --points 1 > $(DEMO)/buggy.txt; code=$$?; head -7 $(DEMO)/buggy.txt; test $$code -eq 1
	@echo
	@echo "--- A small correct plan on 8 devices, every obligation shown: PROVED, exit code 0."
	$(BIN)/trainverify verify $(DEMO)/mlp.logical.json $(DEMO)/mlp.plan.json
	@echo
	@echo "--- The same plan without one backward all-reduce: REFUTED, exit code 1, with the place."
	$(BIN)/trainverify verify $(DEMO)/mlp.logical.json $(DEMO)/mlp.buggy.json; test $$? -eq 1
	@echo
	@if $(BIN)/python -c "import torch" 2>/dev/null; then \
		echo "--- PyTorch code as it is, data and tensor parallel on 4 ranks, captured on fake tensors: PROVED."; \
		$(BIN)/trainverify torch examples/pytorch/train.py:reference examples/pytorch/train.py:distributed --world-size 4 > $(DEMO)/torch.txt; \
		code=$$?; head -1 $(DEMO)/torch.txt; exit $$code; \
	else echo "--- PyTorch is absent: no PyTorch code is captured (pip install 'trainverify[torch]')."; fi

test: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal
	$(MAKE) test-jax

test-jax: $(JAX)/stamp
	$(JAX)/bin/python -c "import jax; print('JAX', jax.__version__)"
	$(JAX)/bin/pytest -n 2 --dist worksteal tests/jax tests/docs/test_jax_page.py

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal tests/primitives tests/graph tests/build tests/check tests/axes tests/verdicts/test_mlp.py tests/verdicts/test_unasked.py tests/verdicts/test_claims.py tests/prove/test_laws.py tests/docs

campaign: $(VENV)/dev.stamp $(JAX)/stamp
	$(BIN)/pytest -m long -n 2
	$(BIN)/python -m tools.campaign --both --count $(or $(COUNT),2000) --seed $(or $(SEED),0) --workers 2 --seconds 20 --oracle 0.3
	$(BIN)/python -m tools.steps --count $(or $(COUNT),3000) --seed $(or $(SEED),0) --workers 2
	$(JAX)/bin/python -m tools.jax_steps --count $(or $(COUNT),1000) --seed $(or $(SEED),0) --workers 2

capture: $(VENV)/dev.stamp $(JAX)/stamp
	$(BIN)/pytest tests/capture -m "capture or not capture" -v -o faulthandler_timeout=3600
	$(BIN)/python -m tools.opinfo --count 0 --wrong
	$(JAX)/bin/pytest tests/jax -m "capture or not capture" -v
	$(JAX)/bin/python -m tools.harnesses

frameworks: $(TITAN)/stamp $(MEGATRON)/stamp $(TRANSFORMERS)/stamp $(DEEPSPEED)/stamp
	$(TITAN)/bin/pytest tests/frameworks -v
	$(TITAN)/bin/trainverify bench frameworks
	$(MEGATRON)/bin/pytest tests/frameworks/test_megatron.py -v
	$(MEGATRON)/bin/trainverify bench frameworks
	$(TRANSFORMERS)/bin/pytest tests/frameworks/test_transformers.py tests/frameworks/test_door.py -v
	$(TRANSFORMERS)/bin/trainverify bench frameworks
	$(DEEPSPEED)/bin/pytest tests/frameworks/test_deepspeed.py -v
	$(DEEPSPEED)/bin/trainverify bench frameworks

versions: $(OTHER_TORCHES:torch==%=.venv-torch-%/stamp)
	@for v in $(OTHER_TORCHES:torch==%=%); do echo "PyTorch $$v" && .venv-torch-$$v/bin/pytest $(WITH_OTHERS) || exit 1; done

clean:
	rm -rf $(VENV) $(OTHER_TORCHES:torch==%=.venv-torch-%) $(JAX) $(TITAN) $(MEGATRON) $(TRANSFORMERS) $(DEEPSPEED) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	@touch $@

# PyTorch in a step of its own: what else is installed must not choose its version.
$(VENV)/torch.stamp: | $(VENV)/bin/python
	$(BIN)/pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/core.stamp

# JAX in an environment of its own: the rest of the suite runs without it.
$(JAX)/stamp: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(JAX)
	$(JAX)/bin/pip install --quiet --editable ".[jax]" flax optax absl-py "pytest>=9,<10" "pytest-xdist>=3.6,<4"
	@touch $@

# Another version of PyTorch likewise; this library leaves it as it is.
.venv-torch-%/stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/pip install --quiet "torch==$*"
	.venv-torch-$*/bin/pip install --quiet --editable ".[torch]" "pytest>=9,<10"
	.venv-torch-$*/bin/python -c "import torch; assert torch.__version__.split('+')[0] == '$*', torch.__version__"
	@touch $@

# torchtitan in an environment of its own. PyTorch first: what else is installed must not choose its version.
$(TITAN)/stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/pip install --quiet "$(TORCH)"
	$(TITAN)/bin/pip install --quiet "$(TORCH)" torchtitan==0.3.0 triton --editable . "pytest>=9,<10"
	@touch $@

# Megatron-core likewise, without Transformer Engine and apex.
$(MEGATRON)/stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(MEGATRON)
	$(MEGATRON)/bin/pip install --quiet "$(TORCH)"
	$(MEGATRON)/bin/pip install --quiet "$(TORCH)" megatron-core==0.16.1 --editable . "pytest>=9,<10"
	@touch $@

# Transformers with accelerate likewise, and Lightning.
$(TRANSFORMERS)/stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(TRANSFORMERS)
	$(TRANSFORMERS)/bin/pip install --quiet "$(TORCH)"
	$(TRANSFORMERS)/bin/pip install --quiet "$(TORCH)" transformers==5.23.0 accelerate==1.15.0 lightning --editable . "pytest>=9,<10"
	@touch $@

# DeepSpeed likewise. Its real runs compile an extension once: that takes minutes, a C++ compiler and ninja.
$(DEEPSPEED)/stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/pip install --quiet "$(TORCH)"
	$(DEEPSPEED)/bin/pip install --quiet "$(TORCH)" deepspeed==0.19.8 ninja --editable . "pytest>=9,<10"
	@touch $@
