"""Fact: the groups of a training step make up the whole mesh, and no group of all ranks is made for a few numbers."""

from __future__ import annotations

import pytest

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.model.group_plan import communication_axes
from megatron3d.parallel.mesh import Mesh, disjoint_cover
from megatron3d.parallel.modes import MODES, build_mode

MODEL = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 8, "seq_length": 8}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, entry in MODES.items() for form in entry.forms])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("others", [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 2, 2)])
def test_numbers_of_all_ranks_are_reduced_over_existing_groups(
    name: str, form: str, family: str, others: tuple[int, int, int]
) -> None:
    mode = build_mode(name, form, MODES[name].default_shape(8))
    arch = resolve_architecture(ModelConfig.model_validate({"family": family, **MODEL}), 61, mode.vocab_multiple)
    mesh = Mesh((*zip(("pipeline", "replica", "data"), others, strict=True), *mode.axes))
    sets = communication_axes(arch, mode, mesh)
    everything = mesh.nontrivial(mesh.names)
    assert disjoint_cover(everything, sets), f"{everything} are not made up of {sets}"
    if others[0] > 1:
        assert everything not in sets
    assert len(sets) == len(set(sets))
