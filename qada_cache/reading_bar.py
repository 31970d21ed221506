"""A progress bar, with the time left, while a prompt is read."""

from tqdm import tqdm

SHOWN_AFTER = 2.0  # seconds; a prompt that takes less shows no bar


class ReadingBar:
    """One bar for a prompt, whether it is read in one pass or in chunks. The bar advances by each layer of a pass, as
    layers take about the same time."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._first = self._next = 0  # the cache's tokens when the bar began, and when the next chunk begins
        self._held = self._layers = self._prompt = 0  # arguments of `advance`

    def __deepcopy__(self, memo: dict) -> "ReadingBar":
        return ReadingBar()

    def advance(self, layer: int, layers: int, *, held: int, tokens: int, prompt: int) -> None:
        """Update the bar as layer number `layer` of `layers` begins to read `tokens` new tokens. The cache has `held`
        tokens before them, and `prompt` ones after the whole prompt. The bar is closed in the prompt's last layer."""
        if self._bar is not None and not self._first <= held <= self._next:
            self.close()  # the bar's prompt was not read to its end
        if self._bar is None:
            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
            label = f"Reading {prompt - held:,} tokens"
            self._bar = tqdm(desc=label, total=prompt - held, bar_format=form, delay=SHOWN_AFTER, leave=False)
            self._first = held
        self._held, self._layers, self._prompt, self._next = held, layers, prompt, held + tokens
        self._update(self._bar, layer)

    def reach(self, layer: int) -> None:
        """As `advance`, for a layer without keys of its own. Those before the first one with keys are still told of the
        chunk before theirs, and do not turn the bar back."""
        if self._bar is not None and self._find_done(layer) > self._bar.n:
            self._update(self._bar, layer)

    def _find_done(self, layer: int) -> float:
        return self._held - self._first + (self._next - self._held) * layer / self._layers

    def _update(self, bar: tqdm, layer: int) -> None:
        bar.update(self._find_done(layer) - bar.n)
        if layer == self._layers - 1 and self._next >= self._prompt:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
