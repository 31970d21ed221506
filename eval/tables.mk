# One target for each committed table, `make tables/NAME`: what made eval/results/NAME, on two cores of the machine that
# the table's column `machine` names. QWEN is the file of Qwen2.5-Coder-0.5B-Instruct; SmolLM2 is installed by `make`.
# Tables of trials and sweeps resume: `make` adds the rows that are missing.
# `--own` lists a threshold of 0.3, too, since the tables of bits/ were made; the others lack its rows.
QWEN ?= qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
TABLES := eval/results
EVAL := $(RUN) -m eval
OUT = --out $(TABLES)/$(@:tables/%=%)
RULER := prose_niah prose_niah_multikey_4 prose_niah_multivalue prose_niah_multiquery prose_vt prose_cwe prose_fwe prose_icl
NEEDLES := prose_niah prose_niah_multikey_4
SELECTED := --prefill 0 12 --question dense sparse
FEW_BITS := --dtype bfloat16 --tokens --tasks $(RULER) --lengths 4096 --thresholds --static
PAPERS := --group-rules head --moments random-words wiki single-word current --thresholds 0.1 0.3 0.5 0.7 0.9 0.99

TARGETS := $(shell sed -n 's|^\(tables/.*\):.*|\1|p' eval/tables.mk)
.PHONY: $(TARGETS)
$(TARGETS): $(VENV)/.installed

# Quality: docs/choosing.md.
tables/trials.csv:
	$(EVAL).trials --lengths 3072 --documents 10 $(OUT)
	$(EVAL).trials --tokens --lengths 3072 --documents 10 $(OUT)
	$(EVAL).trials --tokens --own --lengths 1024 7168 --documents 8 $(OUT)
	$(EVAL).trials --tokens --own --tasks code --lengths 4096 --documents 8 $(OUT)
	$(EVAL).trials --tokens --own --tasks $(NEEDLES) --lengths 4096 --documents 64 --question dense sparse $(OUT)
	$(EVAL).trials --few --lengths 1024 7168 --documents 8 $(OUT)
	$(EVAL).trials --few --tasks $(NEEDLES) --lengths 4096 --documents 64 $(OUT)
	$(EVAL).trials --tasks prose_niah --lengths 2048 --documents 5 $(OUT)
	$(EVAL).trials --tasks niah_single_1 --lengths 2048 --documents 12 $(OUT)

tables/trials-qwen2.5-coder-0.5b.csv:
	$(EVAL).trials --model $(QWEN) --few --lengths 3072 --documents 8 $(OUT)
	$(EVAL).trials --model $(QWEN) --few --tasks $(NEEDLES) --lengths 4096 --documents 16 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --lengths 3072 --documents 4 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --few --lengths 3072 --documents 8 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --lengths 1024 --documents 8 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --few --lengths 16384 --documents 3 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --tasks code --lengths 4096 --documents 8 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --few --tasks code --lengths 4096 --documents 4 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --tasks code --lengths 8192 --documents 4 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --tasks code --lengths 16384 --documents 3 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --tasks $(NEEDLES) --lengths 4096 --documents 16 --question dense sparse $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --tasks prose_niah --lengths 16384 --documents 4 --question dense sparse $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --tasks prose_niah --lengths 32000 --documents 1 --question sparse $(OUT)

tables/latent_trials.csv:  # of what `eval.convert --latent` made of both models
	$(EVAL).trials --model smollm2-latent --latents --lengths 3072 --documents 2 $(OUT)
	$(EVAL).trials --model qwen2.5-coder-0.5b-latent --latents --lengths 3072 --documents 2 $(OUT)
	$(EVAL).trials --model smollm2-latent --latents --tasks prose_niah --lengths 4096 --documents 8 --question sparse $(OUT)
	$(EVAL).trials --model qwen2.5-coder-0.5b-latent --latents --tasks prose_niah --lengths 4096 --documents 1 --question sparse $(OUT)

tables/trials-peers.csv:  # interrupted after 5 needles of Qwen's
	$(EVAL).trials --peers --documents 8 $(OUT)
	$(EVAL).trials --model $(QWEN) --peers --documents 4 $(OUT)
	$(EVAL).trials --peers --tasks prose_niah --lengths 4096 --documents 16 --question sparse dense $(OUT)
	$(EVAL).trials --model $(QWEN) --peers --tasks prose_niah --lengths 4096 --documents 5 --question sparse dense $(OUT)

tables/bits/trials.csv:  # interrupted after 7 needles; they are older, and have an open segment in 16 bits
	$(EVAL).trials --tokens --own --bits 16 8 4 --documents 8 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --bits 16 8 4 --documents 4 $(OUT)
	$(EVAL).trials --tokens --own --bits 16 8 4 --tasks prose_niah --lengths 4096 --documents 12 --question sparse dense $(OUT)

tables/bits/trials-bfloat16.csv:  # interrupted after 8 and 2 needles
	$(EVAL).trials --tokens --own --bits 16 8 4 --dtype bfloat16 --documents 6 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --bits 16 8 4 --dtype bfloat16 --documents 4 $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --bits 8 4 --dtype bfloat16 --lengths 16384 --documents 1 $(OUT)
	$(EVAL).trials --tokens --own --bits 8 4 --dtype bfloat16 --tasks prose_niah --lengths 4096 --documents 12 --question dense sparse $(OUT)
	$(EVAL).trials --model $(QWEN) --tokens --own --bits 8 4 --dtype bfloat16 --tasks prose_niah --lengths 4096 --documents 4 --question dense sparse $(OUT)

tables/prefill/trials.csv:  # interrupted after a document of prose
	$(EVAL).trials --prefill 0 4.4 12 30 --bits 8 --documents 4 $(OUT)
	$(EVAL).trials --prefill 0 4.4 12 30 --bits 8 --tasks code --lengths 4096 --documents 4 $(OUT)

tables/prefill/trials-bfloat16.csv:  # interrupted after four documents
	$(EVAL).trials --dtype bfloat16 $(SELECTED) --bits 8 4 --tasks $(NEEDLES) --lengths 4096 --documents 5 $(OUT)
	$(EVAL).trials --dtype bfloat16 --prefill 0 12 --bits 8 --tasks prose code chat --lengths 4096 --documents 2 $(OUT)

tables/prefill/trials-qwen2.5-coder-0.5b.csv:  # interrupted after a document, and two of 8 bits and a sparse question
	$(EVAL).trials --model $(QWEN) --dtype bfloat16 $(SELECTED) --bits 8 4 --tasks $(NEEDLES) --lengths 4096 --documents 5 $(OUT)
	$(EVAL).trials --model $(QWEN) --dtype bfloat16 $(SELECTED) --bits 8 --tasks prose_niah --lengths 16384 --documents 1 $(OUT)
	$(EVAL).trials --model $(QWEN) --dtype bfloat16 --prefill 0 12 --bits 8 --tasks prose code chat --lengths 4096 --documents 1 $(OUT)

tables/prefill/ruler-smollm2.csv:  # and by selection in 4 bits for both kinds of needles, then interrupted
	$(EVAL).sweep $(FEW_BITS) --prefill 0 12 --bits 8 --limit 2 $(OUT)
	$(EVAL).sweep $(FEW_BITS) --bits 4 --limit 2 $(OUT)

tables/prefill/ruler-qwen2.5-coder-0.5b.csv:
	$(EVAL).sweep --model $(QWEN) $(FEW_BITS) --prefill 0 12 --bits 8 --limit 1 $(OUT)
	$(EVAL).sweep --model $(QWEN) $(FEW_BITS) --bits 4 --limit 1 $(OUT)

tables/rungs-smollm2.csv:
	$(EVAL).codes rungs $(OUT)

tables/rungs-qwen2.5-coder-0.5b.csv:
	$(EVAL).codes rungs --model $(QWEN) $(OUT)

tables/ruler-smollm2.csv:
	$(EVAL).sweep --tasks $(RULER) --lengths 4096 --limit 4 --tokens --thresholds --static $(OUT)
	$(EVAL).sweep --tasks $(RULER) --lengths 7168 --limit 2 --tokens --thresholds --static $(OUT)

tables/ruler-qwen2.5-coder-0.5b.csv:
	$(EVAL).sweep --model $(QWEN) --tasks $(RULER) --lengths 8192 --limit 2 --tokens --thresholds --static $(OUT)
	$(EVAL).sweep --model $(QWEN) --tasks prose_vt --lengths 16000 --limit 3 --tokens --thresholds --static $(OUT)
	$(EVAL).sweep --model $(QWEN) --tasks $(RULER) --lengths 16000 --limit 1 --tokens --thresholds --static $(OUT)

tables/sweep.csv:
	$(EVAL).sweep --tasks $(NEEDLES) --lengths 1024 --limit 8 --moments current --thresholds 0.6 0.8 --static $(OUT)

tables/sweep-qwen2.5-coder-0.5b.csv:  # interrupted in its last rows
	$(EVAL).sweep --model $(QWEN) --tasks $(NEEDLES) prose_vt --lengths 4096 --limit 6 $(PAPERS) --static oracle other --alphas 0.1 0.2 0.3 0.4 0.5 0.6 $(OUT)
	$(EVAL).sweep --model $(QWEN) --tasks $(NEEDLES) prose_vt --lengths 8192 --limit 2 $(PAPERS) --static $(OUT)

tables/heads.csv:
	$(EVAL).heads --tasks prose_niah prose_icl --lengths 2048 --limit 2 $(OUT)

tables/energies.csv:
	$(EVAL).codes energies $(OUT)
	$(EVAL).codes energies --model $(QWEN) $(OUT)

tables/spreads.csv:
	$(EVAL).codes spreads $(OUT)
	$(EVAL).codes spreads --model $(QWEN) --spreads 0 1.5 --documents 1 $(OUT)

tables/demo.csv:  # before bulks had 8 bits by default
	$(EVAL).demo $(OUT)

tables/demo-qwen2.5-coder-0.5b.csv:  # 16,000 tokens alike
	$(EVAL).demo --model $(QWEN) --tokens 8000 $(OUT)

tables/tune-qwen2.5-coder-0.5b.txt:
	$(VENV)/bin/qada tune $(QWEN) --dtype float32

tables/lm_eval-qwen2.5-coder-0.5b.txt:  # and without cache=qada
	$(VENV)/bin/lm_eval --model hf --limit 3 --device cpu --tasks prose_niah,prose_niah_multikey_4 --metadata '{"max_seq_lengths": [8192], "documents": 3}' --model_args pretrained=$(dir $(QWEN)),gguf_file=$(notdir $(QWEN)),dtype=float32,cache=qada

tables/lm_eval-smollm2-latent.txt:  # and with cache=qada
	$(VENV)/bin/lm_eval --model hf --limit 1 --device cpu --tasks prose_niah_multikey_4,prose_niah_multivalue,prose_niah_multiquery,prose_vt,prose_cwe,prose_fwe,prose_icl --metadata '{"max_seq_lengths": [4096], "documents": 1}' --model_args pretrained=smollm2-latent,dtype=float32,cache=gaussian

tables/families.csv:
	$(EVAL).families $(OUT)

# Speed: docs/speed.md.
tables/benchmark-llama-3.2-1b-cpu.csv:
	$(EVAL).benchmark --tokens 131072 32768 8192 --steps 6 --rounds 2 $(OUT)

tables/rows8/benchmark-llama-3.2-1b-cpu.csv:
	$(EVAL).benchmark --tokens 8192x8 --steps 6 --rounds 6 $(OUT)

tables/bits/benchmark-llama-3.2-1b-cpu.csv:
	$(EVAL).benchmark --tokens 32768 8192 --steps 6 --rounds 2 $(OUT)

tables/benchmark-smollm2-cpu.csv:
	$(EVAL).benchmark --model smollm2 --dtype float32 --tokens 4096 --steps 6 --rounds 2 $(OUT)

tables/benchmark-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).benchmark --model $(QWEN) --dtype float32 --tokens 16384 --steps 6 --rounds 2 $(OUT)

# One thread each, beside other work.
$(filter %/benchmark-deepseek-v2-lite-cpu.csv,$(TARGETS)): export OMP_NUM_THREADS = 1
LATENT := $(EVAL).benchmark --model deepseek-v2-lite --steps 2 --rounds 1
tables/float32/benchmark-deepseek-v2-lite-cpu.csv:
	$(LATENT) --dtype float32 --tokens 2048 8192 $(OUT)

tables/bfloat16/benchmark-deepseek-v2-lite-cpu.csv:
	$(LATENT) --tokens 2048 8192 $(OUT)

tables/long/benchmark-deepseek-v2-lite-cpu.csv:
	$(LATENT) --tokens 32768 $(OUT)

tables/float32/long/benchmark-deepseek-v2-lite-cpu.csv:
	$(LATENT) --dtype float32 --tokens 32768 $(OUT)

# On a GPU: `make gpu` runs its tests first.
STEPPED_ON_GPU := "no context" "ideal dense" DynamicCache "device, 16 bits" "device, 8 bits" "host, 8 bits"

tables/gpu_step-llama-3-8b-cuda.csv:  # by code before splits filled whole rounds and weights were looked at behind a launch
	$(EVAL).gpu_step --model llama-3-8b --tokens 32768 131072 32768x8 --caches $(STEPPED_ON_GPU) $(OUT)

tables/first_token-llama-3-8b-cuda.csv:
	$(EVAL).latency prompt --model llama-3-8b --device cuda --tokens 8192 32768 --rounds 2 $(OUT)

tables/turns-llama-3-8b-cuda.csv:
	$(EVAL).latency turns --model llama-3-8b --device cuda --tokens 8192 --turns 1 16 64 256 --rounds 2 $(OUT)

tables/medians.csv:
	$(EVAL).figures compare --record

tables/first_token-smollm2-cpu.csv:
	$(EVAL).latency prompt --model smollm2 --dtype float32 --tokens 4096 --rounds 2 $(OUT)

tables/first_token-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).latency prompt --model $(QWEN) --dtype float32 --tokens 4096 --rounds 2 $(OUT)

tables/bfloat16/first_token-smollm2-cpu.csv:
	$(EVAL).latency prompt --model smollm2 --tokens 4096 7000 --prefill 12 --rounds 2 $(OUT)

tables/bfloat16/first_token-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).latency prompt --model $(QWEN) --tokens 4096 8192 16384 32768 --prefill 12 --rounds 1 $(OUT)

tables/alone/first_token-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).latency prompt --model $(QWEN) --tokens 16384 --prefill 12 --rounds 2 $(OUT)

# On a processor with AMX.
tables/amx/first_token-smollm2-cpu.csv:
	$(EVAL).latency prompt --model smollm2 --tokens 4096 7000 --rounds 3 $(OUT)

tables/amx/first_token-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).latency prompt --model $(QWEN) --tokens 4096 16384 --rounds 1 $(OUT)

tables/amx/first_token-deepseek-v2-lite-cpu.csv:
	$(EVAL).latency prompt --model deepseek-v2-lite --tokens 2048 --rounds 1 $(OUT)

tables/amx/prompt_rate.csv:
	$(EVAL).prompts rate --tokens 8192 16384 --dims 64 128 --rounds 2 $(OUT)

# As on a processor that has no more than AVX2; Intel's own library (MKL) goes by a variable of its own.
$(filter tables/avx2/%,$(TARGETS)): export ATEN_CPU_CAPABILITY = avx2
$(filter tables/avx2/%,$(TARGETS)): export ONEDNN_MAX_CPU_ISA = AVX2
$(filter tables/avx2/%,$(TARGETS)): export MKL_ENABLE_INSTRUCTIONS = AVX2
tables/avx2/first_token-smollm2-cpu.csv:
	$(EVAL).latency prompt --model smollm2 --dtype float32 --tokens 4096 7000 --prefill 12 --rounds 3 $(OUT)

tables/avx2/first_token-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).latency prompt --model $(QWEN) --dtype float32 --tokens 8192 --prefill 12 --rounds 2 $(OUT)

tables/turns-smollm2-cpu.csv:
	$(EVAL).latency turns --model smollm2 --tokens 4000 --turns 4 16 64 112 128 512 $(OUT)

tables/turns-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).latency turns --model $(QWEN) --tokens 8192 --turns 4 16 64 112 128 512 $(OUT)

tables/prompt_rate.csv:
	$(EVAL).prompts rate --tokens 8192 16384 --dims 64 128 --rounds 2 $(OUT)

tables/prompt_loss-smollm2.csv:
	$(EVAL).prompts loss --dtype float32 --tokens 7000 --documents 1 --thresholds 4.4 12 30 $(OUT)

tables/prompt_loss_spreads.csv:
	$(EVAL).prompts loss --dtype float32 --tokens 4096 --documents 1 --thresholds 12 --spreads 0 1.5 $(OUT)

tables/prompt_loss-qwen2.5-coder-0.5b.csv:
	$(EVAL).prompts loss --model $(QWEN) --dtype bfloat16 --tokens 16384 --documents 1 --thresholds 12 $(OUT)

tables/sampled/prompt_loss-smollm2.csv:
	$(EVAL).prompts loss --sampled --dtype float32 --tokens 4096 7500 --documents 1 --thresholds 12 18 25 40 $(OUT)

tables/sampled/prompt_loss-qwen2.5-coder-0.5b.csv:
	$(EVAL).prompts loss --sampled --model $(QWEN) --dtype float32 --tokens 4096 --documents 1 --thresholds 12 18 25 40 $(OUT)

tables/sampled/long/prompt_loss-qwen2.5-coder-0.5b.csv:
	$(EVAL).prompts loss --sampled --model $(QWEN) --dtype float32 --tokens 16384 --documents 1 --thresholds 60 100 $(OUT)

tables/sampled/trials.csv:  # by shares in float32; interrupted after six needles of the second kind
	$(EVAL).trials --sampled --prefill 0 18 --bits 8 --dtype float32 --tasks $(NEEDLES) --lengths 4096 --documents 8 $(OUT)

tables/sampled/trials-qwen2.5-coder-0.5b.csv:
	$(EVAL).trials --sampled --model $(QWEN) --prefill 0 40 --bits 8 --dtype float32 --tasks prose_niah --lengths 4096 --documents 8 $(OUT)

tables/long/prompt_loss-qwen2.5-coder-0.5b.csv:
	$(EVAL).prompts loss --model $(QWEN) --dtype bfloat16 --tokens 32768 --documents 1 --thresholds 12 $(OUT)

tables/step_overhead-small-cpu.csv:
	$(EVAL).overhead step --model small --dtype float32 --tokens 2000 --rounds 24 $(OUT)

tables/step_overhead-llama-3.2-1b-cpu.csv:
	$(EVAL).overhead step --tokens 2048 8192 32768 131072 $(OUT)

# Memory, files and what grows: docs/memory.md, docs/cache-files.md, docs/prefix-store.md.
tables/memory-smollm2.csv:
	$(EVAL).memory held --model smollm2 --tokens 7500 --dtype bfloat16 $(OUT)
	$(EVAL).memory held --model smollm2 --tokens 3072 --dtype bfloat16 $(OUT)

tables/memory-qwen2.5-coder-0.5b.csv:
	$(EVAL).memory held --model $(QWEN) --tokens 16000 --dtype bfloat16 $(OUT)

tables/chunks/memory-qwen2.5-coder-0.5b.csv:
	$(EVAL).memory held --model $(QWEN) --tokens 16000 --dtype bfloat16 --chunk 1024 $(OUT)

tables/float32/memory-smollm2.csv:
	$(EVAL).memory held --model smollm2 --tokens 7500 --dtype float32 $(OUT)

tables/chunks/memory-smollm2.csv:
	$(EVAL).memory held --model smollm2 --tokens 7500 --dtype bfloat16 --chunk 1024 $(OUT)

tables/triton-resources.csv:
	$(EVAL).triton_resources $(OUT)

tables/launch_time.csv:
	$(EVAL).overhead launch $(OUT)

tables/prefix_reuse.csv:
	$(EVAL).reuse copies --tokens 7500 $(OUT)

tables/prefix_reuse-qwen2.5-coder-0.5b.csv:
	$(EVAL).reuse copies --model $(QWEN) --tokens 7500 $(OUT)

tables/restart-smollm2.csv:
	$(EVAL).reuse restart --model smollm2 --rounds 1 $(OUT)

tables/restart-qwen2.5-coder-0.5b.csv:
	$(EVAL).reuse restart --model $(QWEN) --rounds 1 $(OUT)

tables/restart-qwen3.5-0.8b.csv:
	$(EVAL).reuse restart --model qwen3.5-0.8b --rounds 1 $(OUT)

tables/restart-gemma-3-270m.csv:
	$(EVAL).reuse restart --model gemma-3-270m --rounds 1 $(OUT)

tables/soak-tiny-cpu.csv:
	$(EVAL).memory soak --model tiny --tokens 20000 --dtype float32 $(OUT)

tables/soak-smollm2-cpu.csv:
	$(EVAL).memory soak --model smollm2 --tokens 2000 --dtype float32 $(OUT)

tables/soak-qwen2.5-coder-0.5b-instruct-q4_k_m.gguf-cpu.csv:
	$(EVAL).memory soak --model $(QWEN) --tokens 2000 --dtype float32 $(OUT)

# Drawn and summed up from those of trials, sweeps and heads: docs/measuring.md.
tables/trials_summary.csv tables/log_error.csv:
	$(EVAL).figures draw
