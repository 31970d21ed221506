"""Into what pieces kernels cut their work. Numbers are for all GPUs, and are read when a layer's storage is new to it:
who tries others sets them here before. Kernels are compiled anew for most of them."""

import math
from typing import Any

import torch
import triton

from ...sketch import SEGMENT_TOKENS
from ..operands import Operands, Query
from .latent_records import count_own_words

# A split of a bulk has at least about so many tokens, as its result must be written and read again. One flagged KV head
# alone should still occupy most of a GPU. Blocks of splits have room for all: such as followed the capacity would be
# compiled anew when the bulk grows.
SPLIT_TOKENS, MAX_SPLITS = 256, 128
# Where tokens are selected, few of a split are read: to begin and to end take most of a program's time. So there are
# no more programs than a device runs at once, if these are `FEWEST_SPLITS` of a bulk, or several times as many.
SELECTED_TOKENS, SELECTED_SPLITS, FEWEST_SPLITS = 1024, 64, 8
SELECTED_WARPS = 4
REGISTERS, MOST_CORES = 65536, 132  # of a multiprocessor, by which programs run at once; of an H100
SCAN_TOKENS = 512  # among which a program chooses at once; a power of two, as:
SCAN_SCORES = 2048  # of so many estimates at most: with more, registers spill
SCAN_RUN = 32  # tokens of a scan that lie side by side; a power of two
SCAN_STAGES = 1  # of the pipeline that fetches estimates
PART_BYTES = 8192  # of float32 parts of the bulk that a program merges at once
NEAR_PART_BYTES = 4096  # of float32 parts of the near buffer that a program merges at once
MERGE_STAGES = 5  # of the pipeline that fetches parts to merge
# Channels above which values, or keys, are wide; and the stages of the pipeline for the near buffer's parts then.
WIDE, WIDE_MERGE_STAGES = 256, 2
ESTIMATE_HEADS = 8  # query heads that are prepared, and whose scores are estimated, at once
ESTIMATES = 1024  # scores that are estimated at once
ESTIMATE_TOKENS = 512  # of a split of estimates, at least about
PREPARED_LINES = 8  # queries that are prepared at once, of a head and a segment each; a power of two, as:
WIDE_LINES = 4  # likewise, of wide keys
RECORD_SCORES = 1024  # of tokens whose records are read at once
COPIED = ("cpu",)  # devices whose records come over a bus, by whole ones
ESTIMATED_TOKENS = 256  # whose scores are, at most; a power of two that divides the tokens of a segment
BLOCK_BYTES = 16384  # of keys and values in flight for each stage of the pipeline of a program
NEAR_BYTES = 32768  # likewise, of the near buffer, where programs are few
NEAR_TOKENS = 32  # of it at most, where a sketch makes them many
NEAR_COLUMNS = 512  # that a buffer has at most by default: of any number up to these kernels are the same
# Terms of 8 bits each that attention's weights are rounded to where records hold the values, by the dtype of outputs.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# Registers of a thread. Told how many it may take, the assembler spills none for the sake of more programs at once.
SELECTED_REGISTERS, LARGE = 128, 8  # for four programs at once, as shared memory admits, of so many query heads at most
NEAR_REGISTERS = 128  # likewise, where a sketch makes programs many
ESTIMATE_REGISTERS = 128
RECORD_REGISTERS = {4: 168, 8: 128}  # by warps, for three or two
MOST_REGISTERS = 255  # where fewer would spill, or programs are few
RECORD_SIZES = "KEY_BITS", "VALUE_BITS", "RECORD", "COPY", "UNPACKED", "UNIT", "TERMS", "BLOCK_R"
SELECTED_STAGES = 5  # half of them fetch indices: as many keys and values are in flight as in the default 3


def count_splits(capacity: int, at_least: int, at_most: int, groups: int, device: torch.device, compiled: dict) -> int:
    """Into how many splits of `at_least` tokens a bulk is cut: `at_most`, and so many that the programs of all `groups`
    fill the device once, or as often as it takes for `FEWEST_SPLITS`: a last round of few takes as long as a full
    one."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MOST_CORES
    resident = REGISTERS // (32 * compiled.get("num_warps", 4) * (compiled["maxnreg"] or MOST_REGISTERS))
    rounds = triton.cdiv(FEWEST_SPLITS * groups, resident * cores)
    return min(triton.cdiv(capacity, at_least), at_most, rounds * resident * cores // groups)


def pad(size: int) -> int:
    """The block that holds `size` rows or columns of a matrix product."""
    return max(16, triton.next_power_of_2(size))


def count_warps(sizes: dict[str, int]) -> int:
    """The warps of a program that holds whole values: more for wide ones, as registers would spill."""
    return 4 if max(sizes["BLOCK_D"], sizes["BLOCK_V"]) < 256 else 8


def find_record_sizes(layer: Operands, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Any]:
    """The compile-time sizes of records for `selected_kernel`, and its numbers of warps and registers."""
    many, records = sizes["BLOCK_G"] > 16, layer.records
    if records is None:
        nothing: dict[str, Any] = dict.fromkeys(RECORD_SIZES, 0)
        few = 1 < sizes["G"] <= LARGE and count_warps(sizes) == 4
        registers = SELECTED_REGISTERS if few else MOST_REGISTERS
        # Of float32, with any number, registers spill.
        return nothing | {"num_warps": SELECTED_WARPS, "maxnreg": registers if dtype.itemsize == 2 else None}
    layout, tensor = records.layout, records.tensor
    found = {"KEY_BITS": layout.key_bits, "VALUE_BITS": layout.value_bits, "UNIT": layout.unit}
    found["RECORD"] = tensor.shape[3]
    warps = count_warps(sizes)
    found |= {"TERMS": TERMS[dtype], "num_warps": warps, "maxnreg": RECORD_REGISTERS[warps]}
    if layer.decodes:
        tokens = sizes["BLOCK_N"]
        own = count_own_words(tokens, sizes["D"], dtype.itemsize, tensor.shape[3])
        return found | {"COPY": 0, "BLOCK_R": tokens, "UNPACKED": own, "maxnreg": MOST_REGISTERS}
    copied = tensor.shape[3] // 4 if tensor.device.type in COPIED else 0
    if many or TERMS[dtype] > 1 or layout.dim < sizes["BLOCK_D"] or copied:
        found["maxnreg"] = MOST_REGISTERS
    tokens = max(16, min(64, RECORD_SCORES // sizes["BLOCK_G"]))
    found |= {"COPY": triton.next_power_of_2(copied), "BLOCK_R": tokens}
    return found | {"UNPACKED": tokens * (sizes["BLOCK_D"] // 4 + sizes["BLOCK_V"] // 2 + copied)}


def find_run(scan: int, layer: Operands) -> int:
    """The consecutive tokens of a scan's runs: all of a scan if latents are decoded, a segment's together."""
    return scan if layer.decodes else min(SCAN_RUN, scan)


def find_sizes(query: Query, layer: Operands) -> dict[str, int]:
    """The sizes of heads and blocks, for all kernels that read tokens."""
    dim, value_dim = query.states.shape[3], layer.near_values.shape[3]
    group = query.states.shape[1] // layer.kv_heads
    sizes = {"G": group, "BLOCK_G": pad(group), "D": dim, "BLOCK_D": pad(dim), "V": value_dim}
    sizes["BLOCK_V"] = pad(value_dim)
    if layer.records is not None:
        sizes["BLOCK_D"] = max(32, sizes["BLOCK_D"])  # as products of 8-bit integers take
    return sizes | {"BLOCK_N": find_block_tokens(sizes, BLOCK_BYTES // query.states.element_size())}


def find_block_tokens(sizes: dict[str, int], most: int) -> int:
    """Tokens that are read at once, of `most` numbers in keys and values."""
    return max(16, min(64, 2 ** int(math.log2(most // (sizes["BLOCK_D"] + sizes["BLOCK_V"])))))


def find_near_sizes(sketched: bool, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, int]:
    """The tokens of the near buffer that `local_kernel` reads at once, and the registers that it takes; of wide values
    also the stages in which it merges them, whose memory few devices have five times."""
    few, block = dtype.itemsize == 2 and sizes["BLOCK_G"] <= 16, sizes["BLOCK_N"]
    wide = {"MERGE_STAGES": WIDE_MERGE_STAGES} if sizes["BLOCK_V"] > WIDE else {}
    if sketched:
        tight = few and sizes["G"] > 1 and sizes["D"] == sizes["BLOCK_D"] < 256  # masks take some, and wide heads
        registers = NEAR_REGISTERS if tight else MOST_REGISTERS
        return wide | {"BLOCK_N": min(NEAR_TOKENS, block), "maxnreg": registers}
    return wide | {
        "BLOCK_N": find_block_tokens(sizes, NEAR_BYTES // dtype.itemsize) if few else block,
        "maxnreg": MOST_REGISTERS,
    }


def find_estimate_sizes(queries: int) -> dict[str, int]:
    """The tokens whose scores `estimate_kernel` estimates at once, and the registers that it takes: for four programs
    at once, if it takes all heads at once."""
    heads = min(queries, ESTIMATE_HEADS)
    registers = ESTIMATE_REGISTERS if heads == queries else MOST_REGISTERS
    tokens = min(SEGMENT_TOKENS, ESTIMATED_TOKENS, ESTIMATES // heads)
    return {"BLOCK_H": heads, "BLOCK_T": tokens, "maxnreg": registers}


def find_prepared_sizes(queries: int, sizes: dict[str, int]) -> dict[str, int]:
    """The heads and segments that are prepared at once."""
    lines = PREPARED_LINES if sizes["BLOCK_D"] <= WIDE else WIDE_LINES
    heads = min(queries, ESTIMATE_HEADS, lines)
    return {"BLOCK_H": heads, "PREPARED": lines // heads}
