"""Prompts to collect key moments from: words or tokens at random, real text, one word or token repeated."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..names import PROMPTS, WITHOUT_TEXT

TOKENS_FOR_WORDS = {"random-words": "random-tokens", "single-word": "single-token"}
ARTICLE = Path(__file__).parent / "article.txt"
ROWS = 65536  # of a vocabulary that are read at a time
UNKNOWN_SHARE = 0.1  # of a text's tokens or characters: beyond it the tokenizer does not know the language


def choose_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase | None, text: str | None = None) -> str:
    """`prompt`, or its counterpart of tokens (`TOKENS_FOR_WORDS`): if it is of words of our article (no `text`), and
    `tokenizer` is None or does not know them."""
    if prompt not in TOKENS_FOR_WORDS or text is not None:
        return prompt
    article = ARTICLE.read_text(encoding="utf-8")
    knows_article = tokenizer is not None and knows(tokenizer, article, _encode(tokenizer, article))
    return prompt if knows_article else TOKENS_FOR_WORDS[prompt]


def make_ids(
    prompt: str | Tensor,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int,
    seed: int,
    text: str | None = None,
    fewer: bool = False,
) -> Tensor:
    """Token ids `[tokens]` int64 of a prompt, special tokens at its start included; arguments as for
    `KeyMoments.collect`.

    "random-words": words of `text` in random order, each drawn anew. "wiki": `text` as it is. "single-word": one word
    of `text`, repeated. "random-tokens", "single-token": the same with ordinary tokens of the model's vocabulary,
    without a tokenizer. Any other string is itself the text; a tensor, the token ids.

    A ValueError if the prompt is shorter than `tokens` (unless `fewer`: then it is taken as it is), if the tokenizer
    does not know its words, or if words or a text come without a tokenizer.
    """
    shown = "token ids" if isinstance(prompt, Tensor) else prompt
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."

    def draw(choices: int, count: int) -> Tensor:
        """Indices `[count]` of words or tokens: each drawn anew, or one repeated."""
        drawn = 1 if prompt in ("single-word", "single-token") else count
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randint(choices, (drawn,), generator=generator, dtype=torch.int64, device="cpu").expand(count)

    if isinstance(prompt, Tensor):
        ids = prompt.flatten().cpu().long()
    elif prompt in WITHOUT_TEXT:
        begin, choices = _find_ordinary_tokens(model, tokenizer)
        ids = torch.cat([begin, choices[draw(len(choices), tokens - len(begin))]])
    else:
        if tokenizer is None:
            raise ValueError(f"a prompt of text ({shown}) needs the model's tokenizer: give tokenizer=...")
        whole = text or ARTICLE.read_text(encoding="utf-8") if prompt in PROMPTS else prompt
        if prompt in TOKENS_FOR_WORDS:
            words = whole.split()
            whole = " ".join(words[index] for index in draw(len(words), tokens).tolist())
        ids = _encode(tokenizer, whole)
        if not knows(tokenizer, whole, ids):
            raise ValueError(f"the tokenizer does not know the words of the prompt ({shown}): give another text")
    if len(ids) < tokens and not fewer:
        raise ValueError(
            f"the prompt ({shown}) has {len(ids)} tokens and {tokens} were asked for: give a longer text, or "
            f"tokens={len(ids)}"
        )
    return ids[:tokens]


def read_dataset(name: str, subset: str | None, split: str, column: str, *, characters: int) -> str:
    """The first rows of a dataset's text, at least `characters` long if the dataset is. ValueError without the package
    datasets, or without the column, or if that holds no text."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("--dataset needs the package datasets: pip install datasets") from error
    text = ""
    for row in load_dataset(name, subset, split=split, streaming=True):
        if column not in row:
            raise ValueError(f"{name} has no column {column!r}, it has {', '.join(row)}")
        if row[column] is None:
            continue
        if not isinstance(row[column], str):
            raise ValueError(f"column {column!r} of {name} has no text, it has {row[column]!r:.40}")
        text += row[column] + "\n"
        if len(text) >= characters:
            break
    if not text.strip():  # else our article would be read instead
        raise ValueError(f"column {column!r} of {name} has no text in the split {split!r}")
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Token ids `[tokens]` int64 of a text, on the CPU; tokenizers' own tensors lie on torch's default device."""
    return torch.tensor(tokenizer(text).input_ids, dtype=torch.long, device="cpu")


def knows(tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor) -> bool:
    """Whether the tokenizer knew the words of `text`, which has these ids."""
    unknown = tokenizer.unk_token_id
    if unknown is not None and float((ids == unknown).float().mean()) > UNKNOWN_SHARE:
        return False
    # Some drop what they do not know.
    known, whole = ("".join(str(each).split()) for each in (tokenizer.decode(ids), text))
    return len(ids) > 0 and len(known) >= (1 - UNKNOWN_SHARE) * len(whole)


@torch.no_grad()
def _find_norms(embeddings: Any) -> Tensor:
    """Norms of all tokens' embeddings, float32 `[vocabulary]` on the CPU; zeros if the weights have no values."""
    with align_module_device(embeddings):  # accelerate may keep them elsewhere
        weights: Tensor = embeddings.weight.detach()
        if weights.is_meta:
            return torch.zeros(len(weights), dtype=torch.float32, device="cpu")
        if hasattr(weights, "full_tensor"):  # each process takes in its own part
            return torch.linalg.vector_norm(weights.float(), dim=-1).full_tensor().cpu()
        if type(weights) is Tensor and weights.is_floating_point():
            rows = weights.split(ROWS)
        else:  # quantised, packed perhaps: only the module itself can look tokens up
            ids = torch.arange(embeddings.num_embeddings, dtype=torch.int64, device=weights.device)
            rows = map(embeddings, ids.split(ROWS))
        return torch.cat([torch.linalg.vector_norm(part.float(), dim=-1).cpu() for part in rows])


def _find_ordinary_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Tensor, Tensor]:
    """The token that begins a prompt, int64 `[1]` or `[0]`, and all ordinary ones, int64 `[tokens]`: trained, and not
    special."""
    config, norms = model.config.get_text_config(decoder=True), _find_norms(model.get_input_embeddings())
    # Vocabularies hold rows that no text ever trained, and their norms stand out.
    outside = len(norms) // 20
    low, high = norms.kthvalue(1 + outside).values, norms.kthvalue(len(norms) - outside).values
    ordinary = (norms >= low) & (norms <= high)
    special: set[Any] = set(tokenizer.all_special_ids if tokenizer is not None else [])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"):
        value = getattr(config, name, None)
        special |= set(value if isinstance(value, list) else [value])
    vocabulary = range(len(ordinary))
    ordinary[[index for index in special if index in vocabulary]] = False
    begin: Any = getattr(config, "bos_token_id", None)
    begins = torch.tensor([begin] if begin in vocabulary else [], dtype=torch.long, device="cpu")
    return begins, ordinary.nonzero().squeeze(-1)
