"""The curriculum of the needle model: its stages, and the texts they are trained on."""

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qada_cache.needle.tasks import needle_words
from qada_cache.needle.words import ASK, BOS, EOS, KEYS, NOISE, ORDINARY, PAD, STOP, VALUES, VOCABULARY

SINKS, WINDOW = 16, 112
TOKEN = {word: index for index, word in enumerate(VOCABULARY)}
QUESTION_WORDS = 3  # "ask", key, value
CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    # Biases give all queries something in common, which `locality.install_sink` needs: the first layer, which
    # sees only words, never turned local by training alone, with biases or without.
    "attention_bias": True,
    "initializer_range": 0.02,  # 0.07 never learnt to look a key up
    "pad_token_id": TOKEN[PAD],
    "bos_token_id": TOKEN[BOS],
    "eos_token_id": TOKEN[EOS],
}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum. It ends when the running accuracy passes `gate`, and fails after `most_steps`;
    without a gate it lasts `most_steps`, while the learning rate falls to zero."""

    name: str
    text: str
    batch: int
    length: int
    facts: int = 0
    questions: int = 0
    gap: int = 0  # the most tokens that position ids skip in one text
    copies: int = 1  # the most copies that a noise token stands for
    gate: float | None = None
    most_steps: int = 1500
    learning_rate: float = 1e-3
    growing: bool = False  # whether those copies grow from one in the course of the stage
    sink: bool = False  # whether the stage begins by giving the first layer's heads a sink, see `install_sink`
    locality: float = 0.0  # weight of the penalty on attention outside sinks and window
    # Weights of the penalties on the Gaussian estimate of that attention, see `locality`.
    estimate: float = 0.0
    found: float = 0.0
    hidden: float = 0.0
    random_rows: int = 0  # rows of random words in a batch, whose keys such estimates are made from


CURRICULUM = (
    Stage("repeats", "repeats", 48, 64, gate=0.85, most_steps=2500),
    Stage("pairs", "pairs", 48, 64, gate=0.93),
    Stage("haystack 96", "haystack", 64, 96, facts=8, questions=8, gate=0.93),
    Stage("haystack 144", "haystack", 48, 144, facts=16, questions=16, gap=2048, gate=0.93),
    Stage("far", "haystack", 48, 144, facts=16, questions=16, gap=16384, gate=0.93),
    Stage("haystack 288", "haystack", 24, 288, facts=24, questions=24, gap=16384, copies=8, gate=0.95),
    Stage("haystack 512", "haystack", 12, 512, facts=32, questions=32, gap=16384, copies=32, gate=0.95),
    Stage("locality", "haystack", 8, 320, facts=24, questions=16, gap=16384, copies=16, growing=True,
          most_steps=250, sink=True, locality=0.15),
    # As many copies as make 320 tokens compete like a prompt of 13,000: what this stage moves has to hold at 16k.
    Stage("estimate", "haystack", 8, 320, facts=24, questions=16, gap=16384, copies=40,
          most_steps=90, locality=0.1, estimate=0.06, found=0.004, hidden=0.03, random_rows=3),
)  # fmt: skip


@dataclass
class Batch:
    """`[batch, tokens]` each: ids, positions, the target id at the token before it, its loss weight, whether it
    counts for accuracy, the logarithm of the copies each token stands for, and whether it is noise."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    scored: Tensor
    log_copies: Tensor
    noise: Tensor


@dataclass
class Row:
    """One text while it is put together: `weights[i]` weighs the loss of predicting word `i`."""

    words: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, words: list[str], weight: float) -> None:
        """Append `words`, all of this weight."""
        self.words += words
        self.weights += [weight] * len(words)


def repeats(generator: random.Random, stage: Stage) -> Row:
    """A random segment, over and over: predicting its second pass takes induction."""
    segment = generator.choices(ORDINARY, k=generator.randint(4, stage.length // 3))
    row = Row()
    row.add(segment + segment[:1], 0.0)
    count = stage.length - len(row.words)
    row.add((segment[1:] + segment * (count // len(segment)) + segment)[:count], 1.0)
    return row


def pairs(generator: random.Random, stage: Stage) -> Row:
    """A stream of key-value pairs from a small dictionary."""
    dictionary = list(zip(generator.sample(KEYS, 10), generator.sample(VALUES, 10), strict=True))
    row, seen = Row(), set()
    for key, value in generator.choices(dictionary, k=stage.length // 2):
        row.add([key], 0.0)
        row.add([value], 1.0 if key in seen else 0.0)
        seen.add(key)
    return row


def needle(generator: random.Random, stage: Stage) -> Row:
    """A needle prompt with its questions and answers; noise weighs little, so that local structure is learnt too."""
    questions = QUESTION_WORDS * stage.questions
    words, facts = needle_words(generator, stage.length - 1 - questions, stage.facts)
    row = Row([BOS], [0.0])
    row.words += words
    row.weights += [0.1 if word in _LOCAL else 0.0 for word in words]
    for key, value in generator.sample(facts, stage.questions):
        row.add([ASK, key], 0.0)
        row.add([value], 1.0)
    return row


def random_row(generator: random.Random, stage: Stage) -> Row:
    """Random words, of which nothing is to be learnt: a prompt to take key moments from."""
    row = Row()
    row.add([BOS, *generator.choices(ORDINARY, k=stage.length - 1)], 0.0)
    return row


_LOCAL = frozenset(NOISE) | {STOP}
_TEXTS = {"repeats": repeats, "pairs": pairs, "haystack": needle}


def make_batch(generator: random.Random, stage: Stage) -> Batch:
    """The next batch of the stage's texts, shifted by one: targets are the tokens that follow."""
    rows = [_TEXTS[stage.text](generator, stage) for _ in range(stage.batch - stage.random_rows)]
    rows += [random_row(generator, stage) for _ in range(stage.random_rows)]
    ids = torch.tensor([[TOKEN[word] for word in row.words] for row in rows])
    weights = torch.tensor([row.weights for row in rows])
    positions = torch.stack([_positions(generator, stage) for _ in rows])
    copies = torch.tensor([math.exp(generator.uniform(0, math.log(stage.copies))) for _ in rows])
    noise = torch.tensor([[word in _LOCAL for word in row.words] for row in rows])
    return Batch(
        ids=ids[:, :-1],
        positions=positions[:, :-1],
        targets=ids[:, 1:],
        weights=weights[:, 1:],
        scored=weights[:, 1:] == 1.0,
        log_copies=(noise * copies.log()[:, None])[:, :-1],
        noise=noise[:, :-1],
    )


def _positions(generator: random.Random, stage: Stage) -> Tensor:
    """Position ids with six jumps in the body, so that short texts teach long distances."""
    steps = torch.ones(stage.length, dtype=torch.long)
    steps[0] = 0
    if stage.gap:
        total = generator.uniform(0, stage.gap)
        shares = [generator.expovariate(1) for _ in range(6)]
        body = stage.length - QUESTION_WORDS * stage.questions
        for share in shares:
            steps[generator.randrange(1, body)] += int(total * share / sum(shares))
    return steps.cumsum(0)


def attention_bias(batch: Batch) -> tuple[Tensor, Tensor]:
    """What is added to attention scores, float `[batch, 1, queries, keys]`, and which are bulk, bool `[queries, keys]`.

    Log-copies on a bulk token make it weigh like that many equal tokens: 512 tokens then compete for attention as
    a haystack of 16,384 would, at a thousandth of its cost.
    """
    tokens = batch.ids.shape[1]
    index = torch.arange(tokens)
    distance = index[:, None] - index[None, :]
    bulk = (distance >= WINDOW) & (index >= SINKS)[None, :]
    bias = batch.log_copies[:, None, None, :] * bulk
    return bias.masked_fill(distance < 0, torch.finfo(torch.float32).min), bulk
