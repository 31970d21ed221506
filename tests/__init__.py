"""A package, so that pytest puts the repository on the path and not this folder: `tests/lm_eval` is no `lm_eval`."""
