"""Options of choosing tokens that are refused when a cache is built; others are in tests/cache/."""

import math
from typing import Any

import pytest
import torch
from harness import make_shared


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"token_threshold": -1.0}, "token_threshold must be finite and not negative, got -1.0"),
        ({"token_threshold": math.nan}, "token_threshold must be finite and not negative, got nan"),
        ({"token_threshold": math.inf}, "token_threshold must be finite and not negative, got inf"),
        ({"token_threshold": 10**400}, "token_threshold must be finite and not negative, got 1000"),
        ({"token_threshold": "2"}, "token_threshold must be a number, got str"),
        ({"token_threshold": True}, "token_threshold must be a number, got bool"),
        ({"prefill_threshold": -1.0}, "prefill_threshold must be finite and not negative, got -1.0"),
        ({"prefill_threshold": math.nan}, "prefill_threshold must be finite and not negative, got nan"),
        ({"prefill_threshold": "2"}, "prefill_threshold must be a number, got str"),
        ({"sketch_bits": 0.4}, "sketch_bits must be from 0.5 to 4.0, got 0.4"),
        ({"sketch_bits": 5}, "sketch_bits must be from 0.5 to 4.0, got 5"),
        ({"sketch_bits": float("nan")}, "sketch_bits must be from 0.5 to 4.0, got nan"),
        ({"sketch_bits": True}, "sketch_bits must be a number, got bool"),
        ({"sketch_bits": torch.arange(2)}, "sketch_bits must be a number, got Tensor"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        make_shared(**options)
