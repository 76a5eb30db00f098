"""Configuration of a run for a number of ranks, and `--check`, which needs neither torch nor a launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron3d.config.cli import Arguments
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.read import Resolved, read
from megatron3d.config.report import batch_arithmetic, render, slow_shapes
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.facts import WORLD_SIZE, Facts, MissingHere
from megatron3d.config.validate.files import check_files
from megatron3d.config.validate.remarks import remarks
from megatron3d.config.validate.rules import layout_problems, value_problems
from megatron3d.errors import ExitCode, UserError, one_line
from megatron3d.model.linear_spec import num_parameters

# Keys from which other model sizes are derived, which the tensor axes must divide.
_SHAPE = frozenset({"model.family", "model.activation", "model.hidden_size", "model.num_attention_heads"})


def resolve(
    config: Path, overrides: Sequence[str], world_size: int, elsewhere: bool = False, counted_by: str = WORLD_SIZE
) -> Resolved:
    """Return the configuration for `world_size` ranks; raises UserError with every problem in it and in its files.

    With `elsewhere` the run is on another machine, so files are not checked; `counted_by` names what the user types for
    another number of ranks.  A rule that involves a value which could
    not be read is skipped, since it would be applied to the default.
    """
    reading = read(config, overrides)
    facts = Facts(reading.config, world_size, origins=reading.origins, counted_by=counted_by)
    broken = list(value_problems(facts))
    if not any(key in _SHAPE or key.startswith("parallel.") for key in reading.unsure):
        broken += layout_problems(facts)
    broken += [] if elsewhere else check_files(reading.config, world_size, reading.origins)
    skipped = {key.partition(".")[2] for key in reading.unsure}
    kept = [problem for problem in broken if skipped.isdisjoint(re.findall(r"\w+", problem))]
    UserError.collect((*reading.problems, *kept))
    return Resolved(reading.config, reading.origins, remarks=tuple(remarks(facts)))


def run_check(
    arguments: Arguments,
    environ_world_size: int | None = None,
    forecasts: Callable[[RunSpec], Iterable[str]] = lambda _: (),
) -> int:
    """Print a configuration's arithmetic, or every problem on stderr, and its verdict last; return 0 or 2 to exit with.

    `forecasts` returns what else is known of a valid run, as lines.
    """
    world_size, name = arguments.world_size or environ_world_size or 1, one_line(arguments.config)
    try:
        resolved = resolve(arguments.config, arguments.overrides, world_size, arguments.elsewhere)
        found = check_files(resolved.config, world_size, resolved.origins) if arguments.elsewhere else []
        UserError.collect(problem for problem in found if not isinstance(problem, MissingHere))
    except UserError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        print(f"{name}: refused, {_count(len(error.problems), 'problem')}")
        return ExitCode.USER_ERROR
    if arguments.details:
        print(render(resolved))
    print(batch_arithmetic(RunSpec(resolved.config, world_size)))
    print(parameter_line(resolved.config))
    spec = RunSpec(resolved.config, world_size)
    for line in (*slow_shapes(spec), *forecasts(spec)):
        print(line)
    for problem in found:
        print(f"on this machine: {problem}")
    for remark in resolved.remarks:
        print(f"WARNING: {remark}")
    counts = {"warning": len(resolved.remarks), "missing file": len(found)}
    but = " and ".join(_count(number, name) for name, number in counts.items() if number)
    print(f"{name}: valid on {_count(world_size, 'rank')}{', with ' * bool(but)}{but}")
    return ExitCode.DONE


def _count(number: int, name: str) -> str:
    """Return `2 problems`, or `1 problem`."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def parameter_line(config: Config) -> str:
    """Return the number of parameters as text: per token of the vocabulary while its size is not known."""
    arch = resolve_architecture(config.model, config.model.vocab_size or 0)
    if arch.vocab_size:
        return f"parameters {num_parameters(arch):,} (vocabulary {arch.vocab_size:,})"
    none, one = (num_parameters(replace(arch, vocab_size=size)) for size in (0, 1))
    return f"parameters {none:,} + {one - none:,} for each token of the vocabulary"
