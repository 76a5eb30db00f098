"""Fact: a run on a blend with packed documents plans, logs and resumes like a run on one corpus."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.checkpoint.index import read_meta
from megatron3d.data.corpus.stream import StreamedSamples
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from tests.support.pool import Pool
from tests.support.tiny_run import (
    evaluations,
    in_run,
    refuse,
    run,
    run_as_rank,
    steps,
    stored,
    write_config,
    write_corpus,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_config(tmp_path_factory.mktemp("run"))
    write_corpus(config.parent / "other", inspect.getsource(json))
    return config


def blend(config: Path, *more: str) -> list[str]:
    paths = f"data.data_path=[0.75,{config.parent}/corpus,0.25,{config.parent}/other]"
    packing = ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true"]
    return [paths, *packing, "data.split=80,20,0", "train.eval_interval=4", "train.eval_iters=2", *more]


def test_a_blend_is_planned_logged_and_continued(config: Path, tmp_path: Path) -> None:
    whole = run(config, *blend(config, *in_run(f"{tmp_path}/whole")))
    assert whole.code == ExitCode.DONE, whole.err
    assert f"> {config.parent}/corpus: 75 % 96 samples to read" in whole.out
    assert f"> {config.parent}/other: 25 % 32 samples to read" in whole.out
    assert re.search(r"> documents: [\d,]+ tokens on average in 16 typical sequences; attention multi", whole.out)
    rows = [row for row in read_journal(tmp_path / "whole" / "metrics.jsonl") if "lm_loss" in row]
    assert [row[f"consumed_tokens/{config.parent}/corpus"] for row in rows] == [192.0 * n for n in range(1, 9)]
    parts = blend(config, *in_run(f"{tmp_path}/parts"))
    assert run(config, *parts, "train.exit_interval=3").code == ExitCode.STOPPED
    assert run(config, *parts).code == ExitCode.DONE
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")


def test_a_run_with_another_meaning_of_samples_is_refused(config: Path, tmp_path: Path) -> None:
    own = in_run(f"{tmp_path}/run")
    assert run(config, *blend(config, *own), "train.exit_interval=1").code == ExitCode.STOPPED
    outcome = run(
        config, *blend(config, *own), f"data.data_path=[0.5,{config.parent}/corpus,0.5,{config.parent}/other]"
    )
    assert outcome.code == 2 and "saved with corpus=" in outcome.err
    outcome = run(config, *blend(config, *own), "data.eod_mask_loss=false")
    assert outcome.code == 2 and "saved with packing of data=reset_position_ids=True" in outcome.err, outcome.err


def test_skipped_iterations_consume_their_samples(config: Path, tmp_path: Path) -> None:
    assert run(config, "train.iterations_to_skip=[1,3]", *in_run(f"{tmp_path}/run")).code == ExitCode.DONE
    rows = [row for row in read_journal(tmp_path / "run" / "metrics.jsonl") if "lm_loss" in row]
    assert [row["iteration"] for row in rows] == [2, 4, 5, 6, 7, 8]
    assert [row["consumed_samples"] for row in rows] == [32, 64, 80, 96, 112, 128]


def test_a_corpus_without_ends_of_documents_is_refused(config: Path) -> None:
    write_corpus(config.parent / "plain", inspect.getsource(textwrap))
    tokens = bytearray((config.parent / "plain.bin").read_bytes())
    (config.parent / "plain.bin").write_bytes(bytes(tokens).replace(b"\x00\x01", b"\x20\x00"))
    (config.parent / "plain.manifest.json").unlink()
    overrides = [f"data.data_path={config.parent}/plain", "data.eod_mask_loss=true"]
    refuse(config, overrides, ("document 0 does not end with token 256", "--append-eod"))


RAMPS = ["train.rampup_batch_size=[4,4,40]", "train.seq_length_warmup=[4,4,60]"]


def test_ramped_batches_are_the_same_with_and_without_a_restart(config: Path, tmp_path: Path, pool: Pool) -> None:
    wide = ["train.precision=fp64", *RAMPS]
    assert run(config, *in_run(f"{tmp_path}/whole"), *wide).code == ExitCode.DONE
    parts = [*in_run(f"{tmp_path}/parts"), *wide]
    assert run(config, *parts, "train.exit_interval=3").code == ExitCode.STOPPED
    assert run(config, *parts).code == ExitCode.DONE
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    whole, parted = (stored(tmp_path / name, 8) for name in ("whole", "parts"))
    assert all(torch.equal(parted[name], whole[name]) for name in whole)
    rows = [row for row in read_journal(tmp_path / "whole" / "metrics.jsonl") if "lm_loss" in row]
    assert [row["global_batch_size"] for row in rows] == [4, 4, 4, 4, 8, 8, 12, 16]
    assert [row["seq_length"] for row in rows] == [4, 4, 4, 4, 4, 8, 8, 12]
    assert [row["consumed_samples"] for row in rows] == [4, 8, 12, 16, 24, 32, 44, 60]
    assert rows[-1]["consumed_tokens"] == 24 * 4 + 20 * 8 + 16 * 12
    layout = ["parallel.pipeline_model_parallel_size=2", "train.micro_batch_size=1"]
    pool.run(run_as_rank, 4, config, [[*in_run(f"{tmp_path}/ranks"), *wide, *layout]])
    for one, other in zip(steps(tmp_path / "ranks"), steps(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_a_run_of_samples_ends_and_warms_up_by_them_also_after_a_restart(config: Path, tmp_path: Path) -> None:
    rates = ["optimizer.lr_warmup_iters=0", "optimizer.lr_warmup_fraction=0.5", "optimizer.lr_decay_samples=80"]
    length = ["train.train_iters=null", "train.train_samples=90", "train.rampup_batch_size=[4,4,40]"]
    whole = run(config, *in_run(f"{tmp_path}/whole"), *length, *rates, "optimizer.lr_decay_style=linear")
    assert whole.code == ExitCode.DONE and "train_samples 90 = 9 iterations of 76 samples, 14 left over" in whole.out
    parts = [*in_run(f"{tmp_path}/parts"), *length, *rates, "optimizer.lr_decay_style=linear"]
    assert run(config, *parts, "train.exit_interval=5").code == ExitCode.STOPPED
    ended = run(config, *parts)
    assert ended.code == ExitCode.DONE and "the same command with train.train_samples=180" in ended.out
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    rows = [row for row in read_journal(tmp_path / "parts" / "metrics.jsonl") if "lm_loss" in row]
    consumed = [4, 8, 12, 16, 24, 32, 44, 60, 76]
    assert [row["consumed_samples"] for row in rows] == consumed
    wanted = [0.01 * min(samples / 40, (80 - samples) / 40) for samples in consumed]
    assert [row["learning_rate"] for row in rows] == pytest.approx(wanted)
    assert rows[-1]["remaining_s"] == 0 < rows[-2]["remaining_s"]


@pytest.mark.parametrize("names", [["data"], ["data", "more"]], ids=["alone", "blended"])
def test_a_streamed_dataset_continues_on_other_ranks(
    config: Path, tmp_path: Path, pool: Pool, names: list[str]
) -> None:
    lines = [json.dumps({"body": line}) + "\n" for line in inspect.getsource(textwrap).splitlines()]
    for name in names:
        (tmp_path / name).mkdir()
        for part in range(3):
            (tmp_path / name / f"part-{part}.jsonl").write_text("".join(lines[part::3]))
    pairs = ",".join(f"{weight},hf:{tmp_path}/{name}" for weight, name in zip((0.75, 0.25), names, strict=False))
    named = f"[{pairs}]" if len(names) > 1 else f"hf:{tmp_path}/data"
    paths = ["data.data_path=null", "data.split=969,30,1", f"data.train_data_path={named}"]
    keys = [*paths, "data.stream_key=body", "data.stream_lanes=4", "train.precision=fp64"]
    assert run(config, *in_run(f"{tmp_path}/whole"), *keys).code == ExitCode.DONE
    parts = [*in_run(f"{tmp_path}/parts"), *keys]
    assert pool.run(run_as_rank, 2, config, [[*parts, "train.exit_interval=3"]]) == [[ExitCode.STOPPED]] * 2
    assert len(read_meta(tmp_path / "parts" / "iter_0000003").cursors) == 4 * len(names)
    assert run(config, *parts).code == ExitCode.DONE
    for one, other in zip(steps(tmp_path / "parts"), steps(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    refuse(config, [*keys, "data.stream_key=text"], ("no key 'text'; it has 'body'",))


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"],
        ["parallel.tensor_parallel_mode=3d", "parallel.tensor_parallel_shape=[2,2,1]", "train.micro_batch_size=2"],
        ["parallel.context_parallel_size=2", "parallel.tensor_model_parallel_size=2", "data.reset_attention_mask=true"],
    ],
    ids=["tensor and pipeline", "3d", "context and documents"],
)
def test_a_stream_is_read_once_for_all_ranks_that_need_it(
    config: Path, tmp_path: Path, pool: Pool, layout: list[str]
) -> None:
    """Bug that this finds: every tensor, context and pipeline rank downloads and encodes the same text."""
    lines = "".join(json.dumps({"text": line}) + "\n" for line in inspect.getsource(textwrap).splitlines())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.jsonl").write_text(lines)
    paths = ["data.data_path=null", "data.split=969,30,1", f"data.train_data_path=hf:{tmp_path}/data"]
    keys = [*paths, "data.stream_lanes=4", "train.precision=fp64", "train.exit_interval=4"]
    whole, ranks = ([*in_run(f"{tmp_path}/{name}"), *keys] for name in ("whole", "ranks"))
    masks = [each for each in layout if each.startswith("data.")]
    assert run(config, *whole, *masks).code == ExitCode.STOPPED
    reads = pool.run(count_reads, 4, config, [*ranks, *layout])
    copies = 2 if "3d" in str(layout) else 4
    assert sum(count > 0 for count in reads) == 4 // copies, reads
    for one, other in zip(steps(tmp_path / "ranks"), steps(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    ours, theirs = (read_meta(tmp_path / name / "iter_0000004").cursors for name in ("ranks", "whole"))
    assert ours == theirs and len(ours) == 4


def count_reads(rank: int, world_size: int, config: Path, overrides: list[str]) -> int:
    """Train as a rank of the pool; return how often this rank has read samples of a stream."""
    reads, read = list[int](), StreamedSamples.read

    def counted(samples: StreamedSamples, wanted: Any) -> Any:
        reads.append(1)
        return read(samples, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedSamples, "read", counted)
        assert run_as_rank(rank, world_size, config, [overrides]) == [ExitCode.STOPPED]
    return len(reads)


def test_bad_records_of_a_stream_are_counted_on_any_ranks_and_over_a_restart(
    config: Path, tmp_path: Path, pool: Pool
) -> None:
    rows = [None if number % 7 == 6 else line for number, line in enumerate(inspect.getsource(textwrap).splitlines())]
    (tmp_path / "data").mkdir()
    for part in range(3):
        lines = "".join(json.dumps({"body": row}) + "\n" for row in rows[part::3])
        (tmp_path / "data" / f"part-{part}.jsonl").write_text(lines)
    paths = ["data.data_path=null", "data.split=969,30,1", f"data.train_data_path=hf:{tmp_path}/data"]
    keys = [*paths, "data.stream_key=body", "data.stream_lanes=4", "train.precision=fp64"]
    stopped = run(config, *in_run(f"{tmp_path}/stopped"), *keys)
    assert stopped.code == ExitCode.USER_ERROR and "'body' holds a NoneType" in stopped.err, stopped.err
    assert "or leave such out with data.on_bad_record=skip" in stopped.err
    keys.append("data.on_bad_record=skip")
    whole = run(config, *in_run(f"{tmp_path}/whole"), *keys)
    assert whole.code == ExitCode.DONE, whole.err
    assert f"> rank 0 skips a record: hf:{tmp_path}/data, shard " in whole.out
    counts = [row["skipped_records"] for row in read_journal(tmp_path / "whole" / "metrics.jsonl") if "lm_loss" in row]
    assert counts == sorted(counts) and counts[-1] > 0 and f"skipped records: {counts[-1]:3d} |" in whole.out
    parts = [*in_run(f"{tmp_path}/parts"), *keys]
    assert pool.run(run_as_rank, 2, config, [[*parts, "train.exit_interval=3"]]) == [[ExitCode.STOPPED]] * 2
    assert run(config, *parts).code == ExitCode.DONE
    found = [row["skipped_records"] for row in read_journal(tmp_path / "parts" / "metrics.jsonl") if "lm_loss" in row]
    assert found == counts
    for one, other in zip(steps(tmp_path / "parts"), steps(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)
