"""Keys in a few bits, coded in the metric of the queries, and the tokens that are selected by them."""

from .codec import BITS, Sketch, code_bytes, encode_segments, rotation, rounded_slopes
from .segments import MIN_TOKENS, SEGMENT_TOKENS, segment_start, segments_of
from .selection import Selection, select_tokens, unread_value, unreliable

__all__ = [
    "BITS",
    "MIN_TOKENS",
    "SEGMENT_TOKENS",
    "Selection",
    "Sketch",
    "code_bytes",
    "encode_segments",
    "rotation",
    "rounded_slopes",
    "segment_start",
    "segments_of",
    "select_tokens",
    "unread_value",
    "unreliable",
]
