"""Print the tables of speed from the results; `--write` replaces them in README.md, benchmarks/README.md, docs/gpu.md.

A page marks the place of a table by a comment with the table's name, `<!-- steps -->`, on the line before it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from common.report import ROOT

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.forecast.time.step import as_configured, load_machine, predict_time
from megatron3d.model.local_sizes import KERNELS

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "docs" / "gpu.md")
Row = Mapping[str, Any]


@cache
def results(name: str) -> Sequence[Row]:
    """Return the rows of a file in benchmarks/results; none where there is no such file."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else ()


def chosen(name: str, values: Row) -> Row | None:
    """Return the row with these values, None where there is none."""
    return next((row for row in results(name) if values.items() <= row.items()), None)


class Case(NamedTuple):
    """Our step next to a baseline's: where both are in the results."""

    what: str
    peer: str
    file: str
    select: Row
    ours: Row
    baseline: Row

    def cells(self, folder: str) -> tuple[str, str]:
        """Return the two times in ms, and the speed-up, of one machine; empty where it was not measured."""
        ours = chosen(folder + self.file, {**self.select, **self.ours})
        peer = chosen(folder + self.file, {**self.select, **self.baseline})
        if ours is None or peer is None:
            return "", ""
        return f"{peer['step_ms']:.0f}, {ours['step_ms']:.0f}", f"{peer['ours_over_this']:.2f}×"


def one(size: str, precision: str, peer: str, name: str) -> Case:
    """Return a case of one process."""
    select = {"size": size, "precision": precision}
    ours = {"contestant": "megatron3d"}
    return Case(f"1 process, {precision}, {size}", peer, "single_process", select, ours, {"contestant": name})


def tensor(size: str) -> Case:
    """Return a case of two tensor-parallel ranks."""
    ours, peer = {"contestant": "1d sequence_parallel"}, {"contestant": "DTensor"}
    what = f"TP 2 with sequence parallelism, fp32, {size}"
    return Case(what, "torch `parallelize_module`", "tensor_parallel", {"size": size}, ours, peer)


def data(ranks: int, size: str, stage: int) -> Case:
    """Return a case of data-parallel ranks."""
    peer, name = ("torch DDP", "DDP") if stage == 0 else ("torch FSDP2", "FSDP2")
    select = {"ranks": ranks, "size": size}
    what = f"DP {ranks}, ZeRO {stage}, fp32, {size}"
    return Case(what, peer, "data_parallel", select, {"contestant": f"ZeRO {stage}"}, {"contestant": name})


def pipeline(schedule: str) -> Case:
    """Return a case of two pipeline ranks."""
    what = f"PP 2, {schedule}, fp32, 6M"
    select = {"schedule": schedule}
    return Case(what, "torch.distributed.pipelining", "pipeline", select, {"engine": "ours"}, {"engine": "torch"})


PLAIN, HUGGING_FACE = ("plain PyTorch GPT", "plain"), ("Hugging Face GPT-2", "hugging face")
CASES: Sequence[Case] = (
    *(one(s, p, *peer) for p in ("fp32", "bf16") for s in ("3M", "30M") for peer in (PLAIN, HUGGING_FACE)),
    *(tensor(size) for size in ("3M", "30M")),
    *(data(ranks, size, stage) for stage in (0, 3) for ranks in (2, 4) for size in ("3M", "30M")),
    *(pipeline(schedule) for schedule in ("1f1b", "interleaved", "gpipe")),
)
SHORT = (
    one("30M", "fp32", *PLAIN),
    one("30M", "bf16", *PLAIN),
    tensor("30M"),
    pipeline("1f1b"),
    pipeline("interleaved"),
)


def table(columns: Sequence[str], numbers: int, rows: Iterator[Sequence[str]]) -> str:
    """Return a table of Markdown, whose last `numbers` columns are numbers."""
    rule = ["---"] * (len(columns) - numbers) + ["--:"] * numbers
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def steps() -> str:
    """Return every case, on both machines."""
    columns = ("what", "baseline", "Zen 4: baseline, ours, ms", "speed-up", "Zen 5: baseline, ours, ms", "speed-up")
    rows = ((case.what, case.peer, *case.cells("zen4/"), *case.cells("")) for case in CASES)
    return table(columns, 4, rows)


def short() -> str:
    """Return the few cases of the front page, on the machine that was measured last."""
    rows = ((case.what, case.peer, *case.cells("zen4/")) for case in SHORT)
    return table(("what", "baseline", "baseline, ours, ms", "speed-up"), 2, rows)


def overlaps() -> str:
    """Return the medians over all modes of the speed-up by overlaps."""

    def rows() -> Iterator[Sequence[str]]:
        for what, execution in (("all", "all overlaps"), ("and weights kept", "all overlaps, W kept")):
            found = [row for row in results("overlaps") if row["execution"] == execution]
            ratios = [median(row["times_faster"] for row in found if row["ranks"] == ranks) for ranks in (2, 4, 8)]
            yield what, *(f"{ratio:.2f}×" for ratio in ratios)

    return table(("overlaps", "2 ranks", "4 ranks", "8 ranks"), 3, rows())


CHECKPOINT = {
    "stall": "stall of an asynchronous save",
    "async save": "time to disk, asynchronous",
    "save": "time to disk, synchronous",
    "load": "loading in the same layout",
    "reshard": "loading in another layout",
}


def checkpoints() -> str:
    """Return seconds of saving and loading, next to torch.distributed.checkpoint."""

    def rows() -> Iterator[Sequence[str]]:
        for what, name in CHECKPOINT.items():
            for ranks in (2, 4):
                row = chosen("checkpoint", {"what": what, "peer": f"{what} torch", "ranks": ranks})
                assert row is not None, (what, ranks)
                yield name, str(ranks), f"{row['peer_s']:.2f}, {row['ours_s']:.2f}", f"{1 / row['ratio']:.2f}×"

    return table(("what", "ranks", "torch, ours, s", "speed-up"), 3, rows())


def index() -> str:
    """Return seconds to load an index, and MB that leave and reach rank 0, next to sending it through the store."""

    def rows() -> Iterator[Sequence[str]]:
        for row in results("checkpoint_index"):
            if row["what"] == "load":
                peer = chosen("checkpoint_index", {"what": "load, whole through the store", "ranks": row["ranks"]})
                assert peer is not None, row
                ours_mb = row["store_MB"] + 2 * row["collectives_MB"]  # a ring receives what it sends
                sizes, seconds = f"{peer['store_MB']:,.0f}, {ours_mb:,.0f}", f"{peer['s']:.0f}, {row['s']:.0f}"
                yield str(row["ranks"]), sizes, seconds, f"{peer['s'] / row['s']:.2f}×"

    return table(("ranks", "through rank 0: store, ours, MB", "store, ours, s", "speed-up"), 4, rows())


def tokens() -> str:
    """Return the speed of tokenization and of reading samples."""

    def rows() -> Iterator[Sequence[str]]:
        for row in results("preprocess"):
            if row["what"].startswith("ours"):
                bare = chosen("preprocess", {"tokenizer": row["tokenizer"], "what": "bare loop"})
                assert bare is not None, row["tokenizer"]
                rates = f"{bare['MB/s']:.1f}, {row['MB/s']:.1f} MB/s"
                yield f"text to token files, {row['tokenizer']}", "bare loop", rates, f"{row['over bare loop']:.2f}×"
        peer, ours = (chosen("data_loading", {"what": what}) for what in ("megatron-core GPTDataset", "ours"))
        assert peer is not None and ours is not None, "data_loading.json has both"
        rates = f"{peer['samples/s']:,.0f}, {ours['samples/s']:,.0f} samples/s"
        yield "random samples of 1024 tokens", peer["what"], rates, f"{peer['ours_over_this']:.1f}×"

    return table(("what", "baseline", "baseline, ours", "speed-up"), 2, rows())


def measured_on_h100(what: str) -> Iterator[Row]:
    """Yield the rows of gpu_day.py that have a key: of shipped presets or of single ranks."""
    for line in (ROOT / "benchmarks" / "results" / "h100.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if what in row:
            yield row


def predicted_on_h100(preset: str) -> tuple[float, float]:
    """Return the predicted seconds and GiB of a preset's step of two microbatches, which gpu_day.py measures."""
    config = read_config(ROOT / "configs" / f"{preset}.yaml").config
    assert config.model.vocab_size is not None, f"{preset} names its vocabulary"
    spec = RunSpec(config, 1, config.model.vocab_size).with_microbatches(2)
    machine = as_configured(load_machine("eos", config.train.precision, 1), spec)
    return predict_time(spec, machine).step_s, predict_memory(spec, KERNELS["gpu"]).total / 2**30


def h100() -> str:
    """Return step time, MFU and memory of presets on one H100, measured and predicted."""

    def rows() -> Iterator[Sequence[str]]:
        for row in measured_on_h100("preset"):
            step_s, gib = predicted_on_h100(row["preset"])
            step_ms = 1e3 * step_s
            mfu = [100 * row["mfu"] * row["step_ms"] / each for each in (row["step_ms"], step_ms)]
            yield (
                f"`{row['preset'].removeprefix('gpus/')}`",
                f"{row['step_ms']:.1f} ({step_ms:.1f})",
                f"{row['enqueue_ms']:.0f}",
                f"{mfu[0]:.1f} ({mfu[1]:.1f})",
                f"{row['peak_gib']:.1f} ({gib:.1f})",
            )

    columns = ("step, ms (predicted)", "host, ms", "MFU, % (predicted)", "memory, GiB (predicted)")
    return table(("preset", *columns), 4, rows())


TABLES: Mapping[str, Callable[[], str]] = {
    each.__name__: each for each in (steps, short, overlaps, checkpoints, index, tokens, h100)
}


def written(page: str) -> str:
    """Return the text of a page with its tables as the results say."""
    marked = rf"^<!-- ({'|'.join(TABLES)}) -->\n(?:\|.*\n)*"
    return re.sub(marked, lambda found: f"<!-- {found[1]} -->\n{TABLES[found[1]]()}", page, flags=re.M)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in the pages")
    if not parser.parse_args().write:
        print("\n".join(make() for make in TABLES.values()))
        return
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
