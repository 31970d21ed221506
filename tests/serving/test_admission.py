"""Memory that is there for a call, before it begins: what is not there is made, or the call is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from calling import EXACT, NEW, Reads, ours, said
from models import FAMILIES, generate, prompt, tiny
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from qada_cache import QAdACache
from qada_cache.serving import conversations, counters, memory
from qada_cache.serving.conversations import AllConversations, Conversations, find_conversations
from qada_cache.stats import count_bytes
from qada_cache.versions import pass_cache

MIB = 2**20
BURST = """
import resource, sys, threading
from concurrent.futures import ThreadPoolExecutor

import torch
from models import prompt, tiny
from qada_cache.serving import FOLDER, counters

torch.set_num_threads(1)
model = tiny(num_hidden_layers=4, num_key_value_heads=4, head_dim=256, max_position_embeddings=4096)  # 32 KiB a token

def ask(seed, tokens=1500):
    ids = prompt(tokens, seed=seed)[0]
    options = {"max_new_tokens": 3, "do_sample": False, "cache_options": {"moments": "current"}}
    options["attention_mask"] = torch.ones_like(ids)
    try:
        return model.generate(ids, custom_generate=FOLDER, trust_remote_code=True, **options).shape[1] - tokens
    except MemoryError as error:
        return str(error)

pool, together = ThreadPoolExecutor(8), threading.Barrier(8)
list(pool.map(lambda _: together.wait() and torch.ones(300, 300) @ torch.ones(300, 300), range(8)))
print(ask(99))
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[1]), resource.RLIM_INFINITY))
print(*pool.map(ask, range(8)), sep="\\n")
print(ask(8))
print(counters(model)["evicted"])
"""


def control_group(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """One that is not there: its folder's files, in a tree of version 2, beside a group of version 1 without memory."""
    monkeypatch.setattr(memory, "_TREE", folder / "tree")
    monkeypatch.setattr(memory, "_GROUPS", folder / "cgroup")
    (folder / "cgroup").write_text("4:cpuset:/elsewhere\n0::/some.slice/of.service\n")
    own = folder / "tree/some.slice/of.service"
    own.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (own / f"memory.{name}").write_text(text)


def test_what_a_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own limit, one around it, and none: files in memory that the system can take back are left as well."""
    total = memory.find_host_memory()
    control_group(tmp_path, monkeypatch, max="max\n", current="1000\n")
    assert memory.find_host_memory() == total
    stat = f"anon 7\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\nshmem {5 * MIB}\n\nother\n"
    control_group(tmp_path, monkeypatch, max=f"{100 * MIB}\n", current=f"{90 * MIB}\n", stat=stat)
    assert memory.find_host_memory() == 100 * MIB
    assert memory.find_memory_left() == 40 * MIB
    around = tmp_path / "tree/some.slice"
    (around / "memory.max").write_text(f"{60 * MIB}\n")
    (around / "memory.current").write_text(f"{70 * MIB}\n")
    assert memory.find_host_memory() == 60 * MIB
    assert memory.find_memory_left() == 0


def test_what_a_control_group_of_version_1_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control_group(tmp_path, monkeypatch)
    (tmp_path / "cgroup").write_text("4:memory:/of.service\n0::/\n")
    own = tmp_path / "tree/memory/of.service"
    own.mkdir(parents=True)
    for name, number in {"limit_in_bytes": 100 * MIB, "usage_in_bytes": 90 * MIB}.items():
        (own / f"memory.{name}").write_text(f"{number}\n")
    (own / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {MIB}\ntotal_active_file {2 * MIB}\n")
    assert (memory.find_host_memory(), memory.find_memory_left()) == (100 * MIB, 13 * MIB)


def leave(monkeypatch: pytest.MonkeyPatch, megabytes: float, model: PreTrainedModel | None = None) -> None:
    """So much memory beside what the model's conversations take now."""
    held = counters(model)["bytes"] if model else 0
    left = lambda: int(megabytes * MIB) + (held - counters(model)["bytes"] if model else 0)  # noqa: E731
    monkeypatch.setattr(memory, "find_memory_left", left)


def test_conversations_make_room_and_a_call_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a token is read; and what was there of its own conversation stays."""
    model = tiny()
    reads, ids = Reads(model), said(120)
    ours(model, prompt(110, seed=7)[0])
    answered = ours(model, ids)
    needed = memory.estimate_bytes(model, 500 + NEW, 500) / MIB
    leave(monkeypatch, needed, model)
    assert ours(model, prompt(500, seed=8)[0]).shape[1] == 500 + NEW
    assert counters(model)["evicted"] == 0
    leave(monkeypatch, needed - 0.01, model)
    ours(model, prompt(500, seed=9)[0])
    assert counters(model)["evicted"] == 1
    leave(monkeypatch, needed, model)
    reads.clear()
    with pytest.raises(MemoryError, match=r"to read 801 tokens takes about \d MiB of host memory and \d MiB are left"):
        ours(model, said(answered, 800))
    assert not reads
    assert counters(model)["conversations"] == 3  # its own, and others', which would not have been enough
    leave(monkeypatch, 100)
    ours(model, said(answered, 7))
    assert reads.first() == 8


@pytest.mark.parametrize("how", [{"one_user": False}, {"num_beams": 2}, {"conversations": 0}], ids=str)
def test_calls_that_are_not_kept_are_refused_too(how: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), said(500)
    reads = Reads(model)
    leave(monkeypatch, 1.9 * memory.estimate_bytes(model, 500 + NEW, 500) / MIB / (1 if "num_beams" in how else 2))
    with pytest.raises(MemoryError, match="to read 500 tokens"):
        ours(model, ids, **how)
    assert not reads


def test_who_can_never_fit_drops_nobodys_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens to be generated count, however many they are said to be."""
    model = tiny()
    ours(model, said(120))
    for more in ({"max_new_tokens": 10**12}, {"max_new_tokens": None, "max_length": 10**12}):
        with pytest.raises(MemoryError, match="lower max_new_tokens"):
            ours(model, prompt(90, seed=5)[0], **more)
        assert counters(model)["conversations"] == 1


def test_calls_under_way_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 10)
    none = AllConversations(Conversations())
    second = memory.reserve_memory(1, 6 * MIB, none)
    message = "about 6 MiB of host memory and 4 MiB are left"
    with (
        memory.reserve_memory(1, 6 * MIB, AllConversations(Conversations())),
        pytest.raises(MemoryError, match=message),
    ):
        second.__enter__()
    with memory.reserve_memory(1, 10 * MIB, none):
        pass


@pytest.mark.parametrize("chunk", [None, 100])
def test_what_is_needed_follows_the_tokens_and_chunks(chunk: int | None) -> None:
    model: PreTrainedModel = tiny()
    kept = 1.5 * 2 * 2 * 2 * 8 * 4  # half as much again as keys and values: layers, heads, dim, bytes
    passing = (3 * 48 + 8 * 32) * 4 + 8 * 4 * 8 * 4
    assert memory.estimate_bytes(model, 1000, chunk or 900) == int(1000 * kept + (chunk or 900) * passing)
    assert memory.estimate_bytes(model.to(torch.bfloat16), 1000, 0) == int(1000 * kept / 2)
    mamba = MambaForCausalLM._from_config(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1))
    assert memory.estimate_bytes(mamba, 1000, 1000) == 0  # states do not grow


def test_a_cache_on_the_device_takes_no_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its tokens nor activations count; files of a stored conversation do while they are read."""
    model, ids = tiny(), said(300)
    monkeypatch.setattr(memory, "find_inputs_device", lambda _: torch.device("cuda"))
    leave(monkeypatch, 0)
    options = {**EXACT, "offloading": False}
    assert ours(model, ids, options, conversations_store=tmp_path).shape[1] == 300 + NEW
    find_conversations(model).forget()
    with pytest.raises(MemoryError, match="to read 299 tokens"):
        ours(model, ids, options, conversations_store=tmp_path)
    leave(monkeypatch, memory.estimate_bytes(model, 299, 0) / MIB)
    ours(model, ids, options, conversations_store=tmp_path)
    assert counters(model)["restored"] == 1
    with pytest.raises(MemoryError, match="to read 312 tokens"):
        ours(model, said(312), EXACT)


@pytest.mark.parametrize(
    ("options", "times"), [({}, 2), ({"offloading": False}, 1), ({"device_budget": 1.0}, 1)], ids=str
)
def test_a_stored_conversation_is_read_where_there_is_room(
    options: dict[str, Any], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its files' contents, and for the cache unless that lies on the device."""
    model, ids = tiny(), said(300)
    monkeypatch.setattr(memory, "find_inputs_device", lambda _: torch.device("cuda"))
    ours(model, ids, EXACT | options, conversations_store=tmp_path)
    find_conversations(model).forget()
    needed = times * memory.estimate_bytes(model, 299, 0)
    leave(monkeypatch, (needed - 1) / MIB)
    with pytest.raises(MemoryError, match="to read 299 tokens"):
        ours(model, ids, EXACT | options, conversations_store=tmp_path)
    leave(monkeypatch, needed / MIB)
    ours(model, ids, EXACT | options, conversations_store=tmp_path)
    assert counters(model)["restored"] == 1


def test_conversations_on_the_device_are_not_dropped_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would free none."""
    model = tiny()
    ours(model, said(300))
    held = counters(model)["bytes"]
    assert AllConversations(find_conversations(model)).count_host_bytes() == held
    monkeypatch.setattr(conversations, "find_device", lambda _: torch.device("cuda"))
    find_conversations(model).forget()
    ours(model, said(300), {**EXACT, "offloading": False})
    assert counters(model)["bytes"] > 0
    leave(monkeypatch, (memory.estimate_bytes(model, 90 + NEW, 90) - 1) / MIB)
    with pytest.raises(MemoryError):
        ours(model, prompt(90, seed=5)[0])
    assert counters(model)["conversations"] == 1


_DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 64}
_TYPES = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("gemma3", {"sliding_window": 1000, **_TYPES}), ("qwen3_next", _DELTA), ("bamba", _MAMBA)],
    ids=("sliding", "delta", "mamba"),
)
def test_snapshots_of_other_layers_are_needed_too(family: str, sizes: dict) -> None:
    with patch.dict(FAMILIES, {"bamba": ("Bamba", {})}):
        model = tiny(family, **sizes)
    cache = QAdACache(model, moments="current", bulk_bits=16)
    cache.keep_snapshots()
    generate(model, prompt(900)[0], cache, tokens=2)
    snapshots = cache._shared.snapshots.nbytes
    assert snapshots > 0
    assert memory.estimate_bytes(model, 902, 0) >= sum(count_bytes(cache))
    without = memory.estimate_bytes(model, 902, 0, snapshots=False)
    assert memory.estimate_bytes(model, 902, 0) - without >= snapshots
    assert without >= sum(count_bytes(cache)) - snapshots


def test_a_call_that_keeps_no_snapshots_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_next", **_DELTA)
    leave(monkeypatch, memory.estimate_bytes(model, 300 + NEW, 300, snapshots=False) / MIB)
    ours(model, said(300), conversations=0)
    with pytest.raises(MemoryError):
        ours(model, said(300))


def test_a_sliding_layer_needs_its_window() -> None:
    """And a linear one nothing for a further token."""
    token = 2 * 3 * 8 * 4  # KV heads, half as much again as a key and a value, dim, bytes
    for family in ("gemma3", "qwen3_next"):
        few, more = (memory.estimate_bytes(tiny(family), tokens, 0) for tokens in (900, 901))
        assert more - few == token
    alone = tiny("mistral_sliding")  # whose cache keeps no snapshots
    assert memory.estimate_bytes(alone, 902, 0) == 2 * 12 * token


_SLIDING = {
    "sliding_window": 64,
    "num_hidden_layers": 40,
    "layer_types": ["sliding_attention"] * 39 + ["full_attention"],
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("family", "sizes"), [("gemma3", _SLIDING), ("qwen3_next", _DELTA)], ids=("sliding", "delta"))
def test_rows_need_states_and_passes_of_other_layers(family: str, sizes: dict, rows: int) -> None:
    """A sliding layer's keys are views of a whole pass until the next one."""
    model, (ids, mask) = tiny(family, **sizes), prompt(*[900] * rows)
    cache = QAdACache(model, moments="current", bulk_bits=16)
    with torch.no_grad():
        model(ids, attention_mask=mask, logits_to_keep=1, **pass_cache(cache))
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    hidden = sum(
        each.untyped_storage().nbytes() - each.nbytes for layer in sliding for each in (layer.keys, layer.values)
    )
    assert bool(hidden) == (family == "gemma3")
    at_once = 900 * rows if hidden else 0
    needed = memory.estimate_bytes(model, 900 * rows, at_once, 16, rows=rows, snapshots=False)
    assert needed >= sum(count_bytes(cache)) + hidden


def test_layers_on_the_device_need_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a budget has room for; one that outgrows it comes to the host with all that it holds."""
    model = tiny(num_hidden_layers=4)
    monkeypatch.setattr(memory, "find_inputs_device", lambda _: torch.device("cuda"))
    layer = 1000 * 2 * 3 * 8 * 4

    def count_layers(budget: Any, held: int = 0) -> float:
        return memory.estimate_bytes(model, 1000, 1000, device_budget=budget, held=held) / layer

    assert [count_layers(budget) for budget in (0, "auto", 0.0, 0.5, 0.7, 1.0)] == [4, 4, 4, 2, 2, 0]
    assert [count_layers(int(layers * layer)) for layers in (0.9, 1, 3.5, 9)] == [4, 3, 1, 0]
    assert [count_layers(each, held=3000) for each in (0.5, 12 * layer, 16 * layer)] == [2, 4, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits its own address space")
def test_a_burst_under_a_limit_ends_no_process() -> None:
    """Eight long requests at once, of about 100 MiB each: some are answered, and a later one is, in the room of others.

    Freed memory goes back to the system at once, so that the free memory is known.
    """
    here = os.path.dirname(os.path.dirname(__file__))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.join(here, "helpers"), *filter(None, sys.path)]),
    }
    environment |= {
        "QADA_KERNELS": "torch",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [sys.executable, "-c", BURST, str(250 * MIB)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, *burst, later, evicted = done.stdout.splitlines()
    assert first == "3"
    refused = [answer for answer in burst if answer != "3"]
    assert len(burst) == 8
    assert all(answer.startswith("to read 1500 tokens takes about") for answer in refused)
    assert 0 < len(refused) < 8
    assert later == "3"
    assert int(evicted) > 0
