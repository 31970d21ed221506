"""Segments' places are a function of a bulk's length."""

import itertools

from sketch_reference import segment_spans

from qada_cache.sketch import MIN_TOKENS, SEGMENT_TOKENS, count_segments, find_segment_start


def test_segments_of_every_length() -> None:
    """They follow one another, and all but the last have 512 tokens; that one has 128 to 639, if there are so many."""
    assert SEGMENT_TOKENS == 512
    for length in range(1, 5001):
        count, last = count_segments(length), find_segment_start(length)
        spans = [(512 * index, 512 * (index + 1)) for index in range(count - 1)] + [(last, length)]
        assert spans == segment_spans(length)
        assert last == 512 * (count - 1)
        assert length - last <= 639
        assert length - last >= 128 or (count == 1 and length < 128)


def test_a_segment_that_is_not_the_last_never_changes() -> None:
    """One more token is in the last one, or begins no earlier one anew."""
    starts = [find_segment_start(length) for length in range(1, 5001)]
    assert all(
        0 <= after - before <= 512 and (after - before) % 512 == 0 for before, after in itertools.pairwise(starts)
    )
    assert count_segments(MIN_TOKENS) == 2  # the shortest bulk with a sketch
