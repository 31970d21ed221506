"""Attention of a prompt over selected keys in float64: a second definition, which shares no code with the first."""

import math

import torch
from torch import Tensor

SEGMENT = 64  # keys that are coded together
BLOCK = 66  # queries that read together
TILE = 256  # keys after which the mass that a key is compared with is updated
STRIP = 6  # queries that estimate the same keys
SAMPLED = 16  # keys of a segment that are estimated in any case
REACH = 3.5  # standard deviations


def hadamard(size: int) -> Tensor:
    """Orthonormal float64 `[size, size]`, with Hadamard blocks of the largest power of two that divides `size`."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(matrix)) == 0:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix * len(matrix) ** -0.5] * (size // len(matrix)))


def rounded(vectors: Tensor, levels: int, words: int = 1) -> Tensor:
    """Vectors `[..., dim]` rounded to multiples of a step, `levels` of them either way up to a vector's largest number.

    With several `words` the step may be larger. A word has four numbers, two pairs. Sums over the first pairs of
    `words` words, of numbers of one sign, times numbers up to `2 * levels`, must fit into 16 bits; so must those over
    the second pairs."""
    step = vectors.abs().amax(-1, keepdim=True).clamp_min(1e-30) / levels
    for first in range(0, vectors.shape[-1], 4 * words) if words > 1 else ():
        part = vectors[..., first : first + 4 * words]
        for pair in (0, 1):
            both = torch.cat([part[..., 2 * pair :: 4], part[..., 2 * pair + 1 :: 4]], dim=-1)
            for one_sign in (both.clamp_min(0), -both.clamp_max(0)):
                step = torch.maximum(step, one_sign.sum(-1, keepdim=True) / (32767 // (2 * levels) - words))
    return torch.round(vectors / step) * step


def selected_prompt(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    theta: float,
    sinks: int,
    window: int,
    least: int,
    levels: int,
    words: int,
    energies: Tensor | None = None,
) -> tuple[Tensor, list[float], list[float]]:
    """Outputs `[tokens, value_dim]` of one query head `[tokens, dim]` over its keys and values, the share of far keys
    that each block reads, and the share of pairs of a strip and a segment that each block samples.

    Queries of a block read sinks and windows exactly, both rounded up to whole segments. The other keys are far, and
    visited from the newest on. A far key is read if any query gives it `theta` times an even share of the mass that the
    query has met: of sinks, window, and whole tiles of 256 keys visited before the key's own. Queries with fewer than
    `least` far keys, and the last `window` queries, read all keys.

    A strip of queries estimates a sample of a segment's keys, for all of them, unless one of its queries may find a key
    to read: one in the sample, or by the mean of its scores plus `REACH` standard deviations. These are of scores with
    the first `least` far keys within segments, times the root mean square length of the segment's coded keys over that
    of the former.

    Keys are coded times `(energies / v) ** 0.25`, queries over it: `v` is the variance of each channel within segments,
    of the first `least` far keys. Both are at least a share of their means, 1e-4 and 1e-8.
    """
    tokens, turn = len(query), hadamard(query.shape[1])
    dtype, (query, key, value) = key.dtype, (each.double() for each in (query, key, value))
    sampled: list[float] = []
    first, back = -(-sinks // SEGMENT) * SEGMENT, window - 1
    begin = first + least + back
    scores = (scaling * query @ key.T).masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -math.inf)
    out, shares, weights = scores.softmax(-1) @ value, [], torch.ones(query.shape[1], dtype=torch.float64)
    former = key[first : first + least].unflatten(0, (-1, SEGMENT))
    former = (former - former.mean(1, keepdim=True)).flatten(0, 1)
    if energies is not None:
        variances = former.square().mean(0)
        energies = energies.double().clamp_min(1e-4 * energies.double().mean())
        weights = (energies / variances.clamp_min(1e-8 * variances.mean())) ** 0.25
    for start in range(begin, tokens - window, BLOCK):
        stop = min(start + BLOCK, tokens - window)
        far = range(first, (start - back) // SEGMENT * SEGMENT)
        q = query[start:stop]
        keys, values = key[far.start : far.stop], value[far.start : far.stop]
        segments = keys.unflatten(0, (-1, SEGMENT))
        centres = segments.mean(1).to(dtype).double()
        residuals = (segments - centres[:, None]) * weights
        coded = rounded(residuals @ turn, levels, words).flatten(0, 1)
        turned = rounded(q / weights @ turn, levels)
        estimates = scaling * (turned @ coded.T + (q @ centres.T).repeat_interleave(SEGMENT, 1))
        near = scores[start:stop].clone()
        near[:, far.start : far.stop] = -math.inf
        met, read = near.logsumexp(-1), torch.zeros(len(far), dtype=torch.bool)
        sizes = residuals.square().sum(-1).mean(-1).sqrt() / (former * weights).square().sum(-1).mean().sqrt()
        spread = scaling * (q @ former.T).square().mean(-1).sqrt()[:, None] * sizes
        reach = scaling * q @ centres.T + REACH * spread
        strips = torch.arange(len(q)) // STRIP
        times = torch.ones_like(estimates)  # that a key counts for a query
        for end in range(len(far), 0, -TILE):
            cut = met + math.log(theta / len(far))
            for segment in range(max(0, end - TILE) // SEGMENT, end // SEGMENT):
                part = torch.arange(segment * SEGMENT, (segment + 1) * SEGMENT)
                sample = part[segment % (SEGMENT // SAMPLED) * SAMPLED :][:SAMPLED]
                may = (reach[:, segment] >= cut) | (estimates[:, sample] >= cut[:, None]).any(-1)
                whole = torch.stack([may[strips == strip].any() for strip in strips])
                read[part] = (estimates[:, part] >= cut[:, None])[whole].any(0)
                times[:, part] *= whole[:, None]
                times[:, sample] = torch.where(whole, 1.0, SEGMENT / SAMPLED)[:, None].double()
            part = slice(max(0, end - TILE), end)
            met = torch.logaddexp(met, (estimates + times.log())[:, part].logsumexp(-1))
        shares.append(float(read.double().mean()))
        sampled.append(float((times.unflatten(-1, (-1, SEGMENT)) == 0).any(-1).double().mean()))
        near[:, far.start : far.stop] = scores[start:stop, far.start : far.stop].masked_fill(~read, -math.inf)
        unread = (estimates + times.log()).masked_fill(read, -math.inf)
        centred_keys, mean_value = keys - keys.mean(0), values.mean(0)
        line = scaling * q @ (centred_keys.T @ (values - mean_value)) / len(far)  # Cov(v, s) of each query
        variance = (scaling * q @ centred_keys.T).square().mean(-1)
        mean_score = scaling * q @ keys.mean(0)
        lifted = (unread.softmax(-1).nan_to_num() * estimates).sum(-1) - mean_score
        rest = mean_value + torch.where(variance > 1e-12, lifted / variance, 0.0)[:, None] * line
        lse, rest_lse = near.logsumexp(-1), unread.logsumexp(-1)
        share = (rest_lse - torch.logaddexp(lse, rest_lse)).exp()[:, None]
        out[start:stop] = (1 - share) * (near.softmax(-1) @ value) + share.nan_to_num() * rest
    return out, shares, sampled
