"""Table of every parameter of the model: logical shape, layout and initial value, which the modules look up.

A fused matmul (q, k and v; gate and up) is one parameter of several logical tensors, so that whole heads and whole
gate/up pairs stay together in every layout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron3d.experts.plan import Experts
from megatron3d.model.linear_spec import (
    DOWN,
    FC1,
    FC2,
    GATE,
    KV_UP,
    MTP_LINEARS,
    PROJ,
    Q_UP,
    QKV,
    linear_size,
    linear_sizes,
    shared_linears,
)
from megatron3d.model.spec import GATED, Architecture, has_experts
from megatron3d.model.stage_plan import Stage, StageAssignment, make_stages
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.mesh import DATA, Axes
from megatron3d.parallel.modes.mode import Mode

EMBEDDING, HEAD = "embedding.weight", "head.weight"
Named = Iterator[tuple[str, ParamSpec]]


def param_specs(arch: Architecture, mode: Mode) -> dict[str, ParamSpec]:
    """Return the specs of the whole model by parameter path, in the order of the forward pass."""
    return dict(_stage_specs(arch, mode, make_stages([arch.num_layers])[0], EMBEDDING))


def stage_specs(
    arch: Architecture, mode: Mode, assignment: StageAssignment, rank: int
) -> dict[int, dict[str, ParamSpec]]:
    """Return the specs of each stage on a pipeline rank; a parameter is in the first stage that uses it.

    Where the ends of the pipeline are on two ranks and the last one needs the embedding matrix as well, both hold it,
    one logical tensor: `embedding.weight` on the first; on the last `head.weight` where embeddings are tied, else
    `embedding.weight`, which multi-token prediction reads.
    """
    first, last = assignment.owners[0], assignment.owners[-1]
    is_apart = first != last
    tied_head = HEAD if rank == last and is_apart else EMBEDDING
    tables = {stage.index: list(_stage_specs(arch, mode, stage, tied_head)) for stage in assignment.on_rank(rank)}
    uses = Counter(name for table in tables.values() for name, _ in table)
    stages: dict[int, dict[str, ParamSpec]] = {}
    seen: set[str] = set()
    for index, table in tables.items():
        new = {name: spec for name, spec in table if name not in seen}
        for name, spec in new.items():
            is_shared = is_apart and shares_embedding(arch) and spec.parts[0].name == EMBEDDING
            new[name] = replace(spec, uses=uses[name], holders=(first, last) if is_shared else (rank,))
        stages[index] = new
        seen |= set(new)
    return stages


def shares_embedding(arch: Architecture) -> bool:
    """Return whether the last stage uses the embedding matrix as well: as LM head, or for multi-token prediction."""
    return arch.tie_embeddings or arch.mtp_num_layers > 0


def _stage_specs(arch: Architecture, mode: Mode, stage: Stage, tied_head: str) -> Named:
    """Yield the parameters of a stage; `tied_head` is the path of the head's matrix where that is the embedding's."""
    table = _Table(arch, mode)
    if stage.has_embedding:
        yield from table.embedding()
    for index in stage.layers:
        yield from table.layer(index)
    if stage.has_head:
        yield from table.norm("final_norm", arch.hidden_size, *mode.residual)
        head = (tied_head, EMBEDDING) if arch.tie_embeddings else (HEAD, HEAD)
        yield from table.vocabulary(*head)
        for depth in range(arch.mtp_num_layers):
            yield from table.vocabulary(head[0] if arch.tie_embeddings else EMBEDDING, EMBEDDING)
            yield from table.mtp(f"mtp.{depth}")
            yield from table.vocabulary(*head)


@dataclass(frozen=True)
class _Table:
    arch: Architecture
    mode: Mode

    def embedding(self) -> Named:
        """Yield word and position embeddings."""
        yield from self.vocabulary(EMBEDDING, EMBEDDING)
        if self.arch.position_embedding_type == "learned_absolute":
            name, shape = "embedding.position", (self.arch.max_position_embeddings, self.arch.hidden_size)
            tokens, features = self.mode.residual
            yield name, ParamSpec(_same(name, shape), ((), features), DATA + tokens, init=self.arch.init_method_std)

    def vocabulary(self, path: str, name: str) -> Named:
        """Yield a [vocabulary, hidden] matrix in the head's layout, which the embedding has as well, tied or not."""
        hidden, plan = self.arch.hidden_size, self.mode.expand
        part = Part(name, (self.arch.vocab_size, hidden), (self.arch.padded_vocab_size, hidden))
        yield path, ParamSpec((part,), plan.w_layout, DATA + plan.m, init=self.arch.init_method_std)

    def layer(self, index: int, path: str | None = None) -> Named:
        """Yield the parameters of one transformer layer, of the kind of this index."""
        arch, (tokens, features) = self.arch, self.mode.residual
        name = path or f"layers.{index}"

        def norm(site: str) -> Named:
            return (
                self.norm(f"{name}.{site}", arch.hidden_size, tokens, features) if site in arch.norm_sites else iter(())
            )

        yield from norm("input_norm")
        if arch.is_latent:
            yield from self.latents(name)
        else:
            yield from self.linear(name, QKV)
            yield from self.head_norms(f"{name}.attention") if arch.qk_layernorm else ()
        yield from self.sinks(f"{name}.attention") if arch.softmax_type == "learnable" else ()
        yield from self.linear(name, PROJ)
        yield from norm("attention_output_norm")
        yield from norm("post_attention_norm")
        if arch.experts is not None and has_experts(arch, index):
            yield from self.experts(name, arch.experts)
        else:
            yield from self.linear(name, FC1)
            yield from self.activation(f"{name}.mlp")
            yield from self.linear(name, FC2)
        yield from norm("mlp_output_norm")

    def latents(self, layer: str) -> Named:
        """Yield the projections of latent attention and the norms of its latents, sharded as those of the residual."""
        ranks = {"q_norm": self.arch.q_lora_rank, "kv_norm": self.arch.kv_lora_rank}
        yield from self.linear(layer, DOWN)
        for name, size in ranks.items():
            yield from () if size is None else self.norm(f"{layer}.attention.{name}", size, *self.mode.residual)
        yield from self.linear(layer, Q_UP)
        yield from self.linear(layer, KV_UP)
        yield from self.linear(layer, GATE) if self.arch.attention_output_gate else ()

    def experts(self, layer: str, experts: Experts) -> Named:
        """Yield the parameters of a mixture of experts; those of all experts that a rank holds are one of each kind."""
        arch, path = self.arch, f"{layer}.mlp"
        for name in shared_linears(arch):
            yield from self.linear(layer, name)
        used, std = DATA + self.mode.home, arch.init_method_std
        if experts.has_shared_gate:
            name = f"{path}.shared_gate.weight"
            yield name, ParamSpec(_same(name, (1, arch.hidden_size)), ((), ()), used, init=std)
        name = f"{path}.router.weight"
        yield name, ParamSpec(_same(name, (experts.num_experts, arch.hidden_size)), ((), ()), used, init=std)
        if experts.has_router_bias:
            name = f"{path}.router.bias"
            yield name, ParamSpec(_same(name, (experts.num_experts,)), ((),), used, decay=False)
        sizes = linear_sizes(arch.hidden_size, experts.ffn_hidden_size, 1, 1, arch.activation in GATED)
        split = self.mode.etensor
        for name, scale, layout in ((FC1, 1.0, (split, ())), (FC2, math.sqrt(2 * arch.num_layers), ((), split))):
            size = sizes[name]
            of_experts = {
                f"{path}.experts.{expert}.{part}": rows
                for expert in range(experts.num_experts)
                for part, rows in size.outputs.items()
            }
            parts = tuple(Part(f"{part}.weight", *2 * [(rows, size.num_inputs)]) for part, rows in of_experts.items())
            linear = f"{path}.experts.{name.rpartition('.')[2]}"
            yield f"{linear}.weight", ParamSpec(parts, layout, used, init=std / scale, part_axes=self.mode.experts)
            if arch.has_mlp_bias:
                biases = tuple(Part(f"{part}.bias", (rows,), (rows,)) for part, rows in of_experts.items())
                yield f"{linear}.bias", ParamSpec(biases, layout[:1], used, decay=False, part_axes=self.mode.experts)

    def mtp(self, name: str) -> Named:
        """Yield the parameters of one module of multi-token prediction, without those that it shares."""
        for norm in ("hidden_norm", "embedding_norm"):
            yield from self.norm(f"{name}.{norm}", self.arch.hidden_size, *self.mode.residual)
        for linear in MTP_LINEARS:
            yield from self.linear(name, linear)
        yield from self.layer(self.arch.num_layers - 1, f"{name}.layer")
        yield from self.norm(f"{name}.final_norm", self.arch.hidden_size, *self.mode.residual)

    def head_norms(self, name: str) -> Named:
        """Yield the norms of queries and keys, over each head or over the whole projection."""
        arch, (tokens, features) = self.arch, self.mode.inner
        is_whole = arch.qk_layernorm_scope == "projection"
        heads = (arch.num_attention_heads, arch.num_query_groups) if is_whole else (1, 1)
        sizes = [count * arch.kv_channels for count in heads]
        axes, rows = (features, tokens) if is_whole else ((), tokens + features)
        for part, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            yield from self.norm(f"{name}.{part}", size, rows, axes)

    def sinks(self, name: str) -> Named:
        """Yield the attention sinks: one logit for each query head, sharded as these are, 0 at first."""
        path, (tokens, features) = f"{name}.sinks", self.mode.inner
        yield path, ParamSpec(_same(path, (self.arch.num_attention_heads,)), (features,), DATA + tokens, decay=False)

    def activation(self, name: str) -> Named:
        """Yield the parameters of an activation, which every rank has."""
        used = DATA + sum(self.mode.inner, ())
        for param, fill in self.arch.activation_params.items():
            path = f"{name}.{param}"
            yield path, ParamSpec(_same(path, (1,)), ((),), used, fill=fill, decay=False)

    def norm(self, name: str, size: int, tokens: Axes, features: Axes) -> Named:
        """Yield weight and bias of a norm, as far as its kind has them; `tokens` are the axes that shard its rows."""
        used = DATA + tokens
        weight, bias, fill = f"{name}.weight", f"{name}.bias", 0.0 if self.arch.apply_layernorm_1p else 1.0
        if self.arch.num_norm_tensors > 0:
            yield weight, ParamSpec(_same(weight, (size,)), (features,), used, fill=fill, decay=False)
        if self.arch.num_norm_tensors > 1:
            yield bias, ParamSpec(_same(bias, (size,)), (features,), used, decay=False)

    def linear(self, layer: str, name: str) -> Named:
        """Yield weight and bias of a linear; those onto the residual stream start smaller (Radford et al. 2019)."""
        size, path = linear_size(self.arch, name), f"{layer}.{name}"
        axis_sizes = dict(self.mode.axes)
        plan, module = size.plan(self.mode), path.rpartition(".")[0]
        width, used = self.arch.mup_width, DATA + plan.m
        std = self.arch.init_method_std / (1 if size.expands else math.sqrt(2 * self.arch.num_layers))
        init = std / math.sqrt(width)
        blocks = math.prod(axis_sizes[axis] for axis, dim in plan.y.items() if dim == "N") if size.expands else 1
        parts = {f"{module}.{part}": n for part, n in size.outputs.items()}
        weights = tuple(Part(f"{part}.weight", *2 * [(n, size.num_inputs)]) for part, n in parts.items())
        yield f"{path}.weight", ParamSpec(weights, plan.w_layout, used, init=init, lr_mult=1 / width, blocks=blocks)
        if size.has_bias:
            biases = tuple(Part(f"{part}.bias", (n,), (n,)) for part, n in parts.items())
            tokens, features = plan.y_layout
            yield f"{path}.bias", ParamSpec(biases, (features,), DATA + tokens, decay=False)


def _same(name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    return (Part(name, shape, shape),)
