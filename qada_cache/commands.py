"""The commands of `qada`, as functions of parsed arguments."""

import argparse
import shlex
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from . import files, profile, tuned_choice, tuning
from .cache import QAdACache
from .key_moments import KeyMoments
from .key_moments.defaults import CURRENT, split_sources
from .key_moments.prompts import choose_prompt, make_ids, read_dataset
from .models.loading import count_positions, load_model
from .names import PROMPTS
from .prefix_store import PrefixStore
from .prefix_store.folder import FOLDER
from .preparing import prepare
from .report import report
from .report.asking import Request
from .serving import make_folder
from .state import Options
from .tuning import measuring, prompts


def _load(options: argparse.Namespace, *tokens: str) -> tuple[Any, Any]:
    """Model and tokenizer; ValueError, if the options named in `tokens` add up to more than the model's positions."""
    given = {name: getattr(options, name) for name in ("dtype", "device_map", "revision", "trust_remote_code")}

    def check(config: PreTrainedConfig) -> None:
        longest, together = count_positions(config), sum(getattr(options, name) or 0 for name in tokens)
        if longest is not None and together > longest:
            named = " and ".join(f"--{name.replace('_', '-')}" for name in tokens)
            raise ValueError(f"{named} come to {together} tokens, and the model has {longest} positions")

    return load_model(options.model, check=check, **given)


def collect_moments(options: argparse.Namespace) -> None:
    """`qada moments`."""
    text = _choose_text(options)
    given = {name: getattr(options, name) for name in ("tokens", "seed", "scheme")}
    moments = KeyMoments.collect(*_load(options, "tokens"), options.prompt, text=text, **given)
    moments.save(options.out)
    layers, kv_heads, dim = moments.shape
    lengths = f"bulks of {', '.join(map(str, moments.lengths))} tokens" if moments.lengths else "bulks of any length"
    print(
        f"wrote {options.out}: {layers} layers, {kv_heads} KV heads, {dim} dims, for {lengths}, from {moments.tokens} "
        f"tokens ({moments.prompt})"
    )


def _choose_text(options: argparse.Namespace) -> str | None:
    """The text the user named, if any."""
    if not options.dataset:
        return _read_text(options.text, "--text") if options.text else None
    characters = 16 * (options.tokens or 1024)  # more than enough for as many tokens
    return read_dataset(options.dataset, options.subset, options.split, options.column, characters=characters)


def _read_text(path: Path, name: str) -> str:
    """The text file that the option `name` gives."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is no text file in UTF-8") from error
    if not text.strip():
        raise ValueError(f"{name}: {path} is empty")
    return text


def measure_profile(options: argparse.Namespace) -> None:
    """`qada profile`."""
    cache = _read_cache_options(options)
    model, tokenizer = _load(options, "prompt_tokens", "new_tokens")
    prepare(model, tokenizer, **cache)
    words = choose_prompt("random-words", tokenizer)
    ids = make_ids(words, model=model, tokenizer=tokenizer, tokens=options.prompt_tokens, seed=options.seed)[None]
    if (asked := QAdACache(model, **cache).options).tuned:
        print(f"QAdACache takes the setting that qada tune kept: {tuned_choice.describe(asked)}")
    profiles = profile.profile(model, ids, new_tokens=options.new_tokens, chunk=options.chunk, **cache)
    _print_table([each.summarize() for each in profiles])
    if options.layers:
        _print_table(profile.make_layer_table(profiles))
    if options.out:
        profile.write_tokens(profiles, options.out)
    if options.plot:
        profile.plot(profiles, options.plot)


def _read_cache_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of QAdACache that the user gave. Errors as QAdACache raises them for any model."""
    given = {name: getattr(options, name) for name in ("moments", "threshold", "token_threshold", "tuned")}
    given = {name: value for name, value in given.items() if value is not None}
    tuned_choice.check_left_out(Options(**given))
    _, other = split_sources(given.get("moments", CURRENT))
    if other is not None and other not in PROMPTS:
        KeyMoments.load(str(other))
    return given


def make_report(options: argparse.Namespace) -> None:
    """`qada report`."""
    request = Request(
        _read_text(options.text, "--text"), options.text.name, options.ask, options.tokens, options.new_tokens
    )
    cache = _read_cache_options(options)
    model, tokenizer = _load(options)
    name = Path(options.model).resolve().name if Path(options.model).exists() else options.model
    page = report(model, tokenizer, request, name=name, **cache).encode()
    files.write(options.out, [page])
    print(f"wrote {options.out}, {len(page) / 2**20:.1f} MiB")


def choose_setting(options: argparse.Namespace) -> int:
    """`qada tune`; 1, if nothing was kept."""
    if options.tokens < tuning.MIN_PROMPT_TOKENS:
        raise ValueError(f"--tokens must be at least {tuning.MIN_PROMPT_TOKENS}, got {options.tokens}")
    budget = tuning.Budget(options.kl if options.bytes is None else None, options.bytes)
    text = _read_text(options.text, "--text") if options.text else measuring.read_default_text()
    other = _read_text(options.confirm_text, "--confirm-text") if options.confirm_text else None
    tuned_choice.check_folder()
    model, tokenizer = _load(options, "tokens", "following")
    pieces = measuring.cut_both(text, other, tokenizer, options.pieces, options.tokens, options.following)
    prepare(model, tokenizer)
    if options.prefill:
        prompts.check_selects(model, pieces[0][0].prompt)
    outcome = tuning.tune(model, *pieces, budget)
    _print_table(tuning.make_rows(outcome), *tuning.write_sentences(outcome))
    prefill = prompts.tune_prompts(model, *pieces, options.kl) if options.prefill else None
    if prefill is not None:
        _print_table(prompts.make_table(prefill), *prompts.write_sentences(prefill))
    status = _keep_choice(options.model, model, outcome, prefill)
    if options.plot:  # last: a full disk must not lose a choice that took minutes to measure
        tuning.plot(outcome, options.plot)
    return status


def _keep_choice(name: str, model: Any, outcome: tuning.Outcome, prefill: prompts.PromptOutcome | None) -> int:
    """Save the setting that was chosen for the model of this name, and print where; 1, if nothing was saved."""
    by_hand = "A setting of a table can be given by hand: QAdACache(model, token_threshold=..., threshold=...)"
    if not outcome.confirmed:
        print(f"Nothing was kept. {by_hand}")
        return 1
    try:
        path = tuning.keep(model, outcome, prefill)
    except (OSError, LookupError) as error:  # a failure after minutes of measuring is no user error
        print(f"The choice cannot be kept ({error}). {by_hand}")
        return 1
    print(
        f"Kept in {path} for {name} in {model.dtype}: QAdACache(model, tuned=True) goes by it, and so do "
        "qada profile --tuned, and lm-eval with cache_tuned=True."
    )
    return 0


def make_serve_folder(options: argparse.Namespace) -> None:
    """`qada serve-folder`."""
    make_folder(options.model, options.out)
    source, options.model = options.model, str(options.out)
    try:
        prepare(*_load(options))
    except (OSError, ValueError) as error:
        shutil.rmtree(options.out)
        raise ValueError(f"no folder was made of {source}: {error}") from error
    except BaseException:  # an interruption, too: a folder that is left would make the next try fail
        shutil.rmtree(options.out)
        raise
    served = shlex.quote(str(options.out))
    print(f"made {options.out}: transformers serve {served} --trust-remote-code --log-level info")


def manage_store(options: argparse.Namespace) -> int:
    """`qada store`; 1, if files were damaged."""
    store = PrefixStore(options.folder)
    if options.action != "drop" and (options.ids or options.all):
        raise ValueError(f"{options.action} is of all stored prompts and takes no ID")
    if options.action == "drop" and bool(options.ids) == options.all:
        raise ValueError("drop takes the IDs that `qada store list` prints, or --all")
    try:
        if options.action == "drop":
            stored = {each.id for each in store.prompts()}
            if missing := set(options.ids) - stored:
                raise ValueError(f"there are no stored prompts {', '.join(sorted(missing))}: see `qada store list`")
            print(f"removed {store.drop(None if options.all else options.ids)} files")
            return 0
        if options.action == "verify":
            whole, wrong = store.verify()
            print(*wrong, f"{whole} files are whole, {len(wrong)} were not", sep="\n")
            return int(bool(wrong))
        prompts_in_store = store.prompts()
    except FileNotFoundError:
        print(f"no stored prompts: there is no folder {store.folder or files.find_home() / FOLDER}")
        return 0
    if prompts_in_store:
        _print_table([each.make_row() for each in prompts_in_store])
    else:
        print("no stored prompts")
    return 0


def _print_table(rows: list[dict[str, str]], *sentences: str) -> None:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(*("  ".join(map(str.rjust, line, widths)) for line in lines), *sentences, sep="\n")


RUN = {
    "moments": collect_moments,
    "profile": measure_profile,
    "tune": choose_setting,
    "report": make_report,
    "serve-folder": make_serve_folder,
    "store": manage_store,
}
