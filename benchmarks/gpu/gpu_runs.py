"""Sections of gpu_day.py that compare runs: bf16 and fp32, layouts and one process, resumed and uninterrupted ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from gpu.gpu_program import ALONE, HIDE_GPU, ROOT, SMALL_BYTES, command, losses, rows_of, write_corpus
from gpu.gpu_timing import Place, Row, Steps, spec_of

from megatron3d.errors import ExitCode

# How far the mean of the last losses in bf16 and in fp32 may be apart.
NEAR = 2e-2
NUM_STEPS, NUM_LAST = 200, 50


def numbers(place: Place) -> Iterator[Row]:
    """Yield the losses of the same steps on bytes of source code in bf16 and in fp32, from the same weights."""
    num_steps, num_last = (10, 3) if place.quick else (NUM_STEPS, NUM_LAST)
    keys = [*ALONE, "train.micro_batch_size=8", "train.global_batch_size=8", "train.compile=false"]
    found: dict[str, torch.Tensor] = {}
    for precision in ("fp32", "bf16"):
        spec = spec_of(place, "gpt2-124m", keys, last=[f"train.precision={precision}"])
        steps = Steps(place, spec, has_initial_values=True)
        losses = []
        for tokens in source_batches(num_steps, 8, spec.arch.seq_length):
            steps.read(tokens.to(place.device))
            losses.append(steps())
        found[precision] = torch.stack(losses).cpu()
        del steps
        place.free()
    last = {name: each[-num_last:].mean().item() for name, each in found.items()}
    apart = abs(last["bf16"] / last["fp32"] - 1)
    learns = all(last[name] < each[0].item() for name, each in found.items())
    shown = {
        name: [round(loss, 4) for loss in each[:: max(1, num_steps // 10)].tolist()] for name, each in found.items()
    }
    yield {**shown, "last": last, "relative_difference": apart, "is_right": apart < NEAR and learns}


def source_batches(num_steps: int, num_samples: int, length: int) -> Iterator[torch.Tensor]:
    """Yield batches of tokens [samples, length + 1]: bytes from random places of this repository's source."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "megatron3d").rglob("*.py")))
    source, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        starts = torch.randint(len(source) - length, (num_samples, 1), generator=generator)
        yield source[starts + torch.arange(length + 1)].long()


# Cores for the processes of a layout; as many layouts run side by side as fit.
CORES_OF_LAYOUT = 8
# Layouts that ranks on one GPU are compared in: every ZeRO stage, kind of schedule, mode and form.
PIPELINE, DOUBLED = "llama-70b", "parallel.virtual_pipeline_model_parallel_size=2"
FORMS = ("grid", "grid-scatter", "1d", "1d-sp", "2d", "2d-weight-stationary", "2.5d", "2.5d-weight-stationary")
LAYOUTS: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    **{f"ZeRO {stage}": ("llama-1b", 8, (f"parallel.zero_stage={stage}",)) for stage in range(4)},
    "1f1b": (PIPELINE, 512, ("parallel.pipeline_schedule=1f1b", "parallel.virtual_pipeline_model_parallel_size=null")),
    "interleaved": (PIPELINE, 512, ()),
    "zb-v": (PIPELINE, 512, ("parallel.pipeline_schedule=zb-v", DOUBLED)),
    **{name: (f"modes/{name}", 8, ()) for name in (*FORMS, "3d", "3d-tokens")},
}


def layouts(place: Place) -> Iterator[Row]:
    """Yield whether each layout equals one process in float64; ranks share the GPU, and their collectives lag."""
    names = ["ZeRO 1"] if place.quick else list(LAYOUTS)
    device = "cpu" if place.device.type == "cpu" else "gpu"
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_OF_LAYOUT)) as threads:
        yield from threads.map(partial(verified, device), names)


def verified(device: str, name: str) -> Row:
    """Return whether the layout equals one process."""
    preset, world_size, overrides = LAYOUTS[name]
    program = [sys.executable, "tools/verify_layout.py", "--config", f"configs/{preset}.yaml", "--steps", "1"]
    options = ["--world-size", str(world_size), "--device", device, "--tolerance", "1e-9", "--lag-ms", "1"]
    eager = "train.compile=false"  # each of the eight ranks would compile
    begin = time.perf_counter()
    done = subprocess.run([*program, *options, *overrides, eager], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
    seconds = round(time.perf_counter() - begin, 1)
    return {"layout": name, "equal": done.returncode == 0, "seconds": seconds, "line": lines[-1][:200]}


# Of the 1B: 0.8 GB of a checkpoint, since a lent machine's disk may be slow.
ONE_LAYER = ("model.vocab_size=null", "model.num_layers=1", "model.seq_length=2048")


def program(place: Place) -> Iterator[Row]:
    """Yield what pretrain_gpt.py does on SIGUSR1, whether it goes on as if never stopped, and what a save costs it."""
    keys = ["--config", str(ROOT / "configs" / "llama-1b.yaml"), *ALONE, "train.train_iters=100000"]
    keys += ["train.micro_batch_size=2", "train.global_batch_size=4", "checkpoint.async_save=true"]
    keys += ["train.deterministic_mode=true"]  # cuDNN's attention has another sum in each backward
    keys += SMALL_BYTES if place.quick else ONE_LAYER
    hide = HIDE_GPU if place.device.type == "cpu" else ()
    with tempfile.TemporaryDirectory() as folder:
        corpus, output, whole = write_corpus(Path(folder) / "bytes"), Path(folder) / "run", Path(folder) / "whole"
        first = stopped([*hide, *command(corpus, output, keys)], output)
        yield {"run": "stopped", **first}
        if not first["is_right"]:
            return
        iteration = int((output / "latest_checkpointed_iteration.txt").read_text())
        keys += [f"train.exit_interval={iteration + 2}"]
        for name, place_of in (("resumed", output), ("never stopped", whole)):
            saves = [f"checkpoint.save_interval={iteration + 1}"] if place_of is whole else []
            done = subprocess.run([*hide, *command(corpus, place_of, [*keys, *saves])], capture_output=True, text=True)
            is_right = done.returncode == ExitCode.STOPPED
            yield {"run": name, "code": done.returncode, "is_right": is_right, "line": _last(done.stdout + done.stderr)}
            if not is_right:
                return
        yield same_losses(losses(output), losses(whole), iteration)
        *_, step_ms = (row["elapsed_ms"] for row in rows_of(whole) if "elapsed_ms" in row)
        yield {"run": "asynchronous save", "stall_ms": stalls_ms(whole), "step_ms": step_ms}


def same_losses(resumed: Mapping[int, float], whole: Mapping[int, float], iteration: int) -> Row:
    """Return whether the losses after an iteration, at which one run was stopped and resumed, are equal bit for bit."""
    pairs = [(resumed[each], whole[each]) for each in (iteration + 1, iteration + 2)]
    equal = all(one == other for one, other in pairs)
    return {"run": "compared", "from": iteration, "losses": pairs, "is_right": equal}


def stalls_ms(output: Path) -> list[float]:
    """Return the milliseconds for which saves held training up."""
    timers = [row.get("timers", {}) for row in rows_of(output)]
    return [each["save-checkpoint"]["max"] for each in timers if "save-checkpoint" in each]


def stopped(typed: Sequence[str], output: Path, limit_s: float = 150.0) -> Row:
    """Start a run, send SIGUSR1 once it has made some steps, and return its exit code."""
    begin = time.monotonic()
    child = subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    shown: list[str] = []

    def show() -> None:
        """Read what the run prints as it comes, so that the log tells how far a section got that was ended."""
        assert child.stdout is not None, "the output is a pipe"
        for line in child.stdout:
            shown.append(line)
            print(f"{time.monotonic() - begin:6.1f} s {line}", end="", flush=True)

    reader = threading.Thread(target=show)
    reader.start()
    metrics, end_s = output / "metrics.jsonl", begin + limit_s
    while child.poll() is None and time.monotonic() < end_s:
        if metrics.exists() and metrics.read_text(encoding="utf-8").count('"lm_loss"') >= 3:
            break
        time.sleep(0.2)
    child.send_signal(signal.SIGUSR1)
    child.wait(timeout=limit_s)
    reader.join()
    return {"code": child.returncode, "is_right": child.returncode == ExitCode.STOPPED, "line": _last("".join(shown))}


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]
