"""A run on a blend with packed documents plans, logs and continues as a run on one corpus does."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import pytest

from megatron3d.metrics.journal import read_journal
from megatron3d.runtime import EXIT_DONE, EXIT_STOPPED
from tests.end_to_end import evaluations, in_run, refuse, run, steps, write_config, write_corpus


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
    assert whole.code == EXIT_DONE, whole.err
    assert f"> {config.parent}/corpus: 75 % 96 samples to read" in whole.out
    assert f"> {config.parent}/other: 25 % 32 samples to read" in whole.out
    rows = [row for row in read_journal(tmp_path / "whole" / "metrics.jsonl") if "lm_loss" in row]
    assert [row[f"consumed_tokens/{config.parent}/corpus"] for row in rows] == [192.0 * n for n in range(1, 9)]
    parts = blend(config, *in_run(f"{tmp_path}/parts"))
    assert run(config, *parts, "train.exit_interval=3").code == EXIT_STOPPED
    assert run(config, *parts).code == EXIT_DONE
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")


def test_what_samples_mean_may_not_change_in_a_run(config: Path, tmp_path: Path) -> None:
    own = in_run(f"{tmp_path}/run")
    assert run(config, *blend(config, *own), "train.exit_interval=1").code == EXIT_STOPPED
    outcome = run(
        config, *blend(config, *own), f"data.data_path=[0.5,{config.parent}/corpus,0.5,{config.parent}/other]"
    )
    assert outcome.code == 2 and "saved with corpus=" in outcome.err
    outcome = run(config, *blend(config, *own), "data.eod_mask_loss=false")
    assert outcome.code == 2 and "saved with packing of data=reset_position_ids=True" in outcome.err, outcome.err


def test_skipped_iterations_use_up_their_samples(config: Path, tmp_path: Path) -> None:
    assert run(config, "train.iterations_to_skip=[1,3]", *in_run(f"{tmp_path}/run")).code == EXIT_DONE
    rows = [row for row in read_journal(tmp_path / "run" / "metrics.jsonl") if "lm_loss" in row]
    assert [row["iteration"] for row in rows] == [2, 4, 5, 6, 7, 8]
    assert [row["consumed_samples"] for row in rows] == [32, 64, 80, 96, 112, 128]


def test_a_corpus_without_ends_of_documents_is_refused(config: Path) -> None:
    write_corpus(config.parent / "plain", inspect.getsource(textwrap))
    tokens = bytearray((config.parent / "plain.bin").read_bytes())
    (config.parent / "plain.bin").write_bytes(bytes(tokens).replace(b"\x00\x01", b"\x20\x00"))
    overrides = [f"data.data_path={config.parent}/plain", "data.eod_mask_loss=true"]
    refuse(config, overrides, ("document 0 does not end with token 256", "--append-eod"))
