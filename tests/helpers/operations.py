"""What torch is asked to do."""

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Torch's operations, in the order in which they are called, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[OpOverload] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(function)
        return function(*args, **(kwargs or {}))
