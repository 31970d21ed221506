"""Tensors that hold tokens row by row: where they lie, and what they take."""

import torch
from torch import Tensor
from transformers.utils import logging

from ..files.private_map import PrivateMap
from . import transfers

logger = logging.get_logger(__name__)


class RowTensors:
    """Those of a `Bulk`, which fills them; offloaded, in pinned host memory."""

    # Keys and values `[batch, kv_heads, capacity, dim]` and `value_dim`, or what `CodedBulk` has; what follows a row's
    # tokens is not initialised and never read.
    tensors: tuple[Tensor, ...]
    stored: list[int]  # tokens of each row in them
    lengths: list[int]  # tokens of each row: as many, or those that `CodedBulk` has beside them too
    source: PrivateMap | None  # the memory that copies share, or the file, under `keys` and `values`
    unwritten: list[int]  # leading tokens of each row that still lie in `source`, the same in every copy
    device: torch.device  # which computes
    offloaded: bool

    def _allocate(self, like: Tensor, capacity: int, batch: int | None = None) -> Tensor:
        shape = (like.shape[0] if batch is None else batch, like.shape[1], capacity, like.shape[3])
        with torch.inference_mode(False):  # an inference tensor could not be appended to outside inference mode
            if self.offloaded and self.device.type != "cpu" and capacity > 0:
                try:
                    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=True)
                except RuntimeError as error:  # the system limits it, or has none left
                    logger.warning_once(
                        f"the bulk lies in host memory that is not pinned, so that copies of it wait: {error}"
                    )
            return transfers.make_empty(shape, like.dtype, transfers.HOST if self.offloaded else self.device)

    @property
    def mappable(self) -> bool:
        """Whether its storage is plain host memory, perhaps a mapped file."""
        return self.device.type == "cpu" and not self.offloaded

    @property
    def capacity(self) -> int:
        """Tokens of a row that `tensors` have room for."""
        return self.tensors[0].shape[2]

    @property
    def stored_token_bytes(self) -> int:
        """Bytes of a token of one head in `tensors`."""
        return sum(tensor.shape[3] * tensor.element_size() for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens in `tensors`."""
        return sum(self.stored) * self.tensors[0].shape[1] * self.stored_token_bytes

    @property
    def shared_bytes(self) -> int:
        """Of these, bytes still in `source`."""
        return sum(map(min, self.unwritten, self.stored)) * self.tensors[0].shape[1] * self.stored_token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that `tensors` take, unused capacity included."""
        pinned = [self.offloaded and tensor.is_pinned() for tensor in self.tensors]
        sizes = [tensor.nbytes for tensor in self.tensors]
        return sum(transfers.count_pinned(size) if block else size for size, block in zip(sizes, pinned, strict=True))
