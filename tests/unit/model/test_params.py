"""Fact: a parameter's entry in the table determines where it lives.

Whole heads and whole gate/up pairs stay together, a rank's shard of a fused matrix is its shard of each part, and the
stages of a pipeline partition the table, each entry going to the ranks that use it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.model.param_spec import EMBEDDING, HEAD, param_specs, stage_specs
from megatron3d.model.spec import Architecture
from megatron3d.model.stage_plan import StageAssignment, make_stages
from megatron3d.parallel.layout import ParamSpec, box_shape, layout_axes, num_copies
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode

EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]


def tables(family: str, **fields: object) -> list[tuple[str, Mode, Mesh, Architecture, dict[str, ParamSpec]]]:
    """Return the table of a small model in every form, all axes above 1, with two data-parallel ranks."""
    values = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 8, "seq_length": 8, "qk_layernorm": True}
    model = ModelConfig.model_validate({"family": family, **values, **fields})
    out = []
    for name, form in EVERY_FORM:
        mode = build_mode(name, form, MODES[name].default_shape(8))
        arch = resolve_architecture(model, 61, mode.vocab_multiple)
        mesh = Mesh((("data", 2), *mode.axes))
        out.append((f"{name} {form}", mode, mesh, arch, param_specs(arch, mode)))
    return out


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_summed_where_tokens_are_split_and_copies_are_equal_otherwise(family: str) -> None:
    """Each axis shards the parameter, shards the tokens that it sees, or holds replicas that see the same tokens."""
    for name, mode, mesh, _, specs in tables(family):
        for path, spec in specs.items():
            split, summed = layout_axes(spec.layout), set(spec.reduce_axes(mesh))
            assert "data" in summed, f"{name} {path} is not summed over data"
            assert not split & summed, f"{name} {path}"
            copies = num_copies(spec.layout, mesh, mesh.names)
            assert copies * mesh.size(split) == mesh.world_size
            tokens = {axis for axis, _ in mode.axes if axis in spec.token_axes}
            assert summed == (tokens | {"data"}) - split


def test_gradients_of_qk_norms_are_summed_over_sequence_and_head_axes() -> None:
    for name, mode, mesh, _, specs in tables("llama"):
        for path in ("layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"):
            assert specs[path].layout == ((),)
            assert set(specs[path].reduce_axes(mesh)) == {"data", *layout_axes(mode.inner)}, f"{name} {path}"


def test_matrices_of_modes_without_copies_are_stored_once() -> None:
    """A matrix is held twice only where a plan shards tokens but not W further, and its gradient is then reduced."""
    for name, _, mesh, _, specs in tables("gpt2"):
        for path, spec in specs.items():
            if path.endswith((".qkv.weight", ".proj.weight", ".fc1.weight", ".fc2.weight", "embedding.weight")):
                unsplit = set(mesh.names) - layout_axes(spec.layout)
                assert unsplit == set(spec.reduce_axes(mesh)), f"{name} {path} is copied over {unsplit}"


def test_a_shard_of_a_fused_matrix_is_the_same_shard_of_each_part() -> None:
    for name, mode, mesh, arch, specs in tables("llama", num_query_groups=2, kv_channels=8, ffn_hidden_size=96):
        for path, sizes in {"qkv": (64, 16, 16), "fc1": (96, 96)}.items():
            owner = "attention" if path == "qkv" else "mlp"
            spec = specs[f"layers.0.{owner}.{path}.weight"]
            rows = mesh.size(spec.layout[0])
            for part_box, size in zip(spec.part_boxes(mesh), sizes, strict=True):
                assert box_shape(part_box)[0] == size // rows, f"{name} {path}"
            assert all(n // rows % spec.blocks == 0 for n in sizes), f"{name} {path}: {spec.blocks} blocks"
        assert specs["embedding.weight"].parts[0].padded_shape[0] % mesh.size(mode.expand.w_layout[0]) == 0
        assert arch.padded_vocab_size % mesh.size(mode.expand.y_layout[1]) == 0


@pytest.mark.parametrize("family,tied", list(product(["gpt2", "llama"], [True, False])))
def test_weight_decay_applies_to_matrices_only(family: str, tied: bool) -> None:
    for _, _, _, _, specs in tables(family, tie_embeddings=tied):
        assert ("head.weight" in specs) != tied
        for path, spec in specs.items():
            assert spec.decay == (len(spec.layout) == 2), path


@st.composite
def assignments(draw: st.DrawFn) -> StageAssignment:
    """Draw up to eight stages of zero to two layers, on up to four ranks in any order."""
    ranks = draw(st.integers(1, 4))
    where = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=4))]))
    counts = draw(st.lists(st.integers(0, 2), min_size=len(where), max_size=len(where)))
    return StageAssignment(make_stages(counts), tuple(where))


@given(assignment=assignments(), tied=st.booleans())
def test_every_parameter_is_where_it_is_used(assignment: StageAssignment, tied: bool) -> None:
    num_layers = assignment.stages[-1].layers.stop
    _, mode, _, arch, _ = tables("gpt2", num_layers=max(num_layers, 1), tie_embeddings=tied)[-1]
    whole = param_specs(arch, mode)
    if not num_layers:
        whole = {path: spec for path, spec in whole.items() if not path.startswith("layers.")}
    first, last = assignment.owners[0], assignment.owners[-1]
    found: dict[tuple[int, str], ParamSpec] = {}
    for rank in range(assignment.num_ranks):
        stages = stage_specs(arch, mode, assignment, rank)
        assert list(stages) == [stage.index for stage in assignment.on_rank(rank)]
        for index, specs in stages.items():
            for path, spec in specs.items():
                assert (rank, path) not in found, f"{path} is in two stages of rank {rank}"
                found[rank, path] = spec
                layer = int(path.split(".")[1]) if path.startswith("layers.") else None
                assert layer is None or layer in assignment.stages[index].layers
    apart = tied and first != last
    copies = {(last, HEAD)} if apart else set()
    assert {path for place, path in found if (place, path) not in copies} == whole.keys()
    assert len(found) == len(whole) + len(copies), "a parameter is on a rank that does not use it"
    for (rank, path), spec in found.items():
        original = whole[EMBEDDING if (rank, path) in copies else path]
        is_matrix = spec.parts[0].name == EMBEDDING
        holders = (first, last) if apart and is_matrix else (rank,)
        uses = 2 if tied and is_matrix and not apart else 1
        assert spec == replace(original, holders=holders, uses=uses), f"{path} on rank {rank}"
    writers = Counter(part.name for (rank, _), spec in found.items() for part in spec.parts if spec.holders[0] == rank)
    assert set(writers.values()) == {1}, "each logical tensor has one rank of the pipeline that writes it"
