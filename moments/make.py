"""Makes the moment file kept in this folder: `python -m moments.make`."""

from pathlib import Path

from eval.shared.language_model import load
from qada_cache import KeyMoments

FILE = Path(__file__).parent / "smollm2-135m-instruct-random-words.safetensors"


def main() -> None:
    """Collect SmolLM2's key moments on random words, and write them beside this script."""
    model, tokenizer = load("smollm2")
    moments = KeyMoments.collect(model, tokenizer, "random-words")
    moments.save(FILE)
    print(f"wrote {FILE.name}: {moments.tokens} tokens, {list(moments.shape)} means, for bulks of any length")


if __name__ == "__main__":
    main()
