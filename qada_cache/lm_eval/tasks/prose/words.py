"""Words of prompts: keys of needles, and kinds of things for classification."""

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
