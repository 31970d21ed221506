"""What the demo reads: a real text cut to a length, and facts planted in it that the model cannot know otherwise."""

import random
import re
from dataclasses import dataclass
from pydoc_data.topics import topics

# Whole topics of the Python language reference, in an order that reads as a document. Every Python has the reference;
# its topics and their wording change from version to version.
TOPICS = (
    *("objects", "execmodel", "import", "try", "calls", "function", "class", "numeric-types", "with", "raise"),
    *("naming", "async", "strings", "identifiers", "operator-summary", "attribute-access", "typesseq"),
)

_SHIPS = ("Aurora", "Meridian", "Petrel", "Halcyon")
_CAPTAINS = ("Helena Brandt", "Oscar Lindqvist", "Marta Silva", "Edwin Hale", "Ruth Calloway", "Jonas Weber")
_FESTIVALS = ("lantern", "kite", "puppet", "harvest")
_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Dublin", "Prague")
_TOWNS = ("Oakmere", "Brackwell", "Tilford", "Ashcombe")
_DATES = ("14 March 1897", "2 June 1911", "30 October 1854", "7 May 1923", "21 January 1876")
_BUILDINGS = ("harbor", "castle", "museum", "lighthouse")
_CLUBS, _ANIMALS = ("rowing", "chess", "cycling"), ("heron", "badger", "otter", "falcon")
_DISHES = ("grandmother's soup", "the baker's cake", "the winter tea")
_SPICES = ("saffron", "nutmeg", "ginger", "cardamom")


@dataclass(frozen=True)
class Turn:
    """One question of a chat.

    Args:
        question: as the user asks it.
        begun: how the answer begins, written for the model: it goes on from there.
        fact: the sentence in the text that answers it, "" for questions of which nobody knows the right answer.
        expected: what a right answer contains, "" likewise.
    """

    question: str
    begun: str = ""
    fact: str = ""
    expected: str = ""

    def is_right(self, answer: str) -> bool:
        """Whether an answer has what is expected, in whatever case and line breaks, but not as part of a longer word
        or number."""
        words = r"\s+".join(map(re.escape, self.expected.split()))
        return bool(self.expected) and re.search(rf"(?<!\w){words}(?!\w)", answer, re.IGNORECASE) is not None


# Asked of the reference as well. Judged by nobody: what counts is whether every cache leads to the same answer.
ABOUT_THE_REFERENCE = (
    Turn("What is an object's identity, according to the text?", begun="According to the text, an object's identity"),
    Turn("What is garbage collection, according to the text?", begun="According to the text, garbage collection"),
)


def reference() -> str:
    """The default document: topics of the Python language reference."""
    return "\n\n".join(topics[name].strip() for name in TOPICS if name in topics)


def planted(seed: int) -> list[Turn]:
    """A fact of each kind with the question about it, in the order they are asked; names and values drawn by `seed`.

    One fact a kind: SmolLM2-135M mixes up two captains, whichever cache it has.
    """
    draw = random.Random(seed)
    building, code = draw.choice(_BUILDINGS), str(draw.randrange(10**6, 10**7))
    ship, captain = draw.choice(_SHIPS), draw.choice(_CAPTAINS)
    festival, city = draw.choice(_FESTIVALS), draw.choice(_CITIES)
    town, date = draw.choice(_TOWNS), draw.choice(_DATES)
    club, animal = draw.choice(_CLUBS), draw.choice(_ANIMALS)
    dish, spice = draw.choice(_DISHES), draw.choice(_SPICES)
    return [
        _turn(f"What is the access code of the {building}?", f"The access code of the {building} is", code),
        _turn(f"Who is the captain of the ship {ship}?", f"The captain of the ship {ship} is named", captain),
        _turn(
            f"In which city does the {festival} festival take place?",
            f"The {festival} festival takes place in the city of",
            city,
        ),
        _turn(f"When was the bridge at {town} opened?", f"The bridge at {town} was opened on", date),
        _turn(f"What is the mascot of the {club} club?", f"The mascot of the {club} club is the", animal),
        _turn(f"What is the secret ingredient of {dish}?", f"The secret ingredient of {dish} is", spice),
    ]


def _turn(question: str, begun: str, expected: str) -> Turn:
    return Turn(question, begun=begun, fact=f"{begun} {expected}.", expected=expected)


def plant(text: str, facts: list[str]) -> str:
    """`text` with the facts as paragraphs of their own, at even depths: each at the break between paragraphs (of
    short texts sentences, else words) that is nearest."""
    for pattern in (r"\n[ \t]*\n\s*", r"(?<=[.!?])\s+", r"\s+"):
        breaks = [match.span() for match in re.finditer(pattern, text)]
        if len(breaks) >= len(facts):
            break
    depths = [len(text) * (index + 1) // (len(facts) + 1) for index in range(len(facts))]
    parts, done = [], 0
    for depth, fact in zip(depths, facts, strict=True):
        left = [span for span in breaks if span[0] >= done]
        start, end = min(left, key=lambda span: abs(span[0] - depth), default=(len(text), len(text)))
        parts += [text[done:start], fact]
        done = end
    return "\n\n".join(part for part in [*parts, text[done:]] if part.strip())
