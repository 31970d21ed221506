"""`python -m qada_cache` is the command `qada`."""

import sys

from .cli import main

sys.exit(main())
