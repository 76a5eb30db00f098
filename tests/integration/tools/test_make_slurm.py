"""Fact: the generated job is the committed one with other settings; an impossible job is refused before submission."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.forecast.time.hardware import CLUSTERS, file_names
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
    assert re.findall("#SBATCH --(constraint|qos|account|exclusive|cpus-per-task)(.*)", text) == [
        ("cpus-per-task", "=32"),
        ("exclusive", ""),
        ("constraint", "=gpu"),
        ("qos", "=debug"),
        ("account", "=m1"),
    ]
    assert "\nmodule load cuda\n" in text
    assert "# world_size 1024 = TP 8" in text


def test_a_rank_has_cores_and_its_node_alone_unless_asked_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug that this finds: a job whose ranks get one core each, SLURM's default, for five busy threads."""
    lines = shown(capsys, *BASE).splitlines()
    assert {"#SBATCH --cpus-per-task=8", "#SBATCH --exclusive"} <= {*lines}
    typed = ["--sbatch", "cpus-per-task=24", "--sbatch", "exclusive="]
    text = shown(capsys, *BASE, *typed)
    assert "#SBATCH --cpus-per-task=24\n" in text and "exclusive" not in text


def test_ranks_on_cpus_share_their_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cpus.yaml"
    levels = "[{name: node, ranks: 2, gb_s: 1, latency_us: 1}]"
    cluster.write_text(f"name: CPUs\naccelerator: cpu\ncores: 2\nlevels: {levels}\nsource: this test\n")
    text = shown(capsys, "--config", "configs/gpt2-124m.yaml", "--cluster", str(cluster), "--nodes", "1")
    assert not re.findall("#SBATCH --(cpus-per-task|exclusive|gpus-per-node)", text)


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_bash_parses_arguments_and_containers_as_given(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
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


SHELL = [
    "$(touch X)",
    "`touch X`",
    "${x:-$(touch X)}",
    "$((a[$(touch X)]))",
    "$[a[$(touch X)]]",
    "${!x@P}",
    "$'a'",
    "$1",
]
SHELL += ["$x[$(touch X)]", "${x[$(touch X)]}", "\\$(touch X)", '"$(touch X)"', "'$(touch X)'", ";touch X", "a&touch X"]
SHELL += [">X", "<(touch X)", "!touch", "$", "$$", "\\", "~", "*", "{a,b}", "# a", "a b", "$x", "${x}", "é²"]


WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="$")) | st.sampled_from(SHELL)


@settings(max_examples=30, deadline=None)
@given(st.lists(WORDS, min_size=1))
def test_any_word_stays_one_word_in_which_only_variables_are_expanded(words: list[str]) -> None:
    typed = f"printf '%s\\n' {' '.join(map(quoted, words))}"
    environ = {"PATH": os.environ["PATH"], "x": "a$(touch X)"}
    read = subprocess.run(["bash", "-c", typed], env=environ, capture_output=True, text=True, check=True)
    expanded = [text.replace("${x}", "$x").replace("$x", environ["x"]) for text in words]
    assert read.stdout == "".join(f"{text}\n" for text in expanded)


STUB = """#!/bin/bash
for word; do printf '%s\\0' "$word"; done >>"$RECORD"
case "$*" in *pretrain_gpt.py*) exit 2 ;; *" after "*) exit 1 ;; esac
"""


def job_arguments(folder: Path, script: str) -> list[list[str]]:
    """Run a job with stubs for srun and scontrol; return the arguments of the program in each of its three steps."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    (folder / "job.sbatch").write_text(script)
    record = folder / "record"
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record), "HOME": "/me", "SLURM_JOB_ID": "1"}
    environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "8"}
    done = subprocess.run(["bash", "job.sbatch"], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    words = record.read_text().split("\0")
    begins = [index for index, word in enumerate(words) if word == "--config"]
    return [words[begin:] for begin in begins]


@pytest.mark.parametrize("text", SHELL)
def test_no_name_runs_a_command_in_a_job(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "configs" / f"{text.replace('/', '')}.yaml"
    config.parent.mkdir()
    config.write_text((ROOT / "configs/gpt2-124m.yaml").read_text())
    override = f"logging.wandb_name=run {text}"
    typed = ["--config", str(config), "--cluster", "selene", "--nodes", "1", "--sbatch", "job-name=a", override]
    typed += ["logging.wandb_project=p", "--container", "apptainer", "--image", f"{text}.sif", "--mount", f"/{text}"]
    code = make_slurm.main([*typed, "--dry-run"])
    said = capsys.readouterr()
    if code == 2:  # the override is not YAML
        assert "logging.wandb_name" in said.err
        return
    steps = job_arguments(tmp_path, said.out)
    assert len(steps) == 3 and not list(tmp_path.rglob("X"))
    for words in steps:
        assert words[0] == "--config"
        if "x" not in text:
            assert words[:3] == ["--config", str(config), override]


@pytest.mark.parametrize("mark", ["\n", "\r", "\x1b", "\x85", "\u2028"])
@pytest.mark.parametrize("place", ["--config", "--image", "--mount", "--sbatch", "--setup", "--cluster", "override"])
def test_a_control_character_is_refused_anywhere(
    mark: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = f"a{mark}touch X"
    config, cluster = tmp_path / f"{bad if place == '--config' else 'a'}.yaml", tmp_path / "mine.yaml"
    config.write_text((ROOT / "configs/gpt2-124m.yaml").read_text())
    name = json.dumps(bad) if place == "--cluster" else "Selene"
    cluster.write_text((CLUSTERS / "selene.yaml").read_text().replace("name: Selene", f"name: {name}"))
    typed = ["--config", str(config), "--cluster", str(cluster), "--nodes", "1", "--dry-run", "--container", "pyxis"]
    values = {"--sbatch": f"comment={bad}", "--image": bad, "--mount": bad, "--setup": bad}
    typed += ["--image", "a", *([place, values[place]] if place in values else [])]
    typed += ["logging.wandb_project=p", f'logging.wandb_name="{bad}"'] if place == "override" else []
    assert make_slurm.main(typed) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err) < 1000


@pytest.mark.parametrize(
    ("option", "written"),
    [
        ("comment=a b", '#SBATCH --comment="a b"'),
        ('comment="a b"', '#SBATCH --comment="a b"'),
        ("comment=#1", '#SBATCH --comment="#1"'),
        ("exclusive", "#SBATCH --exclusive"),
    ],
)
def test_a_value_of_sbatch_is_one_word(option: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert written in shown(capsys, *BASE, "--sbatch", option).splitlines()


@pytest.mark.parametrize("option", ['a"b', 'comment=a"b', "comment=a\\", "a b=c", "", "=x", "é"])
def test_what_is_no_option_of_sbatch_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_slurm.main([*BASE, "--sbatch", option]) == 2
    assert "--sbatch" in capsys.readouterr().err


def test_overrides_and_options_come_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train.seed=3", *BASE, "train.train_iters=5")
    assert "arguments=(--config configs/gpt3-175b.yaml train.seed=3 train.train_iters=5)" in text
    with pytest.raises(SystemExit):
        make_slurm.main([*BASE, "--lr", "1e-3"])
    assert "--lr: no option of this program; use optimizer.lr=1e-3" in capsys.readouterr().err


@pytest.mark.parametrize("shards", ["a[$(touch X)]", "08", "0", "-1", "1.5", "", "9" * 30])
def test_preprocessing_counts_its_shards_only_in_digits(shards: str, tmp_path: Path) -> None:
    typed = ["bash", str(ROOT / "scripts/slurm/preprocess.sbatch"), shards, "prefix"]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "SHARDS is a whole number" in done.stderr
    assert not list(tmp_path.iterdir())


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
def test_jobs_that_could_not_run_are_refused(
    typed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_slurm.main([*BASE, *typed]) == 2
    assert message in capsys.readouterr().err


def test_times() -> None:
    written = ("90", "90:30", "24:00:00", "2-12", "2-12:30", "1-00:00:01")
    assert [seconds(time) for time in written] == [5400, 5430, 86400, 216000, 217800, 86401]
