"""Prompts to collect key moments from: random words, real text, one word repeated."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = ("random-words", "wiki", "single-word")
ARTICLE = Path(__file__).parent / "article.txt"
UNKNOWN_SHARE = 0.1  # of an article's tokens: beyond it the tokenizer does not know the language


def prompt_ids(
    prompt: str | Tensor,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int,
    seed: int,
    text: str | None = None,
) -> Tensor:
    """Token ids `[tokens]` int64 of a prompt of exactly that many tokens, whatever begins a prompt included.

    Args:
        prompt: "random-words": words of `text` in random order, each drawn anew; without a tokenizer, or with one that
            does not know our article's words, random ordinary tokens. "wiki": `text` as it is. "single-word": one
            ordinary word or token, repeated. Any other string is itself the text; a tensor, the token ids.
        model: whose vocabulary is drawn from without a tokenizer.
        tokenizer: the model's, or None.
        tokens: how many.
        seed: of everything random.
        text: for "random-words" and "wiki", instead of the article that comes with this package.

    Raises:
        TypeError: token ids came in the place of the tokenizer.
        ValueError: the text or the ids are shorter than `tokens`, the tokenizer does not know the text's words, or
            text came without a tokenizer.
    """
    if isinstance(tokenizer, Tensor):
        raise TypeError("token ids are the prompt, not the tokenizer: give prompt=...")
    if isinstance(prompt, Tensor):
        ids = prompt.flatten().cpu().long()
    elif prompt not in PROMPTS or (prompt == "wiki"):
        if tokenizer is None:
            raise ValueError(f"a prompt of text ({_shown(prompt)}) needs the model's tokenizer: give tokenizer=...")
        whole = prompt if prompt not in PROMPTS else text or ARTICLE.read_text(encoding="utf-8")
        ids = tokenizer(whole, return_tensors="pt").input_ids[0]
        if _unknown_share(ids, tokenizer) > UNKNOWN_SHARE:
            raise ValueError(
                f"the tokenizer does not know the words of the prompt ({_shown(prompt)}): give another text"
            )
    else:
        generator = torch.Generator().manual_seed(seed)
        words = _words(prompt, text, tokenizer, tokens, generator)
        ids = _ordinary_tokens(prompt, model, tokenizer, tokens, generator) if words is None else words
    if len(ids) < tokens:
        raise ValueError(
            f"the prompt ({_shown(prompt)}) has {len(ids)} tokens and {tokens} were asked for: give a longer text, or "
            f"tokens={len(ids)}"
        )
    return ids[:tokens]


def _shown(prompt: str | Tensor) -> str:
    if isinstance(prompt, Tensor):
        return "token ids"
    return prompt if len(prompt) <= 40 else f"{prompt[:40]}..."


def _words(
    prompt: str, text: str | None, tokenizer: PreTrainedTokenizerBase | None, tokens: int, generator: torch.Generator
) -> Tensor | None:
    """Random or repeated words of the text; None without a tokenizer that knows them."""
    if tokenizer is None:
        return None
    words = (text or ARTICLE.read_text(encoding="utf-8")).split()
    if prompt == "single-word":
        drawn = [words[int(torch.randint(len(words), (), generator=generator))]] * tokens
    else:
        drawn = [words[index] for index in torch.randint(len(words), (tokens,), generator=generator).tolist()]
    ids = tokenizer(" ".join(drawn), return_tensors="pt", truncation=True, max_length=2 * tokens).input_ids[0]
    if _unknown_share(ids, tokenizer) <= UNKNOWN_SHARE:
        return ids
    if text is not None:
        raise ValueError(f"the tokenizer does not know the words of the prompt ({prompt}): give another text")
    return None


def _unknown_share(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> float:
    return 0.0 if tokenizer.unk_token_id is None else float((ids == tokenizer.unk_token_id).float().mean())


def _ordinary_tokens(
    prompt: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int,
    generator: torch.Generator,
) -> Tensor:
    """Random or repeated tokens that are ordinary: not special, and trained, after the token that begins a prompt."""
    config = model.config.get_text_config(decoder=True)
    weights: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    if weights.device.type == "meta":  # kept elsewhere by accelerate: nothing to tell trained tokens by
        ordinary = torch.ones(len(weights), dtype=torch.bool)
    else:
        # Vocabularies hold rows that no text ever trained, and their norms stand out.
        norms = torch.cat([part.detach().float().norm(dim=-1).cpu() for part in weights.split(65536)])
        outside = len(norms) // 20
        low, high = norms.kthvalue(1 + outside).values, norms.kthvalue(len(norms) - outside).values
        ordinary = (norms >= low) & (norms <= high)
    special = set(tokenizer.all_special_ids if tokenizer is not None else [])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"):
        found = getattr(config, name, None)
        special |= set(found if isinstance(found, list) else [found]) - {None}
    ordinary[[index for index in special if 0 <= index < len(ordinary)]] = False
    choices = ordinary.nonzero().squeeze(-1)
    begin = config.bos_token_id
    begin = torch.tensor([] if begin is None or not 0 <= begin < len(ordinary) else [begin], dtype=torch.long)
    count = tokens - len(begin)
    drawn = choices[torch.randint(len(choices), (1 if prompt == "single-word" else count,), generator=generator)]
    return torch.cat([begin, drawn.expand(count)])
