"""Makes the moment files kept in this folder: `python -m moments.make`."""

from pathlib import Path

from qada_cache import KeyMoments, needle

TOKENS = 4096


def main() -> None:
    """Collect the needle model's key moments on random words, and write them beside this script."""
    words = needle.load_tokenizer()(needle.random_words(tokens=TOKENS), return_tensors="pt").input_ids
    moments = KeyMoments.collect(needle.load_model(), words, prompt="random-words")
    path = Path(__file__).parent / f"needle-random-words-{TOKENS}.safetensors"
    moments.save(path)
    print(f"wrote {path.name}: {TOKENS} tokens, {list(moments.mean.shape)} means")


if __name__ == "__main__":
    main()
