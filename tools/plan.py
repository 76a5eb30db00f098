"""Plans a run before it starts: the fastest layouts on a cluster, one layout explained, or two compared.

python tools/plan.py --config configs/gpt3-175b.yaml --cluster selene --world-size 1024 --output layout.yaml

Times and memory are arithmetic (docs/planner.md); clusters and accelerators are the files of megatron3d/hardware/.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import UserError
from megatron3d.parallel.modes import MODES
from megatron3d.runtime.arguments import MAX_RANKS, add_overwrite, real, require_free, whole
from megatron3d.runtime.files import write_figure
from megatron3d.runtime.program import parse_first, run_tool


def make_parser() -> ConfigParser:
    """Return the parser of the command line."""
    parser = ConfigParser("plan", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="model, batch and precision; its layout is replaced"
    )
    parser.add_argument("--cluster", metavar="NAME", help="a file of megatron3d/hardware/clusters, or a path")
    parser.add_argument("--world-size", type=whole(1, 10**5), metavar="N", help="ranks, one per GPU")
    parser.add_alias("--num-gpus", "--world-size")
    parser.add_argument("--vocab-size", type=whole(1, 10**8), help="where the configuration leaves it to the tokenizer")
    parser.add_argument(
        "--predict",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="rows of runs, one JSON object per line, or folders of runs; needs --output",
    )
    parser.add_argument("--tokens", type=real(1, 1e18), help="of the run; default: as many as configured")
    parser.add_argument("--top", type=whole(1, 1000), default=10, help="layouts that are printed")
    parser.add_argument("--modes", choices=list(MODES), nargs="+", default=list(MODES), help="only these tensor modes")
    told = "search until no layout that was not predicted can be faster"
    parser.add_argument("--thorough", action="store_true", help=told)
    parser.add_argument("--fix", nargs="+", default=[], metavar="KEY=VALUE", help="only layouts with these values")
    parser.add_argument("--practice", default="megatron3d", metavar="NAME", help="framework that trains")
    margin = "percent of memory that stays free (default: 8, or 0 where a practice's allocator is predicted)"
    parser.add_argument("--memory-margin", type=real(0, 90), metavar="PERCENT", help=margin)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the best layout as a configuration that trains")
    parser.add_argument(
        "--nearby", action="store_true", help="also nearby numbers of ranks and batches that are faster"
    )
    parser.add_argument("--explain", action="store_true", help="only the configuration's own layout, part by part")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="two configurations side by side")
    add_overwrite(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="stacked bars (.png, .svg, .pdf)")
    parser.add_argument(
        "--scale",
        type=whole(1, MAX_RANKS),
        nargs="+",
        metavar="N",
        help="also the best speed on N ranks; the batch grows with them",
    )
    parser.add_overrides("values that replace those in the file")

    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.config.read import Resolved, read_config
from megatron3d.config.report import write_resolved
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.search.options import ContextChoice, ExpertChoice, LayoutChoice, TensorChoice
from megatron3d.forecast.search.problem import PlanningProblem, PredictedLayout, read_fixed
from megatron3d.forecast.search.report import (
    compare_plans,
    explain_plan,
    nearby_table,
    result_table,
    scaling_table,
    search_nearby,
)
from megatron3d.forecast.search.rows import error_table, predict_line, predict_rows, row_of_run
from megatron3d.forecast.search.search import search
from megatron3d.forecast.time.hardware import load_cluster
from megatron3d.forecast.time.operation_table import operation_table
from megatron3d.forecast.time.practices import practice
from megatron3d.forecast.time.step import simulated_step

# Options next to those of a task that is not a search.
ONE_LAYOUT = ("cluster", "world_size", "vocab_size", "practice", "picture", "overwrite", "overrides")
USED: Mapping[str, Sequence[str]] = {
    "predict": ("output", "overwrite", "cluster"),
    "compare": ONE_LAYOUT,
    "explain": (*ONE_LAYOUT, "config", "tokens", "memory_margin"),
}


def _option(name: str) -> str:
    return "section.key=value" if name == "overrides" else f"--{name.replace('_', '-')}"


def layout_of(config: Config) -> LayoutChoice:
    """Return the layout that a configuration chooses."""
    parallel, train = config.parallel, config.train
    spec = RunSpec(config)
    forms = MODES[parallel.tensor_parallel_mode].forms
    form = next(name for name, build in forms.items() if build(spec.tensor_shape) == spec.tensor_mode)
    virtual = 1 if spec.has_schedule_file else spec.num_virtual_stages
    return LayoutChoice(
        TensorChoice(parallel.tensor_parallel_mode, form, spec.tensor_shape),
        parallel.pipeline_model_parallel_size,
        parallel.pipeline_schedule,
        virtual,
        parallel.zero_stage,
        train.micro_batch_size,
        train.recompute_granularity,
        ContextChoice(
            parallel.context_parallel_size, parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes or ()
        ),
        ExpertChoice(parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size),
    )


def problem_of(arguments: argparse.Namespace, config: Config, num_ranks: int | None = None) -> PlanningProblem:
    """Return the planning problem of the arguments.  Raises UserError if the vocabulary size is not known."""
    vocab_size = arguments.vocab_size or config.model.vocab_size
    if vocab_size is None:
        raise UserError("model.vocab_size: not known before the tokenizer is read; give --vocab-size")
    accelerator = load_cluster(arguments.cluster).accelerator
    spare = None if arguments.memory_margin is None else arguments.memory_margin / 100
    chosen = practice(arguments.practice, accelerator), read_fixed(arguments.fix), spare
    return PlanningProblem(config, vocab_size, arguments.cluster, num_ranks or arguments.world_size, *chosen)


def planned(arguments: argparse.Namespace, path: Path) -> tuple[PredictedLayout, PlanningProblem]:
    """Predict the layout of a file."""
    config = resolve(path, arguments.overrides, arguments.world_size, elsewhere=True).config
    problem = problem_of(arguments, config)
    return problem.predicted(layout_of(config), config), problem


def check_options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise UserError for options that the task does not use, and for files that cannot or must not be written."""
    task = next((task for task in USED if getattr(arguments, task)), None)
    if task:
        given = (name for name, value in vars(arguments).items() if value and value != parser.get_default(name))
        unused = [name for name in given if name not in (task, *USED[task])]
        UserError.collect([f"{_option(name)}: not with --{task}; leave it out" for name in unused])
    for name in ("output", "picture"):
        path = getattr(arguments, name)
        if path and not path.parent.is_dir():
            raise UserError(f"--{name} {path}: {path.parent} is no folder; make it, or use another")
    inputs = [path for path in (arguments.config, *(arguments.predict or ()), *(arguments.compare or ())) if path]
    for name in ("output", "picture"):
        require_free(f"--{name}", filter(None, [getattr(arguments, name)]), inputs, arguments.overwrite)


def run(arguments: argparse.Namespace) -> None:
    """Do what the arguments ask for."""
    if arguments.predict:
        predict(arguments)
        return
    for name in ("cluster", "world_size"):
        if getattr(arguments, name) is None:
            raise UserError(f"--{name.replace('_', '-')}: missing; only --predict does without it")
    if arguments.compare:
        plans = [planned(arguments, path)[0] for path in arguments.compare]
        print("\n".join(compare_plans(*plans)))
        draw(arguments, plans)
        return
    if arguments.config is None:
        raise UserError("--config: missing; give a YAML file, such as --config configs/gpt3-175b.yaml")
    if arguments.explain:
        plan, problem = planned(arguments, arguments.config)
        step = simulated_step(problem.spec(problem.config), problem.machine)
        told = explain_plan(plan, problem, num_tokens(arguments, problem.config))
        operations = ["operations of a microbatch on a rank, forward and backward:"]
        operations += operation_table(step.local, step.machine)
        print("\n".join([*told, *growing(problem.config), *operations]))
        draw(arguments, [plan])
        return
    resolved = read_config(arguments.config, arguments.overrides)
    problem = problem_of(arguments, resolved.config)
    found = search(problem, arguments.top, arguments.modes, arguments.thorough, _tell)
    best = found.plans[0]
    lines = [*result_table(found, problem), "", *explain_plan(best, problem, num_tokens(arguments, problem.config))]
    print("\n".join([*lines, *growing(problem.config)]))
    if found.is_stopped:
        raise KeyboardInterrupt("the table is of the layouts that were predicted so far; nothing was written")
    if arguments.nearby:
        print("\n".join(["", *nearby_table(problem, best, search_nearby(problem, best))]))
    if arguments.output:
        write(best, resolved, arguments.output, arguments.world_size)
    speeds = scaling(arguments, resolved.config)
    if speeds:
        print("\n".join(["", *scaling_table(speeds)]))
    draw(arguments, found.plans, speeds)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def predict(arguments: argparse.Namespace) -> None:
    """Predict the rows of a file, write them with their predictions, and print the errors by group."""
    if arguments.output is None:
        raise UserError("--output: missing; give the file for the rows with their predictions, such as out.jsonl")
    for path in arguments.predict:
        if not path.exists():
            raise UserError(f"--predict {path}: no such file; give one JSON object per line, or the folder of a run")
    rows: list[dict[str, object]] = []
    with arguments.output.open("w", encoding="utf-8") as file:
        for row in _predicted(arguments):
            rows.append(row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()  # a run that is killed has written what it has predicted
    print("\n".join([*error_table(rows), f"wrote {arguments.output}"]))


def _predicted(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the rows of all files and folders with their predictions."""
    for path in arguments.predict:
        if path.is_dir():
            yield predict_line(json.dumps(row_of_run(path, arguments.cluster)).encode(), 1)
        else:
            yield from predict_rows(path)


def num_tokens(arguments: argparse.Namespace, config: Config) -> float:
    """Return the tokens of the whole run, batch ramp-up included."""
    spec = RunSpec(config)
    return arguments.tokens or float(spec.batches.num_tokens(spec.batches.consumed_samples(spec.train_iters)))


def growing(config: Config) -> Iterator[str]:
    """Yield what is not predicted of a batch or length ramp-up."""
    batches = RunSpec(config).batches
    *ramp, last = batches.runs()
    if ramp:
        num_iterations = sum(run.num_iterations or 0 for run in ramp)
        yield (
            f"the first {num_iterations:,} iterations, {batches.num_tokens(last.first_sample):,} tokens, have smaller "
            "or shorter batches, which take longer per token: all of the above is of whole ones, the days too"
        )


def write(plan: PredictedLayout, resolved: Resolved, path: Path, num_ranks: int) -> None:
    """Write the configuration with the layout, which `pretrain_gpt.py --check --world-size N` accepts."""
    chosen = plan.layout.apply_to(resolved.config)
    origins = {
        key: "planned" if _value(chosen, key) != _value(resolved.config, key) else origin
        for key, origin in resolved.origins.items()
    }
    write_resolved(Resolved(chosen, origins), path)
    print(f"wrote {path}: pretrain_gpt.py --config {path} on {num_ranks} ranks")


def _value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def scaling(arguments: argparse.Namespace, config: Config) -> dict[int, float]:
    """Return tokens per second of the best layout for each number of ranks of --scale; the batch grows with them."""
    speeds = {}
    for num_ranks in arguments.scale or ():
        size = max(config.train.global_batch_size * num_ranks // arguments.world_size, 1)
        here = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})
        problem = problem_of(arguments, here, num_ranks)
        try:
            speeds[num_ranks] = problem.tokens_per_s(search(problem, 1, arguments.modes).plans[0])
        except UserError as error:
            raise UserError(f"--scale {num_ranks}, where train.global_batch_size is {size}: {error}") from error
    return speeds


def draw(
    arguments: argparse.Namespace, plans: Sequence[PredictedLayout], speeds: Mapping[int, float] | None = None
) -> None:
    """Draw stacked bars of the plans' times, and the speeds over the number of ranks."""
    if not arguments.picture:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 1 + bool(speeds), figsize=(7 + 6 * bool(speeds), 6), squeeze=False)
    bars, left = panels[0][0], [0.0] * len(plans)
    every = [plan.step.breakdown for plan in plans]
    for kind in dict.fromkeys(kind for each in every for kind in each):
        widths = [each.get(kind, 0.0) for each in every]
        bars.barh(range(len(plans)), widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    bars.set_yticks(range(len(plans)), [str(plan.layout).replace(", ", "\n") for plan in plans], fontsize=6)
    bars.invert_yaxis()
    bars.set_xlabel("seconds of a step")
    bars.legend(fontsize=7)
    if speeds:
        panels[0][1].loglog(list(speeds), list(speeds.values()), marker="o")
        panels[0][1].set_xlabel("ranks")
        panels[0][1].set_ylabel("tokens per second")
    figure.tight_layout()
    write_figure(arguments.picture, figure)
    pyplot.close(figure)
    print(f"drew {arguments.picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = make_parser()

    def checked(arguments: argparse.Namespace) -> None:
        check_options(arguments, parser)
        run(arguments)

    return run_tool(checked, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
