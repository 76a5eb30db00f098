"""Fact: predictions know which linears a compiled graph quantizes, and which bytes Inductor moves for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common.loopback import LoopbackComm
from torch import Tensor
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import Scheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron3d.config.read import read_config
from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.step_spec import local_sizes
from megatron3d.forecast.time.tasks import traced_bytes
from megatron3d.linear.fp8 import TraceableFp8
from megatron3d.linear.fp8_plan import RECIPES, QuantizedMatmul
from megatron3d.model.layers import is_opaque
from megatron3d.model.local_sizes import KERNELS
from megatron3d.model.modules import Linear
from megatron3d.model.operations import layer_operations
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.state import build_state

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
LLAMA_8B = Path("configs/llama-8b.yaml")
SMALL = (
    *("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=8"),
    *("model.num_query_groups=8", "model.seq_length=32", "model.vocab_size=128", "train.global_batch_size=8"),
    *("train.train_iters=10", "optimizer.lr_warmup_iters=1", "parallel.tensor_model_parallel_size=1"),
    *("parallel.sequence_parallel=false", "train.fp8=e4m3", "train.fp8_recipe=rowwise"),
)
ATTENTION, MLP = {"attention.qkv", "attention.proj"}, {"mlp.fc1", "mlp.fc2"}
LATENT = {f"attention.{name}" for name in ("down", "q_up", "kv_up", "proj")}
OF_LATENTS = ("multi_latent_attention=true", "kv_lora_rank=16", "q_lora_rank=16", "qk_head_dim=8", "v_head_dim=8")
LATENTS = (*(f"model.{key}" for key in OF_LATENTS), "model.qk_pos_emb_head_dim=8", "model.num_query_groups=null")
SELECTIVE = "train.recompute_granularity=selective"
# Linears that the compiler takes, by the ranks and overrides of a run on GPUs.
CASES: dict[str, tuple[int, Sequence[str], set[str]]] = {
    "one rank": (1, (), ATTENTION | MLP),
    "data ranks": (2, (), ATTENTION | MLP),
    "tensor ranks": (2, ("parallel.tensor_model_parallel_size=2",), set()),
    "context ranks": (2, ("parallel.context_parallel_size=2",), set()),
    "latents": (1, LATENTS, LATENT | MLP),
    "latents, tensor ranks": (2, (*LATENTS, "parallel.tensor_model_parallel_size=2"), set()),
    "split backward": (2, ("parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=zb-h1"), set()),
    "window": (1, ("model.window_size=[15,0]",), MLP),
    "capped scores": (1, ("model.attention_softcap=30",), MLP),
    "sinks": (1, ("model.softmax_type=learnable",), MLP),
    "dropout": (1, ("model.attention_dropout=0.1",), MLP),
    "documents": (1, ("data.reset_attention_mask=true",), MLP),
    "core recomputed": (1, (SELECTIVE,), MLP),
    "MLP recomputed": (1, (SELECTIVE, "train.recompute_modules=[mlp]"), ATTENTION),
    "layers recomputed": (1, ("train.recompute_granularity=full",), ATTENTION | MLP),
    "experts": (1, ("model.num_moe_experts=4", "model.moe_router_topk=2"), ATTENTION),
    "eager": (1, ("train.compile=false",), set()),
}


def in_graph(spec: RunSpec) -> set[str]:
    """Return the linears of the first layer that no module around them keeps out of its compiled graph."""
    with FakeTensorMode():
        state = build_state(spec, LoopbackComm(spec.mesh), torch.device("cpu"), has_values=False)
    layer, packs = state.model.layers["0"], spec.config.data.reset_attention_mask
    found = set()
    for path, module in layer.named_modules():
        names = path.split(".")
        around = [layer.get_submodule(".".join(names[:count])) for count in range(1, len(names) + 1)]
        if isinstance(module, Linear) and not any(is_opaque(each, packs) for each in around):
            found.add(path)
    return found if spec.compiles(on_gpu=True) else set()


@pytest.mark.parametrize("name", CASES)
def test_traced_linears_are_those_that_the_compiler_takes(name: str) -> None:
    ranks, overrides, expected = CASES[name]
    spec = RunSpec(read_config(LLAMA_8B, [*SMALL, *overrides]).config, ranks)
    local = replace(local_sizes(spec, KERNELS["gpu"]), defers_wgrads=spec.pipeline.splits_backward)
    assert {each.name for each in layer_operations(local) if each.is_traced} == in_graph(spec) == expected


NO_AXES = MatmulPlan((), (), (), {}, {}, {})
M, K = 512, 1024


class Counted(Exception):
    """Ends the compilation of a graph before its kernels are compiled."""


@pytest.fixture(name="taken")
def operator() -> Iterator[Callable[..., Tensor]]:
    """Yield an operator that takes both forms of an operand, as that of a linear does."""
    library = torch.library.Library("traced_linears", "FRAGMENT")
    library.define("taken(Tensor x, Tensor x_scales, Tensor x_of_dw, Tensor x_of_dw_scales) -> Tensor")
    torch.library.register_fake("traced_linears::taken", lambda x, *others: x.new_empty(1), lib=library)
    yield torch.ops.traced_linears.taken.default
    library._destroy()


@pytest.mark.parametrize("recipe_name", ["tensorwise", "rowwise"])
def test_inductor_moves_the_bytes_that_are_counted(
    recipe_name: str, taken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the copies to transposes, which are no part of a graph, and scalars."""
    found = []

    def count(scheduler: Scheduler) -> None:
        found.append(sum(node.get_read_write_buffers_sizes() for node in scheduler.nodes if not node.is_extern()))
        raise Counted

    monkeypatch.setattr(Scheduler, "codegen", count)
    recipe, e4m3 = RECIPES[recipe_name], torch.float8_e4m3fn
    made_by = TraceableFp8(recipe.x, e4m3, e4m3, recipe.has_powers, False, recipe.scale_bytes)
    (first, second, _), _ = QuantizedMatmul(recipe, NO_AXES, Mesh((), 0), M, K, K).quantizations()
    torch._dynamo.reset()
    with pytest.raises(InductorError, match="Counted"):
        torch.compile(lambda t: taken(*made_by.x(t)))(torch.ones(M, K, dtype=torch.bfloat16))
    assert [traced_bytes(first, second, recipe, 2) - 2 * M * K] == pytest.approx(found, rel=0.01)
