"""Progress of the forward pass or change under way, to notice an interruption."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The layer that called the cache last, and the calls that it has made in this pass.

    A layer may hold attention and states of another kind. It makes one call a pass for each, in an order of its own.
    The same call again belongs to another pass.

    Attributes:
        reached: the layer that called last; -1 before the first call.
        told: calls of that layer in this pass; None: it has made all of them.
        versions: of that layer's states (`watched._versions`), at its first call.
        written: by kind of layer, the states that layers before it wrote in this pass.
        changing: the verb ("crop") that all layers are going through, one after the other; empty if there is none.
    """

    reached: int = -1
    told: set[Hashable] | None = field(default_factory=set)
    versions: dict[Hashable, int] = field(default_factory=dict)
    written: dict[Hashable, set[Hashable]] = field(default_factory=dict)
    changing: str = ""

    def begins_anew(self, layer: int, event: Hashable) -> bool:
        """Whether this call can only belong to a new pass."""
        again = self.told is None or event in self.told
        return layer < self.reached or (layer == self.reached and again)

    def arrives(self, layer: int, event: Hashable) -> bool:
        """Whether this is the first call of the layer in its pass."""
        return self.told is None or layer != self.reached or event in self.told

    def come(self, layer: int, event: Hashable) -> None:
        """Note a call of the layer."""
        if self.told is None or self.arrives(layer, event):
            self.reached, self.told = layer, set()
        self.told.add(event)

    def back_to(self, layer: int) -> None:
        """Forget calls of later layers; this one has made all its calls in this pass."""
        self.reached, self.told = layer, None
