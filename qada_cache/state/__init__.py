"""A cache and its layers beside their tokens: options, counters, progress of a pass."""
