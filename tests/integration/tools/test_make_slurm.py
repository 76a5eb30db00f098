"""Fact: the generated job is the committed one with other settings; an impossible job is refused before submission."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.analysis.cost_model.hardware import CLUSTERS, file_names
from megatron3d.launch.script import END, JobSettings, fill_template, quoted, seconds
from tools import make_slurm

ROOT = Path(__file__).parents[3]
BASE = ["--config", "configs/gpt3-175b.yaml", "--cluster", "selene", "--nodes", "128"]
OVERRIDE = 'data.data_path=[0.5, a b, 0.5, "$HOME/c\'d"]'


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def shown(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    assert make_slurm.main([*typed, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_committed_job_has_the_usual_settings() -> None:
    template = make_slurm.TEMPLATE.read_text()
    assert fill_template(template, JobSettings()) == template


@pytest.mark.parametrize("cluster", file_names(CLUSTERS))
def test_a_job_differs_from_the_committed_one_in_its_settings(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--config", "configs/gpt2-124m.yaml", "--cluster", cluster, "--nodes", "1")
    assert text.partition(END)[2] == make_slurm.TEMPLATE.read_text().partition(END)[2]
    assert "#SBATCH --nodes=1\n" in text and "#SBATCH --job-name=gpt2-124m\n" in text


def test_options_of_the_cluster_and_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--sbatch", "account=m1", "--sbatch", "exclusive", "--sbatch", "qos=debug", "--setup", "module load cuda"]
    text = shown(capsys, *BASE, "--cluster", "perlmutter", "--nodes", "256", *typed)
    assert re.findall("#SBATCH --(constraint|qos|account|exclusive)(.*)", text) == [
        ("constraint", "=gpu"),
        ("qos", "=debug"),
        ("account", "=m1"),
        ("exclusive", ""),
    ]
    assert "\nmodule load cuda\n" in text
    assert "# world_size 1024 = TP 8" in text


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_arguments_and_containers_are_what_bash_reads(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *BASE, "--container", kind, "--image", "$HOME/a b.sif", "--mount", "/data", OVERRIDE)
    settings = text[text.index("python=(") : text.index(END)]
    read = subprocess.run(
        ["bash", "-c", settings + 'printf "%s\\n" "${arguments[@]}" -- "${container[@]}"'],
        env=os.environ | {"HOME": "/me"},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    arguments, container = (part.splitlines() for part in read.stdout.split("--\n"))
    assert arguments == ["--config", "configs/gpt3-175b.yaml", OVERRIDE.replace("$HOME", "/me")]
    assert any("/me/a b.sif" in each for each in container) and any("/data" in each for each in container)


@settings(max_examples=10)
@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="$"), min_size=1)))
def test_any_word_stays_one_word(words: list[str]) -> None:
    typed = f"printf '%s\\n' {' '.join(map(quoted, words))}" if words else "true"
    read = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True)
    assert read.stdout == "".join(f"{text}\n" for text in words)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--nodes", "3"], "world_size 24"),
        (["checkpoint.load=null"], "set both to one folder"),
        (["--time", "5", "--warn", "300"], "--warn 300: not between 0 and --time 5, 300 s"),
        (["--time", "noon"], "--time noon: not a SLURM time"),
        (["--image", "a.sif"], "add --container"),
        (["--container", "pyxis"], "add --image"),
        (["--output", "absent/job.sbatch"], "cannot be written"),
        (["--cluster", "nowhere"], "cluster nowhere: there is none"),
    ],
)
def test_what_could_not_run_is_refused(typed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_slurm.main([*BASE, *typed]) == 2
    assert message in capsys.readouterr().err


def test_times() -> None:
    written = ("90", "90:30", "24:00:00", "2-12", "2-12:30", "1-00:00:01")
    assert [seconds(time) for time in written] == [5400, 5430, 86400, 216000, 217800, 86401]
