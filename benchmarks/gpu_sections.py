"""Sections of gpu_day.py, each in a process of its own: `gpu_sections.py NAME [--cpu] [--quick]` prints JSON lines."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import gpu_kernels
import gpu_steps
import torch
import torch.distributed as dist
from gpu_program import command, write_corpus
from gpu_timing import ALONE, SMALL, Place, Row, power

from megatron3d.hardware.peaks import device_name
from megatron3d.hardware.sdpa_backends import describe_attention
from megatron3d.runtime.backends import backend_of
from megatron3d.runtime.exit_codes import ExitCode

ROOT = Path(__file__).parents[1]


def hardware(place: Place) -> Iterator[Row]:
    """Yield device, versions, attention kernel, the bandwidth of a copy and the rate of the largest GEMM."""
    cuda = torch.backends.cuda.is_built() and torch.version.cuda
    yield {"device": device_name(place.device), "torch": torch.__version__, "cuda_version": cuda or "none", **power()}
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query"], check=False, timeout=20, stdout=sys.stderr)
    yield {"line": describe_attention(place.device, torch.bfloat16, (32, 8, 128), 128 if place.quick else 4096)}
    yield next(gpu_kernels.stream_rows(place))
    yield next(gpu_kernels.gemm_rows(place))


# Layouts that ranks on one GPU are compared in: modes, ZeRO stages and schedules, by the preset and its changes.
LAYOUTS: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "1d-sp": ("modes/1d-sp", 4, ()),
    "2d": ("modes/2d", 4, ()),
    "2d-weight-stationary": ("modes/2d-weight-stationary", 4, ()),
    "2.5d": ("modes/2.5d", 8, ()),
    "3d": ("modes/3d", 8, ()),
    "grid": ("modes/grid", 8, ()),
    **{f"ZeRO {stage}": ("llama-1b", 8, (f"parallel.zero_stage={stage}",)) for stage in (1, 2, 3)},
    "interleaved": ("llama-70b", 512, ()),
    "zb-v": ("llama-70b", 512, ("parallel.pipeline_schedule=zb-v",)),
}


def layouts(place: Place) -> Iterator[Row]:
    """Yield whether each layout equals one process in float64; ranks share the GPU, and their collectives lag."""
    names = ["ZeRO 1"] if place.quick else list(LAYOUTS)
    device = "cpu" if place.device.type == "cpu" else "gpu"
    for name in names:
        preset, world_size, overrides = LAYOUTS[name]
        if name == "zb-v":
            overrides = (*overrides, "parallel.virtual_pipeline_model_parallel_size=2")
        program = [sys.executable, "tools/verify_layout.py", "--config", f"configs/{preset}.yaml", "--steps", "1"]
        options = ["--world-size", str(world_size), "--device", device, "--tolerance", "1e-9", "--lag-ms", "1"]
        done = subprocess.run([*program, *options, *overrides], cwd=ROOT, capture_output=True, text=True)
        lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
        yield {"layout": name, "equal": done.returncode == 0, "line": lines[-1][:200]}


def nccl(place: Place) -> Iterator[Row]:
    """Yield what a world of one shows of process groups: start, a subgroup with its timeout, a barrier."""
    begin = time.perf_counter()
    backend = backend_of(place.device.type)
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], timeout=timedelta(seconds=77))
    x = torch.ones(2**20, device=place.device)
    dist.all_reduce(x, group=group)
    place.synchronize()
    started_s = time.perf_counter() - begin
    options = getattr(group._get_backend(place.device), "options", None)
    timeout = getattr(options, "_timeout", None)
    dist.barrier(group=group)
    dist.destroy_process_group()
    yield {"backend": backend, "started_s": started_s, "subgroup_timeout": str(timeout), "sum": float(x[0])}


def program(place: Place) -> Iterator[Row]:
    """Yield exit codes of a training run that is stopped by SIGUSR1, and of one that resumes it."""
    keys = ["--config", str(ROOT / "configs" / "llama-1b.yaml"), *ALONE]
    keys += ["train.micro_batch_size=2", "train.global_batch_size=4", "checkpoint.async_save=true"]
    keys += SMALL if place.quick else ["model.num_layers=4", "model.seq_length=2048"]
    keys = [key for key in keys if not key.startswith("model.vocab_size")] + ["model.vocab_size=null"]
    hide = ["env", "CUDA_VISIBLE_DEVICES="] if place.device.type == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        corpus, output = write_corpus(Path(folder) / "bytes"), Path(folder) / "run"
        typed = [*hide, *command(corpus, output, [*keys, "train.train_iters=100000"])]
        first = stopped(typed, output)
        yield {"run": "stopped", **first}
        if not first["is_right"]:
            return
        iteration = int((output / "latest_checkpointed_iteration.txt").read_text())
        last = f"train.train_iters={iteration + 2}"
        done = subprocess.run([*hide, *command(corpus, output, [*keys, last])], capture_output=True, text=True)
        yield {"run": "resumed", "from": iteration, "code": done.returncode, "line": _last(done.stdout + done.stderr)}


def stopped(typed: Sequence[str], output: Path, limit_s: float = 150.0) -> Row:
    """Start a run, send SIGUSR1 once it has made some steps, and return its exit code."""
    child = subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, end_s = output / "metrics.jsonl", time.monotonic() + limit_s
    while child.poll() is None and time.monotonic() < end_s:
        if metrics.exists() and metrics.read_text(encoding="utf-8").count('"lm_loss"') >= 3:
            break
        time.sleep(0.2)
    child.send_signal(signal.SIGUSR1)
    text, _ = child.communicate(timeout=limit_s)
    return {"code": child.returncode, "is_right": child.returncode == ExitCode.STOPPED, "line": _last(text)}


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


SECTIONS: Mapping[str, Callable[[Place], Iterator[Row]]] = {
    "hardware": hardware,
    "layouts": layouts,
    "nccl": nccl,
    "mfu": gpu_steps.mfu,
    "ranks": gpu_steps.ranks,
    "kernels": gpu_kernels.kernels,
    "profile": gpu_steps.profiled,
    "program": program,
    "switches": gpu_steps.switches,
    "overlap": gpu_kernels.overlap,
}


def main() -> int:
    """Run one section and print its rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_day")
    args = parser.parse_args()
    has_gpu = torch.accelerator.is_available() and not args.cpu
    if not (has_gpu or args.cpu):
        print("torch sees no GPU; --cpu computes on the CPU")
        return 2
    kind = str(torch.accelerator.current_accelerator()) if has_gpu else "cpu"
    place = Place(torch.device(kind, 0) if has_gpu else torch.device("cpu"), args.quick, args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    failed = False
    for row in SECTIONS[args.section](place):
        print(json.dumps(row), flush=True)
        failed = failed or "error" in row or row.get("equal") is False or row.get("is_right") is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
