"""What transformers runs in the place of `model.generate`; in a model's folder, a copy that is yours to change."""

import functools

from qada_cache import serving

CACHE_OPTIONS: dict = {}  # of QAdACache, for example {"threshold": 0.9, "token_threshold": 0.5}
CONVERSATIONS = serving.CONVERSATIONS  # how many conversations' caches are kept between requests

generate = functools.partial(serving.generate, cache_options=CACHE_OPTIONS, conversations=CONVERSATIONS)
