"""The main job, end to end, on the embedded needle model: `python -m eval.demo`.

Reads a long text prompt, then asks questions about it one after the other with `model.generate`, three times: with
transformers' DynamicCache, with sinks and window only, and with QAdACache. Prints how each answered, what its heads
read and where its bytes lie. Exits with 1 if QAdACache gets a question wrong that DynamicCache gets right, or more than
a tenth of all: the test model itself misses about one in twenty-five at this length. Nothing is precomputed.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.machine import machine
from eval.tables import plain, write
from qada_cache import QAdACache, needle


@dataclass
class Result:
    """One method's run: what it answered, and what it cost."""

    name: str
    answers: list[str]
    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    cache: DynamicCache


def run(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: needle.NeedlePrompt,
    cache: DynamicCache,
    bar: tqdm,
) -> Result:
    """Prefill the prompt's context, then answer its questions on the same, growing cache."""
    bar.set_postfix_str(f"{name}: reading the prompt")
    ids = tokenizer(prompt.context, return_tensors="pt").input_ids
    context_tokens = ids.shape[1]
    start = time.perf_counter()
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    prefilled = time.perf_counter()
    bar.update()
    answers = []
    for question in prompt.questions:
        bar.set_postfix_str(f"{name}: {question}")
        asked = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        ids = torch.cat([ids, asked], dim=-1)
        # The attention mask says that every token is real; the last answer is in `ids` and not yet in the cache.
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, do_sample=False
        )
        answers.append(tokenizer.decode(ids[0, -1:]))
        bar.update()
    decode_seconds = time.perf_counter() - prefilled
    return Result(name, answers, prefilled - start, decode_seconds, cache.get_seq_length() - context_tokens, cache)


def measure(results: list[Result], prompt: needle.NeedlePrompt) -> list[dict[str, str]]:
    """The results as a table of text cells, one method a row."""
    table = []
    for result in results:
        right = sum(answer == expected for answer, expected in zip(result.answers, prompt.answers, strict=True))
        if isinstance(result.cache, QAdACache):
            stats = result.cache.stats()
            local, kv_local = f"{stats.sparsity:.0%}", f"{stats.kv_sparsity:.0%}"
            device, host, pulled = stats.device_bytes, stats.host_bytes, stats.pulled_bytes / result.decode_tokens
        else:  # DynamicCache keeps everything on the device, and every head reads it for every token
            device = sum(layer.keys.nbytes + layer.values.nbytes for layer in result.cache.layers)
            local, kv_local, host, pulled = "0%", "0%", 0, 0.0
        table.append(
            {
                "method": result.name,
                "right": f"{right}/{len(prompt.answers)}",
                "q heads local": local,
                "KV heads local": kv_local,
                "device MiB": f"{device / 2**20:.2f}",
                "host MiB": f"{host / 2**20:.2f}",
                "pulled MiB/token": f"{pulled / 2**20:.2f}",
                "prefill s": f"{result.prefill_seconds:.1f}",
                "tokens/s": f"{result.decode_tokens / result.decode_seconds:.1f}",
            }
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="length of the prompt (default %(default)s)")
    parser.add_argument("--facts", type=int, default=48, help="facts hidden in it (default %(default)s)")
    parser.add_argument("--questions", type=int, default=16, help="questions asked (default %(default)s)")
    parser.add_argument("--threshold", type=float, default=0.6, help="QAdACache's threshold (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompt (default %(default)s)")
    parser.add_argument("--out", type=Path, help="CSV file to write the table to as well")
    options = parser.parse_args(arguments)
    try:
        prompt = needle.make_prompt(
            tokens=options.tokens, facts=options.facts, questions=options.questions, seed=options.seed
        )
    except ValueError as error:
        parser.error(str(error))

    model, tokenizer = needle.load_model(), needle.load_tokenizer()
    print(
        f"Needle model: {model.num_parameters() / 1e6:.2f}M parameters, {model.config.num_hidden_layers} layers, "
        f"{model.config.num_attention_heads} query heads, {model.config.num_key_value_heads} KV heads; trained on "
        "synthetic text, so its\nanswers say nothing about a real model's quality. "
        f"Prompt: {options.tokens} tokens, {options.facts} facts, {options.questions} questions."
    )
    words = prompt.context.split()
    print(f"\n  {' '.join(words[:24])} ... {prompt.questions[0]} -> {prompt.answers[0]}\n")
    # Before anything is timed: what happens once is done, such as building kernels for a question's number of tokens,
    # which is one more from the second on, as it brings the last answer along.
    short = needle.make_prompt(tokens=2048, facts=8, questions=2, seed=options.seed)
    run("", model, tokenizer, short, QAdACache(model), tqdm(disable=True))
    methods: list[Result] = []
    with tqdm(total=3 * (1 + len(prompt.questions)), unit="step", bar_format="{l_bar}{bar}| {postfix}") as bar:
        for name, cache in (
            ("DynamicCache", DynamicCache(config=model.config)),
            ("sinks + window only", QAdACache(model, criterion="local")),
            ("QAdACache", QAdACache(model, threshold=options.threshold)),
        ):
            methods.append(run(name, model, tokenizer, prompt, cache, bar))
        bar.set_postfix_str("done")
    print()
    table = measure(methods, prompt)
    print(plain(table))
    print(
        f"\nQAdACache ran at threshold {options.threshold} with the key moments of 1,024 random words. A local "
        "head reads 128 tokens.\nOn a CPU, host and device are one memory: host is where the bulk would lie."
    )
    if options.out:
        write(options.out, table, machine=machine())
    full, ours = methods[0].answers, methods[-1].answers
    wrong = [
        f"{question}: {answer!r}, expected {expected!r}" + ("" if reference == expected else ", as with DynamicCache")
        for question, answer, reference, expected in zip(prompt.questions, ours, full, prompt.answers, strict=True)
        if answer != expected
    ]
    if wrong:
        print(f"\nQAdACache got {len(wrong)} of {len(prompt.answers)} questions wrong:", *wrong, sep="\n  ")
    lost = sum(
        reference == expected != answer for answer, reference, expected in zip(ours, full, prompt.answers, strict=True)
    )
    failed = lost > 0 or len(wrong) > 0.1 * len(prompt.answers)
    if failed:
        print(f"FAILED: {lost} of them DynamicCache got right.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
