"""Keys and values in few bits, as transformers' `QuantizedCache` has them by default.

Groups of 64 channels of one token, each with a scale and a least value: asymmetric, the backend quanto's `axis=0`. All
of the text is coded, its first and last tokens included; what follows stays exact, as the 128 tokens after a text do
there. The quantizer is ours, of the same results, so that nothing need be installed for it.
"""

from torch import Tensor

from qada_cache.tuning.measuring import VALUE_BITS

GROUP = 64  # values with a scale in common


def group(dim: int) -> int:
    """How many of a head's `dim` channels have a scale in common; all of them if they are no groups of 64."""
    return GROUP if dim % GROUP == 0 else dim


def quantized(values: Tensor, bits: int) -> Tensor:
    """Keys or values `[..., dim]` as that many bits a value give them, in their own dtype."""
    parts = values.unflatten(-1, (-1, group(values.shape[-1])))
    least = parts.amin(dim=-1, keepdim=True)
    most = 2**bits - 1
    scale = (parts.amax(dim=-1, keepdim=True) - least).clamp_min(1e-9) / most
    return ((parts - least).div(scale).round().clamp(0, most) * scale + least).flatten(-2)


def share(bits: int, dim: int) -> float:
    """Bytes of quantized values, with their groups' scales and least values, over those of `VALUE_BITS` a value."""
    return bits / VALUE_BITS + 2 / group(dim)
