"""All targets by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import checkpoint_targets, config_targets, data_targets
from tests.fuzz.runner import Target

TARGETS: Mapping[str, Target] = {
    target.name: target for module in (checkpoint_targets, data_targets, config_targets) for target in module.TARGETS
}
