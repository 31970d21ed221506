"""The command `qada`, and `python -m qada_cache`."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import KeyMoments, PrefixStore, QAdACache, __version__, files, prepare, profile, tuned_choice, tuning
from .key_moments.collecting import SCHEMES
from .key_moments.prompts import PROMPTS, choose_prompt, make_ids, read_dataset
from .models.loading import count_positions, load_model
from .report import report
from .report.asking import Request
from .serving import make_folder
from .tuning import measuring, prompts


def main(arguments: list[str] | None = None) -> int:
    """Run `qada`; returns the exit status. User errors are one line on stderr and status 1. In `tune` they are status
    2, as 1 says that no setting was kept."""
    options = _make_parser().parse_args(arguments)
    try:
        _check_options(options)
        return options.run(options) or 0
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        print(f"qada {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if options.command == "tune" else 1
    except KeyboardInterrupt:
        print(f"qada {options.command}: interrupted, nothing was written", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    about = "QAdACache: attention heads that read the long context only when they need it."
    parser = argparse.ArgumentParser(prog="qada", description=about)
    parser.add_argument("--version", action="version", version=f"qada-cache {__version__}")
    parser.set_defaults(revision=None, trust_remote_code=False)
    commands = parser.add_subparsers(dest="command", required=True)

    loading = argparse.ArgumentParser(add_help=False)
    loading.add_argument("--dtype", default="auto", help="of the model (default: the checkpoint's)")
    loading.add_argument("--device-map", help="where the model goes, e.g. auto, cuda, cpu")
    hub = argparse.ArgumentParser(add_help=False, parents=[loading])
    hub.add_argument("--revision", help="of a model of the Hub")
    hub.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    deciding = argparse.ArgumentParser(add_help=False, parents=[hub])
    deciding.add_argument("--threshold", type=float, help="QAdACache's (default: its own)")
    deciding.add_argument("--token-threshold", type=float, help="QAdACache's (default: its own)")
    deciding.add_argument("--tuned", action="store_true", default=None, help="take what qada tune kept")
    names = f"current, {', '.join(PROMPTS)}, a file, or current+ one of the others"
    deciding.add_argument("--moments", help=f"QAdACache's: {names} (default: its own)")
    which = "path, Hugging Face Hub id, or GGUF file"

    def command(name: str, run: Callable, parent: argparse.ArgumentParser, brief: str, **least: int) -> Any:
        """A command that `run` runs, whose docstring describes it; `least` are the least values of its options."""
        made = commands.add_parser(name, parents=[parent], help=brief, description=run.__doc__)
        made.set_defaults(run=run, least=least)
        return made

    add = command("moments", _collect_moments, hub, "collect a model's key moments").add_argument
    add("--model", required=True, help=which)
    add("--prompt", choices=PROMPTS, default="random-words", help="what the model reads (default: %(default)s)")
    add("--text", type=Path, help="text file to take real text or words from, instead of our article")
    add("--dataset", help="dataset to take the text from, of the Hub or a path")
    add("--subset", help="of the dataset, e.g. wikitext-103-raw-v1")
    add("--split", default="train", help="of the dataset (default: %(default)s)")
    add("--column", default="text", help="of the dataset (default: %(default)s)")
    add("--tokens", type=int, help="how many to read (default: 1024)")
    add("--seed", type=int, default=0, help="of the random words (default: %(default)s)")
    add("--scheme", choices=SCHEMES, default="auto", help="how moments become length-free (default: %(default)s)")
    add("--out", type=Path, required=True, help="safetensors file to write")

    profiling = command("profile", _profile, deciding, "measure a long prompt", prompt_tokens=1, new_tokens=1, chunk=1)
    add = profiling.add_argument
    add("--model", required=True, help=which)
    add("--prompt-tokens", type=int, default=32768, help="of the prompt (default: %(default)s)")
    add("--new-tokens", type=int, default=32, help="to decode (default: %(default)s)")
    add("--chunk", type=int, default=4096, help="tokens of a prefill pass (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompt (default: %(default)s)")
    add("--layers", action="store_true", help="print a table of the layers as well")
    add("--out", type=Path, help="CSV file to write every token to")
    add("--plot", type=Path, help="picture to draw, e.g. profile.png")

    brief = "choose a model's token_threshold and threshold by what they cost"
    tune = command("tune", _tune, hub, brief, tokens=tuning.MIN_PROMPT_TOKENS, following=1, pieces=2)
    add, budget = tune.add_argument, tune.add_mutually_exclusive_group()
    add("model", metavar="MODEL", help=which)
    add("--text", type=Path, help="text file to choose by (default: Python's help topics)")
    add("--confirm-text", type=Path, help="text file to confirm by (default: other parts of the same)")
    budget.add_argument("--kl", type=float, default=0.002, help="most KL from reading all, nats (default: 0.002)")
    budget.add_argument("--bytes", type=float, help="instead: most of the bulk's bytes that may be read, e.g. 0.08")
    add("--tokens", type=int, default=4096, help="of each piece of text (default: %(default)s)")
    add("--following", type=int, default=32, help="to decode after each (default: %(default)s)")
    add("--pieces", type=int, default=4, help="to choose by; half as many confirm (default: %(default)s)")
    add("--prefill", action="store_true", help="choose a prefill_threshold too, by what prompts lose and take")
    add("--plot", type=Path, help="picture to draw, e.g. tune.png")

    add = command("report", _report, deciding, "show what an answer read", tokens=1, new_tokens=1).add_argument
    add("model", metavar="MODEL", help=which)
    add("--text", type=Path, required=True, help="text file that the question is about")
    add("--ask", required=True, metavar="QUESTION", help="the question")
    add("--tokens", type=int, default=16384, help="of the text at most (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="of an answer at most (default: %(default)s)")
    add("--out", type=Path, required=True, help="HTML file to write")

    folder = command("serve-folder", _serve_folder, loading, "make a folder of a model's for transformers serve")
    folder.add_argument("--model", required=True, help="the model's folder")
    folder.add_argument("--out", type=Path, required=True, help="folder to make")

    stored = command("store", _store, argparse.ArgumentParser(add_help=False), "list, drop or verify stored prompts")
    stored.add_argument("action", choices=("list", "drop", "verify"), help="what to do")
    stored.add_argument("ids", nargs="*", metavar="ID", help="drop: of a model and owner, as list prints them")
    stored.add_argument("--all", action="store_true", help="drop: all of them")
    stored.add_argument("--folder", type=Path, help="of a PrefixStore (default: its own)")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what can be refused before minutes of loading and measuring."""
    for name in ("out", "plot"):
        path = getattr(options, name, None)
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"--{name}: there is no folder {path.parent}")
        if path is not None and path.is_dir() and options.command != "serve-folder":
            raise IsADirectoryError(f"--{name}: {path} is a folder, name a file in it")
    if getattr(options, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'qada-cache[plot]'")
    if getattr(options, "prefill", False) and options.bytes is not None:
        raise ValueError("--prefill goes by KL, of which --bytes says nothing: give --kl")
    for name, least in options.least.items():
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")


def _load(options: argparse.Namespace, *tokens: str) -> tuple[Any, Any]:
    """Model and tokenizer; ValueError, if the model has fewer positions than these options take together."""
    given = {name: getattr(options, name) for name in ("dtype", "device_map", "revision", "trust_remote_code")}
    model, tokenizer = load_model(options.model, **given)
    longest, together = count_positions(model), sum(getattr(options, name) for name in tokens)
    if longest is not None and together > longest:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in tokens)
        raise ValueError(f"{named} come to {together} tokens, and the model has {longest} positions")
    return model, tokenizer


def _collect_moments(options: argparse.Namespace) -> None:
    """Collect the key moments of a model on a prompt, for QAdACache(moments=FILE). QAdACache(model, moments=NAME) does
    so by itself; this command takes other texts, and makes a file to share."""
    text = _choose_text(options)
    given = {name: getattr(options, name) for name in ("tokens", "seed", "scheme")}
    moments = KeyMoments.collect(*_load(options), options.prompt, text=text, **given)
    moments.save(options.out)
    layers, kv_heads, dim = moments.shape
    lengths = f"bulks of {', '.join(map(str, moments.lengths))} tokens" if moments.lengths else "bulks of any length"
    print(
        f"wrote {options.out}: {layers} layers, {kv_heads} KV heads, {dim} dims, for {lengths}, from {moments.tokens} "
        f"tokens ({moments.prompt})"
    )


def _choose_text(options: argparse.Namespace) -> str | None:
    """The text the user named, if any."""
    if options.text and options.dataset:
        raise ValueError("give --text or --dataset, not both")
    if not options.dataset:
        return _read_text(options.text, "--text") if options.text else None
    characters = 16 * (options.tokens or 1024)  # more than enough for as many tokens
    return read_dataset(options.dataset, options.subset, options.split, options.column, characters=characters)


def _read_text(path: Path, name: str) -> str:
    """The text file that the option `name` gives."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is no text file in UTF-8") from error


def _profile(options: argparse.Namespace) -> None:
    """Measure memory and time of a long prompt of random words, layer by layer and token by token, with DynamicCache
    and then with QAdACache."""
    model, tokenizer = _load(options, "prompt_tokens", "new_tokens")
    cache = _read_cache_options(options)
    prepare(model, tokenizer, **cache)
    words = choose_prompt("random-words", tokenizer)
    ids = make_ids(words, model=model, tokenizer=tokenizer, tokens=options.prompt_tokens, seed=options.seed)[None]
    if (asked := QAdACache(model, **cache).options).tuned:
        print(f"QAdACache takes the setting that qada tune kept: {tuned_choice.describe(asked)}")
    found = profile.profile(model, ids, new_tokens=options.new_tokens, chunk=options.chunk, **cache)
    _print_table([each.summarize() for each in found])
    if options.layers:
        _print_table(profile.make_layer_table(found))
    if options.out:
        profile.write_tokens(found, options.out)
    if options.plot:
        profile.plot(found, options.plot)


def _read_cache_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those of QAdACache that were given."""
    given = {name: getattr(options, name) for name in ("moments", "threshold", "token_threshold", "tuned")}
    return {name: value for name, value in given.items() if value is not None}


def _report(options: argparse.Namespace) -> None:
    """Ask a model about a document, with DynamicCache and with QAdACache. Write one page that shows both answers, what
    they cost, and which words each layer and head read. It loads nothing from elsewhere."""
    request = Request(
        _read_text(options.text, "--text"), options.text.name, options.ask, options.tokens, options.new_tokens
    )
    model, tokenizer = _load(options)
    name = Path(options.model).resolve().name if Path(options.model).exists() else options.model
    page = report(model, tokenizer, request, name=name, **_read_cache_options(options)).encode()
    files.write(options.out, [page])
    print(f"wrote {options.out}, {len(page) / 2**20:.1f} MiB")


def _tune(options: argparse.Namespace) -> int:
    """Measure on a model and a text what settings of both thresholds lose and read. Choose one within a budget, confirm
    it on other text, and keep it, for QAdACache(model, tuned=True)."""
    budget = tuning.Budget(options.kl if options.bytes is None else None, options.bytes)
    text = _read_text(options.text, "--text") if options.text else measuring.read_default_text()
    other = _read_text(options.confirm_text, "--confirm-text") if options.confirm_text else None
    model, tokenizer = _load(options, "tokens", "following")
    pieces = measuring.cut_both(text, other, tokenizer, options.pieces, options.tokens, options.following)
    prepare(model, tokenizer)
    if options.prefill:
        prompts.check_selects(model, pieces[0][0].prompt)
    found = tuning.tune(model, *pieces, budget)
    _print_table(tuning.make_rows(found), *tuning.write_sentences(found))
    read = prompts.tune_prompts(model, *pieces, options.kl) if options.prefill else None
    if read is not None:
        _print_table(prompts.make_table(read), *prompts.write_sentences(read))
    if options.plot:
        tuning.plot(found, options.plot)
    by_hand = "A setting of a table can be given by hand: QAdACache(model, token_threshold=..., threshold=...)"
    if not found.confirmed:
        print(f"Nothing was kept. {by_hand}")
        return 1
    try:
        path = tuning.keep(model, found, read)
    except (OSError, LookupError) as error:  # a failure after minutes of measuring is no user error
        print(f"The choice cannot be kept ({error}). {by_hand}")
        return 1
    print(
        f"Kept in {path} for {options.model} in {model.dtype}: QAdACache(model, tuned=True) goes by it, and so do "
        "qada profile --tuned, and lm-eval with cache_tuned=True."
    )
    return 0


def _serve_folder(options: argparse.Namespace) -> None:
    """Make a folder for `transformers serve --trust-remote-code` that links to a model's files and holds no code but
    our generate.py. Collect key moments and compile kernels ahead, in the dtype and on the device that the model will
    be served with."""
    make_folder(options.model, options.out)
    options.model = str(options.out)
    prepare(*_load(options))
    print(f"made {options.out}: transformers serve {options.out} --trust-remote-code --log-level info")


def _store(options: argparse.Namespace) -> int:
    """List a PrefixStore's prompts by model and owner, drop some or all of them, or read every file and remove damaged
    ones (status 1 if there were any)."""
    store = PrefixStore(options.folder)
    if options.action != "drop" and (options.ids or options.all):
        raise ValueError(f"{options.action} is of all stored prompts and takes no ID")
    if options.action == "drop" and bool(options.ids) == options.all:
        raise ValueError("drop takes the IDs that `qada store list` prints, or --all")
    try:
        if options.action == "drop":
            known = {each.id for each in store.prompts()}
            if missing := set(options.ids) - known:
                raise ValueError(f"there are no stored prompts {', '.join(sorted(missing))}: see `qada store list`")
            print(f"removed {store.drop(None if options.all else options.ids)} files")
            return 0
        if options.action == "verify":
            whole, wrong = store.verify()
            print(*wrong, f"{whole} files are whole, {len(wrong)} were not", sep="\n")
            return int(bool(wrong))
        found = store.prompts()
    except FileNotFoundError:
        found = []
    if found:
        _print_table([each.make_row() for each in found])
    else:
        print("no stored prompts")
    return 0


def _print_table(rows: list[dict[str, str]], *sentences: str) -> None:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(*("  ".join(map(str.rjust, line, widths)) for line in lines), *sentences, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
