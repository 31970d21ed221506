"""What documents are made of: the Python language reference, part of every Python, or a file; and words for keys."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

ADJECTIVES = (
    *("amber", "ancient", "bitter", "brave", "brisk", "calm", "clever", "cosmic", "crimson", "curious"),
    *("distant", "eager", "faded", "gentle", "gloomy", "golden", "hidden", "hollow", "humble", "icy"),
    *("jolly", "lively", "lonely", "loyal", "mellow", "misty", "noisy", "polite", "proud", "quiet"),
    *("rapid", "rusty", "silent", "sleepy", "smooth", "stormy", "tidy", "velvet", "wild", "young"),
)
NOUNS = (
    *("anchor", "badger", "bakery", "basket", "beacon", "blanket", "bridge", "button", "candle", "canyon"),
    *("castle", "comet", "compass", "cottage", "dolphin", "engine", "falcon", "feather", "forest", "garden"),
    *("hammer", "harbor", "island", "kettle", "ladder", "lantern", "library", "marble", "meadow", "mirror"),
    *("orchard", "pebble", "pillow", "puzzle", "river", "saddle", "teapot", "tunnel", "violin", "window"),
)
KINDS = {
    "animal": "badger bear camel cat cow deer dog donkey elephant fox frog goat hamster horse lion monkey mouse otter "
    "rabbit sheep squirrel tiger wolf zebra",
    "food": "apple bacon banana bread butter cake carrot cheese cherry cookie grape honey lemon onion orange pancake "
    "peach pizza potato rice salad sausage soup tomato",
    "clothing": "apron belt blouse boots cap cardigan coat dress gloves hat hoodie jacket jeans mittens pajamas robe "
    "sandals scarf shirt shorts skirt socks sweater trousers",
    "vehicle": "airplane ambulance bicycle boat bus canoe car ferry helicopter jeep kayak limousine lorry motorcycle "
    "rocket scooter ship submarine taxi tractor train tram truck van",
    "body": "ankle arm cheek chin ear elbow eye finger foot forehead hand heel hip jaw knee leg lip neck nose shoulder "
    "stomach thumb tongue wrist",
    "country": "Argentina Australia Austria Brazil Canada Chile China Cuba Denmark Egypt Finland France Germany Greece "
    "India Ireland Italy Japan Kenya Mexico Norway Peru Poland Spain",
}
# The language reference has curved quotation marks too.
SENTENCE_END = re.compile("[.!?:][\"')\u2019\u201d]*\\s+(?=[A-Z\"'(\u2018\u201c*])|\\n\\s*\\n")
BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
PROSE = re.compile(r"(\* )?[A-Z\"].{60,}[.:]")
GOLDEN = 0.6180339887498949  # successive multiples, modulo 1, are spread evenly however many there are
DEPTHS = 40  # places in a passage that a sentence may be put at, from its start to its end, RULER's number


@dataclass(frozen=True)
class Haystack:
    """A text to cut passages from.

    Args:
        words: its words, each with the white space after it.
        paragraphs: the numbers of the words that begin a paragraph, ascending.
        vocabulary: words of lower-case letters, of which none is part of another, sorted.
    """

    words: tuple[str, ...]
    paragraphs: tuple[int, ...]
    vocabulary: tuple[str, ...]

    def passage(self, where: float, size: int) -> str:
        """`size` words from the first paragraph after `where` (0 to 1, start to end); past the end it starts again."""
        place = bisect_left(self.paragraphs, int(where * len(self.words)))
        start = self.paragraphs[place % len(self.paragraphs)]
        return "".join(islice(chain(self.words[start:], *repeat(self.words, size // len(self.words) + 1)), size))


def whereabouts(seed: int, number: int) -> float:
    """Where in the haystack a document begins, 0 to 1: far from those of the numbers before it."""
    return (Random(seed).random() + number * GOLDEN) % 1.0


def hide(draw: Random, passage: str, sentences: list[str]) -> str:
    """The passage with the sentences, in their order, between its own, at depths that `draw` picks.

    Raises:
        ValueError: more sentences than `DEPTHS`.
    """
    if len(sentences) > DEPTHS:
        raise ValueError(f"{len(sentences)} sentences to hide, there are {DEPTHS} depths")
    # Not the passage's end, where a sentence may be cut.
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(passage))]
    depths = sorted(draw.sample(range(DEPTHS), len(sentences)))
    made, done = [], 0
    for depth, sentence in zip(depths, sentences, strict=True):
        end = ends[round(depth / (DEPTHS - 1) * (len(ends) - 1))]
        before = passage[done:end]
        apart = "\n\n" if BLANK_LINE.search(before[len(before.rstrip()) :]) else " "
        made += [before, "" if not before or before[-1].isspace() else " ", sentence, apart]
        done = end
    return "".join([*made, passage[done:]]).strip()


def language_reference() -> str:
    """The paragraphs of the Python language reference that are prose, one a line: no grammar, code or headings."""
    blocks = (" ".join(block.split()) for topic in topics.values() for block in BLANK_LINE.split(topic))
    kept = (block for block in dict.fromkeys(blocks) if PROSE.fullmatch(block) and letters(block) > 0.88)
    return "\n\n".join(kept)


def letters(text: str) -> float:
    """The share of letters and spaces in a text, 0 to 1."""
    return sum(character.isalpha() or character == " " for character in text) / len(text)


@cache
def load(path: str | None = None) -> Haystack:
    """The haystack in a UTF-8 text file, or the Python language reference.

    Raises:
        OSError: no such file.
        ValueError: it is not a text, or has fewer than a hundred words.
    """
    text = language_reference() if path is None else Path(path).read_text("utf-8")
    words = re.findall(r"\S+\s*", text.strip() + "\n\n\n")
    if len(words) < 100:
        raise ValueError(f"{path}: {len(words)} words are too few for a haystack")
    paragraphs = [0, *(number for number, word in enumerate(words[:-1], start=1) if BLANK_LINE.search(word))]
    found = sorted(set(re.findall(r"(?<![^\s(])[a-z]{4,10}(?![^\s.,:;!?)])", text)))
    joined = " ".join(found)
    return Haystack(tuple(words), tuple(paragraphs), tuple(word for word in found if joined.count(word) == 1))
