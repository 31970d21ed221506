"""The needle model: a 0.9M-parameter Llama to test the cache on.

It is a test model, trained for minutes on the synthetic text of this module. Its heads are local by default and
turn long-context for a question about something far away, as tests of the cache need. Training sees to that: its last
stages penalise far attention, and train the Gaussian estimate of it. So key moments of random words find the heads that
a question needs, and moments of the prompt itself mostly miss them. The script that trained it is in the history, up to
commit db97d06. Measurements on this model are no evidence about a real language model's quality.

    model, tokenizer = load_model(), load_tokenizer()
    prompt = make_prompt(tokens=4096)
    inputs = tokenizer(f"{prompt.context} {prompt.questions[0]}", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=1)   # its last token: prompt.answers[0]

Further questions go on the same sequence: the answer's token, then
`tokenizer(prompt.questions[1], add_special_tokens=False)`.

A prompt is a haystack, a dozen noise sentences repeated in random order, with facts ("note tiger copper .") scattered
between them. Asking is appending a question ("ask tiger"): the next word is the answer. Several questions are asked one
after the other on the same text: "ask tiger copper ask otter honey ...". `tokens` always counts the `<s>` that the
tokenizer puts in front, so a prompt has exactly `tokens` input ids.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The words that the model knows, by role. A word's place in `VOCABULARY` is its token id.
PAD, BOS, EOS, UNKNOWN = SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
NOTE, ASK, STOP = MARKERS = ("note", "ask", ".")

# The haystack: these sentences, over and over. They are the same in every prompt, so a model that has learnt them
# needs only the last few words to continue one; nothing but a question asks for something far away.
SENTENCES = tuple(
    sentence.split()
    for sentence in (
        "the old farmer walks slowly along the river .",
        "a young sailor waits quietly behind the harbor .",
        "every morning fresh snow covers our little village .",
        "her brother paints tall ships on brown paper .",
        "some children play loud games under the bridge .",
        "that teacher often reads long letters after dinner .",
        "cold wind moves dark clouds across empty fields .",
        "my neighbor grows bright flowers near his window .",
        "this train leaves the station early each evening .",
        "two friends share one umbrella in heavy rain .",
        "an honest writer opens another shop before dawn .",
        "few people visit that quiet museum during winter .",
    )
)
NOISE = tuple(dict.fromkeys(word for sentence in SENTENCES for word in sentence if word != STOP))

KEYS = _words(
    """tiger lion bear wolf fox deer moose elk bison buffalo camel llama alpaca donkey horse zebra giraffe elephant
    rhino hippo monkey gorilla baboon lemur sloth panda koala kangaroo wombat badger otter beaver weasel ferret mink
    skunk raccoon rabbit hare squirrel hamster mouse rat gopher hedgehog mole bat whale dolphin porpoise seal walrus
    shark stingray salmon trout tuna herring sardine anchovy eel carp pike perch cod halibut lobster crab shrimp oyster
    mussel squid octopus jellyfish starfish coral eagle hawk falcon owl raven crow magpie robin sparrow finch swallow
    thrush starling pigeon dove parrot toucan pelican heron stork crane flamingo swan goose duck penguin puffin gull
    albatross turkey pheasant quail peacock ostrich emu kiwi turtle tortoise lizard gecko iguana chameleon crocodile
    alligator snake python cobra viper frog toad newt salamander bee wasp hornet ant termite beetle ladybug firefly
    cricket locust mantis moth butterfly dragonfly mosquito spider scorpion tick snail slug worm leech cheetah leopard
    jaguar panther cougar lynx bobcat hyena jackal coyote dingo mongoose meerkat antelope gazelle impala oryx yak goat
    sheep ram pig boar cow bull ox pony mule cat dog poodle terrier beagle hound collie mastiff setter
    spaniel greyhound dachshund husky corgi"""
)

VALUES = _words(
    """apple apricot avocado banana blackberry blueberry cherry coconut cranberry date fig grape grapefruit guava lemon
    lime lychee mango melon nectarine olive orange papaya peach pear pineapple plum pomegranate quince raisin raspberry
    strawberry tangerine artichoke asparagus aubergine bean beetroot broccoli cabbage carrot cauliflower celery chard
    chicory cucumber endive fennel garlic kale leek lentil lettuce maize mushroom okra onion parsnip pea pepper potato
    pumpkin radish rhubarb shallot spinach squash tomato turnip yam basil bay chive cinnamon clove coriander cumin dill
    ginger mint mustard nutmeg oregano paprika parsley rosemary saffron sage salt sesame tarragon thyme turmeric vanilla
    almond cashew chestnut hazelnut peanut pecan pistachio walnut barley millet oat quinoa rice rye spelt wheat bread
    butter cheese cream curd honey jam jelly milk sugar syrup yogurt bacon ham sausage steak tofu noodle pasta pizza
    pancake waffle biscuit cake cookie muffin pastry pie pudding tart chocolate caramel toffee fudge sherbet coffee
    tea cocoa cider juice lemonade soda water wine copper silver gold iron steel bronze brass nickel cobalt zinc tin
    lead chrome marble granite slate quartz amber jade ruby emerald sapphire topaz opal pearl ivory ebony maple oak
    cedar birch willow pine teak mahogany spruce larch aspen"""
)

ORDINARY = NOISE + KEYS + VALUES
VOCABULARY = SPECIAL + MARKERS + ORDINARY

FACT_WORDS = 4
_SENTENCE_WORDS = len(SENTENCES[0])
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class NeedlePrompt:
    """One text and what to ask about it: `answers[i]` is the word that follows `questions[i]`."""

    context: str
    questions: list[str]
    answers: list[str]


def make_prompt(*, tokens: int = 16384, facts: int = 48, questions: int = 16, seed: int = 0) -> NeedlePrompt:
    """A haystack of `tokens` tokens with `facts` facts in it, and `questions` questions about different facts.

    Raises:
        ValueError: the facts do not fit, or there are more facts than keys or more questions than facts.
    """
    if not 1 <= facts <= len(KEYS):
        raise ValueError(f"facts must lie in 1..{len(KEYS)}, got {facts}")
    if not 0 <= questions <= facts:
        raise ValueError(f"questions must lie in 0..facts ({facts}), got {questions}")
    if tokens < 1 + facts * FACT_WORDS:
        raise ValueError(f"{facts} facts need at least {1 + facts * FACT_WORDS} tokens, got {tokens}")
    generator = random.Random(f"needle {seed}")
    pairs = list(zip(generator.sample(KEYS, facts), generator.sample(VALUES, facts), strict=True))
    words = _noise_words(generator, tokens - 1 - facts * FACT_WORDS)
    sentences = len(words) // _SENTENCE_WORDS
    starts = sorted((generator.randint(0, sentences) * _SENTENCE_WORDS for _ in pairs), reverse=True)
    for start, (key, value) in zip(starts, pairs, strict=True):  # from the back, so that earlier starts stay valid
        words[start:start] = [NOTE, key, value, STOP]
    asked = generator.sample(pairs, questions)
    return NeedlePrompt(
        context=" ".join(words),
        questions=[f"{ASK} {key}" for key, _ in asked],
        answers=[value for _, value in asked],
    )


def haystack(*, tokens: int = 16384, seed: int = 0) -> str:
    """Noise sentences in random order, no facts: text as repetitive as a needle prompt's."""
    return " ".join(_noise_words(random.Random(f"haystack {seed}"), tokens - 1))


def random_words(*, tokens: int = 16384, seed: int = 0) -> str:
    """Words drawn uniformly from all noise words, keys and values: the prompt to collect key moments from."""
    return " ".join(random.Random(f"random words {seed}").choices(ORDINARY, k=tokens - 1))


def _noise_words(generator: random.Random, count: int) -> list[str]:
    sentences = generator.choices(SENTENCES, k=-(-count // _SENTENCE_WORDS))
    return [word for sentence in sentences for word in sentence][:count]


def load_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The needle model in evaluation mode, on the CPU: a test model, no evidence about a real model's quality."""
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=dtype, local_files_only=True).eval()


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Its tokenizer: one token per word of `VOCABULARY`, `<s>` in front unless `add_special_tokens=False`."""
    return PreTrainedTokenizerFast.from_pretrained(FOLDER, local_files_only=True)
