"""Monitor of a training run: throughput, phase times, memory, slow ranks, tensor statistics, traces and profiles.

Steps are timed without waiting for a device.  When a line is due, the ranks' numbers are all-reduced: rank 0 handles a
few hundred of them however many ranks there are, and a handful of each rank to find slow ones.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.data.ramp_plan import Batch
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.forecast.memory.table import memory_table, process_growth
from megatron3d.forecast.time import breakdown
from megatron3d.forecast.time.breakdown import TimeBreakdown
from megatron3d.forecast.time.forecast import STEPS, Forecast, forecast
from megatron3d.forecast.time.traffic import step_flops
from megatron3d.hardware.devices import corrected_peak, describe_peak, device_name
from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.metrics import StepRecord, process_memory, timers
from megatron3d.metrics.step_record import StepWork, Throughput, memory_bytes
from megatron3d.metrics.timers import PHASES, Spread, own_ms, pipeline_bubble
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.parallel.mesh import DATA, PIPELINE
from megatron3d.pipeline.engine import Observer
from megatron3d.train.monitor.fp8_stats import StepFp8Statistics
from megatron3d.train.monitor.profiling import Profiler, TraceRecorder, nested, write_trace
from megatron3d.train.monitor.reports import max_by_pipeline_rank, run_metadata
from megatron3d.train.monitor.stragglers import SlowRanks, gain_without, straggler_detector
from megatron3d.train.monitor.tensor_stats import StepTensorStatistics
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepResult

Table = Mapping[str, Spread]
TIMERS, MEMORY = "timers", "memory"


class RankStatistics:
    """Reduces each rank's numbers; every rank has the same list of labels.

    Args:
        num_lanes: lanes of a streamed dataset whose bad records are skipped; 0 without one.

    Attributes:
        devices: host and device of each rank, on rank 0; empty elsewhere.
    """

    def __init__(self, comm: ProcessComm, device: torch.device, num_lanes: int = 0) -> None:
        self._comm, self._mesh, self._device = comm, comm.mesh, device
        self._lanes = tuple(f"skipped records of lane {lane}" for lane in range(num_lanes))
        self._timers = (*PHASES, *map(ExposedComm, comm.axis_sets))
        self._memory = tuple(memory_bytes(device))
        self.devices: Sequence[str] = comm.gather_object(f"host {socket.gethostname()}, {device_name(device)}") or ()

    def reduce(self, times_ms: Mapping[str, float], skipped_records: Sequence[int] = ()) -> Table:
        """Return the spread over ranks of every label's number, the same on every rank.

        Args:
            times_ms: milliseconds of this rank by phase.
            skipped_records: records that this rank has skipped, by lane.
        """
        labels = *self._timers, *self._memory, *self._lanes
        mine = {**times_ms, **memory_bytes(self._device), **dict(zip(self._lanes, skipped_records, strict=True))}
        assert mine.keys() <= set(labels), f"{mine.keys() - set(labels)} are no labels of the other ranks"
        values = torch.tensor([mine.get(label, 0.0) for label in labels], dtype=torch.float64, device=self._device)
        highest, lowest = self._all_reduce(torch.cat((values, -values)), "max").chunk(2)
        mean = self._all_reduce(values.clone(), "sum") / self._mesh.world_size
        mine_if_highest = torch.where(values == highest, -self._mesh.rank, -self._mesh.world_size)
        holder = -self._all_reduce(mine_if_highest.to(torch.float64), "max")
        rows = zip(labels, (-lowest).tolist(), highest.tolist(), holder.tolist(), mean.tolist(), strict=True)
        return {label: Spread(low, high, int(rank), average) for label, low, high, rank, average in rows}

    def own_ms(self, times_ms: Mapping[str, float]) -> list[float]:
        """Return the milliseconds of every rank's own work, in rank order, on every rank; one number per rank."""
        mine = torch.tensor([own_ms(times_ms)], dtype=torch.float64, device=self._device)
        everyone: list[float] = self._comm.all_gather(mine, self._mesh.names, dim=0).wait().tolist()
        return everyone

    def _all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return self._comm.all_reduce(x, self._mesh.names, op).wait()

    def skipped_records(self, ranks: Table) -> int | None:
        """Return the skipped records of all lanes, each as counted by the ranks that read it; None without lanes."""
        return sum(int(ranks[lane].max) for lane in self._lanes) if self._lanes else None

    def tables(self, ranks: Table) -> dict[str, Table]:
        """Return the spread over ranks of the milliseconds of each phase that took any, and of the bytes."""
        wanted = {TIMERS: self._timers, MEMORY: self._memory}
        return {
            name: {label: ranks[label] for label in labels if ranks[label].max > 0} for name, labels in wanted.items()
        }


class PredictionCheck:
    """Compares the predicted with the measured step time, once, after enough steps.

    Attributes:
        forecast: the prediction, or the reason for having none.
    """

    def __init__(self, run: Run) -> None:
        on_cpu = run.runtime.device.type == "cpu"
        self.forecast = forecast(run.spec, on_cpu)
        self._num_steps, self._sum_s = 0, 0.0
        self._parts = TimeBreakdown()

    def add(self, step_s: float, num_steps: int, phases_ms: Mapping[str, Spread]) -> None:
        """Add `num_steps` measured steps: mean seconds of one, and milliseconds of its phases over all ranks."""
        if self._num_steps >= STEPS or not isinstance(self.forecast, Forecast):
            return
        self._sum_s += step_s * num_steps
        self._num_steps += num_steps
        parts = parts_of({name: 1e-3 * spread.mean for name, spread in phases_ms.items()})
        self._parts = self._parts.plus(parts.scaled(num_steps))
        if self._num_steps >= STEPS:
            lines = self.forecast.compare(self._sum_s / self._num_steps, self._parts.scaled(1 / self._num_steps))
            print("\n".join(f"> {line}" for line in lines), flush=True)


def parts_of(phases: Mapping[str, float]) -> TimeBreakdown:
    """Convert seconds by timed phase to seconds by predicted part; empty if phases were not timed.

    Waiting for pipeline neighbours counts as bubble, which is all the time of the schedule outside computations.
    """
    if timers.SCHEDULE not in phases:
        return TimeBreakdown()
    exposed = {name: s for name, s in phases.items() if breakdown.is_exposed(name)}
    waits = {name: s for name, s in exposed.items() if breakdown.exposed_axes(name) != (PIPELINE,)}
    computes = sum(phases.get(name, 0.0) for name in timers.COMPUTES)
    own = computes + phases.get(timers.GRADS, 0.0) - sum(waits.values())
    bubble, update = phases[timers.SCHEDULE] - computes, phases.get(timers.UPDATE, 0.0)
    rest = {breakdown.BUBBLE: max(bubble, 0.0), breakdown.UPDATE: update}
    loading = phases.get(timers.BATCH, 0.0)
    return TimeBreakdown({breakdown.COMPUTATION: max(own, 0.0), **waits, **rest, breakdown.LOADING: loading})


class StepStatistics(Protocol):
    """Statistics of one step; every rank creates them for the same steps, since `finish` communicates.

    Attributes:
        KEY: their key in metrics.jsonl.
    """

    KEY: str

    def observe(self, inner: Observer) -> Observer:
        """Return the observer of the step that `inner` is a part of."""
        ...

    def finish(self, result: StepResult) -> Mapping[str, Any]:
        """Return the statistics, the same on every rank."""
        ...


def due_statistics(run: Run, iteration: int) -> list[StepStatistics]:
    """Return the statistics that the configuration asks for of an iteration."""
    logging, fp8 = run.config.logging, run.spec.fp8
    kinds: Mapping[Callable[[TrainState, torch.device], StepStatistics], int | None] = {
        StepTensorStatistics: logging.log_moments_interval,
        StepFp8Statistics: None if fp8 is None else logging.fp8_stats_interval,
    }
    due = [kind for kind, interval in kinds.items() if interval is not None and iteration % interval == 0]
    return [kind(run.state, run.runtime.device) for kind in due]


class Monitor:
    """Observes a run from its next step on; every rank creates one at the same point, since it communicates.

    Attributes:
        slow: ranks that were found slow after the last step, the same on all ranks.
    """

    def __init__(self, run: Run, job: StepSpec) -> None:
        self._run, self._job = run, job
        self._first_iteration = run.state.iteration + 1
        self._skipped = torch.zeros((), device=run.runtime.device)
        self._stream = run.state.stream if run.config.data.on_bad_record == "skip" else None
        num_lanes = self._stream.num_lanes if self._stream else 0
        self._ranks = RankStatistics(run.comm, run.runtime.device, num_lanes)
        self._shown_faults: set[str] = set()
        self.slow = SlowRanks(())
        flops = [step_flops(job.on_pipeline_rank(coord)) for coord in range(job.pipeline.num_ranks)]
        self._peak, self._stragglers = run.peak, straggler_detector(run, flops)
        self._work = step_work(run, flops)
        self._prediction = PredictionCheck(run)
        self._profiler = Profiler(run.config, run.runtime.rank, run.runtime.device)
        self._trace: TraceRecorder | None = None
        self._statistics: list[StepStatistics] = []
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
        iteration = run.state.iteration + 1
        self._statistics = due_statistics(run, iteration)
        self._trace = TraceRecorder(run.comm, run.runtime.device) if iteration in logging.trace_iterations else None
        observer = nested(run.timers.observe, self._trace.observe) if self._trace else run.timers.observe
        for statistics in self._statistics:
            observer = statistics.observe(observer)
        return self._profiler.begin_step(iteration, observer)

    def end_step(self, result: StepResult, lr: float, batch: Batch, *, is_logged: bool) -> None:
        """Count a step, and write the reports that are due after it; of the step itself where it `is_logged`."""
        run, iteration = self._run, self._run.state.iteration
        self.slow = SlowRanks(())
        self._num_steps += 1
        self._num_tokens += batch.num_tokens
        self._skipped += result.skipped
        run.timers.end_step()
        self._profiler.end_step(iteration)
        if is_logged:
            self._report_step(result, lr, batch)
        if iteration == self._first_iteration:
            self._report_memory()
        for statistics in self._statistics:
            table = statistics.finish(result)
            if run.metrics:
                run.metrics.statistics(iteration, statistics.KEY, table)
        if self._trace:
            self._write_trace(self._trace, batch)
        if iteration == self._first_iteration or self._statistics or self._trace:
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
            full_step_s = step_s / batch_fraction
            record = StepRecord(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                consumed_tokens=run.batches.num_tokens(state.consumed_samples),
                lm_loss=loss,
                grad_norm=grad_norm,
                learning_rate=lr,
                elapsed_ms=1000 * step_s,
                remaining_s=full_step_s * (run.spec.train_iters - state.iteration),
                **asdict(self._throughput(full_step_s)),
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
            run.metrics.step(record, {**consumed, **self._routers(result), **_logits(state), **shown})
            if batch_fraction == 1:
                self._prediction.add(step_s, self._num_steps, tables[TIMERS])
        self._report_stragglers(own_ms, 1000 * step_s)
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

    def _report_stragglers(self, own_ms: Sequence[float], step_ms: float) -> None:
        """Report ranks that have been slow for long, and what the run would gain without them."""
        run, detector = self._run, self._stragglers
        if detector is None or not (found := detector.check(own_ms)):
            return
        self.slow = SlowRanks(tuple(each.rank for each in found))
        if run.metrics is None:
            return
        excess_ms = max(detector.peers.excess(each.rank, own_ms) for each in found)
        gain = gain_without(run, found, step_ms, excess_ms)
        self.slow = replace(self.slow, gains=gain.ratio < 1)
        for each in found:
            device = self._ranks.devices[each.rank]
            run.metrics.straggler(run.state.iteration, each.rank, device, each.ratio, gain.text)

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
        now, before = process_memory(device), self._run.baseline
        grown = now.peak - before.peak
        peaks = max_by_pipeline_rank(self._run.spec.parallel_state, self._run.comm, grown)
        if metrics:
            on_cpu = device.type == "cpu"
            how = "growth of the whole process" if on_cpu else "peak of allocated tensors"
            lines = [f"memory, estimated and measured in the first step ({how}):", *memory_table(self._job, peaks)]
            lines += [process_growth(self._job, grown, now.code - before.code)] if on_cpu else []
            print("\n".join(f"> {line}" for line in lines))
            metrics.first_step(self._first_iteration, peaks)

    def _write_trace(self, trace: TraceRecorder, batch: Batch) -> None:
        run = self._run
        assert run.config.checkpoint.save is not None, "a traced run has a folder"
        num_microbatches = self._job.num_microbatches * batch.num_samples // run.batches.last.num_samples
        schedule = run.state.executor.schedule(num_microbatches)
        write_trace(trace, run.comm, schedule, Path(run.config.checkpoint.save), run.state.iteration)


def _logits(state: TrainState) -> dict[str, float]:
    """Return the largest logit of attention of the last step by its key, where QK-clip watches it."""
    clip = state.optimizer.qk_clip
    return {} if clip is None or clip.largest is None else {"max_attention_logit": clip.largest.item()}


def rounded(spread: Spread) -> dict[str, float]:
    """Return a spread as it is logged: three decimals of milliseconds or bytes."""
    return {name: round(value, 3) for name, value in spread._asdict().items()}


def step_work(run: Run, flops: Sequence[int]) -> StepWork:
    """Return the work of a step, given the FLOPs of one rank of each pipeline stage."""
    num_ranks, peak = run.runtime.world_size, run.peak.flops if run.peak else None
    per_token = flops_per_token(run.state.model.arch)
    return StepWork(run.batches.last.num_tokens, num_ranks, per_token, sum(flops) / len(flops), peak)
