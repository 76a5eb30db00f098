"""Fact: compiled layers compute the uncompiled values, with one graph per kind of layer.

A layer that cannot be compiled runs uncompiled, and the log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.model.compile import Backend, Compiler
from megatron3d.model.layers import Linear
from megatron3d.train.state import TrainState, build_state, connect
from tests.support.pool import Pool

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
    torch._dynamo.reset()
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
    assert compiler.num_graphs == 1 and compiler.failures == []


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
    assert compiler.num_graphs == 2 and compiler.failures == []
    assert [name for name, _ in blocks[0].named_parameters()] == ["up", "inner.weight"]
    assert all(isinstance(block.inner, Inner) for block in blocks)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_graph_that_fails_to_compile_runs_eagerly_with_one_message(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = Compiler(rank, is_inner, failing)
    blocks, eager = build(compiler)
    for _ in range(3):
        agree(blocks, eager)
    assert compiler.num_graphs == 0 and compiler.failures == ["ValueError: no such compiler"]
    why = " (ValueError: no such compiler)" if rank == 0 else ""
    assert capsys.readouterr().out == (
        f"WARNING: rank {rank}: train.compile: a part of a layer is not compiled and runs slower{why}\n"
    )


def test_a_missing_cpp_compiler_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    from torch._inductor import config

    compiler = Compiler()
    blocks, eager = build(compiler, nn.Identity)
    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        agree(blocks, eager)
    assert compiler.num_graphs == 0
    assert "no-such-compiler" in capsys.readouterr().out


def test_a_layer_that_recompiles_endlessly_continues_uncompiled_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler = Compiler(is_opaque=is_inner, backend=as_it_is)
    blocks, eager = build(compiler)
    for power in range(20):
        agree(blocks, eager, str(power))
    assert len(compiler.failures) == 1 and "FailOnRecompileLimitHit" in compiler.failures[0]
    assert capsys.readouterr().out.count("WARNING") == 1


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
    torch._dynamo.reset()
    spec = RunSpec(config, world_size, 61, rank)
    comm = connect(spec)
    plain, compiled = (build_state(spec, comm, torch.device("cpu")) for _ in range(2))
    compiler = Compiler(rank, lambda module: isinstance(module, Linear), backend)
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
    assert compiler.num_graphs > 0 and compiler.failures == []


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
    assert num_graphs[1] == num_graphs[-1] <= 2 * num_graphs[0] and compiler.failures == []


def test_modules_that_communicate_stay_out_of_the_graphs(pool: Pool) -> None:
    pool.run(communicating, 2, torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(1)))


@pytest.mark.slow
def test_a_backward_that_fails_to_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure occurs while forward is compiled, not during a training step."""
    from torch._inductor import compile_fx as module
    from torch._inductor import config

    inner = module.compile_fx_inner

    def forward_only(*args: Any, is_backward: bool = False, **kwargs: Any) -> Any:
        if is_backward:
            raise ValueError("no backward")
        return inner(*args, is_backward=is_backward, **kwargs)

    monkeypatch.setattr(module, "compile_fx", partial(module.compile_fx, inner_compile=forward_only))
    compiler = Compiler()
    blocks, eager = build(compiler, nn.Identity)
    with config.patch(force_disable_caches=True):
        agree(blocks, eager)
    assert compiler.num_graphs == 0
    assert compiler.failures == ["ValueError: no backward"]
