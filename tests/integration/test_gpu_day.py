"""Fact: gpu_day.py runs from end to end as one command, keeps every row, and ends sections at their limits.

On the CPU the sections only show that they work; a section that printed nothing, or a run that lost rows of a section
that was ended, would be found.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gpu_day
import pytest
import torch
from gpu import gpu_kernels, gpu_runs, gpu_sections, gpu_steps
from gpu.gpu_timing import Place, Steps, spec_of

from megatron3d.config.read import read_config
from megatron3d.config.validate.rules import check
from tests.support.tiny_run import ROOT

Results = list[dict[str, object]]
# A key that a row of each section has.
KEYS: Mapping[str, str] = {
    "hardware": "device",
    "tests": "last_line",
    "numbers": "relative_difference",
    "layouts": "equal",
    "nccl": "recorded",
    "8b": "predicted_gib",
    "1b": "predicted_gib",
    "124m": "predicted_gib",
    "steps": "last_line",
    "ranks": "action_ms",
    "kernels": "proposal",
    "profile": "operation",
    "program": "stall_ms",
    "switches": "speed_up",
    "overlap": "overlap",
    "fp8": "Y",
    "queue": "overlap",
}


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Return the folder and the rows of one command with all sections."""
    folder = tmp_path_factory.mktemp("day")
    command = [sys.executable, "benchmarks/gpu_day.py", "--cpu", "--quick", "--minutes", "15"]
    command += ["--sections", ",".join(KEYS)]
    done = subprocess.run([*command, "--output", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, results(folder)


def test_one_command_runs_every_section(day: tuple[Path, Results]) -> None:
    folder, rows = day
    assert {*KEYS} == {*gpu_day.SECTIONS, *gpu_day.SECOND, *gpu_day.THIRD}
    for name, key in KEYS.items():
        mine = [row for row in rows if row["section"] == name]
        assert mine and any(key in row for row in mine), f"{name} printed no {key}"
        assert mine[-1]["exit_code"] == 0 and not [row for row in mine if "error" in row], mine
    table = (folder / "table.txt").read_text(encoding="utf-8")
    assert all(f"\n{name} " in f"\n{table}" for name in KEYS)


def test_what_comes_home_fits(day: tuple[Path, Results]) -> None:
    folder, _ = day
    names = {path.name for path in folder.iterdir()}
    assert names == {"results.jsonl", "table.txt", "log.txt", "trace_eager.json.gz", "flight_recorder.pickle"}


def test_a_resumed_run_is_compared_bit_for_bit() -> None:
    whole = {1: 3.0, 2: 2.5, 3: 2.25}
    assert gpu_runs.same_losses(whole, whole, 1)["is_right"]
    assert not gpu_runs.same_losses(whole | {3: 2.25 + 2**-50}, whole, 1)["is_right"]


def test_compiled_rows_are_compiled(tmp_path: Path) -> None:
    """Would catch rows of MFU that are called compiled while their layers run eagerly."""
    place = Place(torch.device("cpu"), quick=True, output=tmp_path)
    for setting in (True, False):
        steps = Steps(place, spec_of(place, "llama-1b", [f"train.compile={str(setting).lower()}"]))
        assert all(("forward" in vars(layer)) == setting for layer in steps.state.model.layers.values())


def test_every_layout_is_one_that_ranks_can_have() -> None:
    for preset, world_size, overrides in gpu_runs.LAYOUTS.values():
        config = read_config(ROOT / "configs" / f"{preset}.yaml", overrides).config
        assert list(check(config, world_size)) == []


def test_every_section_has_a_program_and_a_place_in_ten_minutes() -> None:
    """Would catch limits of the first sections that leave none to the later ones."""
    measured = {*gpu_day.SECTIONS, *gpu_day.SECOND, *gpu_day.THIRD} - {"tests", "steps", "queue"}
    assert measured == set(gpu_sections.SECTIONS)
    assert list(gpu_day.SECTIONS)[-1] == "layouts", "the section that takes what remains is the last one"
    limits = [section.limit_s for name, section in gpu_day.SECTIONS.items() if name != "layouts"]
    assert sum(limits) <= 500, "layouts get a hundred seconds even where all others take their limits"
    for named in (gpu_day.SECOND, gpu_day.THIRD):
        assert sum(section.limit_s for section in named.values()) <= 595, "they fit one command"


def test_a_kernel_that_fails_ends_no_section(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: Place) -> Iterator[dict[str, object]]:
        raise RuntimeError("no such kernel\nand more")
        yield {}

    monkeypatch.setattr(gpu_kernels, "layer_rows", fails)
    rows = list(gpu_kernels.kernels(Place(torch.device("cpu"), quick=True, output=Path())))
    assert {"kernel": "fails", "error": "no such kernel"} in rows and "proposal" in rows[-1]


def test_shipped_presets_are_measured() -> None:
    place = Place(torch.device("cpu"), quick=False, output=Path())
    for name, presets in gpu_steps.PRESETS.items():
        assert all((ROOT / f"configs/gpus/{preset}.yaml").exists() for preset in presets.values())
        config = spec_of(place, gpu_steps.preset_of(place, name), ()).config
        assert config.model.num_attention_heads * (64 if name == "124m" else 128) == config.model.hidden_size


def test_bits_are_compared_where_kernels_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention does not, unless the run is deterministic; ranks that share a GPU do not compile."""
    typed = list[Sequence[str]]()
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(gpu_runs, "stopped", lambda command, output: typed.append(command) or {"is_right": False})
    monkeypatch.setattr(subprocess, "run", lambda command, **_: typed.append(command) or done)
    place = Place(torch.device("cpu"), quick=False, output=tmp_path)
    list(gpu_runs.program(place))
    list(gpu_runs.layouts(place))
    (program, *layouts) = typed
    assert "train.deterministic_mode=true" in program
    assert len(layouts) == len(gpu_runs.LAYOUTS) and all("train.compile=false" in command for command in layouts)


def wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as packed:
        packed.writestr(f"{name.partition('-')[0]}.py", "")


def test_wheels_of_this_python_are_unpacked(tmp_path: Path) -> None:
    """Wheels of another Python, or broken ones, are named; they end nothing, and no pip is needed."""
    mine, machine = f"cp3{sys.version_info.minor}", platform.machine()
    built = (f"built-1-{mine}-{mine}-manylinux_2_17_{machine}", f"stable-1-cp38-abi3-linux_{machine}")
    for name in ("pure-1-py3-none-any", *built, "old-1-cp27-cp27m-linux_x86_64", f"far-1-{mine}-{mine}-win_arm64"):
        wheel(tmp_path, name)
    (tmp_path / "broken-1-py3-none-any.whl").write_bytes(b"no archive")
    folder, left_out = gpu_day.unpacked_wheels(tmp_path)
    assert folder is not None and {path.stem for path in folder.iterdir()} == {"pure", "built", "stable"}
    assert [name.partition("-")[0] for name in left_out] == ["broken", "far", "old"]


def test_an_inherited_path_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    shows = ["-c", "import os; print(os.environ['PYTHONPATH'], os.environ['A'])"]

    def path(packages: Path | None) -> str:
        return subprocess.run([*gpu_day.python_of(packages, "A=1"), *shows], capture_output=True, text=True).stdout

    monkeypatch.setenv("PYTHONPATH", "/theirs:/also")
    assert path(Path("/wheels")) == f"{ROOT}:{ROOT}/benchmarks:/wheels:/theirs:/also 1\n"
    monkeypatch.delenv("PYTHONPATH")
    assert path(None) == f"{ROOT}:{ROOT}/benchmarks 1\n"


def results(folder: Path) -> Results:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rows_are_kept_when_a_section_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prints rows and hangs with a child in a session of its own, one fails; both are in results and table."""
    child = "subprocess.Popen(['sleep', '60'], start_new_session=True).pid"
    printed = f"print('{{\"a\": 1}}'); print('{{no row}}'); print({child}, flush=True)"
    hangs = f"import subprocess, time; {printed}; time.sleep(60)"
    fails = "import sys; print('{\"b\": 2}'); sys.exit('broken')"
    sections = {"hangs": gpu_day.Section(2, ("-c", hangs), ""), "fails": gpu_day.Section(9, ("-c", fails), "")}
    monkeypatch.setattr(gpu_day, "SECTIONS", sections)
    begin = time.monotonic()
    assert gpu_day.main(["--output", str(tmp_path)]) == 1
    assert time.monotonic() - begin < 30, "a child that holds the output open kept the section going"
    run, first, ended, second, failed = results(tmp_path)
    assert run["command"] == f"python benchmarks/gpu_day.py --output {tmp_path}" and run["date"] and run["commit"]
    assert (first["section"], first["a"]) == ("hangs", 1) and (second["section"], second["b"]) == ("fails", 2)
    assert ended["timed_out"] and ended["exit_code"] != 0
    assert failed["exit_code"] == 1 and failed["last_line"] == "broken" and not failed["timed_out"]
    assert "a=1" in (tmp_path / "table.txt").read_text(encoding="utf-8")
    status = Path(f"/proc/{ended['last_line']}/stat")
    assert not status.exists() or ") Z " in status.read_text(), "the child is still there"


def test_a_machine_without_git_has_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_day.facts([])["commit"] == "unknown"


def test_the_table_comes_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section gets the time that is left, the next one none."""
    section = gpu_day.Section(60, ("-c", "import time; time.sleep(60)"), "")
    monkeypatch.setattr(gpu_day, "SECTIONS", {"hangs": section, "waits": section})
    assert gpu_day.main(["--minutes", "0.11", "--output", str(tmp_path)]) == 1
    _, ended, skipped = results(tmp_path)
    assert ended["timed_out"] and skipped["last_line"] == "no time left of --minutes 0.11"


def test_a_folder_of_eight_files_comes_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "MAX_FILE_BYTES", 10)
    for name, size in (("results.jsonl", 5), ("large.gz", 11), *((f"{place}.gz", 1) for place in range(9))):
        (tmp_path / name).write_text("x" * size)
    removed = list(gpu_day.trim(tmp_path))
    assert len(removed) == 3 and any("large.gz" in line for line in removed)
    assert (tmp_path / "results.jsonl").exists() and len(list(tmp_path.iterdir())) == gpu_day.MAX_FILES


def test_two_nodes_run_the_same_sections() -> None:
    args = [gpu_day.parse_args(["--two-nodes", "node0:29500", "--node-rank", str(rank)]) for rank in (0, 1)]
    assert args[0].names == args[1].names == ["network", *gpu_day.TWO]
    ports = set()
    for name in args[0].names:
        one, other = (gpu_day.command_of(name, each, None) for each in args)
        assert {*one} ^ {*other} == {"0", "1"} and "node0" in one
        ports.add(one[one.index("--master-port") + 1])
    assert len(ports) == len(args[0].names)


def test_layouts_of_two_nodes_are_those_of_sixteen_ranks() -> None:
    for overrides in gpu_day.TWO.values():
        config = read_config(ROOT / "configs" / "llama-1b.yaml", ["train.global_batch_size=128", *overrides]).config
        assert list(check(config, 16)) == []


def test_two_nodes_measure_network_and_bubble_next_to_the_prediction(tmp_path: Path) -> None:
    """Each node is a command with one rank here."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "benchmarks/gpu_day.py", "--cpu", "--quick", "--two-nodes", f"localhost:{port}"]
    nodes = []
    for rank in ("0", "1"):
        output = ["--node-rank", rank, "--sections", "network,1f1b", "--output", str(tmp_path)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        nodes.append(
            subprocess.Popen(
                [*command, *output], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [node.communicate(timeout=600)[0] for node in nodes]
    logs = [(tmp_path / f"node{rank}" / "log.txt").read_text() for rank in ("0", "1")]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join([*said, *logs])
    rows = results(tmp_path / "node0")
    assert any("gb_s" in row and "predicted_s" in row for row in rows)
    assert any(str(row.get("what", "")).startswith("first use of ") for row in rows)
    (found,) = (row for row in rows if "pipeline_bubble" in row)
    assert found["section"] == "1f1b" and found["predicted_bubble"] and found["predicted_ms"] and found["elapsed_ms"]
    assert "bubble measured" in logs[0]
    assert not list((tmp_path / "1f1b").glob("iter_*")), "checkpoints are large"


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_day.parse_args(["--sections", "1b,everything"])
    assert "--sections everything: use some of hardware, tests" in capsys.readouterr().err
