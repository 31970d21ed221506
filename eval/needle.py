"""Trains and checks the needle model, the 0.9M-parameter test model of `qada_cache.needle`.

    python -m eval.needle train --out /tmp/needle
    python -m eval.needle check --model /tmp/needle

The shipped model was made with `train --threads 1` and the default seed, in two goes: its last stage was trained from a
checkpoint of the stage before, with that stage's state of the generator. Another number of threads, or another machine,
adds up in another order and gives another model.

Training is a curriculum: induction on random text first, then key-value pairs, then ever longer haystacks, and last
penalties on attention that goes outside sinks and window, which make heads local unless a question needs them, and
on the Gaussian estimate of it, which make key moments of random words find those heads and the prompt's own miss them.
A stage ends when the running accuracy passes its gate, never on a schedule: raised too early, the difficulty stops
the model from ever learning to look a key up, and it settles for guessing among the values it has seen.
"""

import argparse
import csv
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.needle_training import locality
from eval.needle_training.locality import LocalityPenalties, install_sink
from eval.needle_training.texts import CONFIG, CURRICULUM, SINKS, TOKEN, WINDOW, Stage, attention_bias, make_batch
from qada_cache.needle import FOLDER, NeedlePrompt, make_prompt
from qada_cache.needle.words import BOS, EOS, PAD, UNKNOWN


def train_stage(
    model: LlamaForCausalLM, stage: Stage, generator: random.Random, progress: tqdm, deadline: float
) -> int:
    """Trains until the gate is passed, and returns the steps it took.

    Raises:
        RuntimeError: the gate was not reached within `stage.most_steps` or before `deadline` (`time.monotonic`).
    """
    penalties = LocalityPenalties(stage) if stage.locality else None
    model.set_attn_implementation(locality.NAME if penalties else "sdpa")
    if stage.sink:
        install_sink(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    accuracy = 0.0
    for step in range(1, stage.most_steps + 1):
        warm_up = min(1.0, step / (100 if stage.gate else 30))
        decay = 1.0 if stage.gate else 1.0 - (step - 1) / stage.most_steps
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * warm_up * decay
        grown = min(1.0, step / (0.6 * stage.most_steps)) if stage.growing else 1.0
        batch = make_batch(generator, replace(stage, copies=stage.copies**grown))
        bias, bulk = attention_bias(batch)
        if penalties:
            penalties.begin(bulk, batch.noise, tokens=generator.choice((4096, 8192, 16384)))
        output = model.model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=bias, use_cache=False)
        wanted = batch.weights > 0
        logits = model.lm_head(output.last_hidden_state[wanted])
        targets, weights = batch.targets[wanted], batch.weights[wanted]
        loss = (cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        outside = None
        if penalties:
            penalty, outside = penalties.penalty()
            loss = loss + penalty
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == targets)[batch.scored[wanted]].float().mean().item()
        accuracy += (right - accuracy) / min(step, 20)
        progress.update()
        shown = "" if outside is None else f", outside {outside:.3f}"
        progress.set_postfix_str(f"{stage.name}, step {step}, accuracy {accuracy:.3f}{shown}")
        if stage.gate and step >= 20 and accuracy >= stage.gate:
            return step
        if time.monotonic() > deadline:
            raise RuntimeError(f"out of time in stage {stage.name!r} at accuracy {accuracy:.3f}")
    if stage.gate:
        raise RuntimeError(
            f"stage {stage.name!r} is at accuracy {accuracy:.3f} after {stage.most_steps} steps, its gate is "
            f"{stage.gate}: try another --seed"
        )
    return stage.most_steps


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; words and punctuation apart, upper case ignored, `<s>` in front."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, TOKEN[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def train(out: Path, seed: int, minutes: float) -> None:
    """Trains a model from scratch and writes it and its tokenizer to the folder `out`."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    start = time.monotonic()
    steps = {}
    with tqdm(desc="training", unit="step") as progress:
        for stage in CURRICULUM:
            steps[stage.name] = train_stage(model, stage, generator, progress, start + 60 * minutes)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    took = ", ".join(f"{name} {count}" for name, count in steps.items())
    print(f"wrote {out} after {sum(steps.values())} steps ({took}) and {(time.monotonic() - start) / 60:.1f} minutes")


@torch.no_grad()
def right_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: NeedlePrompt, *, window_only: bool
) -> int:
    """How many of the prompt's questions, asked one after the other, the model answers right, greedily.

    The context is always read with full attention; with `window_only`, the questions see sinks and window alone.
    """

    def encode(text: str, special: bool) -> Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids

    cache = DynamicCache(config=model.config)
    model.model(encode(prompt.context, True), past_key_values=cache, use_cache=True)
    right, last = 0, torch.empty(1, 0, dtype=torch.long)
    for question, answer in zip(prompt.questions, prompt.answers, strict=True):
        ids = torch.cat([last, encode(question, False)], dim=1)
        mask = None
        if window_only:
            past = cache.get_seq_length()
            key = torch.arange(past + ids.shape[1])
            distance = key[past:, None] - key[None, :]
            mask = ((distance >= 0) & ((distance < WINDOW) | (key < SINKS)))[None, None]
        last = model(ids, past_key_values=cache, attention_mask=mask).logits[:, -1:].argmax(-1)
        right += tokenizer.decode(last[0]) == answer
    return right


def check(folder: Path, out: Path | None, seeds: int) -> None:
    """Prints recall with full attention and with sinks and window alone; also written to the CSV file `out`."""
    model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    table = [("attention", "tokens", "questions", "right", "recall")]
    for attention, tokens in [("full", 4096), ("full", 8192), ("full", 16384), ("window", 4096)]:
        prompts = [make_prompt(tokens=tokens, seed=seed) for seed in range(seeds)]
        counts = [
            right_answers(model, tokenizer, prompt, window_only=attention == "window")
            for prompt in tqdm(prompts, f"{attention} {tokens}", leave=False)
        ]
        asked = sum(len(prompt.questions) for prompt in prompts)
        table.append((attention, tokens, asked, sum(counts), f"{sum(counts) / asked:.3f}"))
    for row in table:
        print("".join(f"{cell:>12}" for cell in row))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.needle", description="Train or check the needle model, a 0.9M-parameter test model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train from scratch: about half an hour on a CPU")
    command.add_argument(
        "--out", type=Path, default=Path("build/needle"), help="folder to write (default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=1, help="of weights and texts (default: %(default)s)")
    command.add_argument("--minutes", type=float, default=60, help="give up after this long (default: %(default)s)")
    command.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    command = commands.add_parser("check", help="measure recall with full attention, and with sinks and window alone")
    command.add_argument("--model", type=Path, default=FOLDER, help="folder to read (default: the shipped model)")
    command.add_argument("--out", type=Path, help="CSV file to write as well, e.g. eval/results/needle_model.csv")
    command.add_argument(
        "--seeds", type=int, default=8, help="prompts per row, 16 questions each (default: %(default)s)"
    )
    command.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.command == "check":
        check(arguments.model, arguments.out, arguments.seeds)
        return
    try:
        train(arguments.out, arguments.seed, arguments.minutes)
    except RuntimeError as error:
        sys.exit(f"training failed: {error}")


if __name__ == "__main__":
    main()
