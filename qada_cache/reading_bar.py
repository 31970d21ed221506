"""A bar with the time left while a prompt is read."""

from tqdm import tqdm

SHOWN_AFTER = 2.0  # seconds; what is read sooner needs no bar


class ReadingBar:
    """One bar for a prompt, whether it is read in one pass or in chunks. Each layer of a pass is a step of it: layers
    take about as long as each other, so the first of them tell how long the rest will take."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._first = self._next = 0  # tokens held when the bar began, and when the next pass of its prompt begins

    def __deepcopy__(self, memo: dict) -> "ReadingBar":
        return ReadingBar()

    def advance(self, layer: int, layers: int, *, held: int, tokens: int, prompt: int) -> None:
        """Layer number `layer` of `layers` begins with `tokens` new tokens behind `held` ones; the prompt ends with
        token number `prompt`. After the last layer has begun the bar is gone."""
        if self._bar is not None and not self._first <= held <= self._next:
            self.close()  # it was of a prompt that was not read to its end
        if self._bar is None:
            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
            label = f"Reading {prompt - held:,} tokens"
            self._bar = tqdm(desc=label, total=prompt - held, bar_format=form, delay=SHOWN_AFTER, leave=False)
            self._first = held
        self._next = held + tokens
        self._bar.update(held - self._first + tokens * layer / layers - self._bar.n)
        if layer == layers - 1 and self._next >= prompt:
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
