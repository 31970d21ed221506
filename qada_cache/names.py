"""Names that the command line knows before torch is imported."""

PROMPTS = ("random-words", "wiki", "single-word", "random-tokens", "single-token")  # what moments are of
SCHEMES = ("auto", "analytic", "spread", "prompt")  # how moments become length-free, see `KeyMoments.collect`
WITHOUT_TEXT = "random-tokens", "single-token"  # prompts that are drawn from the vocabulary
