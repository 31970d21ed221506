"""Transformers' tables of attention functions, as in a process that has built no cache."""

from collections.abc import Iterator

import pytest
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qada_cache.attention import forward
from qada_cache.models import attention_table


@pytest.fixture
def clean_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers' tables of attention and masks are those of a process that has built no cache."""
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        for name, function in mapping.items():
            monkeypatch.setitem(mapping, name, function)  # what a test registers goes again
    forward._switched_on.clear()
    attention_table.displace(forward.attention_forward, forward._make_mask)
    yield
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
