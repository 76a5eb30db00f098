"""Every parameter of the model: logical shape, layout, initial value.  A pure table; the modules only look up.

A fused matmul (q, k and v; gate and up) is one parameter of several logical tensors, so that whole heads and whole
gate/up pairs stay together in every layout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron3d.model.architecture import GATED, Architecture
from megatron3d.model.stages import Stage, StageAssignment, make_stages
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import DATA, Axes
from megatron3d.parallel.modes.mode import Mode

EMBEDDING, HEAD = "embedding.weight", "head.weight"
Named = Iterator[tuple[str, ParamSpec]]


def param_specs(arch: Architecture, mode: Mode) -> dict[str, ParamSpec]:
    """Specs of the whole model by the parameter's path in the module tree, in the order of the forward pass."""
    return dict(_stage_specs(arch, mode, make_stages([arch.num_layers])[0], EMBEDDING))


def stage_specs(
    arch: Architecture, mode: Mode, assignment: StageAssignment, rank: int
) -> dict[int, dict[str, ParamSpec]]:
    """The same for each stage on a rank of the pipeline, a parameter being in the first of them that uses it.

    Where embeddings are tied and the ends of the pipeline are on two ranks, both hold the matrix: `embedding.weight` on
    the first, `head.weight` on the last, one logical tensor.
    """
    first, last = assignment.owners[0], assignment.owners[-1]
    tied_apart = arch.tie_embeddings and first != last
    tied_head = HEAD if rank == last and tied_apart else EMBEDDING
    tables = {stage.index: list(_stage_specs(arch, mode, stage, tied_head)) for stage in assignment.on_rank(rank)}
    uses = Counter(name for table in tables.values() for name, _ in table)
    stages: dict[int, dict[str, ParamSpec]] = {}
    seen: set[str] = set()
    for index, table in tables.items():
        new = {name: spec for name, spec in table if name not in seen}
        for name, spec in new.items():
            is_shared = tied_apart and spec.parts[0].name == EMBEDDING
            new[name] = replace(spec, uses=uses[name], holders=(first, last) if is_shared else (rank,))
        stages[index] = new
        seen |= set(new)
    return stages


def _stage_specs(arch: Architecture, mode: Mode, stage: Stage, tied_head: str) -> Named:
    """`tied_head` is the path of the head's matrix where it is the embedding's."""
    table = _Table(arch, mode)
    if stage.has_embedding:
        yield from table.embedding()
    for index in stage.layers:
        yield from table.layer(f"layers.{index}")
    if stage.has_head:
        yield from table.norm("final_norm", arch.hidden_size, *mode.residual)
        if arch.tie_embeddings:
            yield from table.vocabulary(tied_head, EMBEDDING)
        else:
            yield from table.vocabulary(HEAD, HEAD)


@dataclass(frozen=True)
class _Table:
    arch: Architecture
    mode: Mode

    def embedding(self) -> Named:
        """Word and position embeddings."""
        yield from self.vocabulary(EMBEDDING, EMBEDDING)
        if self.arch.position_embedding_type == "learned_absolute":
            name, shape = "embedding.position", (self.arch.max_position_embeddings, self.arch.hidden_size)
            tokens, features = self.mode.residual
            yield name, ParamSpec(_same(name, shape), ((), features), DATA + tokens, init=self.arch.init_method_std)

    def vocabulary(self, path: str, name: str) -> Named:
        """[vocabulary, hidden], stored as the head's matrix for the embedding as well: tied or not, one layout."""
        hidden, plan = self.arch.hidden_size, self.mode.expand
        part = Part(name, (self.arch.vocab_size, hidden), (self.arch.padded_vocab_size, hidden))
        yield path, ParamSpec((part,), plan.w_layout, DATA + plan.m, init=self.arch.init_method_std)

    def layer(self, name: str) -> Named:
        """One transformer layer."""
        arch, (tokens, features) = self.arch, self.mode.residual
        heads, groups = (arch.kv_channels * n for n in (arch.num_attention_heads, arch.num_query_groups))
        into = (
            {"gate": arch.ffn_hidden_size, "up": arch.ffn_hidden_size}
            if arch.activation in GATED
            else {"up": arch.ffn_hidden_size}
        )
        attention, mlp = f"{name}.attention", f"{name}.mlp"
        yield from self.norm(f"{name}.input_norm", arch.hidden_size, tokens, features)
        yield from self.expand(
            f"{attention}.qkv", {f"{attention}.{p}": n for p, n in zip("qkv", (heads, groups, groups), strict=True)}
        )
        if arch.qk_layernorm:
            inner_rows = sum(self.mode.inner, ())
            yield from self.norm(f"{attention}.q_norm", arch.kv_channels, inner_rows, ())
            yield from self.norm(f"{attention}.k_norm", arch.kv_channels, inner_rows, ())
        yield from self.contract(f"{attention}.proj", heads)
        yield from self.norm(f"{name}.post_attention_norm", arch.hidden_size, tokens, features)
        yield from self.expand(f"{mlp}.fc1", {f"{mlp}.{part}": n for part, n in into.items()})
        yield from self.contract(f"{mlp}.fc2", arch.ffn_hidden_size)

    def norm(self, name: str, size: int, tokens: Axes, features: Axes) -> Named:
        """Scale, and shift where the norm has one; `tokens` split the rows that are normalized."""
        used = DATA + tokens
        weight, bias = f"{name}.weight", f"{name}.bias"
        yield weight, ParamSpec(_same(weight, (size,)), (features,), used, fill=1.0, decay=False)
        if self.arch.normalization == "LayerNorm":
            yield bias, ParamSpec(_same(bias, (size,)), (features,), used, decay=False)

    def expand(self, name: str, sizes: Mapping[str, int]) -> Named:
        """hidden -> the sizes of several parts, joined."""
        axis_sizes, plan = dict(self.mode.axes), self.mode.expand
        blocks = math.prod(axis_sizes[axis] for axis, dim in plan.y.items() if dim == "N")
        yield from self._linear(name, sizes, self.arch.hidden_size, plan, self.arch.init_method_std, blocks)

    def contract(self, name: str, num_inputs: int) -> Named:
        """Inner features -> hidden, onto the residual stream (initial values as in Radford et al. 2019)."""
        std = self.arch.init_method_std / math.sqrt(2 * self.arch.num_layers)
        yield from self._linear(name, {name: self.arch.hidden_size}, num_inputs, self.mode.contract, std, 1)

    def _linear(
        self, name: str, sizes: Mapping[str, int], num_inputs: int, plan: MatmulPlan, std: float, blocks: int
    ) -> Named:
        weights = tuple(Part(f"{part}.weight", (n, num_inputs), (n, num_inputs)) for part, n in sizes.items())
        yield f"{name}.weight", ParamSpec(weights, plan.w_layout, DATA + plan.m, init=std, blocks=blocks)
        if self.arch.add_bias_linear:
            biases = tuple(Part(f"{part}.bias", (n,), (n,)) for part, n in sizes.items())
            tokens, features = plan.y_layout
            yield f"{name}.bias", ParamSpec(biases, (features,), DATA + tokens, decay=False)


def _same(name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    return (Part(name, shape, shape),)
