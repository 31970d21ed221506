"""Keys in a few bits, coded in the metric of the queries (`codec.py`), tokens selected by them (`selection.py`), and
what lies behind these bits (`coded.py`).

A channel of a key gets the more bits, the more of a score's variance it carries (`Layout`). A bulk's tokens lie in
segments: a function of its length alone, however its tokens came.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TOKENS = 1024  # a bulk of fewer is read whole, which takes no longer than to select
# Keys turn with position, so what they are coded by has to come from tokens close by; each segment has its own.
SEGMENT_TOKENS = 512
LAST_TOKENS = 128  # of a bulk's last segment, at least: fewer tell little of its channels
WORD_BITS = 32
BITS = (4, 2, 1)  # of a value, in the order in which a key's words hold them
MIN_BITS, MAX_BITS = 0.5, 4.0  # of a value, on average
# For a Gaussian of deviation 1: the step of the uniform quantizer that is best, and the squared error it leaves.
STEPS = {4: 0.3352, 2: 0.9957, 1: 1.5958}
ERRORS = {4: 0.01154, 2: 0.1188, 1: 0.3634}
BLOCK = 8  # channels that are rotated together; a word holds one block or several
PRODUCT_CHANNELS = 64  # of blocks that are rotated by one product, at most
HADAMARD = BLOCK**-0.5  # a rotation's factor, which makes it orthonormal
# Of channels in the order of their need, the need falls by this factor from first to last: SmolLM2, Qwen2.5-Coder-0.5B.
NEED_FALLS = math.exp(5)
UNCODED = 2.0  # what the error of a channel without bits counts: unlike a quantizer's, neighbours share it


def count_segments(length: int) -> int:
    """The number of segments of a bulk of `length` tokens. The last one has 128 to 639 tokens, all others 512."""
    return max(1, (length + SEGMENT_TOKENS - LAST_TOKENS) // SEGMENT_TOKENS)


def count_closed(length: int) -> int:
    """Number of tokens in closed segments, which are coded for good, of a bulk of `length` tokens; 0 without a
    sketch."""
    return find_segment_start(length) if length >= MIN_TOKENS else 0


def find_segment_start(length: int) -> int:
    """The first token of the last segment of a bulk of `length` tokens."""
    return (count_segments(length) - 1) * SEGMENT_TOKENS


@dataclass(frozen=True)
class Layout:
    """The words of a key's code."""

    dim: int  # channels of a key, a multiple of 8
    # 32-bit words of 4-, 2- and 1-bit values, in this order. Channels are in the order of their need: the first words
    # hold those that need most, and channels for which no word is left have no bits.
    words: tuple[int, int, int]

    @staticmethod
    def from_bits(dim: int, bits: float) -> "Layout | None":
        """`bits` a value on average, as near as whole words come; None for keys of no whole blocks."""
        if dim % BLOCK:
            return None
        return Layout.from_words(dim, max(1, math.floor(dim * bits / WORD_BITS + 0.5)))

    @staticmethod
    @functools.cache
    def from_words(dim: int, count: int) -> "Layout":
        """The best one of so many words, from 1 to `dim / 8`; ValueError, if there is none."""
        need = [NEED_FALLS ** (-channel / dim) for channel in range(dim)]
        found = []
        for fine in range(count + 1):
            for middle in range(count - fine + 1):
                layout = Layout(dim, (fine, middle, count - fine - middle))
                if layout.coded <= dim:
                    each = [ERRORS[bits] for bits in layout.bits] + [UNCODED] * (dim - layout.coded)
                    found.append((sum(map(float.__mul__, each, need)), layout))
        if not found or not count or dim % BLOCK:
            raise ValueError(f"there is no code of {count} words for {dim} channels")
        return min(found, key=lambda pair: pair[0])[1]

    @property
    def count(self) -> int:
        """Words of a key."""
        return sum(self.words)

    @property
    def bits(self) -> list[int]:
        """The number of bits of each coded channel."""
        return [bits for bits, words in zip(BITS, self.words, strict=True) for _ in range(words * WORD_BITS // bits)]

    @property
    def coded(self) -> int:
        """Channels that have bits, a multiple of 8."""
        return len(self.bits)

    def find_half_steps(self, device: torch.device) -> Tensor:
        """float32 `[dim]`: of a channel of deviation 1, half a quantizer's step; 1 of channels without bits."""
        return _spread(self, tuple(STEPS[bits] / 2 for bits in BITS), device)

    def find_errors(self, device: torch.device) -> Tensor:
        """float32 `[dim]`: squared error of a value, in units of its squared half step."""
        return _spread(self, tuple(ERRORS[bits] / (STEPS[bits] / 2) ** 2 for bits in BITS), device)

    def find_levels(self, device: torch.device) -> Tensor:
        """float32 `[dim]`: the number of a value's levels; 1 of channels without bits."""
        return _spread(self, tuple(2.0**bits for bits in BITS), device)


@functools.cache
@torch.inference_mode(False)  # tensors may be used outside of it as well
def _spread(layout: Layout, values: tuple[float, ...], device: torch.device) -> Tensor:
    """The value of each channel's bits, which are as in `BITS`; 1 for channels without bits."""
    channels = [values[BITS.index(bits)] for bits in layout.bits] + [1.0] * (layout.dim - layout.coded)
    made = torch.tensor(channels, dtype=torch.float32, device="cpu")
    return made.to(device, non_blocking=device.type == "cuda")  # which has read it when the call returns


def rotate(values: Tensor, block: int = BLOCK) -> Tensor:
    """`R` of `[..., channels]`: orthonormal Hadamard blocks of `block` channels, a power of two; each its own inverse.

    All kernels compute it by sums and differences of neighbours, then of pairs, then of fours. A product with several
    blocks at once, on a CPU, takes a third of the time. The order of its sums depends on how many vectors there are.
    Sums of whole numbers are exact in any order, so tokens are decoded to the same bits among any others.
    """
    if values.device.type == "cpu" and values.dtype == torch.float32:
        channels = values.shape[-1]
        together = math.gcd(channels, max(block, PRODUCT_CHANNELS))
        with torch.autocast("cpu", enabled=False):  # which rounds products
            product = torch.matmul(values.unflatten(-1, (-1, together)), _make_blocks(block, together))
        return product.flatten(-2).mul_(block**-0.5)
    return _add_in_steps(values, block) * block**-0.5


@functools.cache
@torch.inference_mode(False)  # it may be used outside of it as well
def _make_blocks(block: int, channels: int) -> Tensor:
    return _add_in_steps(torch.eye(channels, dtype=torch.float32, device="cpu"), block)


def _add_in_steps(values: Tensor, block: int) -> Tensor:
    steps = block.bit_length() - 1
    blocks = values.unflatten(-1, (-1, *[2] * steps))
    for axis in range(-1, -steps - 1, -1):
        one, other = blocks.unbind(axis)
        blocks = torch.stack([one + other, one - other], dim=axis)
    return blocks.flatten(-steps - 1)


def find_peak(values: Tensor, axis: int) -> Tensor:
    """The greatest size of the numbers along an axis; 0 of none, as of a latent's values, which have no channels."""
    if not values.shape[axis]:
        return values.sum(dim=axis)
    return values.abs().amax(dim=axis)


def pack(index: Tensor, layout: Layout) -> Tensor:
    """Words int32 `[..., words, tokens]` of indices of levels `[..., tokens, coded]`. A word has four bytes. Its value
    `4 p + j` lies in byte `j`, from bit `p * bits` on."""
    channels = [words * WORD_BITS // bits for bits, words in zip(BITS, layout.words, strict=True)]
    parts = []
    for bits, words, values in zip(BITS, layout.words, index.to(torch.int32).mT.split(channels, dim=-2), strict=True):
        held = values.unflatten(-2, (words, WORD_BITS // bits)) << _make_shifts(bits, index.device)
        parts.append(held.sum(dim=-2, dtype=torch.int32))
    return torch.cat(parts, dim=-2)


def unpack(codes: Tensor, layout: Layout) -> Tensor:
    """Odd integers float32 `[..., tokens, coded]` of words int32 `[..., words, tokens]`."""
    parts = []
    for bits, words in zip(BITS, codes.split(layout.words, dim=-2), strict=True):
        index = (words.unsqueeze(-2) >> _make_shifts(bits, codes.device)) & (2**bits - 1)
        parts.append((2 * index - (2**bits - 1)).flatten(-3, -2))
    return torch.cat(parts, dim=-2).mT.float()


def _make_shifts(bits: int, device: torch.device) -> Tensor:
    """int32 `[32 / bits, 1]`, of a word's values."""
    planes = torch.arange(8 // bits, dtype=torch.int32, device=device)[:, None] * bits
    return (planes + 8 * torch.arange(4, dtype=torch.int32, device=device)).flatten().unsqueeze(-1)
