"""In-context classification: many examples with labels of no meaning by themselves, then one without a label."""

from random import Random

from qada_cache.lm_eval.tasks.prose.haystack import Haystack
from qada_cache.lm_eval.tasks.prose.questions import Question
from qada_cache.lm_eval.tasks.prose.words import KINDS


def classes(draw: Random, size: int, prose: Haystack, **_: object) -> Question:
    """The label of a word that is not among `size` examples, though others of its kind are.

    Labels are two-digit numbers, another for every kind of thing in every document. An example comes again when all
    words have been used. `draw` and `size` are as in `questions`; the prose is not used.
    """
    labels = dict(zip(KINDS, draw.sample(range(10, 100), len(KINDS)), strict=True))
    words = {word: kind for kind, listed in KINDS.items() for word in listed.split()}
    asked = draw.choice(list(words))
    label = labels[words.pop(asked)]
    examples: list[str] = []
    while len(examples) < size:
        again = list(words)
        draw.shuffle(again)
        examples += [f"Word: {word}\nLabel: {labels[words[word]]}\n" for word in again]
    return Question("\n".join([*examples[:size], f"Word: {asked}"]), "Label:", [str(label)])
