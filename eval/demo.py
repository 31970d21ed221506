"""The main job on a real pretrained model: read a long document, then chat about it; `python -m eval.demo`.

By default SmolLM2-135M-Instruct reads a part of the Python language reference in which facts were planted, and is asked
about them in several turns, four times: with transformers' DynamicCache, with sinks and window only, and with
QAdACache, whose heads read what matters of the long context, or, as in the paper, all of it. Prints every answer, and
what each cache read and holds. Exits with 1 if QAdACache misses a planted fact that DynamicCache answers. Nothing is
precomputed. `qada report` shows which tokens an answer read.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten, wrap

import transformers
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from eval.shared import conversation, language_model
from eval.shared.conversation import Form, Told, converse, fit
from eval.shared.tables import align, make_parser, table_of, to_count, to_share, write
from eval.shared.texts import ABOUT_THE_REFERENCE, Turn, draw_facts, read_reference
from qada_cache import QAdACache, restore_attention
from qada_cache.machine import describe_machine
from qada_cache.models.loading import count_positions

TOKENS = 6000  # of the default document: what four prefills on two cores read in a minute or so
WARM_UP_TOKENS = 600
WIDTH = 110
FULL, WINDOW, WHOLE, OURS = "DynamicCache", "sinks + window", "whole heads", "QAdACache"

Caches = dict[str, Callable[[], DynamicCache]]


def make_caches(model: PreTrainedModel, options: argparse.Namespace) -> Caches:
    """What makes the four caches, by method."""
    chosen = {} if options.threshold is None else {"threshold": options.threshold}
    bars = sys.stderr.isatty()  # they would flood a log
    return {
        FULL: lambda: DynamicCache(config=model.config),
        WINDOW: lambda: QAdACache(model, criterion="local", progress=bars),
        WHOLE: lambda: QAdACache(model, token_threshold=0.0, progress=bars, **chosen),
        OURS: lambda: QAdACache(model, progress=bars, **chosen),
    }


def judge(turns: list[Turn], told: dict[str, Told]) -> tuple[dict[str, int], list[str]]:
    """Right answers by method, of the planted facts; and the questions QAdACache alone got wrong of two."""
    right = {
        method: [turn.is_right(answer) for turn, answer in zip(turns, one.answers, strict=True)]
        for method, one in told.items()
    }
    lost = [
        turn.question for turn, full, ours in zip(turns, right[FULL], right[OURS], strict=True) if full and not ours
    ]
    return {method: sum(answers) for method, answers in right.items()}, lost


def _format_share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"  # no bulk to decide about


def make_table(turns: list[Turn], told: dict[str, Told]) -> list[dict[str, str]]:
    """What was measured as text cells, one method a row."""
    right, _ = judge(turns, told)
    facts = sum(bool(turn.fact) for turn in turns)
    ours, rows = told[OURS], []
    whole = math.nan if ours.stats is None else ours.stats.dense_bulk_bytes / ours.generated
    for method, one in told.items():
        same = sum(ours == full for ours, full in zip(one.answers, told[FULL].answers, strict=True))
        read, read_bytes = 1.0, whole  # DynamicCache's heads read everything for every token
        if one.stats is not None:
            read = one.stats.read_share
            read_bytes = (one.stats.bulk_read_bytes + one.stats.sketch_read_bytes) / one.generated
        rows.append(
            {
                "method": method,
                "right": f"{right[method]}/{facts}" if facts else "-",
                "same": f"{same}/{len(turns)}",
                "bulk read": _format_share(read),
                "device MiB": f"{one.device_bytes / 2**20:.1f}",
                "host MiB": f"{one.host_bytes / 2**20:.1f}",
                "read MiB/token": f"{read_bytes / 2**20:.2f}",
                "prefill s": f"{one.prefill_seconds:.1f}",
                "tokens/s": f"{one.decoded / one.decode_seconds:.1f}" if one.decoded else "-",
            }
        )
    return rows


def show(text: str = "", *, indent: str = "", first: str | None = None) -> None:
    """Print a paragraph, wrapped."""
    lines = wrap(text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent)
    print("\n".join(lines))


def show_answers(turns: list[Turn], told: dict[str, Told], text: str) -> None:
    """Print every question, and below it what each method answered."""
    widest = max(map(len, told))
    for number, turn in enumerate(turns, start=1):
        print()
        show(turn.question, indent="    ", first=f"{number:2}. ")
        if turn.fact:
            depth = text.index(turn.fact) / len(text)
            show(f'Planted {depth:.0%} into the text: "{turn.fact}"', indent="    ")
        if turn.begun:
            show(f'Answer begun for the model: "{turn.begun} ..."', indent="    ")
        for method, one in told.items():
            answer = one.answers[number - 1]
            verdict = ("right  " if turn.is_right(answer) else "wrong  ") if turn.fact else ""
            label = f"    {method:{widest}}  {verdict}"
            show(answer or "(nothing)", indent=" " * len(label), first=label)


def show_setting(model: PreTrainedModel, options: argparse.Namespace, form: Form, tokens: int, ours: QAdACache) -> None:
    """Print what is about to be run."""
    config, asked = model.config.get_text_config(), ours.options
    show(
        f"Model: {_shorten_name(options)}, {model.num_parameters() / 1e6:.0f}M parameters, {config.num_hidden_layers} "
        f"layers, {config.num_attention_heads} query heads, {config.num_key_value_heads} KV heads, {model.dtype} on "
        f"{model.device}; {'its chat template' if form.chat else 'no chat template, so plain questions'}."
    )
    title = options.document.name if options.document else "a part of the Python language reference"
    show(f"Document: {title}, {tokens} tokens with all that comes before the first question.")
    show(f"QAdACache: {repr(ours).split('; ')[0]}), group_rule {asked.group_rule}.")
    show("Whole heads: the same with token_threshold 0, as in the paper.")
    if asked.bulk_bits < 16:
        show(f"QAdACache holds distant tokens in {asked.bulk_bits} bits a value, the other methods as they were made.")
    show(f"A local head reads {asked.local_tokens} tokens: {asked.sink_tokens} sinks and a window of {asked.window}.")
    if model.device.type == "cpu":
        show("On a CPU, host and device are one memory: host is where the bulk would lie.")


def _shorten_name(options: argparse.Namespace) -> str:
    """The model's, without the folders it lies in."""
    where = language_model.find_source(options.model)
    if "gguf_file" in where:
        return Path(where["gguf_file"]).stem
    return Path(options.model).resolve().name if Path(options.model).exists() else options.model


def _make_parser() -> argparse.ArgumentParser:
    parser = make_parser("demo", __doc__)
    add = parser.add_argument
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--dtype", choices=language_model.DTYPES, default="auto", help="(default: %(default)s)")
    language_model.add_device(parser)
    add("--document", type=Path, help="a text file to read instead of the Python language reference")
    add("--ask", action="append", default=[], metavar="QUESTION", help="ask this; may be given several times")
    add("--facts", action="store_true", help="plant facts and ask for them with --document or --ask as well")
    add("--tokens", type=to_count, help=f"length to cut the document to (default: {TOKENS}, or the whole --document)")
    add("--new-tokens", type=to_count, default=32, help="an answer's most (default: %(default)s)")
    add("--threshold", type=to_share, help="QAdACache's (default: its own)")
    add("--seed", type=int, default=0, help="of the planted facts (default: %(default)s)")
    add("--out", type=table_of("method", "bulk read", "prefill s"), help="CSV file to write the table to as well")
    return parser


def _read_text(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The document, whole."""
    if options.document is None:
        return read_reference()
    try:
        text = options.document.read_text(encoding="utf-8").strip()
    except OSError as error:
        parser.error(f"--document: {options.document}: {error.strerror}")
    except UnicodeDecodeError:
        parser.error(f"--document: {options.document} is not a text file in UTF-8")
    if not text:
        parser.error(f"--document: {options.document} is empty")
    return text


def _choose_turns(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Turn]:
    """The questions, in order."""
    if options.document and not (options.ask or options.facts):
        parser.error("--document needs questions: give --ask, or --facts to plant some facts in it and ask for them")
    if not all(question.strip() for question in options.ask):
        parser.error("--ask: a question is empty")
    plain_run = not (options.document or options.ask)
    turns = draw_facts(options.seed) if options.facts or plain_run else []
    return turns + (list(ABOUT_THE_REFERENCE) if plain_run else [Turn(question) for question in options.ask])


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    text, turns = _read_text(parser, options), _choose_turns(parser, options)
    transformers.logging.disable_progress_bar()  # ours is the one to watch
    with language_model.check_loading(parser):
        model, tokenizer = language_model.load(options.model, dtype=options.dtype, device=options.device)
        QAdACache(model)  # says so if it does not support the model

    facts = any(turn.fact for turn in turns)
    form = Form(tokenizer, conversation.WITH_FACTS if facts else conversation.WITHOUT_FACTS)
    room = _find_room(parser, model, form, turns, options)
    try:
        opening, shown, cut = fit(form, text, turns, tokens=room)
    except ValueError as error:
        parser.error(f"--tokens: {error}")
    made = make_caches(model, options)
    show_setting(model, options, form, len(opening), made[OURS]())  # type: ignore[arg-type]  # the one that is ours
    if options.document and cut:
        show(f"The document was cut: {room} tokens is {'what --tokens asks for' if options.tokens else 'what fits'}.")
    told = run(model, form, opening, turns, made, options)
    show_answers(turns, told, shown)
    rows = make_table(turns, told)
    print(f"\n{align(rows)}\n")
    show(
        "Each method was asked on its own earlier answers, as in any chat. Same: answers that are DynamicCache's to "
        "the letter. Bulk read: of the bytes of stored keys and values, sinks and the newest left out, those read, and "
        "those of the sketch that selects them. MiB are 2^20 bytes, those read per generated token. Tokens/s: after "
        "an answer's first."
    )
    if options.out:
        write(
            options.out,
            rows,
            model=_shorten_name(options),
            tokens=len(opening),
            seed=options.seed,
            machine=describe_machine(),
        )
    _, lost = judge(turns, told)
    if lost:
        print(f"\nFAILED: QAdACache missed {len(lost)} that DynamicCache answers:", *lost, sep="\n  ")
    return int(bool(lost))


def _find_room(
    parser: argparse.ArgumentParser, model: PreTrainedModel, form: Form, turns: list[Turn], options: argparse.Namespace
) -> int:
    """How many tokens may come before the first question, so that all of the chat fits the model's positions."""
    chat = sum(len(form.make_turn(turn, after=-1)) + options.new_tokens for turn in turns)
    positions = count_positions(model.config) or sys.maxsize
    room = positions - chat
    if options.tokens and options.tokens > room:
        parser.error(f"--tokens: {options.tokens} and {chat} for the chat are more than the model's {positions}")
    if room < 1:
        parser.error(f"the questions and answers alone take {chat} tokens, the model has {positions} positions")
    if options.tokens:
        return options.tokens
    return room if options.document else min(TOKENS, room)


def run(
    model: PreTrainedModel, form: Form, opening: list[int], turns: list[Turn], made: Caches, options: argparse.Namespace
) -> dict[str, Told]:
    """Every method's chat, one after the other."""
    told = {}
    form_of_bar = "{percentage:3.0f}%|{bar:30}| {desc}"
    # A log gets a line for each method instead.
    with tqdm(total=2 * len(made) * (1 + len(turns)), unit="step", bar_format=form_of_bar, disable=None) as bar:

        def tell(doing: str) -> None:
            bar.update()
            bar.set_description_str(f"{method}: {shorten(doing, 60)}")

        # First a beginning of the document and very short answers, untimed: what happens once, such as building
        # kernels for a question's number of tokens, happens here.
        for method, make in made.items():  # noqa: B007  # `tell` names it
            converse(model, form, opening[:WARM_UP_TOKENS], turns, make(), new_tokens=2, tell=tell)
        for method, make in made.items():
            restore_attention(model)  # DynamicCache is to run without ours before the model's own
            if bar.disable:
                print(f"{method} reads and answers ...", file=sys.stderr, flush=True)
            told[method] = converse(model, form, opening, turns, make(), new_tokens=options.new_tokens, tell=tell)
        bar.set_description_str("done")
    return told


if __name__ == "__main__":
    sys.exit(main())
