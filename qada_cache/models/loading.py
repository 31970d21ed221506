"""Models and tokenizers by name, for commands."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def load_model(name: str, *, dtype: str, device_map: str | None, **where: Any) -> tuple[Any, Any]:
    """The model and tokenizer of a path, a repository of the Hub or a GGUF file; `where` is for both.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    if name.endswith(".gguf") and Path(name).is_file():
        name, where["gguf_file"] = str(Path(name).parent), Path(name).name
        dtype = "float32" if dtype == "auto" else dtype  # the weights' own type is none that can be computed in
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **where), tokenizer
    except (OSError, ValueError) as error:  # which do not always name it
        raise ValueError(f"cannot load the model {name!r}: {error}") from error


def count_positions(model: PreTrainedModel) -> int | None:
    """The most tokens that a model has positions for; None if its config does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or None
