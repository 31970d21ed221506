"""Checks that Triton compiles nothing in use after `prepare`: `python tests/helpers/prepared_variants.py`.

Triton compiles a variant of a kernel for each set of constants, and of arguments that are 1, multiples of 16 or None.
Nothing is compiled or computed here: the variants that launches would need are compared. Prints the number of variants
of each scene. Exits with an error if a launch in use needs a variant that none in `prepare` did.
"""

from typing import Any
from unittest import mock

import torch
from models import prompt, tiny

from eval.shared.compiling import KERNELS, specialize
from qada_cache import QAdACache, StaticHeads, prepare
from qada_cache.kernels import choice, decode_trial, storing
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.cpu import building
from qada_cache.kernels.triton import storing as triton_storing
from qada_cache.versions import pass_cache

SCENES: dict[str, dict[str, Any]] = {
    "default": {"moments": "current+random-tokens"},
    "current": {"moments": "current", "group_rule": "head"},
    "whole heads": {"moments": "current", "token_threshold": 0.0, "local_tokens": 1200},
    "8 bits": {"moments": "current", "bulk_bits": 8},
    "4 bits, whole heads": {"moments": "current", "token_threshold": 0.0, "bulk_bits": 4},
    "static": {"criterion": StaticHeads(torch.tensor([[True, False]]))},
    "audited": {"moments": "current", "audit_every": 3},
}


class Launches:
    """Stands in for a kernel: adds the variant that each launch would need to `seen`, and launches nothing."""

    def __init__(self, kernel: Any, seen: set[str]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            made = specialize(self.kernel, dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs)
            self.seen.add(repr((self.kernel.__name__, made.signature, made.constants, made.attrs)))

        return launch


def build_nothing(*_: Any) -> None:
    """Stands in for the build of C++ kernels, which would take longer than all else here."""
    raise OSError("they are not looked at")


@torch.inference_mode()
def use(model: Any, options: dict[str, Any], rows: int, *, padded: bool) -> None:
    """Let the model decode tokens and read short turns, after texts without a bulk, with a bulk, and with a sketch."""
    cache, mask = QAdACache(model, **options), None
    for tokens in (60, 300, 1500):
        ids = prompt(*[tokens] * rows)[0]
        if mask is None:
            mask = torch.ones(rows, 0, dtype=torch.long)
        new = torch.ones_like(ids)
        if padded and not mask.shape[1]:
            new[1:, :9] = 0
        mask = torch.cat([mask, new], dim=1)
        model(ids, attention_mask=mask, **pass_cache(cache), logits_to_keep=1)
        for more in (*[1] * 17, 2, 5, 1, 16):  # single tokens, and turns
            mask = torch.cat([mask, mask.new_ones(rows, more)], dim=1)
            model(ids[:, :more], attention_mask=mask, **pass_cache(cache))


def main() -> None:
    seen: set[str] = set()
    for name in KERNELS:
        setattr(triton_decode, name, Launches(getattr(triton_decode, name), seen))
    triton_storing.store_kernel = Launches(triton_storing.store_kernel, seen)
    choice.AUTO_DEVICES = storing.AUTO_DEVICES = ("cpu",)
    storing.find_storing_fault = lambda *_, **__: None
    choice.compiled_decode.supports = lambda *_: False
    building._load = build_nothing
    choice.explain_unsupported = lambda *_: None
    model = tiny(num_hidden_layers=1, head_dim=16, max_position_embeddings=2**14)
    for name, options in SCENES.items():
        with mock.patch.object(decode_trial, "find_decode_fault", return_value=None):
            options = {"kernels": "auto", **options}
            seen.clear()
            prepare(model, **options)
            prepared = set(seen)
            for rows, padded in ((1, False), (2, True)):  # a batch of equal rows differs by a stride
                seen.clear()
                use(model, options, rows, padded=padded)
                assert len(seen) >= 2
                assert seen <= prepared, f"{name}, {rows} rows, padded: {padded}: {seen - prepared}"
            print(f"{name}: {len(prepared)} variants")


if __name__ == "__main__":
    main()
