"""Where the segments of a sketched bulk lie: a function of its length alone, however its tokens came."""

MIN_TOKENS = 1024  # a bulk of fewer is read whole, which takes no longer than to select
# Keys turn with position, so what they are coded by has to come from tokens close by; each segment has its own.
SEGMENT_TOKENS = 512


def segments_of(length: int) -> int:
    """The number of segments of a bulk of `length` tokens. The last one has 256 to 767 tokens, all others 512."""
    return max(1, (length + SEGMENT_TOKENS // 2) // SEGMENT_TOKENS)


def segment_start(length: int) -> int:
    """The first token of the last segment of a bulk of `length` tokens."""
    return (segments_of(length) - 1) * SEGMENT_TOKENS
