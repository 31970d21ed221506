"""A tokenizer with the words of our article, and a model in whose folder it lies."""

from pathlib import Path
from typing import Any

from models import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qada_cache.key_moments.prompts import ARTICLE


def english_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose vocabulary is the words of our article."""
    words = {"<unk>": 0, "<s>": 1, **{word: 2 + i for i, word in enumerate(sorted(set(ARTICLE.read_text().split())))}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def readable_model(folder: Path, **changes: Any) -> PreTrainedModel:
    """A tiny model, saved in `folder` with `english_tokenizer` and loaded from there."""
    tokenizer = english_tokenizer()
    tiny(vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, local_files_only=True).eval()
