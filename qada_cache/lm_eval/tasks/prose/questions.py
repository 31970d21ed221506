"""What a prompt of each form asks: numbers for keys, the variables of a value, frequent words, labels of words.

The forms but the last, the prompts' wording and the answers' prefixes are those of RULER (Hsieh et al., 2024). Every
maker takes the document's own random numbers `draw`, the `size` of the text around the question, and the prose. The
same arguments give the same question; another size changes the surrounding text alone.
"""

from math import pi
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple

from qada_cache.lm_eval.tasks.prose.haystack import ADJECTIVES, KINDS, NOUNS, Haystack, hide

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4  # of a chain of variables
COMMON = 10  # words asked for
FREQUENT = 3  # coded words asked for


class Question(NamedTuple):
    """A prompt, the given beginning of its answer, and the expected content of the rest."""

    prompt: str
    prefix: str
    answers: list[str]


def needles(
    draw: Random, size: int, prose: Haystack, *, where: float, keys: int = 1, values: int = 1, asked: int = 1
) -> Question:
    """Seven-digit numbers for keys, in `size` words of prose.

    Args:
        draw, size, prose: see above.
        where: the part of the prose, 0 to 1.
        keys: how many have numbers.
        values: numbers of each key.
        asked: keys whose numbers are asked for.
    """
    words = zip(draw.sample(ADJECTIVES, keys), draw.sample(NOUNS, keys), strict=True)  # no two keys share one
    pairs = [f"{adjective}-{noun}" for adjective, noun in words]
    drawn = iter(draw.sample(range(1_000_000, 10_000_000), keys * values))
    numbers = {pair: [str(next(drawn)) for _ in range(values)] for pair in pairs}
    facts = [f"One of the special magic numbers for {pair} is: {value}." for pair in pairs for value in numbers[pair]]
    draw.shuffle(facts)
    queries = draw.sample(pairs, asked)
    text = hide(draw, prose.passage(where, size), facts)
    query = queries[0] if asked == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    answers = [value for pair in queries for value in numbers[pair]]
    if len(answers) == 1:
        return Question(
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the number afterwards.\n{text}\n"
            f"What is the special magic number for {query} mentioned in the provided text?",
            f"The special magic number for {query} mentioned in the provided text is",
            answers,
        )
    return Question(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the numbers afterwards.\n{text}\n"
        f"What are all the special magic numbers for {query} mentioned in the provided text?",
        f"The special magic numbers for {query} mentioned in the provided text are",
        answers,
    )


def variables(draw: Random, size: int, prose: Haystack, **_: object) -> Question:
    """A chain of assignments among `size` sentences that say nothing, after a solved example with shorter names."""
    example = chain(draw, 5 * (HOPS + 1), letters=3)
    question = chain(draw, size, letters=5)
    return question._replace(
        prompt=f"{example.prompt} {example.prefix} {' '.join(example.answers)}\n\n{question.prompt}"
    )


def chain(draw: Random, size: int, *, letters: int) -> Question:
    """One chain of `HOPS` + 1 variables, their names of so many letters, among `size` sentences."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    value = str(draw.randrange(10_000, 100_000))
    places = sorted(draw.random() for _ in names)
    said = NOISE.replace(". ", ".\n").split("\n")
    lines, done = [], 0
    for place, name, given in zip(places, names, [value, *(f"VAR {name}" for name in names)], strict=False):
        lines += [said[number % len(said)] for number in range(done, int(place * size))]
        lines.append(f"VAR {name} = {given}")
        done = int(place * size)
    lines += [said[number % len(said)] for number in range(done, size)]
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

    Args:
        draw, size, prose: see above.
        often, seldom: how often the ten and the others are in the list.

    Raises:
        ValueError: the prose has too few different words.
    """
    words = list(prose.vocabulary)
    draw.shuffle(words)
    example = word_list(draw, COMMON, words[: 2 * COMMON], often=3, seldom=1)
    question = word_list(draw, size, words[2 * COMMON :], often=often, seldom=seldom)
    solved = " ".join(f"{number}. {word}" for number, word in enumerate(example.answers, start=1))
    return question._replace(prompt=f"{example.prompt} {example.prefix} {solved}\n{question.prompt}")


def word_list(draw: Random, size: int, words: list[str], *, often: int, seldom: int) -> Question:
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
    words have been used. `draw` and `size` are as above; the prose is not used.
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
