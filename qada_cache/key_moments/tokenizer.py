"""The tokenizer of a model that was loaded from somewhere."""

import os
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that lies where the model was loaded from: its folder, its GGUF file or its repository of the Hub.

    A folder needs no network. Code that comes with a tokenizer is not run.

    Raises:
        LookupError: there is none; the message has the place and the reason.
    """
    config = model.config
    name = config._name_or_path
    if not name:
        raise LookupError("none was found: the model was not loaded from anywhere")
    quantization: Any = getattr(config, "quantization_config", None)
    file = quantization.get("gguf_file") if isinstance(quantization, dict) else getattr(quantization, "gguf_file", None)
    where: dict[str, Any] = {} if file is None else {"gguf_file": file}
    if os.path.isdir(name):
        where["local_files_only"] = True
    else:
        where["revision"] = getattr(config, "_commit_hash", None) or "main"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except (OSError, ValueError, KeyError, ImportError) as error:  # no files, or a missing dependency
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise LookupError(f"none was found at {name} ({reason})") from error
    # For some kinds of model, a folder without a tokenizer's files yields one that knows nothing but special tokens.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise LookupError(f"none was found at {name} (what is there has no vocabulary)")
    return tokenizer
