"""README's table against the committed tables."""

from __future__ import annotations

import re

from documents import DOCUMENTS, ROOT

from eval.shared.deciding import summarize
from eval.shared.tables import Rows, read
from qada_cache.state import SKETCH_BITS, THRESHOLD, TOKEN_THRESHOLD

README, RESULTS = DOCUMENTS["README.md"], ROOT / "eval/results"
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
MODELS = {
    "smollm2": ("smollm2", "smollm2"),
    QWEN: ("qwen2.5-coder-0.5b", QWEN),
}  # in names of memory's tables; of speed's
IN_16_BITS = {
    "moments": "current+random-tokens", "rule": "any", "threshold": f"{THRESHOLD}",
    "read": f"sketch of {SKETCH_BITS} bits, {TOKEN_THRESHOLD}",
}  # fmt: skip
DEFAULT = IN_16_BITS | {"read": f"sketch of {SKETCH_BITS} bits over 8, {TOKEN_THRESHOLD}"}  # on a CPU


def one(rows: Rows, **wanted: str) -> dict[str, str]:
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    return found


def column(model: str) -> list[str]:
    """A model's cells, from the top."""
    prose = {"model": model, "task": "prose", "length": "3072", **DEFAULT}
    # Float32's table has no bytes of few bits.
    same, counted = (
        one(summarize(read(RESULTS / f"bits/{name}.csv")), **prose) for name in ("trials", "trials-bfloat16")
    )
    sparse = {"model": model, "task": "prose_niah, sparse question", "length": "4096", **IN_16_BITS}
    needles = one(read(RESULTS / "trials_summary.csv"), **sparse)
    in_memory, in_speed = MODELS[model]
    memory = [row for row in read(RESULTS / f"memory-{in_memory}.csv") if row["tokens"] != "3072"]  # a picture's
    held = [float(one(memory, cache=cache)["held_mib"]) for cache in ("QAdACache", "DynamicCache")]
    speed = one(read(RESULTS / f"benchmark-{in_speed}-cpu.csv"), method="QAdACache")
    return [
        f"{float(counted['bytes_read']):.1%}",
        f"{float(same['top1'].split()[0]):.1%}",
        needles["found"].replace("/", " of "),
        f"{held[0] / held[1]:.0%}",
        f"{float(speed['against_dynamic']):.1f}",
    ]


def test_figures_are_those_of_the_tables() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$", README.split("## What to expect")[1], re.MULTILINE)
    shown = [list(cells) for cells in zip(*rows[1:6], strict=True)]
    assert shown == [column(model) for model in MODELS]
    assert f"AMD EPYC, Qwen2.5-Coder-0.5B decodes {column(QWEN)[-1]} times as fast in float32" in README
    speeds = [one(read(RESULTS / f"benchmark-{speed}-cpu.csv"), method="QAdACache") for _, speed in MODELS.values()]
    small, large = (f"{float(row['against_static']):.1f}" for row in speeds)
    assert f"it is {small} and {large} times the speed of StaticCache" in " ".join(README.split())


def test_times_of_prompts() -> None:
    rows, told = read(RESULTS / f"bfloat16/first_token-{QWEN}-cpu.csv"), " ".join(README.split())

    def find_share(tokens: str) -> str:
        ours, dynamic = (one(rows, method=name, tokens=tokens) for name in ("QAdACache", "DynamicCache"))
        return f"{float(ours['first_token_s']) / float(dynamic['first_token_s']):.1f}"

    assert f"In bfloat16, on an EPYC with AVX512-BF16, the prompt takes {find_share('16384')} of the time." in told
    assert f"{find_share('4096')} of DynamicCache's time at 4,096 tokens, and {find_share('32768')} at 32,768" in told


def test_a_further_question() -> None:
    turn = one(read(RESULTS / f"turns-{QWEN}-cpu.csv"), method="QAdACache", tokens="8192", turn="64")
    assert f"tokens, with 8,192 read before, takes {turn['over_dynamic']} of the time" in README.replace("\n", " ")


def test_latents_and_hybrids() -> None:
    told, rows = " ".join(README.split()), read(RESULTS / "long/benchmark-deepseek-v2-lite-cpu.csv")
    ours, dynamic = (float(one(rows, method=name)["p50_ms"]) / 1000 for name in ("QAdACache", "DynamicCache"))
    assert f"a token after 32,768 others takes {ours:.1f} s, with DynamicCache {dynamic:.0f} (" in told
    turns = read(RESULTS / "restart-qwen3.5-0.8b.csv")
    names = "PrefixStore, a third turn", "DynamicCache, read again"
    third, again = (one(turns, way=name, document_tokens="7500")["first_token_s"] for name in names)
    assert f"7,500 tokens takes {float(third):.1f} s, reading everything again {float(again):.0f} (" in told


def test_memory() -> None:
    """The table of docs/memory.md, whose ratios are not rounded twice."""
    caches = {"DynamicCache": "DynamicCache", "**QAdACache**": "QAdACache"}
    caches |= {f"`bulk_bits={bits}`": f"QAdACache, {bits} bits" for bits in (4, 16)}
    tables = ("memory-smollm2", "7500"), ("memory-qwen2.5-coder-0.5b", "16000")
    for shown, cache in caches.items():
        cells = []
        for table, tokens in tables:
            rows = read(RESULTS / f"{table}.csv")
            row, dynamic = (one(rows, cache=name, tokens=tokens) for name in (cache, "DynamicCache"))
            for name, digits in (("held_mib", 1), ("peak_mib", 0)):
                ratio = "" if row is dynamic else f" ({float(row[name]) / float(dynamic[name]):.2f})"
                cells.append(f"{float(row[name]):.{digits}f}{ratio}")
        assert f"| {shown} | {' | '.join(cells)} |" in DOCUMENTS["docs/memory.md"]


def test_on_a_gpu() -> None:
    """README's times, and those of the tables in docs/speed.md."""
    made, turns = (read(RESULTS / f"{name}-llama-3-8b-cuda.csv") for name in ("gpu_step", "turns"))
    shapes = {"32,768 tokens": ("32768", "1"), "131,072": ("131072", "1"), "8 rows of 32,768": ("32768", "8")}

    def find(cache: str, tokens: str) -> str:
        milliseconds = one(made, cache=cache, tokens=tokens, batch="1")["mean_ms"]
        return f"{round_half_up(f'{10 * float(milliseconds):.1f}') / 10}"

    here, dense, host = (find(cache, "131072") for cache in ("device, 16 bits", "ideal dense", "host, 8 bits"))
    told = " ".join(README.split())
    assert f"a token of one row at 131,072 tokens takes {here} ms with" in told
    assert f"where an ideal dense cache takes {dense}, and {host} with the bulk in host memory" in told
    here, dense = (find(cache, "32768") for cache in ("device, 16 bits", "ideal dense"))
    assert f"At 32,768 it takes {here}, the ideal dense cache {dense}." in told
    section = DOCUMENTS["docs/speed.md"].split("## On a GPU")[1]
    kernels, caches = ("local_us", "estimate_us", "selected_us"), list(dict.fromkeys(row["cache"] for row in made))
    assert f"| | {' | '.join(shapes)} |" in section
    shown = re.findall(r"^\|[^|]+\| ([\d.]+ \([\d +]+\)) \| (.+\)) \| (.+\)) \|$", section, re.MULTILINE)
    for cache, cells in zip(caches, shown, strict=True):
        for (tokens, batch), cell in zip(shapes.values(), cells, strict=True):
            row = one(made, cache=cache, tokens=tokens, batch=batch)
            parts = [row[name] for name in kernels] if row["local_us"] else [row["attention_us"]]
            assert cell == f"{row['kernels_ms']} ({' + '.join(f'{round_half_up(part)}' for part in parts)})"
    clock = [
        one(made, cache=cache, tokens=tokens, batch=batch)["mean_ms"]
        for tokens, batch in shapes.values()
        for cache in ("device, 16 bits", "ideal dense")
    ]
    clock += [one(made, cache="host, 8 bits", tokens=tokens, batch=rows)["mean_ms"] for tokens, rows in shapes.values()]
    _, _, by_clock = section.partition("By the clock")
    said = re.findall(r"\b\d+\.\d\d\b", by_clock.partition("\n\n")[0])
    assert said == clock
    for tokens, shown_as in (("1", "1, between longer ones"), ("16", "16"), ("64", "64"), ("256", "256")):
        methods = "QAdACache, device, 16 bits", "QAdACache"
        rows = [one(turns, method=method, tokens="8192", turn=tokens) for method in methods]
        cells = [f"{round_half_up(row['turn_ms'])} ({row['over_dynamic']})" for row in rows]
        assert f"| {shown_as} | {' | '.join(cells)} |" in section


def round_half_up(number: str) -> int:
    return int(float(number) + 0.5)
