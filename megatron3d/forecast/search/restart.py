"""Layout of a launch that has another number of ranks than the configured layout allows, as after a lost node.

    configured: 1d t=8, data=4 on 32 ranks      launched: 24 ranks      chosen: near it, with the same global batch

Every rank chooses for itself, and chooses the same, since nothing that it depends on differs between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron3d.config.read import Resolved, read
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.facts import WORLD_SIZE
from megatron3d.config.validate.files import check_files
from megatron3d.config.validate.rules import check
from megatron3d.errors import RunFailed, UserError
from megatron3d.forecast.search.nearby import describe_layout, nearby_layout

# Multiples of the least ranks of a layout among which its number of ranks is looked for.
MOST_MULTIPLES = 64


def resolve_elastic(
    path: Path, overrides: Sequence[str], world_size: int, counted_by: str = WORLD_SIZE
) -> tuple[Resolved, str | None]:
    """Return the configuration for `world_size` ranks like `resolve`, and what was changed for them, in words.

    With `train.elastic` a layout that does not fit this number of ranks is replaced by the nearest one that does, with
    the same global batch; its predicted step time is in the words.  Raises UserError where none uses all ranks.
    """
    try:
        return resolve(path, overrides, world_size, counted_by=counted_by), None
    except UserError:
        reading = read(path, overrides)
        before = _as_configured(reading.config, world_size)
        if reading.problems or before is None or not check(reading.config, world_size):
            raise
    try:
        chosen = nearby_layout(before, world_size, before.config.logging.cluster, limit_s=math.inf)
    except RunFailed as error:
        raise UserError(f"train.elastic=true: {error}; start more ranks") from error
    if chosen.num_ranks != world_size:
        raise UserError(
            f"train.elastic=true: no layout near the configured one uses all of {world_size} ranks with "
            f"train.global_batch_size={before.config.train.global_batch_size}; start {chosen.num_ranks} ({counted_by})"
        )
    UserError.collect(check_files(chosen.config, world_size, reading.origins))
    how = "as predicted" if chosen.is_predicted else "if it scales with the ranks"
    return Resolved(chosen.config, reading.origins), (
        f"the configured layout needs {before.world_size} ranks ({describe_layout(before)}); this launch has "
        f"{world_size}: {chosen.text}; a step takes {chosen.slowdown:.2f} times as long, {how}"
    )


def _as_configured(config: Config, world_size: int) -> RunSpec | None:
    """Return the run on the fewest ranks above `world_size` that the configured layout fits; None: on none, or not
    elastic."""
    least = RunSpec(config).sizes.model
    first = world_size // least + 1
    sizes = (least * count for count in range(first, first + MOST_MULTIPLES if config.train.elastic else first))
    return next((RunSpec(config, size) for size in sizes if not check(config, size)), None)
