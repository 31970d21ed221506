"""Writes a model as a plain folder, for what cannot read a GGUF file: `python -m eval.convert`.

    python -m eval.convert --model smollm2 --out FOLDER
    python -m eval.convert --model smollm2 --latent --out FOLDER

`qada serve-folder`, for one, takes no GGUF file. The folder's weights are what transformers makes of the file's. With
`--latent` they are written as a model of latent attention, whose logits are the same up to rounding
(`eval/shared/latent_form.py`).
"""

import argparse
import copy
import sys
from pathlib import Path

from transformers import PreTrainedModel

from eval.shared.language_model import DEFAULT, DTYPES, HELP, check_loading, load
from eval.shared.latent_form import make_latent


def make_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the same weights and no memory of how they were stored, which would not let it be saved.

    Raises:
        RuntimeError: its weights are still quantized, not those of a plain model of its kind.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    made = type(model)(config).to(model.dtype)
    made.load_state_dict(model.state_dict())
    made.tie_weights()
    made.generation_config = model.generation_config
    return made.eval()


def main(arguments: list[str] | None = None) -> int:
    """Write the folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.convert", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=DEFAULT, help=HELP)
    add("--dtype", choices=DTYPES, default="auto", help="(default: %(default)s)")
    add("--out", type=Path, required=True, help="folder to make")
    add("--latent", action="store_true", help="write a Llama or Qwen2 as a model of latent attention")
    options = parser.parse_args(arguments)
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        parser.error(f"--out: {options.out} exists already, and is not an empty folder")
    if not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}")
    with check_loading(parser):
        model, tokenizer = load(options.model, dtype=options.dtype)
        made = make_latent(model) if options.latent else make_plain(model)
    try:
        made.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
    except OSError as error:
        parser.error(f"--out: {error}")
    print(f"{options.out}: {made.num_parameters() / 1e6:.0f} million weights, {made.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
