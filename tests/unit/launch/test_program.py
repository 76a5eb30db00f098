"""Fact: a job's checks before and after its ranks return exit codes that separate bad configurations from bad nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d.errors import UserError
from megatron3d.launch import __main__ as around
from tests.support.tiny_run import write_config

SLURM = {
    "SLURM_JOB_ID": "31005",
    "SLURM_JOB_NODELIST": "n[7-8]",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def ask(patch: pytest.MonkeyPatch, node: int, *typed: str, **environ: str) -> int:
    """Call the program as a task on a node."""
    names = {"SLURM_PROCID": str(node), "SLURMD_NODENAME": f"n{7 + node}"}
    with patch.context() as here:
        for name, value in (SLURM | names | environ).items():
            here.setenv(name, value)
        here.setattr("sys.argv", ["launch", *typed])
        return around.main()


def test_a_launch_is_recorded_once_and_decided_on(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for requeues, again in (("0", 0), ("1", 1)):
        codes = [
            ask(monkeypatch, node, "before", "--config", str(config), SLURM_RESTART_COUNT=requeues) for node in (0, 1)
        ]
        assert codes == [0, 0]
        typed = ["after", "--code", "3", "--before-limit", "--config", str(config)]
        assert ask(monkeypatch, 0, *typed, SLURM_RESTART_COUNT=requeues) == again
    assert len((config.parent / "run" / "slurm.jsonl").read_text().splitlines()) == 2
    assert "> launch 2 of job 31005, on n[7-8], from iteration 0" in capsys.readouterr().out


def test_an_error_on_all_nodes_is_the_users_and_on_one_node_its_own(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["before", "--config", str(config), "data.data_path=absent"]
    with pytest.raises(UserError, match=r"absent[.]bin does not"):
        ask(monkeypatch, 0, *typed)
    assert ask(monkeypatch, 1, *typed) == 1
    assert "node n8: data.data_path=absent" in (said := capsys.readouterr().err) and "--exclude=n8" in said
    assert ask(monkeypatch, 1, *typed[:3], SLURM_GPUS_ON_NODE="999") == 1
    assert "of the 999 GPUs that SLURM gave" in capsys.readouterr().err
    assert not (config.parent / "run").exists()
