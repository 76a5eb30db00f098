"""`--check` and a run refuse the same: unusable files and broken rules, except rules on values that were not read."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron3d.config.cli import parse_args
from megatron3d.config.read import read_config
from megatron3d.config.resolve import resolve, run_check
from megatron3d.config.schema import Config
from megatron3d.config.validate.files import check_files
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from tests.support.valid_config import sections, with_changes
from tests.unit.config.validate import test_data, test_rules, test_tensor_parallel

BROKEN = [*test_rules.BROKEN, *test_data.BROKEN, *test_tensor_parallel.BROKEN]


def config_of(**sections: Any) -> Config:
    """Return a configuration from the values of some sections."""
    return Config.model_validate(sections)


def test_files_and_folders_are_checked_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "c.bin").write_bytes(b"\0")
    (tmp_path / "c.idx").touch()
    prefix, absent = tmp_path / "c", tmp_path / "absent"
    problems = check_files(
        config_of(
            data={"data_path": str(prefix), "tokenizer_model": str(absent)},
            checkpoint={"save": f"{prefix}.bin/run", "load": str(absent)},
        ),
        world_size=1,
    )
    assert [problem.partition(";")[0] for problem in problems] == [
        f"data.data_path={prefix}: {prefix}.idx is empty",
        f"data.tokenizer_model={absent}: {absent} does not exist",
        f"checkpoint.save={prefix}.bin/run: {prefix}.bin is not a folder",
        f"checkpoint.load={absent}: there is no such folder",
    ]
    assert not any(absent.parent.glob("absent*"))
    (tmp_path / "c.idx").write_bytes(b"\0")
    same = {"save": str(absent), "load": f"{tmp_path}/absent"}
    data = {"data_path": str(prefix), "tokenizer_type": "ByteTokenizer"}
    assert check_files(config_of(data=data, checkpoint=same), 1) == []


def test_a_run_is_only_continued_in_its_own_folder(tmp_path: Path) -> None:
    save, data = str(tmp_path), {"data_path": __file__[:-3], "tokenizer_type": "ByteTokenizer"}
    others = {str(path): {"save": save, "load": path} for path in (None, str(tmp_path.parent))}
    before = {path: check_files(config_of(data=data, checkpoint=others[path]), 1) for path in others}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    same = others[str(tmp_path.parent)]  # another one, from which this run started
    assert set(check_files(config_of(data=data, checkpoint=same), 1)) <= set(before[str(tmp_path.parent)])
    for path, problems in [("None", before["None"])]:
        (added,) = set(check_files(config_of(data=data, checkpoint=others[path]), 1)) - set(problems)
        assert added.startswith(f"checkpoint.save={save}: the folder already holds a run")
        assert f"checkpoint.load={save}" in added
    continued = {"save": save, "load": save}
    assert set(check_files(config_of(data=data, checkpoint=continued), 1)) <= set(before["None"])


def test_rules_on_unreadable_values_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {n_head: 16, seq_length: 12}\nparallel: {tensor_parallel_mode: 4d}\noptimizer: {min_lr: 1}\n"
        "train: {lr: 2}\ndata: {data_path: nowhere, tokenizer_type: ByteTokenizer, split: '1'}\n"
    )
    with pytest.raises(UserError) as caught:
        resolve(file, ["train.micro_batch_size=5"], world_size=1)
    assert [problem.partition(":")[0].partition(" ")[0] for problem in caught.value.problems] == [
        "model.n_head=16",
        "train.lr=2",
        "parallel.tensor_parallel_mode=4d",
        'data.split="1"',
        "data.data_path=nowhere",
        "data.data_path=nowhere",
    ]


@pytest.mark.parametrize(("changes", "world_size", "message"), BROKEN, ids=[message[:50] for _, _, message in BROKEN])
def test_a_run_that_breaks_a_rule_is_refused(tmp_path: Path, changes: Any, world_size: int, message: str) -> None:
    found = [problem.partition("=")[0] for problem in check(with_changes(changes), world_size, vocab_size=None)]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(sections(changes)))))
    with pytest.raises(UserError) if found else contextlib.nullcontext() as caught:
        resolve(path, [], world_size, elsewhere=True)
    assert not found or [problem.partition("=")[0] for problem in caught.value.problems] == found, message  # type: ignore[union-attr]


def test_the_command_line_reports_or_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"c.{suffix}").write_bytes(b"\0")
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{data_path: {tmp_path}/c, tokenizer_type: ByteTokenizer}}\nmodel: {{vocab_size: 256}}\n")
    typed = ["parallel.tensor_model_parallel_size=2", "--config", str(file), "--check", "train.seed=3"]
    assert run_check(parse_args(typed), environ_world_size=4) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"{file}: valid on 4 ranks" and "model.hidden_size" not in out and len(out) < 500
    for line in (
        "world_size 4 = TP 2 (1d: t 2) x PP 1 x DP 2",
        "global_batch_size 8 = micro_batch_size 1 x data parallel 2 x microbatches 4",
        "parameters 86,039,040 (vocabulary 256)",
    ):
        assert line in out.splitlines()
    assert run_check(parse_args([*typed, "--world-size", "3"]), environ_world_size=4) == 2
    shown = capsys.readouterr()
    assert shown.out == f"{file}: refused, 1 problem\n"
    assert shown.err.startswith("world_size 3: not a multiple of TP 2")
    for wrong in (
        ["--check"],
        ["--config", "x", "--chek"],
        ["--config", "x", "--world-size", "2"],
        ["--config", "x", "--elsewhere"],
        ["--config", "x", "--details"],
    ):
        with pytest.raises(SystemExit) as stopped:
            parse_args(wrong)
        assert stopped.value.code == 2


def test_details_are_read_back_as_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict stands last, with the warnings and the files that are not here."""
    file, copy = tmp_path / "run.yaml", tmp_path / "copy.yaml"
    file.write_text("data: {data_path: /nope, tokenizer_type: ByteTokenizer}\ntrain: {train_iters: 20}\n")
    typed = ["--config", str(file), "--check", "--elsewhere", "--details", "optimizer.lr_warmup_iters=30"]
    assert run_check(parse_args(typed)) == 0
    out = capsys.readouterr().out
    copy.write_text(out[: out.index("world_size 1 = ")])
    assert read_config(copy).config == read_config(file, ["optimizer.lr_warmup_iters=30"]).config
    assert out.splitlines()[-1] == f"{file}: valid on 1 rank, with 1 warning and 2 missing files"


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", ["missing corpus", "missing schedule", "malformed schedule", "empty tokens"])
def test_a_check_for_other_ranks_refuses_bad_files_and_reports_missing_ones(
    kind: str, elsewhere: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check --world-size N && sbatch` must not go on with files that are not there, unless they are elsewhere."""
    (tmp_path / "bad.csv").write_text("no action\n")
    for name in ("c", "empty"):
        for suffix in ("bin", "idx"):
            (tmp_path / f"{name}.{suffix}").write_bytes(b"\0" * (name == "c"))
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{data_path: {tmp_path}/c, tokenizer_type: ByteTokenizer}}\nmodel: {{vocab_size: 256}}\n")
    by_file = ["parallel.pipeline_schedule=file", f"parallel.pipeline_schedule_file={tmp_path}"]
    wrong = {
        "missing corpus": ["data.data_path=/nope"],
        "missing schedule": [by_file[0], f"{by_file[1]}/absent.csv"],
        "malformed schedule": [by_file[0], f"{by_file[1]}/bad.csv"],
        "empty tokens": [f"data.data_path={tmp_path}/empty"],
    }
    typed = ["--config", str(file), "--check", "--world-size", "1", *["--elsewhere"] * elsewhere]
    assert run_check(parse_args(typed)) == 0
    capsys.readouterr()
    is_reported = elsewhere and kind.startswith("missing")
    assert run_check(parse_args([*typed, *wrong[kind]])) == (0 if is_reported else 2)
    out, err = capsys.readouterr()
    assert ("on this machine: " in out) == is_reported and (not err) == is_reported


def test_checking_needs_no_torch() -> None:
    names = sorted(path.stem for path in Path(sys.modules["megatron3d.config"].__path__[0]).glob("[a-z]*.py"))
    program = "".join(f"import megatron3d.config.{name}\n" for name in names)
    program += "import sys\nassert 'torch' not in sys.modules, 'torch was imported'\n"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
