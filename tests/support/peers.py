"""Compare our GPT with a class of transformers on the same random weights: logits, loss and gradients, in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.convert.hub_weights import rows_of
from megatron3d.convert.tensor_names import FileTensor
from megatron3d.model.gpt import GPT
from megatron3d.model.stage_plan import StageAssignment, make_stages
from megatron3d.ops.plan import LossChunk
from megatron3d.parallel.layout import Part
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode

# Modules of the classes that follow Llama's names; a test adds those of its class.
LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "layers.{n}.input_norm": "model.layers.{n}.input_layernorm",
    "layers.{n}.attention.q": "model.layers.{n}.self_attn.q_proj",
    "layers.{n}.attention.k": "model.layers.{n}.self_attn.k_proj",
    "layers.{n}.attention.v": "model.layers.{n}.self_attn.v_proj",
    "layers.{n}.attention.proj": "model.layers.{n}.self_attn.o_proj",
    "layers.{n}.attention.q_norm": "model.layers.{n}.self_attn.q_norm",
    "layers.{n}.attention.k_norm": "model.layers.{n}.self_attn.k_norm",
    "layers.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm",
    "layers.{n}.mlp.gate": "model.layers.{n}.mlp.gate_proj",
    "layers.{n}.mlp.up": "model.layers.{n}.mlp.up_proj",
    "layers.{n}.mlp.fc2": "model.layers.{n}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}


class Outputs(NamedTuple):
    """Logits [B, S, V], loss, and the gradient of each tensor by its name in transformers."""

    logits: Tensor
    loss: Tensor
    gradients: Mapping[str, Tensor]


@contextmanager
def widened() -> Iterator[None]:
    """Make transformers, which computes norms, softmax and rotary angles in fp32, compute them in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(torch, "float32", torch.float64),
            patch.object(torch, "float", torch.float64),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def peer_outputs(settings: Mapping[str, Any], tokens_BT: Tensor) -> tuple[Mapping[str, Tensor], Outputs]:
    """Return the random weights of a class of transformers, and what it computes with them."""
    torch.manual_seed(5)
    with widened():
        config = transformers.AutoConfig.for_model(**settings)
        model = (
            transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
            .double()
            .eval()
        )
        for param in model.parameters():
            param.data.normal_(std=0.3)
        biases = {name: each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}
        for bias in biases.values():  # multiples of 1/8, which fp32 holds
            bias.copy_(torch.randint(-4, 5, bias.shape) / 8)
        logits = model(tokens_BT[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
    params = dict(model.named_parameters())
    gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
    return biases | {name: param.data for name, param in params.items()}, Outputs(
        logits.detach(), loss.detach(), gradients
    )


def our_outputs(
    keys: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokens_BT: Tensor,
    names: Mapping[str, str] = LLAMA_NAMES,
    num_ahead: Sequence[int] = (),
) -> Outputs:
    """Return what our model computes with the weights of a class of transformers.

    `num_ahead`: labels of each module of multi-token prediction, whose losses follow that of the model.
    """
    model_section = ModelConfig.model_validate(keys)
    assert model_section.vocab_size is not None, "a comparison names its vocabulary"
    arch = resolve_architecture(model_section, model_section.vocab_size)
    mode = build_mode(next(iter(MODES)), None, (1,))
    assignment = StageAssignment(make_stages([arch.num_layers]), (0,))
    comm = ProcessComm(Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes)), ())
    model = GPT(arch, mode, comm, assignment, LossChunk(5)).to_empty(device="cpu").double()
    for name, param in model.named_parameters():
        values = [_padded(weights[their_name(part.name, names)], part) for part in model.specs[name].parts]
        param.data.copy_(torch.cat(values))
    model.routers.allocate(torch.device("cpu"))
    for router, table, row in model.routers.rows():
        row.copy_(weights[their_name(f"{router}.{table}", names)])
    stage = assignment.stages[0]
    loss = model(stage, None, model.begin(tokens_BT, tokens_BT[:, 1:].numel(), num_ahead=num_ahead))
    loss.sum().backward()
    gradients = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, f"{name} has no gradient"
        parts = model.specs[name].parts
        for part, grad in zip(parts, param.grad.split([part.padded_shape[0] for part in parts]), strict=True):
            gradients[their_name(part.name, names)] = grad[: part.shape[0]]
    with torch.no_grad():
        logits = model(stage, None, model.begin_sampling(tokens_BT[:, :-1]))
    return Outputs(logits, loss.detach(), gradients)


class Unchanged(dict[str, str]):
    """Names that are those of our model."""

    def __missing__(self, name: str) -> str:
        return name


def as_ours(theirs: Mapping[str, Tensor], table: tuple[FileTensor, ...]) -> dict[str, Tensor]:
    """Return the logical tensors in the tensors of a class of transformers."""
    found: dict[str, Tensor] = {}
    for tensor in table:
        for rows in tensor.row_ranges():
            values = rows_of(theirs[tensor.name], rows)
            found[rows.name] = torch.cat((found[rows.name], values)) if rows.name in found else values
    return found


def their_name(name: str, names: Mapping[str, str]) -> str:
    """Return the name in transformers of a logical tensor of ours."""
    layer = re.match(r"layers\.(\d+)\.", name)
    template = name if layer is None else name.replace(layer[0], "layers.{n}.", 1)
    module, _, kind = template.rpartition(".")
    theirs = names[template] if template in names else f"{names[module]}.{kind}"
    return theirs if layer is None else theirs.replace("{n}", layer[1])


def _padded(value: Tensor, part: Part) -> Tensor:
    out = value.new_zeros(part.padded_shape)
    out[: part.shape[0]] = value.reshape(part.shape)
    return out


def check_equal(ours: Outputs, theirs: Outputs, tolerance: float = 1e-11) -> None:
    """Require equal logits, losses and gradients, relative to the largest value of each tensor."""
    pairs = {"logits": (ours.logits, theirs.logits), "loss": (ours.loss, theirs.loss)}
    pairs |= {name: (ours.gradients[name], grad) for name, grad in theirs.gradients.items()}
    errors = {
        name: ((got - want.reshape(got.shape)).abs().max() / want.abs().max().clamp(min=1e-6)).item()
        for name, (got, want) in pairs.items()
    }
    wrong = [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    assert not wrong, ", ".join(wrong)


def compare(
    settings: Mapping[str, Any],
    keys: Mapping[str, Any],
    names: Mapping[str, str] = LLAMA_NAMES,
    split: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    length: int = 19,
) -> None:
    """Require that our model with `keys` computes what a class of transformers with `settings` does.

    Args:
        split: returns the class's tensors with fused ones split into several names.
    """
    tokens_BT = torch.randint(settings["vocab_size"], (2, length + 1), generator=torch.Generator().manual_seed(1))
    weights, theirs = peer_outputs(settings, tokens_BT)
    theirs = theirs._replace(gradients=split(theirs.gradients))
    check_equal(our_outputs(keys, split(weights), tokens_BT, names), theirs)
