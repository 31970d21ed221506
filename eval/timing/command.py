"""What the commands that time a model have in common: their options, the model these ask for, and the report."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.models.language_model import label
from eval.models.workloads import MODEL_HELP, load, slug
from eval.reporting.tables import machine, plain, write


def timing_parser(name: str, description: str, *, table: str) -> argparse.ArgumentParser:
    """A parser for `python -m eval.NAME`; `table` is what `--out` says is written."""
    parser = argparse.ArgumentParser(
        prog=f"python -m eval.{name}", description=description.split("\n\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help=f"{MODEL_HELP} (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--out", type=Path, help=f"folder to write {table} to")
    return parser


def load_model(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, tokens: int
) -> tuple[PreTrainedModel, Callable]:
    """As `workloads.load`, for contexts of up to `tokens` tokens; ends the program where options make no sense."""
    if options.out and not options.out.is_dir():
        parser.error(f"--out: there is no folder {options.out}")
    try:
        return load(
            options.model,
            dtype=getattr(torch, options.dtype),
            device=torch.device(options.device),
            positions=tokens + 1024,
        )
    except (OSError, ValueError) as error:
        parser.error(f"--model: {error}")


def report(options: argparse.Namespace, rows: list[dict[str, Any]], name: str, **everywhere: object) -> Path | None:
    """Print the table, and write it to `NAME-MODEL-DEVICE.csv` if a folder was given: the file, else None.

    `everywhere` are columns with the same value in all rows, beside those that every table has.
    """
    print(f"{machine()}; {torch.get_num_threads()} threads")
    print(plain(rows))
    if not options.out:
        return None
    path = options.out / f"{name}-{slug(options.model)}-{torch.device(options.device).type}.csv"
    shared = {"seed": options.seed, "threads": torch.get_num_threads(), "machine": machine()}
    write(path, rows, model=label(options.model), dtype=options.dtype, **everywhere, **shared)
    return path
