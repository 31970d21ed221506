"""The main job, end to end, on the embedded needle model: `python -m eval.demo`.

Reads a long text prompt, then asks questions about it one after the other with `model.generate`, three times: with
transformers' DynamicCache, with sinks and window only, and with QAdACache. Prints how each answered, what its heads
read and where its bytes lie. Exits with 1 unless QAdACache answered every question correctly. Nothing is precomputed.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from qada_cache import KeyMoments, QAdACache, needle


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
    decoded = cache.get_seq_length() - tokenizer(prompt.context, return_tensors="pt").input_ids.shape[1]
    return Result(name, answers, prefilled - start, time.perf_counter() - prefilled, decoded, cache)


def dense_bytes(cache: DynamicCache) -> int:
    """Bytes of every key and value of a DynamicCache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def table(results: list[Result], prompt: needle.NeedlePrompt) -> str:
    """The results as plain text, one method a line."""
    header = ["method", "right", "q heads local", "KV heads local", "device MiB", "host MiB", "pulled KiB/token"]
    header += ["prefill s", "tokens/s"]
    lines = [header]
    for result in results:
        right = sum(answer == expected for answer, expected in zip(result.answers, prompt.answers, strict=True))
        line = [result.name, f"{right}/{len(prompt.answers)}"]
        if isinstance(result.cache, QAdACache):
            stats = result.cache.stats()
            line += [f"{stats.sparsity:.0%}", f"{stats.kv_sparsity:.0%}"]
            line += [f"{stats.device_bytes / 2**20:.2f}", f"{stats.host_bytes / 2**20:.2f}"]
            line += [f"{stats.pulled_bytes / result.decode_tokens / 2**10:.0f}"]
        else:  # DynamicCache keeps everything on the device, and every head reads it for every token
            everything = dense_bytes(result.cache)
            line += ["0%", "0%", f"{everything / 2**20:.2f}", "0.00", "-"]
        line += [f"{result.prefill_seconds:.1f}", f"{result.decode_tokens / result.decode_seconds:.1f}"]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rows = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    rows.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="length of the prompt (default %(default)s)")
    parser.add_argument("--facts", type=int, default=48, help="facts hidden in it (default %(default)s)")
    parser.add_argument("--questions", type=int, default=16, help="questions asked (default %(default)s)")
    parser.add_argument("--threshold", type=float, default=0.3, help="QAdACache's threshold (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt (default %(default)s)")
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
    methods: list[Result] = []
    with tqdm(total=1 + 3 * (1 + len(prompt.questions)), unit="step", bar_format="{l_bar}{bar}| {postfix}") as bar:
        bar.set_postfix_str("key moments of a random-words prompt")
        random_words = tokenizer(needle.random_words(tokens=options.tokens), return_tensors="pt").input_ids
        moments = KeyMoments.collect(model, random_words, prompt="random-words")
        bar.update()
        for name, cache in (
            ("DynamicCache", DynamicCache(config=model.config)),
            ("sinks + window only", QAdACache(model, criterion="local")),
            ("QAdACache", QAdACache(model, threshold=options.threshold, moments=moments)),
        ):
            methods.append(run(name, model, tokenizer, prompt, cache, bar))
        bar.set_postfix_str("done")
    print()
    print(table(methods, prompt))
    print(
        f"\nQAdACache ran at threshold {options.threshold} with the key moments of {options.tokens} random words. A "
        "local head reads 128 tokens.\nOn a CPU, host and device are one memory: host is where the bulk would lie."
    )
    wrong = [
        f"{question}: {answer!r}, expected {expected!r}"
        for question, answer, expected in zip(prompt.questions, methods[-1].answers, prompt.answers, strict=True)
        if answer != expected
    ]
    if wrong:
        print(f"\nFAILED: QAdACache got {len(wrong)} of {len(prompt.answers)} questions wrong:", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
