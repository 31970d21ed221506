"""`python -m qada_cache.lm_eval ...`: lm-eval's own command line, with our model and tasks although the hook is off."""

from _qada_cache_startup import install
from lm_eval.__main__ import cli_evaluate

install()
cli_evaluate()
