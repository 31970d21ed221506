"""The arguments of the command `qada`. Nothing here imports torch, so that help and typing errors come at once."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from . import __version__
from .names import PROMPTS, SCHEMES, WITHOUT_TEXT

# Each command, in a line, and in full.
COMMANDS = {
    "moments": (
        "collect a model's key moments",
        "Collect the key moments of a model on a prompt, for QAdACache(moments=FILE). QAdACache(model, moments=NAME) "
        "does so by itself; this command takes other texts, and makes a file to share.",
    ),
    "profile": (
        "measure a long prompt",
        "Measure memory and time of a long prompt of random words, layer by layer and token by token, with "
        "DynamicCache and then with QAdACache.",
    ),
    "tune": (
        "choose a model's token_threshold and threshold by what they cost",
        "Measure on a model and a text what settings of both thresholds lose and read. Choose one within a budget, "
        "confirm it on other text, and keep it, for QAdACache(model, tuned=True).",
    ),
    "report": (
        "show what an answer read",
        "Ask a model about a document, with DynamicCache and with QAdACache. Write one page that shows both answers, "
        "what they cost, and which words each layer and head read. It loads nothing from elsewhere.",
    ),
    "serve-folder": (
        "make a folder of a model's for transformers serve",
        "Make a folder for `transformers serve --trust-remote-code` that links to a model's files and holds no code "
        "but our generate.py. Collect key moments and compile kernels ahead, in the dtype and on the device that the "
        "model will be served with.",
    ),
    "store": (
        "list, drop or verify stored prompts",
        "List a PrefixStore's prompts by model and owner, drop some or all of them, or read every file and remove "
        "damaged ones (status 1 if there were any).",
    ),
}
WHICH = "path, Hugging Face Hub id, or GGUF file"


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    about = "QAdACache: attention heads that read the long context only when they need it."
    parser = _Parser(prog="qada", description=about)
    parser.add_argument("--version", action="version", version=f"qada-cache {__version__}")
    parser.set_defaults(revision=None, trust_remote_code=False)
    commands: Any = parser.add_subparsers(dest="command", required=True)

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

    def command(name: str, parent: argparse.ArgumentParser, which: str = WHICH, **least: int) -> Any:
        """A command about a model, which is told by its place or by `--model`; `least` are the least values of its
        options."""
        brief, whole = COMMANDS[name]
        subparser = commands.add_parser(name, parents=[parent], help=brief, description=whole)
        subparser.set_defaults(least=least, parser=subparser, which=which)
        if which:
            told: dict[str, Any] = {"metavar": "MODEL", "action": _Once}
            subparser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=which, **told)
            subparser.add_argument("--model", help="the same", **told)
        return subparser

    add = command("moments", hub, tokens=1).add_argument
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

    add = command("profile", deciding, prompt_tokens=1, new_tokens=1, chunk=1).add_argument
    add("--prompt-tokens", type=int, default=32768, help="of the prompt (default: %(default)s)")
    add("--new-tokens", type=int, default=32, help="to decode (default: %(default)s)")
    add("--chunk", type=int, default=4096, help="tokens of a prefill pass (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompt (default: %(default)s)")
    add("--layers", action="store_true", help="print a table of the layers as well")
    add("--out", type=Path, help="CSV file to write every token to")
    add("--plot", type=Path, help="picture to draw, e.g. profile.png")

    tune = command("tune", hub, following=1, pieces=2)
    add, budget = tune.add_argument, tune.add_mutually_exclusive_group()
    add("--text", type=Path, help="text file to choose by (default: Python's help topics)")
    add("--confirm-text", type=Path, help="text file to confirm by (default: other parts of the same)")
    budget.add_argument("--kl", type=float, default=0.002, help="most KL from reading all, nats (default: 0.002)")
    budget.add_argument("--bytes", type=float, help="instead: most of the bulk's bytes that may be read, e.g. 0.08")
    add("--tokens", type=int, default=4096, help="of each piece of text (default: %(default)s)")
    add("--following", type=int, default=32, help="to decode after each (default: %(default)s)")
    add("--pieces", type=int, default=4, help="to choose by; half as many confirm (default: %(default)s)")
    add("--prefill", action="store_true", help="choose a prefill_threshold too, by what prompts lose and take")
    add("--plot", type=Path, help="picture to draw, e.g. tune.png")

    add = command("report", deciding, tokens=1, new_tokens=1).add_argument
    add("--text", type=Path, required=True, help="text file that the question is about")
    add("--ask", required=True, metavar="QUESTION", help="the question")
    add("--tokens", type=int, default=16384, help="of the text at most (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="of an answer at most (default: %(default)s)")
    add("--out", type=Path, required=True, help="HTML file to write")

    folder = command("serve-folder", loading, which="the model's folder")
    folder.add_argument("--out", type=Path, required=True, help="folder to make")

    stored = command("store", argparse.ArgumentParser(add_help=False), which="")
    stored.add_argument("action", choices=("list", "drop", "verify"), help="what to do")
    # With a default, as argparse would name it among what is missing.
    stored.add_argument(
        "ids", nargs="*", default=(), metavar="ID", help="drop: of a model and owner, as list prints them"
    )
    stored.add_argument("--all", action="store_true", help="drop: all of them")
    stored.add_argument("--folder", type=Path, help="of a PrefixStore (default: its own)")
    return parser


class _Parser(argparse.ArgumentParser):
    """Takes the IDs of `qada store` behind options, too: argparse of Python 3.11 takes none that follow a FOLDER."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, rest = super().parse_known_args(args, namespace)
        if hasattr(options, "ids"):
            options.ids = [*options.ids, *(each for each in rest if not each.startswith("-"))]
            rest = [each for each in rest if each.startswith("-")]
        return options, rest


class _Once(argparse.Action):
    """Takes a value once: another one in another place would replace the first without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if (known := getattr(namespace, self.dest, None)) not in (None, values):
            parser.error(f"give one MODEL, not {known} and {values}")
        setattr(namespace, self.dest, values)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what can be refused before seconds of importing, and minutes of loading and measuring: ValueError or
    OSError. argparse's own error names a missing argument."""
    if getattr(options, "model", "") is None:
        options.parser.error("the following arguments are required: MODEL (" + options.which + ")")
    if options.command == "moments":
        _check_source(options)
    for name in ("text", "confirm_text"):
        path = getattr(options, name, None)
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')}: there is no file {path}")
    if not getattr(options, "ask", "why").strip():
        raise ValueError("--ask: the question is empty: give a text")
    for name in ("out", "plot"):
        path = getattr(options, name, None)
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"--{name}: there is no folder {path.parent}")
        if path is not None and path.is_dir() and options.command != "serve-folder":
            raise IsADirectoryError(f"--{name}: {path} is a folder, name a file in it")
    _check_places(options)
    if (picture := getattr(options, "plot", None)) is not None:
        _check_picture(picture)
    if getattr(options, "prefill", False) and options.bytes is not None:
        raise ValueError("--prefill goes by KL, of which --bytes says nothing: give --kl")
    for name, least in options.least.items():
        if (given := getattr(options, name)) is not None and given < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {given}")


def _check_source(options: argparse.Namespace) -> None:
    """Raise ValueError, if the options of `qada moments` name two texts, or one that nothing reads."""
    if options.dataset and options.text:
        raise ValueError("give --text or --dataset, not both")
    if options.subset and not options.dataset:
        raise ValueError("--subset is of a --dataset: give one")
    if options.prompt in WITHOUT_TEXT and (options.dataset or options.text):
        raise ValueError(f"--prompt {options.prompt} reads no text: leave out --text and --dataset, or name another")


def _check_places(options: argparse.Namespace) -> None:
    """Raise ValueError, if a file would be written over one that is read, or if texts that should differ are one."""
    named = ((name, getattr(options, name, None)) for name in ("model", "text", "confirm_text", "out", "plot"))
    places = {name: Path(path).resolve() for name, path in named if path is not None}
    for name in places.keys() & {"out", "plot"}:
        for other in places.keys() - {name}:
            if places[name] == places[other]:
                raise ValueError(f"--{name} would write over --{other.replace('_', '-')}: name another file")
    if "text" in places and places["text"] == places.get("confirm_text"):
        raise ValueError("--confirm-text is --text: a choice is confirmed by other text")


def _check_picture(path: Path) -> None:
    """Raise ValueError, if nothing can draw a picture of this name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'qada-cache[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.filetypes
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot: matplotlib draws no {path.suffix} files, but {', '.join(sorted(kinds))}")
