"""`generate(custom_generate=FOLDER)`: the tokens of a QAdACache that is carried from turn to turn by hand."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import DECIDING, EXACT, NEW, Reads, ours, said, stock
from models import VOCABULARY, prompt, tiny
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)

from eval import families
from qada_cache import QAdACache, serving
from qada_cache.serving import CONVERSATIONS, FOLDER, counters, generate
from qada_cache.versions import CACHE, CACHE_NAMES, pass_cache


@pytest.mark.parametrize("options", [EXACT, DECIDING, {}], ids=["exact", "deciding", "default"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sample"])
def test_one_call(model: PreTrainedModel, options: dict[str, Any], sampling: dict[str, Any]) -> None:
    ids = said(150)
    torch.manual_seed(3)
    wanted = stock(model, ids, QAdACache(model, **options), **sampling)
    torch.manual_seed(3)
    assert torch.equal(ours(model, ids, options, **sampling), wanted)


@pytest.mark.parametrize("options", [EXACT, DECIDING], ids=["exact", "deciding"])
@pytest.mark.parametrize("turn", [7, 60], ids=["within the window", "beyond the window"])
def test_a_conversation(model: PreTrainedModel, reads: Reads, options: dict[str, Any], turn: int) -> None:
    """Three turns read what is new alone, and give what one cache gives that is carried through them."""
    carried, ids = QAdACache(model, **options), said(120)
    for _ in range(3):
        reads.clear()
        wanted = stock(model, ids, carried)
        new = reads.first()
        assert torch.equal(ours(model, ids, options), wanted)
        assert reads.first() == new
        ids = said(wanted, turn)
    assert new == 1 + turn  # the last token that was generated had not been read


def test_a_conversation_is_full_attention_at_a_threshold_of_one(model: PreTrainedModel) -> None:
    ids = said(120)
    for turn in (7, 60):
        answered = ours(model, ids)
        assert torch.equal(answered, stock(model, ids, DynamicCache(config=model.config)))
        ids = said(answered, turn)


@pytest.mark.parametrize("options", [EXACT, DECIDING], ids=["exact", "deciding"])
@pytest.mark.parametrize("same", [124, 100, 80], ids=["in the answer", "near", "in the bulk"])
def test_what_differs_is_read_again(model: PreTrainedModel, reads: Reads, options: dict[str, Any], same: int) -> None:
    """A text that differs is read again from there on, as if the carried cache had been cropped by hand."""
    carried, ids = QAdACache(model, **options), said(120)
    answered = stock(model, ids, carried)
    assert torch.equal(ours(model, ids, options), answered)
    other = said(answered[:, :same], (answered[:, same : same + 1] + 1) % VOCABULARY, 30)
    carried.crop(same - carried.get_seq_length())
    wanted = stock(model, other, carried)
    reads.clear()
    assert torch.equal(ours(model, other, options), wanted)
    assert reads.first() == other.shape[1] - same


def test_the_same_prompt_again_reads_its_last_token(model: PreTrainedModel, reads: Reads) -> None:
    ids = said(120)
    first = ours(model, ids)
    reads.clear()
    assert torch.equal(ours(model, ids), first)
    assert reads.first() == 1
    shorter = ids[:, :110]
    assert torch.equal(ours(model, shorter), stock(model, shorter, DynamicCache(config=model.config)))
    assert reads.first() == 1


def test_conversations_take_turns(model: PreTrainedModel, reads: Reads) -> None:
    """Texts that begin alike but are mostly others are left to each other, and the oldest makes room."""
    texts = [said(50, prompt(70 + place, seed=place)[0]) for place in range(CONVERSATIONS)]
    for ids in texts:
        reads.clear()
        ours(model, ids)
        assert reads.first() == ids.shape[1]
    texts = [said(ours(model, ids), 5) for ids in texts]
    for ids in texts:
        reads.clear()
        ours(model, ids)
        assert reads.first() == 6
    ours(model, prompt(40, seed=99)[0])
    for place, new in ((0, texts[0].shape[1] + 3), (1, 3), (2, 3)):  # the first has made room, and no other
        reads.clear()
        ours(model, said(texts[place], 3))
        assert reads.first() == new


def test_fewer_conversations(model: PreTrainedModel, reads: Reads) -> None:
    one, other = prompt(90, seed=1)[0], prompt(80, seed=2)[0]
    ours(model, one, conversations=1)
    ours(model, other, conversations=1)
    reads.clear()
    ours(model, one, conversations=1)
    assert reads.first() == 90
    ours(model, one, conversations=0)
    assert reads.count(90) == 1  # and what was kept is gone
    reads.clear()
    ours(model, one)
    assert reads.first() == 90


@pytest.mark.parametrize("conversations", [-1, 1.5, True, "4"])
def test_no_count_of_conversations(model: PreTrainedModel, conversations: Any) -> None:
    with pytest.raises(ValueError, match="conversations must be an int, 0 or more, got"):
        ours(model, said(20), conversations=conversations)


MODES = {
    "beams": {"num_beams": 2},
    "sequences": {"num_return_sequences": 2, "do_sample": True},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "dictionary": {"return_dict_in_generate": True},
    "assistant": {"assistant_model": tiny(seed=1)},
    "no mask": {"attention_mask": None},
    "other positions": {"position_ids": torch.arange(3, 63)[None]},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_other_calls_have_a_cache_of_their_own(model: PreTrainedModel, reads: Reads, mode: dict[str, Any]) -> None:
    ids = said(60)
    ours(model, ids)
    torch.manual_seed(3)
    wanted = stock(model, ids, QAdACache(model, **DECIDING), **mode)
    reads.clear()
    torch.manual_seed(3)
    got = ours(model, ids, DECIDING, **mode)
    assert reads.first() >= 60  # assisted, a few candidates with it
    if mode.get("return_dict_in_generate"):
        assert isinstance(got[CACHE], QAdACache)
        got, wanted = got.sequences, wanted.sequences
    assert torch.equal(got, wanted)
    reads.clear()
    ours(model, ids, DECIDING)
    assert reads.first() == 60  # nothing was kept


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_models_without_attention_keep_no_conversation(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model's own cache counts no tokens."""
    model, ids = families.build(kind)[0], said(60) % 8
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    for _ in range(2):
        assert torch.equal(ours(model, ids), model.generate(ids, **settings))
    assert f"no conversations of {kind} are kept" in caplog.text


def test_padded_rows_have_a_cache_of_their_own(model: PreTrainedModel, reads: Reads) -> None:
    for lengths in ((60, 40), (60,)):
        ids, mask = prompt(*lengths)
        mask[-1, :5] = 0
        ids[-1, :5] = 0
        for _ in range(2):
            wanted = stock(model, ids, QAdACache(model, **DECIDING), attention_mask=mask)
            reads.clear()
            assert torch.equal(ours(model, ids, DECIDING, attention_mask=mask), wanted)
            assert reads.first() == 60


def test_a_prompt_that_is_healed_has_a_cache_of_its_own(model: PreTrainedModel) -> None:
    """transformers changes it, behind our look at it."""
    ids = said(60)
    others: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    assert serving._find_row(model, ids, GenerationConfig(), others) is not None
    assert serving._find_row(model, ids, GenerationConfig(token_healing=True), others) is None


def test_embeddings_have_a_cache_of_their_own(model: PreTrainedModel) -> None:
    ids = said(60)
    given = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "max_new_tokens": NEW, "do_sample": False}
    given["attention_mask"] = torch.ones_like(ids)
    got = model.generate(custom_generate=FOLDER, trust_remote_code=True, cache_options=EXACT, **given)
    assert torch.equal(got, model.generate(**pass_cache(QAdACache(model, **EXACT)), **given))


@pytest.mark.parametrize("name", CACHE_NAMES[:2])
@pytest.mark.parametrize("directly", [False, True], ids=["by the folder", "as the model's own generate"])
def test_a_cache_that_is_brought_is_used(model: PreTrainedModel, reads: Reads, name: str, directly: bool) -> None:
    """A cache of the caller's is used, under either name of the argument. Older transformers refuse the new name, newer
    ones warn of the old."""
    ids, cache = said(60), DynamicCache(config=model.config)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW, name: cache}
    call = partial(generate, model=model) if directly else partial(ours, model)
    if name == CACHE_NAMES[0] != CACHE:
        with pytest.raises(ValueError, match="not used by the model"):
            call(ids, **settings)
        return
    with nullcontext() if name == CACHE else pytest.warns(FutureWarning, match=name):
        got = call(ids, **settings)
    assert cache.get_seq_length() == got.shape[1] - 1
    assert counters(model)["requests"] == 0
    assert torch.equal(ours(model, ids, use_cache=False), got)
    assert reads[-1] == got.shape[1] - 1  # without a cache all is read for every token


HUB = {
    "contrastive_search": {"penalty_alpha": 0.5, "top_k": 3},
    "group_beam_search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "dola_generation": {"dola_layers": "low"},
}


@pytest.mark.parametrize("mode", HUB)
@pytest.mark.parametrize("cached", [True, False])
def test_modes_that_moved_to_the_hub_are_refused(
    model: PreTrainedModel, mode: str, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask for a `trust_remote_code` that was given. It gets one where it is not kept back."""
    with pytest.raises(ValueError, match=f"does not serve {mode}, .*call generate without this custom_generate"):
        ours(model, said(60), use_cache=cached, **HUB[mode])
    monkeypatch.setattr(type(model), "load_custom_generate", lambda *_, **__: lambda **given: "by the Hub's code")
    given: dict[str, Any] = {"trust_remote_code": True, "use_cache": cached, **HUB[mode]}
    assert generate(said(60), model=model, **given) == "by the Hub's code"


def test_a_cache_beside_an_implementation_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        ours(model, said(60), cache_implementation="static")


def test_continuous_batching_goes_on_beside_ours() -> None:
    """Continuous batching still uses transformers' attention and its own cache, whose memory is limited here."""
    fields = signature(ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in fields else "block_size"  # before 5.24
    model, settings = tiny(), ContinuousBatchingConfig(**{page: 16}, num_blocks=8, max_batch_tokens=32)

    def batch() -> list[list[int]]:
        found = model.generate_batch(
            [[5, 6, 7], [8, 9]], continuous_batching_config=settings, max_new_tokens=2, eos_token_id=-1, warmup=False
        )
        return [output.generated_tokens for output in found.values()]

    wanted = batch()
    first = ours(model, said(20))
    assert batch() == wanted
    assert torch.equal(ours(model, said(20)), first)


def test_a_models_folder(tmp_path: Path) -> None:
    """Loaded with its code, the model generates so by itself; and that code says by which options."""
    folder = tmp_path / "model"
    made = tiny()
    made.save_pretrained(folder)
    shutil.copytree(Path(FOLDER) / "custom_generate", folder / "custom_generate")
    file = folder / "custom_generate/generate.py"
    file.write_text(file.read_text(encoding="utf-8").replace("dict = {}", f"dict = {DECIDING}"), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    settings = {"do_sample": False, "max_new_tokens": NEW}
    ids, reads, carried = said(60), Reads(model), QAdACache(made, **DECIDING)
    for _ in range(2):
        wanted = stock(made, ids, carried)
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), wanted)
        ids = said(wanted, 9)
    assert [new for new in reads if new > 1] == [60, 10]
    assert torch.equal(stock(model, ids, DynamicCache(config=model.config)), stock(made, ids, None))
    for old, new in (
        ("ONE_USER = True", "ONE_USER = False"),
        ("CONVERSATIONS = serving.CONVERSATIONS", "CONVERSATIONS = 0"),
    ):
        changed = file.read_text(encoding="utf-8").replace(old, new)
        assert new in changed
        (other := tmp_path / new.partition(" ")[0]).mkdir()
        shutil.copytree(folder, other, dirs_exist_ok=True)
        (other / "custom_generate/generate.py").write_text(changed, encoding="utf-8")
        model = AutoModelForCausalLM.from_pretrained(other, trust_remote_code=True)
        reads = Reads(model)
        for _ in range(2):
            model.generate(said(60), attention_mask=torch.ones(1, 60, dtype=torch.long), **settings)
        assert [tokens for tokens in reads if tokens > 1] == [60, 60]
