"""Transformers runs this instead of `model.generate`. The copy in a model's folder is yours to change."""

import functools

from qada_cache import serving

CACHE_OPTIONS: dict = {}  # keywords of QAdACache, for example {"threshold": 0.9, "token_threshold": 0.5}
ONE_USER = True  # False where several are served: nothing is kept of requests without a conversation_key
CONVERSATIONS = serving.CONVERSATIONS  # how many conversations' caches are kept between requests
MEMORY = serving.MEMORY  # of their caches: bytes, or a share of the host's memory
SECONDS = serving.SECONDS  # lifetime of an unused conversation
STORE: bool | str = True  # where turns are written, to be found after a restart: a folder; True: the user's own

generate = functools.partial(
    serving.generate,
    cache_options=CACHE_OPTIONS,
    one_user=ONE_USER,
    conversations=CONVERSATIONS,
    conversations_memory=MEMORY,
    conversations_seconds=SECONDS,
    conversations_store=STORE,
)
