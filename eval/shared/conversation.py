"""A chat about a document: one prefill, then questions asked turn by turn on the cache that holds what was read."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.shared.language_model import Clock
from eval.shared.texts import CHAT, SPARSE, Document, Turn, draw_facts, plant, read_reference
from qada_cache import QAdACache
from qada_cache.stats import CacheStats, count_layer_bytes
from qada_cache.versions import pass_cache

WITH_FACTS = (
    "Some special facts are hidden within the following text. Make sure to memorize them. I will quiz you about them "
    "afterwards."
)
WITHOUT_FACTS = "Read the following text. I will ask you questions about it afterwards."
_DOCUMENT, _QUESTION, _ANSWER = "THE-DOCUMENT-GOES-HERE", "THE-QUESTION-GOES-HERE", "THE-ANSWER-GOES-HERE"


class Form:
    """How a document and a chat about it are put to a model: by its tokenizer's chat template, else plainly.

    A chat is never rendered as a whole: every part is tokenized once and appended to what the cache holds, so nothing
    is read twice, even where a template would write an earlier answer differently than it was generated.

    Attributes:
        chat: whether there is a chat template.
        stop: token ids that end an answer, beside those of the model's generation config.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, introduction: str) -> None:
        self.tokenizer, self.chat = tokenizer, bool(tokenizer.chat_template)
        self.stop: list[int] = []
        if not self.chat:
            self._opening, self._closing = f"{introduction}\n\n{_DOCUMENT}\n\nQuestion: ", "\nAnswer:"
            self._between = "\n\nQuestion: "
            return
        first = self._render(("user", f"{introduction}\n\n{_DOCUMENT}\n\n{_QUESTION}"))
        self._opening, self._closing = first.rsplit(_QUESTION, 1)
        later = self._render(("user", "Hello"), ("assistant", _ANSWER), ("user", _QUESTION))
        self._between = later.rsplit(_ANSWER, 1)[1].rsplit(_QUESTION, 1)[0]
        end = self._encode(self._between)[:1]
        self.stop = [token for token in end if token in tokenizer.all_special_ids]

    def _render(self, *messages: tuple[str, str]) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # known to the templates that can think first, no matter to the others
        )

    def _encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Token ids of a text; a plain text that `begins` all gets what the tokenizer begins texts with."""
        return self.tokenizer(text, add_special_tokens=begins and not self.chat).input_ids

    def make_opening(self, document: str) -> list[int]:
        """Token ids of everything before the first question."""
        return self._encode(self._opening.replace(_DOCUMENT, document), begins=True)

    def make_turn(self, turn: Turn, *, after: int | None) -> list[int]:
        """Token ids between the last answer and the next one: the question, with what the form puts around it.

        Args:
            turn: the question.
            after: the last token of the answer before, None on the first turn. If that token ended the answer, as the
                template does, it is not repeated.
        """
        begun = turn.begun if self.chat or not turn.begun else f" {turn.begun}"
        ids = self._encode(("" if after is None else self._between) + turn.question + self._closing + begun)
        return ids[1:] if after is not None and self.chat and ids[0] == after else ids


def fit(form: Form, text: str, turns: list[Turn], *, tokens: int) -> tuple[list[int], str, bool]:
    """The longest beginning of `text` that, with everything else before the first question, has at most `tokens`.

    Returns:
        Token ids of everything before the first question, the document with the facts planted in it, and whether
        something was cut.

    Raises:
        ValueError: there is no room for a document.
    """
    facts = [turn.fact for turn in turns if turn.fact]
    # A word is a token at least, so further words need not be looked at.
    ends = [match.end() for match, _ in zip(re.finditer(r"\S+", text), range(tokens), strict=False)]

    def make(words: int) -> tuple[list[int], str]:
        document = plant(text[: ends[words - 1]], facts)
        return form.make_opening(document), document

    fewest, most = 0, len(ends)  # `fewest` words fit, more than `most` do not
    best = None
    while fewest < most:
        # The whole is tried first: most texts that are not the default one fit.
        words = most if best is None and most == len(ends) else (fewest + most + 1) // 2
        fitted = make(words)
        if len(fitted[0]) <= tokens:
            fewest, best = words, fitted
        else:
            most = words - 1
    if best is None:
        raise ValueError(f"{tokens} tokens leave no room for a document with {len(facts)} facts")
    return *best, bool(text[ends[fewest - 1] :].strip())


def read_chats(tokenizer: PreTrainedTokenizerBase, *, length: int, count: int) -> Iterator[Document]:
    """Chats of six turns about the reference, which are right so far: the last question is the document's `question`.

    Raises:
        ValueError: `length` leaves no room for the reference.
    """
    form = Form(tokenizer, WITH_FACTS)
    for index in range(count):
        drawn = draw_facts(index)
        last = index % len(drawn)
        turns = [*drawn[last + 1 :], *drawn[: last + 1]]
        questions = [form.make_turn(turn, after=-1 if place else None) for place, turn in enumerate(turns)]
        answers = [tokenizer(f" {turn.expected}", add_special_tokens=False).input_ids for turn in turns]
        dots = tokenizer(".", add_special_tokens=False).input_ids
        chat = [ids for pair in zip(questions, answers, strict=True) for ids in (*pair, dots)]
        history = [token for ids in chat[:-3] for token in ids]
        opening, _, _ = fit(form, read_reference(), drawn, tokens=length - len(history) - len(questions[-1]))
        prompt, answer = torch.tensor([[*opening, *history, *questions[-1]]]), torch.tensor([answers[-1]])
        yield Document(CHAT + SPARSE, length, index, prompt, answer, turns[-1].expected, len(questions[-1]))


@dataclass
class Told:
    """The answers of one method, with seconds, tokens and bytes.

    Attributes:
        answers: texts, one a turn, without what was begun for the model.
        read: tokens the model was given, those of its own answers included.
        generated: tokens.
        prefill_seconds: of the document.
        decode_seconds: of the tokens after the first of every answer; the first one's time is that of the question.
        decoded: how many tokens those were.
        device_bytes, host_bytes: that the cache holds in the end.
        stats: a QAdACache's, None for others.
    """

    answers: list[str] = field(default_factory=list)
    read: int = 0
    generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    stats: CacheStats | None = None


@torch.no_grad()
def converse(
    model: PreTrainedModel,
    form: Form,
    opening: list[int],
    turns: list[Turn],
    cache: DynamicCache,
    *,
    new_tokens: int,
    tell: Callable[[str], None] = lambda doing: None,
) -> Told:
    """Read the document into `cache`, then ask one question after the other; greedy answers of up to `new_tokens`.

    As in any chat, a question follows on the answers that this very cache led to.

    Args:
        model, form: whom to ask, and how.
        opening: token ids before the first question.
        turns: the questions.
        cache: empty, for this model.
        new_tokens: an answer's most.
        tell: is called with what begins, `1 + len(turns)` times.
    """
    result = Told()
    ids = torch.tensor([opening], device=model.device)
    tell("reading the document")
    start = time.perf_counter()
    model(ids, **pass_cache(cache), logits_to_keep=1).logits.argmax().item()  # waits for the device
    result.prefill_seconds = time.perf_counter() - start
    ends = _find_end_tokens(model, form)
    stops = {} if form.chat else {"stop_strings": ["\n"], "tokenizer": form.tokenizer}
    for index, turn in enumerate(turns):
        tell(turn.question)
        question_ids = form.make_turn(turn, after=None if index == 0 else int(ids[0, -1]))
        ids = torch.cat([ids, torch.tensor([question_ids], device=model.device)], dim=-1)
        clock = Clock()
        # The attention mask says that every token is real. Of the ids, the model reads those the cache does not hold:
        # the question, and before it the last token of the answer before.
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **pass_cache(cache),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else None,
            streamer=clock,
            **stops,
        )
        answer = output[0, ids.shape[1] :]
        ids = output
        result.answers.append(form.tokenizer.decode(answer, skip_special_tokens=True).strip())
        result.generated += len(answer)
        first, last = clock.times[1], clock.times[-1]
        result.decode_seconds += last - first
        result.decoded += len(answer) - 1
    result.read = cache.get_seq_length()
    if isinstance(cache, QAdACache):
        result.stats = cache.stats()
        result.device_bytes, result.host_bytes = result.stats.device_bytes, result.stats.host_bytes
    else:
        result.device_bytes = sum(count_layer_bytes(layer)[0] for layer in cache.layers)
    return result


def _find_end_tokens(model: PreTrainedModel, form: Form) -> list[int]:
    """Ids that end an answer: the model's own, and what its chat template puts after one."""
    own = model.generation_config.eos_token_id
    own = [] if own is None else [own] if isinstance(own, int) else list(own)
    return own + [token for token in form.stop if token not in own]
