"""A month of failures on 1,024 and 16,384 GPUs, simulated: what checkpoints on disk, in memory and replanning lose.

    python benchmarks/month.py --output benchmarks/results/month.json --plot benchmarks/results/month.png

Failures are a Poisson process with the published mean time between them, 7.9 h on 1,024 GPUs and 1.8 h on 16,384
(Kokolis et al. 2024, arXiv:2410.21680); each takes a node of eight GPUs, which returns after its repair.  Three ways to
go on:

    disk       checkpoints on disk, every sqrt(2 save MTBF) (Young 1974); a restart on a node that is free at once
    memory     each step in the memory of a peer, every few steps; the same restart
    replan     in-memory checkpoints; the ranks that are left go on in the layout that the planner chooses for them
               (`forecast/search/nearby.py`), spare nodes first; nodes that return join when that is faster

Effective time is what the steps that stay would have taken on all GPUs, over the month.  The times of a recovery are
assumptions that can be given; the slow-downs are the planner's.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from common.report import ROOT, write
from matplotlib.figure import Figure

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.search.nearby import nearby_layout, with_changes
from megatron3d.forecast.search.problem import PlanningProblem

HOUR_S, MONTH_S, NODE = 3600.0, 30 * 24 * 3600.0, 8
DISK, MEMORY, REPLAN = POLICIES = ("disk", "memory", "replan")
# Parts of the month that make no progress.
LOST, DETECT, RECOVER, SLOWER = CAUSES = ("lost steps", "detection", "recovery", "fewer GPUs")


@dataclass(frozen=True)
class Cluster:
    """GPUs, hours between failures, and the run on them.

    Attributes:
        spares: nodes next to the run's, which wait.
    """

    num_gpus: int
    mtbf_h: float
    spares: int
    config: str
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


PIPELINE = {"pipeline_model_parallel_size": 16, "zero_stage": 1, "tensor_model_parallel_size": 8}
CLUSTERS = (
    Cluster(1024, 7.9, 2, "llama-3.1-70b", {"train": {"global_batch_size": 1024}}),
    Cluster(16384, 1.8, 16, "llama-3.1-405b", {"parallel": PIPELINE, "train": {"global_batch_size": 2048}}),
)
SHEET, VOCABULARY = "eos", 128256


@dataclass(frozen=True)
class Times:
    """Assumed times of a failure and of what follows.

    Attributes:
        hang_share: failures that hang a rank instead of ending it, which take `hang_s` to be noticed, others `dead_s`.
        restart_s: from the end of all ranks to the next step, by the scheduler; replan_s: in process.
        repair_h: until a node is back; save_s: until a checkpoint is on disk; memory_steps: between copies in memory.
    """

    hang_share: float = 0.2
    hang_s: float = 60.0
    dead_s: float = 5.0
    restart_s: float = 300.0
    replan_s: float = 30.0
    repair_h: float = 12.0
    save_s: float = 60.0
    memory_steps: int = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate each policy on each cluster, and print the effective time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Times()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--months", type=int, default=200, help="simulated months per row")
    parser.add_argument("--quick", action="store_true", help="one month of the small cluster")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of what is lost, and by what")
    args = parser.parse_args(argv)
    times = Times(**{name: getattr(args, name) for name in vars(Times())})
    clusters, months = (CLUSTERS[:1], 1) if args.quick else (CLUSTERS, args.months)
    rows = [row for cluster in clusters for row in simulate(cluster, times, months)]
    for row in rows:
        lost = ", ".join(f"{cause} {100 * row[cause]:.2f} %" for cause in CAUSES)
        spares = f", {row['spares']} spare nodes" if row["policy"] == REPLAN else ""
        name = f"{row['num_gpus']} GPUs, {row['policy']}{spares}"
        print(f"{name}: effective time {100 * row['effective']:.2f} % (worst {100 * row['worst']:.2f} %); {lost}")
    if args.output:
        write(args.output, rows, times=vars(times), months=months)
    if args.plot:
        plot(rows).savefig(args.plot, dpi=100)
    return 0


def simulate(cluster: Cluster, times: Times, months: int) -> list[dict[str, Any]]:
    """Return a row per policy; replanning with spare nodes and without."""
    found_layouts = layouts(cluster)
    rows = []
    for policy, spares in ((DISK, 0), (MEMORY, 0), (REPLAN, 0), (REPLAN, cluster.spares)):
        runs = [Month(cluster, times, found_layouts, policy=policy, spares=spares, seed=seed) for seed in range(months)]
        found = [month.run() for month in runs]
        causes = {cause: statistics.mean(each[cause] for each in found) / MONTH_S for cause in CAUSES}
        effective = [1 - sum(each.values()) / MONTH_S for each in found]
        values: dict[str, Any] = {
            "num_gpus": cluster.num_gpus,
            "policy": policy,
            "spares": spares,
            "step_s": found_layouts[0],
        }
        rows.append({**values, "effective": statistics.mean(effective), "worst": min(effective), **causes})
    return rows


def layouts(cluster: Cluster) -> tuple[float, Callable[[int], float]]:
    """Return the predicted step on all GPUs, and the slow-down by the number of nodes that are left."""
    values = yaml.safe_load((ROOT / "configs" / "models" / f"{cluster.config}.yaml").read_text(encoding="utf-8"))
    config = Config.model_validate({section: values[section] for section in ("model", "parallel", "train")})
    spec = RunSpec(with_changes(config, cluster.changes), cluster.num_gpus, VOCABULARY)
    start = RunSpec(nearby_layout(spec, cluster.num_gpus, SHEET).config, cluster.num_gpus, VOCABULARY)

    @cache
    def slowdown(num_nodes: int) -> float:
        if num_nodes * NODE >= cluster.num_gpus:
            return 1.0
        return max(1.0, nearby_layout(start, num_nodes * NODE, SHEET).slowdown)

    problem = PlanningProblem(start.config, VOCABULARY, SHEET, cluster.num_gpus)
    return problem.step(problem.spec(start.config)).step_s, slowdown


class Month:
    """One month of a policy on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        times: Times,
        layouts: tuple[float, Callable[[int], float]],
        *,
        policy: str,
        spares: int,
        seed: int,
    ) -> None:
        self.cluster, self.times, self.policy = cluster, times, policy
        self.step_s, self.slowdown = layouts
        self.nodes = cluster.num_gpus // NODE + spares
        self.random = random.Random(f"{seed} {cluster.num_gpus}")
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self.away: list[float] = []  # when each node that failed is back
        mtbf_s = cluster.mtbf_h * HOUR_S
        self.between_s = math.sqrt(2 * times.save_s * mtbf_s) if policy == DISK else times.memory_steps * self.step_s

    def run(self) -> dict[str, float]:
        """Return the seconds that each cause takes of the month."""
        now = 0.0
        while now < MONTH_S:
            fails = min(now + self.random.expovariate(1 / (self.cluster.mtbf_h * HOUR_S)), MONTH_S)
            now = self._work(now, fails)
            if now < MONTH_S:
                now = self._fail(now)
        return self.spent

    def _work(self, now: float, until: float) -> float:
        """Train until a time; nodes that return meanwhile join where that is faster."""
        while self.away and self.away[0] < until:
            back = heapq.heappop(self.away)
            before, after = (self.slowdown(self.nodes - len(self.away) - gone) for gone in (1, 0))
            back = max(now, back)
            self._slow(back - now, before)
            now = back
            if after < before and self.policy == REPLAN:
                now += self._spend(RECOVER, self.times.replan_s, until - now)
        self._slow(until - now, self.slowdown(self.nodes - len(self.away)))
        return until

    def _slow(self, seconds: float, factor: float) -> None:
        if self.policy == REPLAN:
            self.spent[SLOWER] += max(seconds, 0.0) * (1 - 1 / factor)

    def _spend(self, cause: str, seconds: float, most: float) -> float:
        seconds = max(0.0, min(seconds, most))
        self.spent[cause] += seconds
        return seconds

    def _fail(self, now: float) -> float:
        """Lose a node: the steps since the last checkpoint, and the time until the next step; return when that is."""
        times = self.times
        if self.policy == REPLAN:
            heapq.heappush(self.away, now + times.repair_h * HOUR_S)
        self.spent[LOST] += self.random.uniform(0, self.between_s) + self.step_s / 2
        detect_s = times.hang_s if self.random.random() < times.hang_share else times.dead_s
        recover_s = times.replan_s if self.policy == REPLAN else times.restart_s
        now += self._spend(DETECT, detect_s, MONTH_S - now)
        return now + self._spend(RECOVER, recover_s, MONTH_S - now)


def plot(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a bar for each row: the parts of the month that are lost."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = [
        f"{row['num_gpus']:,} GPUs\n{row['policy']}" + f"\n{row['spares']} spares" * (row["spares"] > 0) for row in rows
    ]
    below = [0.0] * len(rows)
    for cause in CAUSES:
        heights = [100 * row[cause] for row in rows]
        axes.bar(names, heights, bottom=below, label=cause)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylabel("% of the month lost")
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
