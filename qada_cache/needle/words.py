"""The words the needle model knows, by role. A word's place in `VOCABULARY` is its token id."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


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
