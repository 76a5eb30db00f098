"""Monitor of a training run: throughput, phase times, memory, slow ranks, tensor statistics, traces and profiles.

Steps are timed without waiting for a device.  When a line is due, the ranks' numbers are all-reduced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron3d.analysis.cost_model.traffic import step_flops
from megatron3d.analysis.memory_model.step_spec import StepSpec
from megatron3d.analysis.memory_model.table import memory_table
from megatron3d.data.ramp import Batch
from megatron3d.hardware.peaks import corrected_peak, describe_peak
from megatron3d.metrics import StepRecord, peak_memory_bytes
from megatron3d.metrics.straggler import PeerGroups, StragglerDetector
from megatron3d.metrics.throughput import StepWork, Throughput
from megatron3d.metrics.timers import Spread, pipeline_bubble
from megatron3d.model.flops import flops_per_token
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.actions import Action
from megatron3d.pipeline.engine import Observer
from megatron3d.train.monitor.oom_report import max_by_pipeline_rank
from megatron3d.train.monitor.pipeline_trace import TraceRecorder, write_trace
from megatron3d.train.monitor.prediction_check import PredictionCheck
from megatron3d.train.monitor.profiling import Profiler
from megatron3d.train.monitor.rank_stats import TIMERS, RankStatistics
from megatron3d.train.monitor.run_metadata import run_metadata
from megatron3d.train.monitor.tensor_stats import StepTensorStatistics
from megatron3d.train.run import Run
from megatron3d.train.step import StepResult


class Monitor:
    """Observes a run from its next step on; every rank creates one at the same point, since it communicates."""

    def __init__(self, run: Run, job: StepSpec) -> None:
        self._run, self._job = run, job
        self._first_iteration = run.state.iteration + 1
        self._skipped = torch.zeros((), device=run.runtime.device)
        self._stream = run.state.stream if run.config.data.on_bad_record == "skip" else None
        num_lanes = self._stream.rows.num_lanes if self._stream else 0
        self._ranks = RankStatistics(run.comm, run.runtime.device, num_lanes)
        self._shown_faults: set[str] = set()
        flops = [step_flops(job.on_pipeline_rank(coord)) for coord in range(job.pipeline.num_ranks)]
        self._peak, self._stragglers = run.peak, straggler_detector(run, flops)
        self._work = step_work(run, flops)
        self._prediction = PredictionCheck(run)
        self._profiler = Profiler(run.config, run.runtime.rank, run.runtime.device)
        self._trace: TraceRecorder | None = None
        self._tensor_stats: StepTensorStatistics | None = None
        if run.metrics:
            metadata = run_metadata(run, job, self._work, self._ranks.devices, self._prediction.forecast)
            run.metrics.start(run.state.iteration, metadata)
        self.restart()

    def restart(self) -> None:
        """Restart the measurement after work that is not training."""
        self._run.timers.discard_steps()
        self._begin_s = time.perf_counter()
        self._num_steps, self._num_tokens = 0, 0

    @contextlib.contextmanager
    def between_steps(self, name: str) -> Iterator[None]:
        """Time the body as `name` and keep it out of the step times."""
        with self._run.timers.between_steps(name):
            yield
        self.restart()

    def begin_step(self) -> Observer:
        """Return the context manager factory that the next step enters around its phases and pipeline actions."""
        run, logging = self._run, self._run.config.logging
        iteration, interval = run.state.iteration + 1, logging.log_moments_interval
        has_stats = interval is not None and iteration % interval == 0
        self._tensor_stats = StepTensorStatistics(run.state, run.runtime.device) if has_stats else None
        self._trace = TraceRecorder(run.comm, run.runtime.device) if iteration in logging.trace_iterations else None
        observer = nested(run.timers.observe, self._trace.observe) if self._trace else run.timers.observe
        observer = self._tensor_stats.observe(observer) if self._tensor_stats else observer
        return self._profiler.begin_step(iteration, observer)

    def end_step(self, result: StepResult, lr: float, batch: Batch) -> None:
        """Count a step, and write the reports that are due after it."""
        run, iteration = self._run, self._run.state.iteration
        self._num_steps += 1
        self._num_tokens += batch.num_tokens
        self._skipped += result.skipped
        run.timers.end_step()
        self._profiler.end_step(iteration)
        if iteration % run.config.logging.log_interval == 0:
            self._report_step(result, lr, batch)
        if iteration == self._first_iteration:
            self._report_memory()
        if self._tensor_stats:
            statistics = self._tensor_stats.finish(result, run.config.optimizer.clip_grad)
            if run.metrics:
                run.metrics.tensor_statistics(iteration, statistics)
        if self._trace:
            self._write_trace(self._trace, batch)
        if iteration == self._first_iteration or self._tensor_stats or self._trace:
            self.restart()

    def _report_step(self, result: StepResult, lr: float, batch: Batch) -> None:
        """Report the mean of the steps since the last report."""
        run, state = self._run, self._run.state
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        step_s = (time.perf_counter() - self._begin_s) / self._num_steps
        skipped_records = self._stream.num_bad(state.consumed_samples) if self._stream else ()
        times_ms = run.timers.take(self._num_steps)
        ranks = self._ranks.reduce(times_ms, skipped_records)
        own_ms = self._ranks.own_ms(times_ms) if self._stragglers else []
        self._print_faults()
        if run.metrics:
            # Below 1 while the batch size or the sequence length ramps up.
            batch_fraction = self._num_tokens / (self._num_steps * run.batches.last.num_tokens)
            record = StepRecord(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                consumed_tokens=run.batches.num_tokens(state.consumed_samples),
                lm_loss=loss,
                grad_norm=grad_norm,
                learning_rate=lr,
                elapsed_ms=1000 * step_s,
                **asdict(self._throughput(step_s / batch_fraction)),
                pipeline_bubble=pipeline_bubble(ranks) if run.spec.parallel_state.pipeline_parallel_size > 1 else None,
                peak_memory_bytes=int(ranks["peak"].max),
                skipped_iterations=int(self._skipped),
                loss_scale=state.loss_scale.value,
                global_batch_size=batch.num_samples,
                seq_length=batch.seq_length,
                skipped_records=self._ranks.skipped_records(ranks),
                mtp_losses=tuple(result.mtp_losses.tolist()),
            )
            tables = self._ranks.tables(ranks)
            shown = {name: {str(key): rounded(one) for key, one in table.items()} for name, table in tables.items()}
            consumed = run.consumed_tokens(record.consumed_samples)
            run.metrics.step(record, {**consumed, **self._routers(result), **shown})
            self._report_stragglers(own_ms)
            if batch_fraction == 1:
                self._prediction.add(step_s, self._num_steps, tables[TIMERS])
        self._skipped.zero_()
        self.restart()

    def _routers(self, result: StepResult) -> dict[str, Any]:
        """Return what the routers of each layer counted in this step, by the layer's path."""
        model = self._run.state.model
        experts = model.arch.experts
        if result.routers is None or experts is None:
            return {}
        rows = result.routers.rows(experts.topk, experts.has_expert_bias)
        names = (name.removesuffix(".mlp.router") for name in model.routers.names)
        return {"experts": dict(zip(names, rows, strict=True))}

    def _throughput(self, step_s: float) -> Throughput:
        """Return the throughput of a step; an estimated peak that it exceeds is corrected first, and reported."""
        throughput = self._work.throughput(step_s)
        if self._peak is None or (throughput.hfu or 0.0) <= 1:
            return throughput
        reached, precision = self._work.rank_flops / step_s, self._run.config.train.precision
        corrected = corrected_peak(self._peak, reached, precision)
        if corrected == self._peak:
            return throughput
        print(f"> the estimated peak was exceeded; {describe_peak(corrected, self._run.runtime.device, precision)}")
        self._peak, self._work = corrected, replace(self._work, peak_flops=corrected.flops)
        return self._work.throughput(step_s)

    def _report_stragglers(self, own_ms: Sequence[float]) -> None:
        run = self._run
        assert run.metrics is not None, "rank 0 reports slow ranks"
        for slow in self._stragglers.check(own_ms) if self._stragglers else ():
            run.metrics.straggler(run.state.iteration, slow.rank, self._ranks.devices[slow.rank], slow.ratio)

    def _print_faults(self) -> None:
        """Print the first bad records that were skipped, on one of the ranks that read the same ones."""
        mesh = self._run.comm.mesh
        if any(mesh.coord(axis) for axis in mesh.names if axis not in DATA):
            return
        for fault in self._run.faults():
            if fault not in self._shown_faults:
                print(f"> rank {mesh.rank} skips a record: {fault}", flush=True)
                self._shown_faults.add(fault)

    def _report_memory(self) -> None:
        """Report the peak memory of the first step next to its estimate."""
        device, metrics = self._run.runtime.device, self._run.metrics
        grown = peak_memory_bytes(device) - self._run.baseline_bytes
        peaks = max_by_pipeline_rank(self._run.spec.parallel_state, self._run.comm, grown)
        if metrics:
            how = "peak of allocated tensors" if device.type != "cpu" else "growth of the whole process"
            lines = f"memory, estimated and measured in the first step ({how}):", *memory_table(self._job, peaks)
            print("\n".join(f"> {line}" for line in lines))
            metrics.first_step(self._first_iteration, peaks)

    def _write_trace(self, trace: TraceRecorder, batch: Batch) -> None:
        run = self._run
        assert run.config.checkpoint.save is not None, "a traced run has a folder"
        num_microbatches = self._job.num_microbatches * batch.num_samples // run.batches.last.num_samples
        schedule = run.state.executor.schedule(num_microbatches)
        write_trace(trace, run.comm, schedule, Path(run.config.checkpoint.save), run.state.iteration)


def nested(outer: Observer, inner: Observer) -> Observer:
    """Return an observer that enters both."""

    @contextlib.contextmanager
    def observe(what: Action | str) -> Iterator[None]:
        with outer(what), inner(what):
            yield

    return observe


def rounded(spread: Spread) -> dict[str, float]:
    """Return a spread as it is logged: three decimals of milliseconds or bytes."""
    return {name: round(value, 3) for name, value in spread._asdict().items()}


def step_work(run: Run, flops: Sequence[int]) -> StepWork:
    """Return the work of a step, given the FLOPs of one rank of each pipeline stage."""
    num_ranks, peak = run.runtime.world_size, run.peak.flops if run.peak else None
    per_token = flops_per_token(run.state.model.arch)
    return StepWork(run.batches.last.num_tokens, num_ranks, per_token, sum(flops) / len(flops), peak)


def straggler_detector(run: Run, flops: Sequence[int]) -> StragglerDetector | None:
    """Return the detector of slow ranks, given the FLOPs of one rank of each pipeline rank; None if it is off."""
    logging = run.config.logging
    if logging.straggler_factor is None or logging.timing_log_level == 0:
        return None
    return StragglerDetector(
        PeerGroups.of(run.spec.parallel_state, flops), logging.straggler_factor, logging.straggler_steps
    )
