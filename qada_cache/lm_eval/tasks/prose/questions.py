"""Questions of each form: numbers for keys, the variables of a value, frequent words, labels of words.

A document is made of the Python language reference, part of every Python, or of a file, and of words for keys.

The forms but the last, the prompts' wording and the answers' prefixes are those of RULER (Hsieh et al., 2024). Every
maker takes the document's own random numbers `draw`, the `size` of the text around the question, and the prose. The
same arguments give the same question; another size changes the surrounding text alone.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from math import pi
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple

ADJECTIVES = (
    "amber ancient bitter brave brisk calm clever cosmic crimson curious distant eager faded gentle gloomy golden "
    "hidden hollow humble icy jolly lively lonely loyal mellow misty noisy polite proud quiet rapid rusty silent "
    "sleepy smooth stormy tidy velvet wild young"
)
NOUNS = (
    "anchor badger bakery basket beacon blanket bridge button candle canyon castle comet compass cottage dolphin "
    "engine falcon feather forest garden hammer harbor island kettle ladder lantern library marble meadow mirror "
    "orchard pebble pillow puzzle river saddle teapot tunnel violin window"
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
DEPTHS = 40  # places in a passage that a sentence may be put at, from its start to its end, RULER's number
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4  # of a chain of variables
COMMON = 10  # words asked for
FREQUENT = 3  # coded words asked for


@dataclass(frozen=True)
class Haystack:
    """A text to cut passages from."""

    words: tuple[str, ...]  # each with the white space after it
    paragraphs: tuple[int, ...]  # the numbers of the words that begin a paragraph, ascending
    vocabulary: tuple[str, ...]  # words of lower-case letters, of which none is part of another, sorted

    def take_passage(self, where: float, size: int) -> str:
        """`size` words from the first paragraph after `where` (0 to 1, start to end); past the end it starts again."""
        place = bisect_left(self.paragraphs, int(where * len(self.words)))
        start = self.paragraphs[place % len(self.paragraphs)]
        return "".join(islice(cycle(self.words), start, start + size))


def hide(draw: Random, passage: str, sentences: list[str]) -> str:
    """The passage with the sentences, `DEPTHS` at most, between its own in their order, at depths that `draw` picks."""
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


def read_language_reference() -> str:
    """The paragraphs of the Python language reference that are prose, one a line: no grammar, code or headings."""
    blocks = (" ".join(block.split()) for topic in topics.values() for block in BLANK_LINE.split(topic))
    long = (block for block in dict.fromkeys(blocks) if re.fullmatch(r"(\* )?[A-Z\"].{60,}[.:]", block))
    letters = {block: sum(character.isalpha() or character == " " for character in block) for block in long}
    return "\n\n".join(block for block, count in letters.items() if count / len(block) > 0.88)


@cache
def load(path: str | None = None) -> Haystack:
    """The haystack in a UTF-8 text file, or the Python language reference.

    Raises:
        OSError: no such file.
        ValueError: it is not a text, or has fewer than a hundred words.
    """
    text = read_language_reference() if path is None else Path(path).read_text("utf-8")
    words = re.findall(r"\S+\s*", text.strip() + "\n\n\n")
    if len(words) < 100:
        raise ValueError(f"{path}: {len(words)} words are too few for a haystack")
    paragraphs = [0, *(number for number, word in enumerate(words[:-1], start=1) if BLANK_LINE.search(word))]
    found = sorted(set(re.findall(r"(?<![^\s(])[a-z]{4,10}(?![^\s.,:;!?)])", text)))
    joined = " ".join(found)
    return Haystack(tuple(words), tuple(paragraphs), tuple(word for word in found if joined.count(word) == 1))


class Question(NamedTuple):
    """A prompt, the given beginning of its answer, and the expected content of the rest."""

    prompt: str
    prefix: str
    answers: list[str]


def needles(
    draw: Random, size: int, prose: Haystack, *, where: float, keys: int = 1, values: int = 1, asked: int = 1
) -> Question:
    """Seven-digit numbers for `keys` keys, `values` for each, in `size` words of prose; `asked` keys are asked for.

    `where` is the part of the prose, 0 to 1.
    """
    adjectives, nouns = draw.sample(ADJECTIVES.split(), keys), draw.sample(NOUNS.split(), keys)  # no two keys share one
    pairs = [f"{adjective}-{noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]
    drawn = iter(draw.sample(range(1_000_000, 10_000_000), keys * values))
    numbers = {pair: [str(next(drawn)) for _ in range(values)] for pair in pairs}
    facts = [f"One of the special magic numbers for {pair} is: {value}." for pair in pairs for value in numbers[pair]]
    draw.shuffle(facts)
    queries = draw.sample(pairs, asked)
    text = hide(draw, prose.take_passage(where, size), facts)
    query = queries[0] if asked == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    answers = [value for pair in queries for value in numbers[pair]]
    one = "A", "number", "is", "is"
    some, number, verb, ask = one if len(answers) == 1 else ("Some", "numbers", "are", "are all")
    return Question(
        f"{some} special magic {number} {verb} hidden within the following text. Make sure to memorize it. I will quiz "
        f"you about the {number} afterwards.\n{text}\n"
        f"What {ask} the special magic {number} for {query} mentioned in the provided text?",
        f"The special magic {number} for {query} mentioned in the provided text {verb}",
        answers,
    )


def variables(draw: Random, size: int, prose: Haystack, **_: object) -> Question:
    """A chain of assignments among `size` sentences that say nothing, after a solved example with shorter names."""
    example = make_chain(draw, 5 * (HOPS + 1), letters=3)
    question = make_chain(draw, size, letters=5)
    return question._replace(
        prompt=f"{example.prompt} {example.prefix} {' '.join(example.answers)}\n\n{question.prompt}"
    )


def make_chain(draw: Random, size: int, *, letters: int) -> Question:
    """One chain of `HOPS` + 1 variables, their names of so many letters, among `size` sentences."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    value = str(draw.randrange(10_000, 100_000))
    places = sorted(draw.random() for _ in names)
    lines = list(islice(cycle(NOISE.replace(". ", ".\n").split("\n")), size))
    chained = list(zip(places, names, [value, *(f"VAR {name}" for name in names)], strict=False))
    for place, name, given in reversed(chained):  # the last first, which leaves the places of others
        lines.insert(int(place * size), f"VAR {name} = {given}")
    text = " ".join(lines).replace("again. ", "again.\n")
    return Question(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{text}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        # RULER's spelling, which its published scores were measured with
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assgined the value {value}, they are:",
        names,
    )


def common_words(
    draw: Random, size: int, prose: Haystack, *, often: int = 30, seldom: int = 3, **_: object
) -> Question:
    """The ten most common of the prose's words in a list with `size` others, after a solved example.

    The ten are in the list `often` times each, the others `seldom` times.
    """
    words = list(prose.vocabulary)
    draw.shuffle(words)
    example = list_words(draw, COMMON, words[: 2 * COMMON], often=3, seldom=1)
    question = list_words(draw, size, words[2 * COMMON :], often=often, seldom=seldom)
    solved = " ".join(f"{number}. {word}" for number, word in enumerate(example.answers, start=1))
    return question._replace(prompt=f"{example.prompt} {example.prefix} {solved}\n{question.prompt}")


def list_words(draw: Random, size: int, words: list[str], *, often: int, seldom: int) -> Question:
    """A numbered list in which the first ten of `words` come `often` times, and `size` entries are others.

    If the others run out, they come up to half as often as the ten, and then all come more often.

    Raises:
        ValueError: there are too few words.
    """
    common, others = words[:COMMON], words[COMMON : COMMON - (-size // seldom)]
    if not others:
        raise ValueError("the text has too few different words for a list of them")
    times = -(-size // (len(others) * max(often // 2, 1)))
    entries = [*common * often * times, *(others[number % len(others)] for number in range(size))]
    draw.shuffle(entries)
    text = " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))
    return Question(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{text}\nQuestion: What are the {COMMON} most common words in the above list?",
        f"Answer: The top {COMMON} words that appear most often in the list are:",
        common,
    )


def frequent_words(draw: Random, size: int, prose: Haystack, **_: object) -> Question:
    """The three most frequent of coded words in a text of about `size`: the k-th most frequent has a share of 1 / k².

    The most frequent one is "..." and is not asked for.
    """
    counts: list[int] = []
    while not counts or counts[-1]:
        counts.append(int(size * 6 / pi**2 / (len(counts) + 1) ** 2))
    drawn = ("".join(draw.choices(ascii_lowercase, k=6)) for _ in range(len(counts) + FREQUENT))
    coded = ["...", *dict.fromkeys(drawn)]
    entries = [word for word, count in zip(coded, counts, strict=False) for _ in range(count)]
    draw.shuffle(entries)
    return Question(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(entries)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?",
        "Answer: According to the coded text above, the three most frequently appeared words are:",
        coded[1 : FREQUENT + 1],
    )


def classes(draw: Random, size: int, prose: Haystack, **_: object) -> Question:
    """The label of a word that is not among `size` examples, though others of its kind are.

    Labels are two-digit numbers, another for every kind of thing in every document. An example comes again when all
    words have been used.
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
