"""`cuda_graph=True`: replayed steps give what computed ones give, and whatever a graph cannot hold computes as ever.

On a CPU a recorder stands in for the graph (`recorded_graph.py`), and quick kernels for Triton's (`quick_kernel.py`)
unless a test is `interpreted`; the cases marked `gpu` capture a real graph.
"""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import quick_kernel
import torch
from graphed import decode, make
from models import exact, generate, logits_of, prompt, tiny
from recorded_graph import RecordedGraph
from stand_in import accelerator
from transformers import PreTrainedModel
from uses import Use, copied_and_saved, cropped, one_shot, padded, rows, used_again

from qada_cache import QAdACache, restore_attention, storage
from qada_cache.decode_graph.capturing import GRAPHS
from qada_cache.decode_graph.step import Places, Step
from qada_cache.kernels import choice, cpu
from qada_cache.key_moments import of_layer
from qada_cache.storage import row_tensors, transfers
from qada_cache.storage.padding import Padding
from qada_cache.versions import pass_cache

OPTIONS: dict[str, dict[str, Any]] = {
    "whole heads": {"token_threshold": 0.0},
    "exact": {"threshold": 1.0},
    "other moments": {"token_threshold": 0.0, "moments": "current+random-tokens"},
    "by head": {"token_threshold": 0.0, "group_rule": "head", "threshold": 0.5},
    "latents": {"token_threshold": 0.0, "criterion": "gaussian", "bulk_bits": 16},
    "linear layers": {"token_threshold": 0.0},
    "windows, shared keys": {"token_threshold": 0.0},
}
TYPES = {"latents": "deepseek_v3", "linear layers": "qwen3_next", "windows, shared keys": "gemma3n"}


def describe(cache: QAdACache) -> dict[str, Any]:
    stats = cache.stats()
    kept = ("decisions", "steps", "bulk_read_bytes", "sketch_read_bytes", "dense_bulk_bytes")
    shares = {name: getattr(stats, name).tolist() for name in ("local_share", "kv_local_share")}
    return {name: getattr(stats, name) for name in kept if hasattr(stats, name)} | shares


def brief(model: PreTrainedModel, cache: QAdACache, folder: Path) -> torch.Tensor:
    """A shorter `one_shot`, which still has a flush and replays behind it."""
    return logits_of(generate(model, prompt(90)[0], cache, tokens=16))


CASES: list[tuple[str, Use]] = [(name, one_shot) for name in ("whole heads", "by head")]
CASES += [("whole heads", use) for use in (padded, cropped, rows, copied_and_saved)]
CASES += [("latents", use) for use in (one_shot, padded, cropped, rows, copied_and_saved)]
CASES += [("linear layers", use) for use in (one_shot, padded, rows, copied_and_saved)]
CASES += [("windows, shared keys", use) for use in (one_shot, padded, rows, copied_and_saved)]
MORE: list[tuple[str, Use]] = [("exact", one_shot), ("other moments", one_shot), ("whole heads", used_again)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
INTERPRETED = [
    *((name, brief) for name in ("whole heads", "latents")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES + MORE),
]


@pytest.mark.parametrize(("name", "use"), [*CASES, *SLOW])
def test_outputs_and_counts_are_those_of_computed_steps(name: str, use: Use, device: str, tmp_path: Path) -> None:
    check_outputs_and_counts(name, use, device, tmp_path)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(("name", "use"), INTERPRETED)
def test_of_tritons_kernels_too(name: str, use: Use, device: str, tmp_path: Path) -> None:
    check_outputs_and_counts(name, use, device, tmp_path)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_latents_of_more_heads_than_a_kernel_takes(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parts count together what several read, in memory of the graph's own."""
    monkeypatch.setattr(cpu, "MAX_QUERIES", 2)
    check_outputs_and_counts("latents", brief, device, tmp_path)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("most", [2, 16])
def test_latents_that_are_read_whole(most: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays are computed steps, and say what exact calls say, also with more heads than a kernel takes."""
    monkeypatch.setattr(choice, "AUTO_DEVICES", ("cpu",))  # which has no kernels but Triton's
    monkeypatch.setattr(choice.compiled_decode, "supports", lambda *call: False)
    monkeypatch.setattr(choice.decode_trial, "find_decode_fault", lambda *call, **sizes: None)
    monkeypatch.setattr(cpu, "MAX_QUERIES", most)
    model, told = tiny("deepseek_v3", num_hidden_layers=1), {"kernels": "auto", "bulk_bits": 16}
    caches = [exact(model, **told, cuda_graph=on) for on in (False, True, True)]
    caches[1]._decode_graph.failed = "none is asked for"
    plain, computed, replayed = (brief(model, cache, tmp_path) for cache in caches)
    assert torch.equal(replayed, computed)
    torch.testing.assert_close(computed, plain, atol=2e-5, rtol=0)
    assert describe(caches[2]) == describe(caches[1])
    assert RecordedGraph.replays >= 4


def test_few_bits_of_latents_that_are_read_whole(device: str) -> None:
    with pytest.raises(NotImplementedError, match="whole latents of few bits: give bulk_bits=16"):
        exact(tiny("deepseek_v3").to(device), kernels="auto", bulk_bits=8, cuda_graph=True)


def check_outputs_and_counts(name: str, use: Use, device: str, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 1} if use is brief else {}  # the interpreter is slow
    kind = TYPES.get(name, "llama")
    if device != "cpu" and kind == "gemma3n":  # in transformers 5.17 it copies a number to the device in every step
        kind = "gemma4"
    model = tiny(kind, **layers).to(device)
    plain, graphed = (make(model, **OPTIONS[name], cuda_graph=on) for on in (False, True))
    expected = use(model, plain, tmp_path)
    before = RecordedGraph.replays
    assert not before or use is copied_and_saved  # a loaded cache has the default
    found = use(model, graphed, tmp_path)
    assert torch.equal(found, expected) if device == "cpu" else torch.allclose(found, expected, atol=1e-5)
    assert describe(graphed) == describe(plain)
    assert RecordedGraph.replays >= before + 4


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("bits", [16, 8])
@torch.inference_mode()
def test_selected_tokens(bits: int, device: str) -> None:
    """A bulk that grows by several segments, and its sketch: of what lies elsewhere then nothing is replayed."""
    model = tiny(max_position_embeddings=4096, head_dim=32, num_hidden_layers=1).to(device)
    ids = prompt(1300)[0].to(device)
    made, counts = [], []
    for on in (False, True):
        cache = make(model, token_threshold=1.0, threshold=0.99, bulk_bits=bits, cuda_graph=on)
        model(ids[:, :1200], **pass_cache(cache), logits_to_keep=1)
        steps = [model(ids[:, at : at + 1], **pass_cache(cache)).logits for at in range(1200, 1215)]
        made.append(torch.cat(steps))
        counts.append(describe(cache))
    assert RecordedGraph.replays > 4
    assert torch.allclose(*made, atol=1e-5)
    assert counts[0] == counts[1]
    assert 0 < counts[0]["bulk_read_bytes"] < counts[0]["dense_bulk_bytes"]


@pytest.mark.parametrize("lengths", [(60,), (60, 43)], ids=str)
@torch.inference_mode()
def test_a_replay_prepares_the_next_step(
    lengths: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes the next step's places on the device; the host writes them once after each flush. It compares
    the mask in few operations, too, of padded rows."""
    model, compared, compare = tiny(num_hidden_layers=1).to(device), [], Padding._compare
    monkeypatch.setattr(Padding, "_compare", lambda *given: compared.append(given) or compare(*given))
    written, write = [], Places.write
    cache = make(model, token_threshold=0.0, cuda_graph=True)
    monkeypatch.setattr(Places, "write", lambda own, step: written.append(RecordedGraph.replays) or write(own, step))
    ids, mask = (part.to(device) for part in prompt(*lengths))
    model(ids, attention_mask=mask, **pass_cache(cache))
    prepared = 0
    for _ in range(24):
        ids, mask = ids[:, -1:], torch.nn.functional.pad(mask, (0, 1), value=1)
        position = mask.cumsum(dim=1)[:, -1:] - 1
        model(ids, attention_mask=mask, position_ids=position, **pass_cache(cache))
        graph, store = cache._decode_graph, cache.layers[0].store
        if graph._step is not None and graph._step.is_followed_by(cache.layers) and store.end < store.capacity:
            expected = Step(cache.layers, {}).parts
            found = (graph._places.place, *graph._places._rows)
            assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
            prepared += 1
    assert prepared > 8
    assert len(compared) < 24 - prepared
    assert len(written) < RecordedGraph.replays - 6


@pytest.mark.parametrize("moments", ["current", "current+random-tokens"])
@pytest.mark.parametrize("bits", [16, 8])
@torch.inference_mode()
def test_turns_and_flushes_leave_a_graph_as_it_is(
    bits: int, moments: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind both the next token is a replay, as long as the bulk has room. So it is where another prompt's moments are
    those for more tokens: in place of those for 64 come those for 128."""
    monkeypatch.setattr(row_tensors, "REPLAYING", (device,))
    monkeypatch.setattr(of_layer, "REPLAYING", (device,))
    model, outputs, computed = tiny().to(device), [], []
    ids = prompt(200)[0].to(device)
    model.model.norm.register_forward_hook(lambda *_: computed.append(1))
    for on in (False, True):
        cache = make(model, token_threshold=0.0, bulk_bits=bits, moments=moments, cuda_graph=on)
        logits, at = [model(ids[:, :60], **pass_cache(cache)).logits], 60
        for tokens in (*[1] * 6, 3, *[1] * 22, 12, *[1] * 4, 20, *[1] * 4):
            if at == 66:
                computed.clear()
            logits.append(model(ids[:, at : at + tokens], **pass_cache(cache)).logits)
            at += tokens
        outputs.append(torch.cat(logits, dim=1))
    assert RecordedGraph.replays >= 32
    assert len(computed) == 3  # the turns
    assert torch.allclose(*outputs, atol=1e-5)


@torch.inference_mode()
def test_what_changes_a_cache_between_replays_is_followed(device: str) -> None:
    """Cropped, reordered and counted from elsewhere: the next step is none that a replay has prepared."""
    model, outputs = tiny().to(device), []
    ids = prompt(90)[0].to(device)
    for on in (False, True):
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        logits = [decode(model, cache, 5)]
        cache.crop(-2)
        logits += [model(ids[:, at : at + 1], **pass_cache(cache)).logits for at in (70, 71, 72)]
        cache.batch_repeat_interleave(2)
        logits += [model(ids[:, [at, at + 1]].mT, **pass_cache(cache)).logits for at in (73, 74, 75, 76, 77)]
        cache.reorder_cache(torch.tensor([1, 0]))
        logits += [model(ids[:, [at, at + 1]].mT, **pass_cache(cache)).logits for at in (78, 79, 80)]
        outputs.append(torch.cat([each.flatten() for each in logits]))
    assert RecordedGraph.replays > 6
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("moments", ["current", "random-tokens"])
@torch.inference_mode()
def test_a_crop_behind_a_flush_is_replayed(moments: str, device: str) -> None:
    """Tokens come back from the bulk into the tensors that a graph reads."""
    model, outputs = tiny().to(device), []
    ids = prompt(90)[0].to(device)
    for on in (False, True):
        cache = make(model, token_threshold=0.0, moments=moments, cuda_graph=on)
        logits = [decode(model, cache, 30)]
        flushed, before = cache.layers[0].store.flushed, RecordedGraph.replays
        cache.crop(-25)
        assert cache.layers[0].store.flushed < flushed
        logits += [model(ids[:, at : at + 1], **pass_cache(cache)).logits for at in range(65, 90)]
        outputs.append(torch.cat(logits))
    assert RecordedGraph.replays == before + 25
    assert torch.allclose(*outputs, atol=1e-5)


@torch.inference_mode()
def test_plans_that_are_gone_are_not_replayed(device: str) -> None:
    """They hold memory that a graph writes to. Beams that keep their order keep them."""
    model = tiny().to(device)
    ids, cache = prompt(90)[0].to(device), make(model, token_threshold=0.0, cuda_graph=True)
    decode(model, cache, 5)
    cache.reorder_cache(torch.tensor([0]))
    plans, graph = [layer.plan for layer in cache.layers], cache._decode_graph._graph
    assert None not in plans
    model(ids[:, 71:72], **pass_cache(cache))
    assert [layer.plan for layer in cache.layers] == plans
    assert cache._decode_graph._graph is graph
    del plans
    for layer in cache.layers:
        layer.drop_plans()
    model(ids[:, 72:73], **pass_cache(cache))
    assert cache._decode_graph._graph is not graph


@pytest.mark.parametrize("moments", ["current", "random-tokens"])
@pytest.mark.parametrize("lengths", [(50, 75, 120), (120, 120, 120)])
@torch.inference_mode()
def test_beams_are_replayed(moments: str, lengths: tuple[int, ...], device: str) -> None:
    """Rows change places within the tensors that a graph reads, be they of one length or of several."""
    model, outputs, replays = tiny().to(device), [], []
    for on in (False, True):
        ids, mask = (part.to(device) for part in prompt(*lengths))
        cache = make(model, token_threshold=0.0, moments=moments, cuda_graph=on)
        logits = [model(ids, attention_mask=mask, **pass_cache(cache)).logits[:, -1:]]
        for step in range(12):
            before = RecordedGraph.replays
            if step > 4:
                index = torch.tensor([[1, 2, 0], [0, 0, 1], [0, 1, 2]][step % 3], device=device)
                cache.reorder_cache(index)
                mask, ids = mask[index], ids[index]
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            position = mask.cumsum(dim=1)[:, -1:] - 1
            told = {"attention_mask": mask, "position_ids": position}
            logits.append(model(ids[:, step : step + 1], **told, **pass_cache(cache)).logits)
            replays.append(RecordedGraph.replays - before)
        outputs.append(torch.cat(logits))
    assert replays[17:] == [1] * 7
    assert torch.allclose(*outputs, atol=1e-5)


@torch.inference_mode()
def test_nobody_waits_for_a_device_that_captures(device: str) -> None:
    """CUDA refuses to wait for one, in any thread, and ends the capture."""
    model, free = tiny().to(device), []

    def ask() -> None:
        free.append(transfers.WAITING.acquire(blocking=False))
        if free[-1]:
            transfers.WAITING.release()

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    model.model.norm.register_forward_hook(hook)
    decode(model, make(model, token_threshold=0.0, cuda_graph=True), 8)
    assert free.count(False) == 1
    assert free.count(True) > 3


@torch.inference_mode()
def test_a_reset_keeps_nothing_alive(device: str) -> None:
    """Neither what was stored, nor what a graph holds, also while the next prompt is read."""
    model = tiny().to(device)
    cache = make(model, token_threshold=0.0, cuda_graph=True)
    decode(model, cache, 8)
    assert RecordedGraph.replays
    for reset in (cache.reset, lambda: [layer.reset() for layer in cache.layers]):
        stores = [weakref.ref(layer.store) for layer in cache.layers]
        reset()
        alive: list[int] = []
        handle = model.model.norm.register_forward_pre_hook(
            lambda *_, alive=alive, stores=stores: alive.append(sum(store() is not None for store in stores))
        )
        decode(model, cache, 8)
        handle.remove()
        assert alive[0] == 0


@torch.inference_mode()
def test_a_capture_that_fails_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reads its numbers on the host cannot be captured: steps are computed without a graph, as before."""
    model = tiny().to(device)
    expected = decode(model, make(model, token_threshold=0.0, cuda_graph=False), 12)
    cache = make(model, token_threshold=0.0, cuda_graph=True)
    model.model.norm.register_forward_hook(lambda module, given, found: found if found.sum().item() < 1e9 else None)
    assert torch.allclose(decode(model, cache, 12), expected, atol=1e-5)
    assert not RecordedGraph.replays
    assert cache._decode_graph is not None
    assert cache._decode_graph.failed


@torch.inference_mode()
def test_what_only_the_host_knows_is_not_replayed(device: str) -> None:
    """A decoder that goes by the number of tokens: old numbers would be silently wrong."""
    outputs = []
    for on in (False, True):
        model = tiny().to(device)
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        model.model.norm.register_forward_hook(
            lambda *given, cache=cache: given[2] * (1 + cache.get_seq_length() / 100)
        )
        outputs.append(decode(model, cache, 12))
    assert torch.allclose(*outputs, atol=1e-5)
    assert cache._decode_graph is not None
    assert "the model goes by numbers" in cache._decode_graph.failed
    assert RecordedGraph.replays == 2  # captured, and compared


@torch.inference_mode()
def test_steps_under_autocast_are_not_replayed(device: str) -> None:
    """A graph would keep the dtypes of the step that it recorded. Other steps are replayed again."""
    model, outputs = tiny(dtype=torch.bfloat16).to(device), []
    for on in (False, True):
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        found = [decode(model, cache, 8)]
        before = RecordedGraph.replays
        with torch.autocast(device, torch.bfloat16):
            found.append(decode(model, cache, 3, start=8))
        assert RecordedGraph.replays == before
        found.append(decode(model, cache, 3, start=11))
        outputs.append(torch.cat([part.float() for part in found]))
    assert RecordedGraph.replays > before > 0
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_weights_that_moved_are_read_where_they_are(device: str) -> None:
    model = tiny().to(device)
    cache, plain = (make(model, token_threshold=0.0, cuda_graph=on) for on in (True, False))
    decode(model, cache, 6)
    decode(model, plain, 6)
    before = RecordedGraph.replays
    assert before
    for weight in model.parameters():
        weight.data = weight.data * 1.01
    assert torch.allclose(decode(model, cache, 8, start=6), decode(model, plain, 8, start=6), atol=1e-5)
    assert RecordedGraph.replays > before


@pytest.mark.parametrize("budget", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_layers_within_a_budget_are_replayed(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one has left the device as its memory ran out, which computed steps alone notice by themselves."""
    monkeypatch.setattr(storage, "PENDING_TOKENS", 9)
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    monkeypatch.setitem(GRAPHS, "cpu", RecordedGraph)
    quick_kernel.serve(monkeypatch)
    model = tiny()
    expected = decode(model, make(model, token_threshold=0.0, cuda_graph=False, kernels="triton"), 14)
    with accelerator() as copies:
        copies.eager = True
        cache = make(model, token_threshold=0.0, cuda_graph=True, device_budget=budget, kernels="triton")
        found = [decode(model, cache, 6)]
        before, placed = RecordedGraph.replays, cache.stats().device_layers
        tries = iter([torch.OutOfMemoryError("no room"), None])

        def work() -> None:
            if (error := next(tries)) is not None:
                raise error

        cache._shared.placement.retry(work, torch.device("cpu"))
        found.append(decode(model, cache, 8, start=6))
    assert (placed, cache.stats().device_layers) == (2 * budget, 2 * budget - 1)
    assert 0 < before < RecordedGraph.replays
    assert torch.equal(torch.cat(found), expected)


@torch.inference_mode()
def test_an_interrupted_replay_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().to(device)
    cache = make(model, token_threshold=0.0, cuda_graph=True)
    decode(model, cache, 6)
    monkeypatch.setattr(storage.TokenStore, "advance", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        decode(model, cache, 1, start=6)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="a replayed step was interrupted"):
        decode(model, cache, 1, start=7)


@torch.inference_mode()
def test_an_observer_sees_every_step(device: str) -> None:
    model = tiny().to(device)
    cache = make(model, token_threshold=0.0, cuda_graph=True)
    seen: list[int] = []
    cache.observer = lambda observation: seen.append(observation.layer)
    decode(model, cache, 5)
    assert seen == [0, 1] * 5
    assert not RecordedGraph.replays


def test_another_function_before_the_decoder_is_left_alone(device: str) -> None:
    model = tiny().to(device)
    model.model.forward = model.model.forward
    with pytest.raises(NotImplementedError, match="another library"):
        make(model, cuda_graph=True)
    assert make(model)._decode_graph is None
    with pytest.raises(ValueError, match="needs the model"):
        QAdACache(config=model.config, cuda_graph=True)
    with pytest.raises(TypeError, match="cuda_graph must be a bool or None, got int"):
        make(model, cuda_graph=1)


def test_the_decoder_gets_its_own_function_back() -> None:
    model = tiny()
    own = type(model.model)
    cache = make(model)
    assert type(model.model) is own  # on a CPU nobody has asked for it
    twin = cache.fork(cuda_graph=True)
    assert twin._decode_graph is not None
    assert cache._decode_graph is None
    assert type(model.model) is not own
    assert isinstance(model.model, own)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [type(each.model) for each in copies] == [own, own]
    ids = prompt(5)[0]
    assert all(torch.equal(each(ids).logits, model(ids).logits) for each in copies)
    restore_attention(model)
    assert type(model.model) is own


@torch.inference_mode()
def test_unasked_it_is_there_without_hooks_and_adapters(device: str) -> None:
    """A hook that comes later, and goes again, runs in every step meanwhile."""
    model = tiny().to(device)
    cache, seen = make(model, token_threshold=0.0), []
    decode(model, cache, 6)
    before = RecordedGraph.replays
    assert before == 4
    hook = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    decode(model, cache, 4, start=6)
    before += 1  # which was under way, and undone
    assert (len(seen), RecordedGraph.replays) == (4, before)
    hook.remove()
    assert cache._decode_graph is not None
    assert "hooks or adapters" in cache._decode_graph.failed
    other = make(model, token_threshold=0.0)
    model.model.layers[0].mlp.base_layer = None  # as peft's layers have it
    decode(model, other, 6)
    assert RecordedGraph.replays == before
