"""Fact: compiled layers compute the uncompiled values, with one graph per kind of layer.

A layer that cannot be compiled ends the run with the reason and a way out.  Weight gradients accumulate in main_grad.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron3d.attention.rotary import rotate
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.linear.main_grad import MainGrads
from megatron3d.model.compile import MAX_GRAPHS, Backend, Compiler, Graph
from megatron3d.model.layers import Attention, Layer
from megatron3d.model.microbatch import Pass
from megatron3d.model.modules import Linear
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.verify.layouts import differences, trace
from tests.support.pool import Pool
from tests.support.shards import normal

# torch's tracer and compiler emit warnings about themselves, which they hide only where warnings are not errors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")


class Inner(nn.Module):
    """Module whose Python code cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.compiler.is_compiling(), "this was to stay out of the graph"
        return x * self.weight


class Facts:
    """Object with a cached property, which has a lock up to Python 3.11."""

    @cached_property
    def one(self) -> int:
        return 1


class Block(nn.Module):
    """Two linears with a module between them."""

    def __init__(self, seed: int, inner: type[nn.Module]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(12, 4, generator=generator, dtype=torch.float64))
        self.inner, self.facts = inner(), Facts()

    def forward(self, x: Tensor, power: str = "1") -> Tensor:
        y: Tensor = self.inner(F.gelu(x @ self.up.T)) @ self.up + x * int(power) * self.facts.one
        return y


def run(blocks: Sequence[nn.Module], *args: Any) -> list[Tensor]:
    """Return output and gradients."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    y = x
    for block in blocks:
        y = block(y, *args)
    y.square().sum().backward()
    params = [p for block in blocks for p in block.parameters()]
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    return [t for t in (y.detach(), x.grad, *grads) if t is not None]


def agree(compiled: Sequence[nn.Module], eager: Sequence[nn.Module], *args: Any) -> None:
    for a, b in zip(run(compiled, *args), run(eager, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def build(compiler: Compiler, inner: type[nn.Module] = Inner) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return three compiled blocks, and the same blocks uncompiled."""
    compiled, eager = ([Block(seed, inner) for seed in range(3)] for _ in range(2))
    blocks = [compiler.block(block) for block in compiled]
    assert all(a is b for a, b in zip(blocks, compiled, strict=True))
    return blocks, eager  # type: ignore[return-value]


def is_inner(module: nn.Module) -> bool:
    return isinstance(module, Inner)


def as_it_is(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    return graph


def failing(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    graph.graph.erase_node(next(node for node in graph.graph.nodes if node.op == "output"))
    raise ValueError("no such compiler\n and more of it")


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones_with_one_graph() -> None:
    compiler = Compiler()
    blocks, eager = build(compiler, nn.Identity)
    for _ in range(2):
        agree(blocks, eager)
    assert compiler.num_graphs == 1


def test_recomputation_runs_the_compiled_graph() -> None:
    """The first call must be compiled too: an uncompiled forward saves other tensors than the recomputation."""
    blocks, eager = build(Compiler(backend=as_it_is), nn.Identity)
    repeated = [partial(checkpoint, block, use_reentrant=False) for block in blocks]
    for _ in range(2):
        x, y = (torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_() for _ in range(2))
        for path, t in ((repeated, x), (eager, y)):
            for block in path:
                t = block(t)
            t.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)


def test_an_opaque_module_splits_the_graph_in_two_for_all_layers() -> None:
    compiler = Compiler(is_opaque=is_inner, backend=as_it_is)
    blocks, eager = build(compiler)
    for _ in range(2):
        agree(blocks, eager)
    assert compiler.num_graphs == 2
    assert [name for name, _ in blocks[0].named_parameters()] == ["up", "inner.weight"]
    assert all(isinstance(block.inner, Inner) for block in blocks)


def refused(compiler: Compiler, inner: type[nn.Module] = Inner, *args: Any) -> str:
    """Return the message of a block that cannot be compiled; it must fail before anything is computed."""
    blocks, _ = build(compiler, inner)
    with pytest.raises(UserError, match=r"a layer cannot be compiled .* use train.compile=false") as found:
        run(blocks, *args)
    assert all(param.grad is None for block in blocks for param in block.parameters())
    return str(found.value)


def test_a_graph_that_fails_to_compile_ends_the_run_with_the_reason() -> None:
    """Would catch a silent fallback to eager execution."""
    compiler = Compiler(is_inner, failing)
    assert "(ValueError: no such compiler)" in refused(compiler) and compiler.num_graphs == 0


def test_a_missing_cpp_compiler_is_named() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        message = refused(Compiler(), nn.Identity)
    assert "no-such-compiler" in message and "install what torch.compile needs (a C++ compiler" in message


def test_a_module_that_cannot_be_traced_is_an_error_where_none_is_opaque() -> None:
    """Would catch a graph break that nobody sees."""
    assert "Unsupported" in refused(Compiler(backend=as_it_is), Untraceable)


def test_a_layer_that_recompiles_endlessly_ends_the_run() -> None:
    blocks, _ = build(Compiler(is_inner, as_it_is))
    with pytest.raises(UserError, match=r"FailOnRecompileLimitHit.* use train.compile=false"):
        for power in range(MAX_GRAPHS + 2):
            run(blocks, str(power))


class Untraceable(nn.Module):
    """Module that breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


def states(rank: int, world_size: int, backend: Backend, **model: Any) -> tuple[TrainState, TrainState, Compiler]:
    """Return a small GPT uncompiled, and the same one with compiled layers."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, **model}
    config = Config.model_validate(
        {
            "model": sizes,
            "parallel": {"tensor_model_parallel_size": world_size, "tensor_parallel_mode": "1d"},
            "train": {"global_batch_size": 16},
        }
    )
    spec = RunSpec(config, world_size, 61, rank)
    comm = connect(spec)
    plain, compiled = (build_state(spec, comm, torch.device("cpu")) for _ in range(2))
    compiler = Compiler(lambda module: isinstance(module, Linear), backend)
    for layer in compiled.model.layers.values():
        compiler.block(layer)
    return plain, compiled, compiler


def same_step(plain: TrainState, compiled: TrainState, tokens: Tensor, num_passes: int = 2) -> None:
    """Return loss and gradients of both models."""
    results = []
    for state in (plain, compiled):
        passes = [state.model.begin(tokens, tokens.numel()) for _ in range(num_passes)]
        state.buffers.begin_step(num_passes)
        loss = state.executor.train(passes, state.buffers.check_stage)
        state.buffers.reduce_grads()
        results.append((loss, *(flat.grad.clone() for flat in state.buffers.flat_buffers)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def communicating(rank: int, world_size: int, tokens: Tensor) -> None:
    """Compare a GPT on two tensor-parallel ranks, compiled and uncompiled."""
    plain, compiled, compiler = states(rank, world_size, as_it_is)
    same_step(plain, compiled, tokens)
    assert compiler.num_graphs > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_growing_sequences_and_batches_recompile_once(family: str) -> None:
    """The second length compiles graphs for any length, which other lengths and full-length evaluations share."""
    plain, compiled, compiler = states(0, 1, as_it_is, family=family, seq_length=64)
    tokens = torch.randint(0, 61, (2, 65), generator=torch.Generator().manual_seed(1))
    num_graphs = []
    for step, length in enumerate(range(4, 65, 12)):
        same_step(plain, compiled, tokens[:, : length + 1], num_passes=1 + step)
        num_graphs.append(compiler.num_graphs)
    assert num_graphs[1] == num_graphs[-1] <= 2 * num_graphs[0]


def test_models_of_one_process_are_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine models of other sizes, as a GPU's tests and benchmarks have: each has static sizes and few graphs.

    Would catch graphs of earlier models, which count towards torch's limit of graphs and make sizes symbolic.
    """
    found = list[list[str]]()

    def static(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
        found[-1].append(" ".join(str(x.shape if isinstance(x, Tensor) else x) for x in inputs))
        assert all(isinstance(x, Tensor) and all(type(n) is int for n in x.shape) for x in inputs), found[-1]
        return graph

    monkeypatch.setattr("megatron3d.train.state.Compiler", partial(Compiler, backend=static))
    train = {"global_batch_size": 2, "micro_batch_size": 1, "precision": "fp64", "compile": True}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(1, 10):
            found.append([])
            sizes = {
                "num_layers": 2,
                "hidden_size": 16 * number,
                "num_attention_heads": 4,
                "seq_length": 4 + 2 * number,
            }
            model = {**sizes, "family": ("gpt2", "llama")[number % 2]}
            spec = RunSpec(Config.model_validate({"model": model, "train": train}), 1, 61, 0)
            trace(spec, connect(spec), 3)
    assert [len(graphs) for graphs in found] == [2] * 9, "a graph for training, and one for evaluation"
    assert [str(each.message) for each in said] == []


def test_modules_that_communicate_stay_out_of_the_graphs(pool: Pool) -> None:
    pool.run(communicating, 2, torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(1)))


@pytest.mark.slow
def test_a_backward_that_fails_to_compile_ends_the_run_in_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as module
    from torch._inductor import config

    inner = module.compile_fx_inner

    def forward_only(*args: Any, is_backward: bool = False, **kwargs: Any) -> Any:
        if is_backward:
            raise ValueError("no backward")
        return inner(*args, is_backward=is_backward, **kwargs)

    monkeypatch.setattr(module, "compile_fx", partial(module.compile_fx, inner_compile=forward_only))
    with config.patch(force_disable_caches=True):
        assert "(ValueError: no backward)" in refused(Compiler(), nn.Identity)


def trained(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, compiles: bool, **config: Any
) -> tuple[list[Tensor], int]:
    """Return loss and main_grads of two microbatches of a GPT, and the number of graphs."""
    compilers: list[Compiler] = []

    def make(is_opaque_one: Callable[[nn.Module], bool], has_one_length: bool) -> Compiler:
        compilers.append(Compiler(is_opaque_one, backend, has_one_length))
        return compilers[-1]

    monkeypatch.setattr("megatron3d.train.state.Compiler", make)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}
    model = sizes | {"family": config["family"]}
    train = {"global_batch_size": 4, "micro_batch_size": 2, "precision": config["precision"], "compile": compiles}
    spec = RunSpec(Config.model_validate({"model": model, "train": train}), 1, 61, 0)
    state = build_state(spec, connect(spec), torch.device("cpu"))
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    state.buffers.begin_step(2)
    loss = state.executor.train([state.model.begin(tokens, tokens.numel())] * 2, state.buffers.check_stage)
    state.buffers.reduce_grads()
    return [loss, *(flat.grad for flat in state.buffers.flat_buffers)], sum(each.num_graphs for each in compilers)


def as_autograd_differentiates(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
    """Split forward and backward as Inductor does, but run both as they are."""
    from torch._dynamo.backends.common import aot_autograd

    found: Graph = aot_autograd(fw_compiler=lambda graph, inputs: graph)(graph, inputs)
    return found


def as_inductor_divides(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
    """Choose what forward keeps for backward as Inductor does, but run both as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    compile_graph = aot_autograd(
        fw_compiler=lambda graph, inputs: graph, partition_fn=min_cut_rematerialization_partition
    )
    found: Graph = compile_graph(graph, inputs)
    return found


def noted(saved: list[Tensor], t: Tensor) -> Tensor:
    saved.append(t)
    return t


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_recomputed_activation_is_part_of_the_graph(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch an MLP that runs eagerly, and an output of the activation that the graph keeps for backward."""
    compilers: list[Compiler] = []

    def make(is_opaque_one: Callable[[nn.Module], bool], has_one_length: bool) -> Compiler:
        compilers.append(Compiler(is_opaque_one, as_inductor_divides, has_one_length))
        return compilers[-1]

    monkeypatch.setattr("megatron3d.train.state.Compiler", make)
    model = {"family": "llama", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}
    model |= {"ffn_hidden_size": 40, "activation": activation}
    results, kept = [], []
    for compiles, modules in ((False, ["mlp_act"]), (True, ["mlp_act"]), (True, None)):
        train = {"global_batch_size": 1, "micro_batch_size": 1, "precision": "fp64", "compile": compiles}
        if modules:
            train |= {"recompute_granularity": "selective", "recompute_modules": modules}
        spec = RunSpec(Config.model_validate({"model": model, "train": train}), 1, 61, 0)
        state = build_state(spec, connect(spec), torch.device("cpu"))
        at = state.model.begin(torch.zeros(1, 9, dtype=torch.int64), 8)
        state.buffers.begin_step(1)
        x_MH, saved = normal(8, 16, seed=1).requires_grad_(), list[Tensor]()
        with saved_tensors_hooks(partial(noted, saved), lambda t: t):
            y_MH = state.model.layers["0"](x_MH, at)
        y_MH.backward(normal(8, 16, seed=2))
        kept.append(len({t.data_ptr() for t in saved if t.shape == (8, 40)}))
        results.append((y_MH, x_MH.grad, *(flat.grad for flat in state.buffers.flat_buffers)))
    assert [each.num_graphs for each in compilers] == [1, 1]
    assert kept[2] == kept[1] + 1, "without recomputation also the output of the activation"
    for compiled in results[1:]:
        for a, b in zip(compiled, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("modules", [None, ["mlp_act"]])
def test_the_activation_of_an_opaque_module_is_compiled(
    modules: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts stay out of the graph; their SwiGLU, eager, would move more than twice the bytes."""
    operators = list[str]()

    def noting(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return as_autograd_differentiates(graph, inputs)

    monkeypatch.setattr("megatron3d.train.state.Compiler", partial(Compiler, backend=noting))
    model = {"family": "llama", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}
    model |= {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 8,
    }
    train = {"global_batch_size": 2, "micro_batch_size": 1, "precision": "fp64"}
    if modules:
        train |= {"recompute_granularity": "selective", "recompute_modules": modules}
    sections = [{"model": model, "train": {**train, "compile": compiles}} for compiles in (False, True)]
    specs = [RunSpec(Config.model_validate(each), 1, 61, 0) for each in sections]
    eager, compiled = (trace(spec, connect(spec), 3) for spec in specs)
    assert eager is not None and compiled is not None, "one process is rank 0"
    assert any("silu" in each for each in operators)
    assert list(differences(eager, compiled, 1e-12)) == []


@pytest.mark.parametrize(
    ("model", "data", "train"),
    [
        ({"window_size": [3, 0]}, {}, {}),
        ({"attention_softcap": 5.0, "rotary_interleaved": True}, {}, {}),
        ({"softmax_type": "learnable", "rotary_percent": 0.5}, {}, {"precision": "bf16"}),
        ({}, {"reset_attention_mask": True}, {"recompute_granularity": "selective"}),
    ],
    ids=["window", "softcap", "sinks, bf16", "documents, recomputed"],
)
def test_the_rotary_embedding_of_eager_attention_is_compiled(
    model: dict[str, Any], data: dict[str, Any], train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, it would be a kernel for each of its operators; it rounds as often, to the dtype of queries and keys."""
    num_runs = [0]

    def counting(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        run, is_rotary = as_autograd_differentiates(graph, inputs), "neg" in str(graph.graph)

        def counted(*args: Any) -> Any:
            num_runs[0] += is_rotary
            return run(*args)

        return counted

    monkeypatch.setattr("megatron3d.train.state.Compiler", partial(Compiler, backend=counting))
    sizes = {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
    train = {"global_batch_size": 2, "micro_batch_size": 1, "precision": "fp64"} | train
    sections = [{"model": sizes | model, "data": data, "train": {**train, "compile": each}} for each in (False, True)]
    specs = [RunSpec(Config.model_validate(each), 1, 61, 0) for each in sections]
    eager, compiled = (trace(spec, connect(spec), 3) for spec in specs)
    assert eager is not None and compiled is not None, "one process is rank 0"
    assert num_runs[0] >= 2 * 2 * 3 * 2, "of queries and keys, in each layer, step and microbatch"
    assert list(differences(eager, compiled, 1e-12)) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rotary_interleaved": True}, {"rotary_percent": 0.5}], ids=str)
def test_inductor_rotates_as_eager_execution_does(options: dict[str, Any]) -> None:
    """Forward in bf16 rounds once, and backward as often as autograd, at several batches and numbers of heads."""
    layer, at, _ = one_layer("llama", True, window_size=[3, 0], **options)
    attention = layer.attention
    assert isinstance(attention, Attention) and attention.rotate is not rotate
    cos, sin = at.rotary[0]
    for batch, heads in ((2, 4), (3, 2)):
        x = normal(batch * 8, heads * 4, seed=heads).view(batch, 8, heads, 4).bfloat16()
        results = []
        for function, wide in ((rotate, torch.float64), (rotate, torch.float32), (attention.rotate, torch.float32)):
            mine = x.to(wide if wide == torch.float64 else x.dtype).detach().requires_grad_()
            y = function(mine, (cos.to(wide), sin.to(wide)), attention.interleaves)
            y.backward(x.flip(0).to(y.dtype))
            assert mine.grad is not None
            results.append((y.detach(), mine.grad))
        torch.testing.assert_close(results[2][0].double(), results[0][0], rtol=2**-8, atol=1e-6)
        for exact, eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=0, atol=2**-7 * float(exact.abs().max()))


@pytest.mark.parametrize(("family", "precision"), [("gpt2", "fp64"), ("gpt2", "bf16"), ("llama", "fp32")])
def test_layers_are_one_graph_whose_weight_gradients_accumulate_in_main_grad(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch dW that goes back to autograd, a linear that takes another's number, and a graph per layer."""
    accumulate, num_accumulated = MainGrads.accumulate, [0, 0]

    def counted(self: MainGrads, param: Tensor, *operands: Any) -> bool:
        num_accumulated[-1] += 1
        return accumulate(self, param, *operands)

    monkeypatch.setattr(MainGrads, "accumulate", counted)
    eager, _ = trained(monkeypatch, as_it_is, False, family=family, precision=precision)
    num_accumulated.append(0)
    compiled, num_graphs = trained(monkeypatch, as_autograd_differentiates, True, family=family, precision=precision)
    assert num_graphs == 1
    assert num_accumulated[-1] == num_accumulated[-2] == 2 * 2 * 4, "layers x microbatches x linears"
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def one_layer(family: str, compiles: bool, **options: Any) -> tuple[Layer, Pass, Tensor]:
    """Return a layer, compiled by Inductor or not, and its arguments."""
    model = {"family": family, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8} | options
    train = {"global_batch_size": 1, "micro_batch_size": 1, "precision": "fp64", "compile": compiles}
    spec = RunSpec(Config.model_validate({"model": model, "train": train}), 1, 61, 0)
    state = build_state(spec, connect(spec), torch.device("cpu"))
    at = state.model.begin(torch.zeros(1, 9, dtype=torch.int64), 8)
    state.buffers.begin_step(10)
    layer = state.model.layers["0"]
    assert isinstance(layer, Layer), "layers are layers"
    return layer, at, torch.ones(8, 16, dtype=torch.float64).requires_grad_()


class KernelCounter(TorchDispatchMode):
    """Counts kernels of eager execution between GEMMs and attention: operators that return no view.

    Copies to main_grad are left out, which are outside compiled graphs as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = str(func), func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        others = ("mm", "attention", "linear_pointwise", "empty", "detach", "_unsafe_view", "copy_")
        self.num_kernels += not is_view and not any(other in name for other in others)
        return func(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "least", "most"), [("gpt2", 16, 9), ("llama", 60, 14)])
def test_a_compiled_layer_has_few_kernels_between_its_gemms(
    family: str, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch an operator that splits the fused kernels: forward and backward, of an fp64 layer."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    sources, counts = list[str](), []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    for compiles in (False, True):
        layer, at, x_MH = one_layer(family, compiles)
        counter = KernelCounter()
        with config.patch(force_disable_caches=True), nullcontext() if compiles else counter:
            y_MH = layer(x_MH, at)
            y_MH.backward(torch.ones_like(y_MH))
        calls = [re.findall(r"^ +(cpp_fused_\w+)\(", source, re.M) for source in sources]
        counts.append(sum(map(len, calls)) if compiles else counter.num_kernels)
    assert counts[0] >= least and counts[1] <= most, f"{counts[0]} kernels, compiled {counts[1]}"


def test_an_mlp_that_is_recomputed_as_a_whole_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer is compiled around it, and computes what an eager layer does."""
    monkeypatch.setattr("megatron3d.train.state.Compiler", partial(Compiler, backend=as_autograd_differentiates))
    model = {"family": "llama", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}
    train = {"global_batch_size": 2, "micro_batch_size": 1, "precision": "fp64"}
    train |= {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    sections = [{"model": model, "train": {**train, "compile": compiles}} for compiles in (False, True)]
    specs = [RunSpec(Config.model_validate(each), 1, 61, 0) for each in sections]
    eager, compiled = (trace(spec, connect(spec), 3) for spec in specs)
    assert eager is not None and compiled is not None, "one process is rank 0"
    assert list(differences(eager, compiled, 1e-12)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "precision", "stores"),
    [("blockwise", "bf16", False), ("blockwise", "bf16", True), ("mxfp8", "fp32", False), ("tensorwise", "fp64", True)],
)
def test_fp8_linears_quantize_inside_the_graph(
    recipe: str, precision: str, stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands have eager's bits, since losses and gradients are equal; the input of no linear is kept but in fp8.

    Would catch quantization inside the operator, which saves X in the network's dtype and fuses with nothing, and an
    operator whose results have the dtype of weights that are stored in fp8.
    """
    compilers: list[Compiler] = []

    def make(is_opaque_one: Callable[[nn.Module], bool], has_one_length: bool) -> Compiler:
        compilers.append(Compiler(is_opaque_one, as_inductor_divides, has_one_length))
        return compilers[-1]

    monkeypatch.setattr("megatron3d.train.state.Compiler", make)
    model = {"family": "llama", "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "seq_length": 128}
    model |= {"ffn_hidden_size": 256}
    results, kept = [], list[Tensor]()
    for compiles in (False, True):
        train = {"global_batch_size": 2, "micro_batch_size": 1, "precision": precision, "compile": compiles}
        train |= {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": stores}
        spec = RunSpec(Config.model_validate({"model": model, "train": train}), 1, 61, 0)
        state = build_state(spec, connect(spec), torch.device("cpu"))
        tokens = torch.randint(0, 61, (1, 129), generator=torch.Generator().manual_seed(1))
        kept.clear()
        state.buffers.begin_step(2)
        with saved_tensors_hooks(partial(noted, kept), lambda t: t):
            loss = state.executor.train([state.model.begin(tokens, tokens.numel())] * 2, state.buffers.check_stage)
        state.buffers.reduce_grads()
        flats = state.buffers.flat_buffers
        with torch.no_grad():
            x_MH, at = normal(128, 128, seed=1).to(flats[0].params.dtype), state.model.begin(tokens, tokens.numel())
            evaluated = state.model.layers["0"](x_MH, at)
        results.append((loss, evaluated, *(flat.grad for flat in flats)))
    assert all(map(torch.equal, *results))
    assert [each.num_graphs for each in compilers] == [2], "a graph for training, and one for evaluation"
    weights = {param.data_ptr() for param in state.model.parameters()}
    in_fp8 = [t.shape for t in kept if t.dtype == torch.float8_e4m3fn and t.data_ptr() not in weights]
    assert len(in_fp8) == 2 * 2 * 4 and in_fp8.count(torch.Size((256, 128))) == 2 * 2, "per microbatch and layer"
