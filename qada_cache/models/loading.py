"""Models and tokenizers by name, for commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer, PreTrainedConfig

EXTENDING = "yarn", "dynamic"  # kinds of rope scaling that a config may have beside the positions without it
TIMEOUT = 10  # seconds that the Hub has to answer at all
# Errors whose messages say what is wrong: with files, with a dtype that torch has not, with a device that torch was not
# built for or that has no memory left. Damaged files also raise others, as safetensors' own: these need their class.
_TELLING = OSError, ValueError, AttributeError, AssertionError, RuntimeError, ImportError


def load_model(
    name: str, *, dtype: str, device_map: str | None, check: Callable[[PreTrainedConfig], None], **where: Any
) -> tuple[Any, Any]:
    """The model and tokenizer of a path, a repository of the Hub or a GGUF file. `where` are keywords of
    `from_pretrained` for both. `check` gets the config before weights are read.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    if name.endswith(".gguf") and Path(name).is_file():
        name, where["gguf_file"] = str(Path(name).parent), Path(name).name
        dtype = "float32" if dtype == "auto" else dtype  # the weights' own type is none that can be computed in
    _check_there(name, where.get("revision"))
    with _name_model(name):
        tokenizer, config = AutoTokenizer.from_pretrained(name, **where), AutoConfig.from_pretrained(name, **where)
    check(config)
    with _name_model(name):
        tables = [getattr(auto, "_model_mapping", {}) for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM)]
        reads_images = type(config) not in tables[0] and type(config) in tables[1]
        kind = AutoModelForMultimodalLM if reads_images else AutoModelForCausalLM
        return kind.from_pretrained(name, dtype=dtype, device_map=device_map, **where), tokenizer


@contextmanager
def _name_model(name: str) -> Iterator[None]:
    """Raise a ValueError that names the model in place of any other error."""
    try:
        yield
    except Exception as error:  # at a damaged file each library raises errors of its own, which need not name the model
        said = error if isinstance(error, _TELLING) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load the model {name!r}: {said}") from error


def _check_there(name: str, revision: str | None) -> None:
    """Raise ValueError, if `name` is a path without a file or folder, or a model of the Hub while the Hub cannot be
    reached: transformers would try for a minute."""
    if Path(name).expanduser().exists():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise ValueError(f"there is no file or folder {name}")
    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # its class depends on the HTTP client that the library has
        raise ValueError(
            f"there is no file or folder {name} and no such model in the Hub's cache, and {constants.ENDPOINT} cannot "
            f"be reached ({error})"
        ) from error


def count_positions(config: PreTrainedConfig) -> int | None:
    """The most tokens that a model has positions for, by its config; None if that does not say."""
    config = config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or None
    rope = getattr(config, "rope_parameters", None) or {}
    if positions is None or rope.get("rope_type") not in EXTENDING:
        return positions
    return max(positions, int(rope.get("factor", 1) * (rope.get("original_max_position_embeddings") or positions)))
