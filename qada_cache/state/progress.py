"""How far the forward pass or change under way has come, so that one that was interrupted is noticed."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The layer that called the cache last, and what it has called it for in this pass.

    A layer may hold attention and states of another kind: it calls for each, in an order of its own, once a pass. So a
    second call for the same thing is of another pass.

    Attributes:
        reached: the layer; -1 before the first.
        told: what for; None: everything.
        versions: of the states it has, when it was come to.
        written: by kind of layer, what those before it wrote in this pass.
        changing: the verb that is changing all layers, one after the other; empty if none is.
    """

    reached: int = -1
    told: set[Hashable] | None = field(default_factory=set)
    versions: dict[Hashable, int] = field(default_factory=dict)
    written: dict[Hashable, set[Hashable]] = field(default_factory=dict)
    changing: str = ""

    def begins_anew(self, layer: int, event: Hashable) -> bool:
        """Whether this call can only be of a new pass."""
        again = self.told is None or event in self.told
        return layer < self.reached or (layer == self.reached and again)

    def arrives(self, layer: int, event: Hashable) -> bool:
        """Whether the layer has not called in this pass."""
        return self.told is None or layer != self.reached or event in self.told

    def come(self, layer: int, event: Hashable) -> None:
        """The layer has called for this."""
        if self.told is None or self.arrives(layer, event):
            self.reached, self.told = layer, set()
        self.told.add(event)

    def back_to(self, layer: int) -> None:
        """Nothing after this layer has called in this pass."""
        self.reached, self.told = layer, None
