"""Records the operations of torch that a test calls."""

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Inside, `called` collects torch's operations in the order of their calls, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[OpOverload] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(function)
        return function(*args, **(kwargs or {}))
