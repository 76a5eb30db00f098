"""What is seen of a run while it trains: throughput, times of phases, memory and slow ranks, every so many steps.

Steps are timed without waiting for a device.  When a line is due, each rank adds its numbers to one gather.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megatron3d.analysis.cost_model.traffic import step_flops
from megatron3d.analysis.memory_model.step_spec import Job
from megatron3d.analysis.memory_model.table import memory_table
from megatron3d.data.ramp import Batch
from megatron3d.metrics import StepRecord, peak_memory_bytes
from megatron3d.metrics.straggler import Peers, Stragglers
from megatron3d.metrics.throughput import Work
from megatron3d.metrics.timers import Spread, own_ms, pipeline_bubble
from megatron3d.model.flops import flops_per_token
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.actions import Action
from megatron3d.train.monitor.oom_report import measured
from megatron3d.train.monitor.pipeline_trace import Recording, report
from megatron3d.train.monitor.prediction_check import Expected
from megatron3d.train.monitor.profiling import Profiling
from megatron3d.train.monitor.rank_stats import TIMERS, Everyone
from megatron3d.train.monitor.run_metadata import describe_start
from megatron3d.train.monitor.tensor_stats import Moments
from megatron3d.train.run import Run
from megatron3d.train.step import StepResult, Watch


class Watching:
    """Watches a run from its next step on; every rank makes one at the same place."""

    def __init__(self, run: Run, job: Job) -> None:
        self._run, self._job, self._first = run, job, run.state.iteration + 1
        self._skipped = torch.zeros((), device=run.runtime.device)
        self._stream = run.state.stream if run.config.data.on_bad_record == "skip" else None
        self._everyone = Everyone(run.comm, run.runtime.device, self._stream.rows.num_lanes if self._stream else 0)
        self._told: set[str] = set()
        flops = [step_flops(job.on_pipeline_rank(coord)) for coord in range(job.pipeline.num_ranks)]
        self._work, self._stragglers = work_of(run, flops), stragglers_of(run, flops)
        self._expected = Expected(run)
        self._profiling = Profiling(run.config, run.runtime.rank, run.runtime.device)
        self._recording: Recording | None = None
        self._moments: Moments | None = None
        if run.metrics:
            facts = describe_start(run, job, self._work, self._everyone.names, self._expected.forecast)
            run.metrics.start(run.state.iteration, facts)
        self.restart()

    def restart(self) -> None:
        """Begin to measure anew, after something that is not training."""
        self._run.timers.forget()
        self._begin_s, self._num_steps, self._num_tokens = time.perf_counter(), 0, 0

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Something between steps, which is timed by itself."""
        with self._run.timers.aside(name):
            yield
        self.restart()

    def begin_step(self) -> Watch:
        """What the next step tells of itself."""
        run, iteration, logging = self._run, self._run.state.iteration + 1, self._run.config.logging
        is_traced, interval = iteration in logging.trace_iterations, logging.log_moments_interval
        self._moments = Moments(run.state, run.runtime.device) if interval and iteration % interval == 0 else None
        self._recording = Recording(run.comm, run.runtime.device) if is_traced else None
        watch = both(run.timers.watch, self._recording.watch) if self._recording else run.timers.watch
        return self._profiling.begin_step(iteration, self._moments.watch(watch) if self._moments else watch)

    def end_step(self, result: StepResult, lr: float, batch: Batch) -> None:
        """Count a step, and report it if that is due."""
        run, iteration = self._run, self._run.state.iteration
        self._num_steps += 1
        self._num_tokens += batch.num_tokens
        self._skipped += result.skipped
        run.timers.end_step()
        self._profiling.end_step(iteration)
        if iteration % run.config.logging.log_interval == 0:
            self._report(result, lr, batch)
        if iteration == self._first:
            self._show_memory()
        if self._moments:
            moments = self._moments.finish(result, run.config.optimizer.clip_grad)
            if run.metrics:
                run.metrics.moments(iteration, moments)
        if self._recording:
            assert run.config.checkpoint.save is not None, "a traced run has a folder"
            num_microbatches = self._job.num_microbatches * batch.num_samples // run.batches.last.num_samples
            schedule = run.state.executor.schedule(num_microbatches)
            report(self._recording, run.comm, schedule, Path(run.config.checkpoint.save), iteration)
        if iteration == self._first or self._moments or self._recording:
            self.restart()

    def _report(self, result: StepResult, lr: float, batch: Batch) -> None:
        run, state = self._run, self._run.state
        part = self._num_tokens / (self._num_steps * run.batches.last.num_tokens)  # of whole batches, while they grow
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        elapsed_s = (time.perf_counter() - self._begin_s) / self._num_steps
        left_out = self._stream.num_bad(state.consumed_samples) if self._stream else ()
        ranks = self._everyone.gather(run.timers.take(self._num_steps), left_out)
        self._tell_faults()
        if run.metrics:
            record = StepRecord(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                consumed_tokens=run.batches.num_tokens(state.consumed_samples),
                lm_loss=loss,
                grad_norm=grad_norm,
                learning_rate=lr,
                elapsed_ms=1000 * elapsed_s,
                **asdict(self._work.speed(elapsed_s / part)),
                pipeline_bubble=pipeline_bubble(ranks) if run.comm.mesh.sizes["pipeline"] > 1 else None,
                peak_memory_bytes=int(max(each["peak"] for each in ranks)),
                skipped_iterations=int(self._skipped),
                loss_scale=state.loss_scale.value,
                global_batch_size=batch.num_samples,
                seq_length=batch.seq_length,
                skipped_records=self._everyone.left_out(ranks),
            )
            tables = self._everyone.tables(ranks)
            shown = {name: {key: rounded(one) for key, one in table.items()} for name, table in tables.items()}
            run.metrics.step(record, {**run.consumed_tokens(record.consumed_samples), **shown})
            self._name_slow(ranks)
            if part == 1:
                self._expected.see(elapsed_s, self._num_steps, tables[TIMERS])
        self._skipped.zero_()
        self.restart()

    def _name_slow(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Name ranks that have been slow for long enough."""
        run = self._run
        assert run.metrics is not None, "rank 0 names slow ranks"
        for slow in self._stragglers.see([own_ms(times) for times in ranks]) if self._stragglers else ():
            run.metrics.straggler(run.state.iteration, slow.rank, self._everyone.names[slow.rank], slow.ratio)

    def _tell_faults(self) -> None:
        """Say which the first records are that were left out, on one of the ranks that read the same ones."""
        mesh = self._run.comm.mesh
        if any(mesh.coord(axis) for axis in mesh.names if axis not in DATA):
            return
        for fault in self._run.faults():
            if fault not in self._told:
                print(f"> rank {mesh.rank} leaves out a record: {fault}", flush=True)
                self._told.add(fault)

    def _show_memory(self) -> None:
        """Say what the first step has needed beside what was predicted."""
        device, metrics = self._run.runtime.device, self._run.metrics
        needed = measured(self._run.comm, peak_memory_bytes(device) - self._run.baseline_bytes)
        if metrics:
            how = "tensors at most" if device.type != "cpu" else "what the whole process has grown by"
            lines = f"memory by arithmetic, and in the first step ({how}):", *memory_table(self._job, needed)
            print("\n".join(f"> {line}" for line in lines))
            metrics.first_step(self._first, needed)


def both(outer: Watch, inner: Watch) -> Watch:
    """Tells two what a step does."""

    @contextlib.contextmanager
    def watch(what: Action | str) -> Iterator[None]:
        with outer(what), inner(what):
            yield

    return watch


def rounded(over: Spread) -> dict[str, float]:
    """To microseconds, or bytes."""
    return {name: round(value, 3) for name, value in over._asdict().items()}


def work_of(run: Run, flops: Sequence[int]) -> Work:
    """What a step is, where the ranks of each part of the pipeline multiply so much."""
    num_ranks, peak = run.runtime.world_size, run.peak.flops if run.peak else None
    per_token = flops_per_token(run.state.model.arch)
    return Work(run.batches.last.num_tokens, num_ranks, per_token, sum(flops) / len(flops), peak)


def stragglers_of(run: Run, flops: Sequence[int]) -> Stragglers | None:
    """Who looks for slow ranks; None where nobody does."""
    logging = run.config.logging
    if logging.straggler_factor is None or logging.timing_log_level == 0:
        return None
    return Stragglers(Peers.of(run.comm.mesh, flops), logging.straggler_factor, logging.straggler_steps)
