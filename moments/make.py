"""Makes the moment files kept in this folder: `python -m moments.make`."""

from pathlib import Path

from qada_cache import KeyMoments, needle


def main() -> None:
    """Collect the needle model's key moments on random words, and write them beside this script."""
    moments = KeyMoments.collect(needle.load_model(), needle.load_tokenizer(), "random-words")
    path = Path(__file__).parent / "needle-random-words.safetensors"
    moments.save(path)
    print(f"wrote {path.name}: {moments.tokens} tokens, {list(moments.shape)} means, for bulks of any length")


if __name__ == "__main__":
    main()
