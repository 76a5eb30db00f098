"""Record of one logged step, and its console line in Megatron-LM's format, which existing log parsers read.

MFU = model FLOPs of a step / (time * ranks * peak)          Chowdhery et al. 2022 (arXiv:2204.02311, appendix B)
HFU = the same with all FLOPs of the hardware: activation recomputation and padding included
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_PAGES = Path("/proc/self/statm")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on an accelerator; on the CPU the peak resident size of the process."""
    if device.type != "cpu":
        import torch

        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class ProcessMemory(NamedTuple):
    """Peak bytes as `peak_memory_bytes` has them, and bytes of files in memory: of libraries' code (Linux, CPU)."""

    peak: int
    code: int


def process_memory(device: torch.device) -> ProcessMemory:
    """Return the memory of this process; without code on an accelerator, and where the system does not say it."""
    counts_code = device.type == "cpu" and _PAGES.exists()
    code = int(_PAGES.read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE") if counts_code else 0
    return ProcessMemory(peak_memory_bytes(device), code)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated by tensors, reserved by the allocator, and at the peak.

    On a CPU, allocated is the resident size of the process (on Linux only), and reserved is missing.
    """
    peak = {"peak": peak_memory_bytes(device)}
    if device.type != "cpu":
        import torch

        held = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
        return {"allocated": held[0], "reserved": held[1]} | peak
    if not _PAGES.exists():
        return peak
    return {"allocated": int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")} | peak


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step; `mfu` and `hfu` are None if the peak is unknown."""

    tokens_per_s: float
    tokens_per_s_per_rank: float
    tflops_per_s_per_rank: float
    mfu: float | None
    hfu: float | None


@dataclass(frozen=True)
class StepWork:
    """Work of a training step.

    Attributes:
        num_tokens: tokens of the global batch.
        flops_per_token: FLOPs of the model, forward and backward.
        rank_flops: FLOPs of a rank in a step, the mean over ranks.
        peak_flops: peak FLOP/s of one device, None if unknown.
    """

    num_tokens: int
    num_ranks: int
    flops_per_token: float
    rank_flops: float
    peak_flops: float | None

    def throughput(self, step_s: float) -> Throughput:
        """Return the throughput of a step that takes `step_s` seconds."""
        tokens_per_s = self.num_tokens / step_s
        per_rank = tokens_per_s / self.num_ranks
        model_flops = per_rank * self.flops_per_token
        hardware_flops = self.rank_flops / step_s
        return Throughput(
            tokens_per_s,
            per_rank,
            model_flops / 1e12,
            model_flops / self.peak_flops if self.peak_flops else None,
            hardware_flops / self.peak_flops if self.peak_flops else None,
        )


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one logged step, at full precision.

    Attributes:
        consumed_samples: sequences read since the run began.
        consumed_tokens: tokens read since the run began.
        lm_loss: mean over the tokens of the global batch, in nats.
        grad_norm: global norm of the gradients before clipping.
        elapsed_ms: mean milliseconds per step since the last record.
        remaining_s: seconds of the iterations that are left, at this rate and the full batch size, without
            evaluations and saves.
        tflops_per_s_per_rank: model TFLOP/s of a rank, without recomputation.
        mfu, hfu: model and hardware FLOP/s as a fraction of the device's peak; None if the peak is unknown.
        pipeline_bubble: measured bubble, a fraction of the schedule's time; None without a pipeline.
        peak_memory_bytes: largest peak among the ranks.
        skipped_iterations: steps without an update since the last record.
        loss_scale: factor of the next step's loss; None without loss scaling.
        global_batch_size: sequences of this step, trained on with `seq_length` tokens each.
        skipped_records: bad records skipped since the run began; None if none may be skipped.
        mtp_losses: mean loss of each module of multi-token prediction.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    elapsed_ms: float
    remaining_s: float
    tokens_per_s: float
    tokens_per_s_per_rank: float
    tflops_per_s_per_rank: float
    mfu: float | None
    hfu: float | None
    peak_memory_bytes: int
    pipeline_bubble: float | None = None
    skipped_iterations: int = 0
    loss_scale: float | None = None
    global_batch_size: int = 0
    seq_length: int = 0
    skipped_records: int | None = None
    mtp_losses: tuple[float, ...] = ()

    @property
    def row(self) -> dict[str, object]:
        """Return the numbers by key as in metrics.jsonl."""
        values = asdict(self)
        return values | mtp_rows(values.pop("mtp_losses"))


def mtp_rows(losses: Sequence[float], suffix: str = "loss") -> dict[str, float]:
    """Return the losses of multi-token prediction by key: `mtp_1 loss` is that of the token after the next."""
    return {f"mtp_{depth} {suffix}": loss for depth, loss in enumerate(losses, start=1)}


def step_line(record: StepRecord, train_iters: int, now: datetime) -> str:
    """Return the console line of a step."""
    fields = {
        "consumed samples": f"{record.consumed_samples:12d}",
        "elapsed time per iteration (ms)": f"{record.elapsed_ms:.1f}",
        "remaining time": str(timedelta(seconds=round(record.remaining_s))),
        "tokens per second": f"{record.tokens_per_s:.0f}",
        "tokens per second per rank": f"{record.tokens_per_s_per_rank:.0f}",
        "MFU": None if record.mfu is None else f"{100 * record.mfu:.1f}%",
        "learning rate": f"{record.learning_rate:.6E}",
        "global batch size": f"{record.global_batch_size:5d}",
        "lm loss": scientific(record.lm_loss),
        **{name: scientific(loss) for name, loss in mtp_rows(record.mtp_losses).items()},
        "loss scale": None if record.loss_scale is None else f"{record.loss_scale:.1f}",
        "grad norm": f"{record.grad_norm:.3f}",
        "number of skipped iterations": f"{record.skipped_iterations:3d}",
        "number of skipped records": None if record.skipped_records is None else f"{record.skipped_records:3d}",
        "memory (GB)": f"{record.peak_memory_bytes / 1e9:.2f}",
    }
    shown = "".join(f" {name}: {value} |" for name, value in fields.items() if value is not None)
    return f" [{now:%Y-%m-%d %H:%M:%S}] iteration {record.iteration:8d}/{train_iters:8d} |{shown}"


def timer_lines(timers: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the phase times in Megatron's format, with the slowest rank."""
    yield "(min, max) time across ranks (ms), slowest rank:"
    for name, over in timers.items():
        yield f"    {name} ".ljust(46, ".") + f": ({over['min']:.2f}, {over['max']:.2f}), {over['max_rank']}"


# Key of the validation loss of averaged weights.
EMA_LOSS = "validation_loss_ema"


def evaluation_line(
    iteration: int, validation_loss: float, mtp_losses: Sequence[float] = (), averaged_loss: float | None = None
) -> str:
    """Return the console line of an evaluation; the exponent of the perplexity is capped at 20, as in Megatron."""
    perplexity = math.exp(min(20.0, validation_loss))
    ahead = "".join(f" {name}: {scientific(loss)} |" for name, loss in mtp_rows(mtp_losses, "loss value").items())
    averaged = "" if averaged_loss is None else f" lm loss value of EMA weights: {scientific(averaged_loss)} |"
    return (
        f" validation loss at iteration {iteration} | lm loss value: {scientific(validation_loss)} | "
        f"lm loss PPL: {scientific(perplexity)} |{ahead}{averaged}"
    )


def fp8_loss_line(iteration: int, loss: float, unquantized: float, precision: str) -> str:
    """Return the console line of a comparison of the losses with fp8 and in precision."""
    return (
        f" fp8 loss at iteration {iteration} | lm loss value: {scientific(loss)} | "
        f"in {precision}: {scientific(unquantized)} | difference: {scientific(loss - unquantized)} |"
    )


def scientific(value: float) -> str:
    """Format with six digits as Megatron does; NaN and infinity as words."""
    return f"{value:.6E}" if math.isfinite(value) else str(value).replace("nan", "NaN")
