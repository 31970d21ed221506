"""Keys in a few bits, coded in the metric of the queries, and the tokens that are selected by them."""

from .codec import Sketch, channel_means, order_dtype, quantize_segments, round_slopes
from .layout import BLOCK, MAX_BITS, MIN_BITS, Layout
from .segments import MIN_TOKENS, SEGMENT_TOKENS, segment_start, segments_of
from .selection import Selection, select_tokens, unread_value, unreliable

__all__ = [
    "BLOCK",
    "MAX_BITS",
    "MIN_BITS",
    "MIN_TOKENS",
    "SEGMENT_TOKENS",
    "Layout",
    "Selection",
    "Sketch",
    "channel_means",
    "order_dtype",
    "quantize_segments",
    "round_slopes",
    "segment_start",
    "segments_of",
    "select_tokens",
    "unread_value",
    "unreliable",
]
