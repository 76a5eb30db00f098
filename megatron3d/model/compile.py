"""torch.compile for blocks of a model, with every failure said aloud: what cannot be compiled runs as it is.

    one graph for all blocks of one kind;  a part that communicates is left out, and the graph is broken around it

A graph that the compiler fails on runs uncompiled, in place: nothing before it is done twice, since that may have been
a collective.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

Graph = Callable[..., Any]
Backend = Callable[[fx.GraphModule, Sequence[Tensor]], Graph]


def inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
    """torch's own compiler, forward and backward at once, so that both fail here or not at all."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(force_non_lazy_backward_lowering=True):
        return cast(Graph, compile_fx(graph, inputs))


class Compiler:
    """Compiles the blocks of one model.

    Args:
        rank: every rank says that it does not compile, rank 0 also why.
        is_opaque: whether a module inside a block stays out of its graph, as one must that communicates, or whose
            Python is different at every step.

    Attributes:
        num_graphs: graphs compiled so far.
        failures: what was said, one for each reason.
    """

    def __init__(
        self, rank: int = 0, is_opaque: Callable[[nn.Module], bool] = lambda module: False, backend: Backend = inductor
    ) -> None:
        self._rank, self._is_opaque = rank, is_opaque
        self._compile = backend
        self._opaque_classes: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {}
        self.num_graphs, self.failures = 0, list[str]()

    def block(self, block: nn.Module) -> nn.Module:
        """Return the module so that its first call compiles it; paths and parameters stay."""
        import torch._dynamo.config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        torch._dynamo.config.fail_on_recompile_limit_hit = True  # where it would go on uncompiled with a mere warning
        for module in block.modules():
            _compute_cached(module)
        self._replace_opaque(block)
        eager, compiled = block.forward, torch.compile(block.forward, backend=self._backend)

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._say(error)
                block.forward = eager
            return eager(*args, **kwargs)

        block.forward = forward
        return block

    def _replace_opaque(self, parent: nn.Module) -> None:
        """Replace each opaque child by its twin that the compiler leaves out of the graph."""
        for name, child in parent.named_children():
            self._replace_opaque(child)
            if self._is_opaque(child):
                parent.register_module(name, self._opaque_class(type(child))(child))

    def _opaque_class(self, plain: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
        """Return one class for all modules alike: a function per module would ask for a graph per module.

        Its instances share parameters, children, hooks and all other state with the module they are made from.
        """
        if plain not in self._opaque_classes:

            def __init__(self: nn.Module, module: nn.Module) -> None:
                vars(self).update(vars(module))

            members = {"__init__": __init__, "forward": torch.compiler.disable(plain.forward)}
            self._opaque_classes[plain] = type(plain.__name__, (plain,), members)
        return self._opaque_classes[plain]

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        kept = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        try:
            compiled = self._compile(graph, inputs)
        except Exception as error:  # whatever a compiler may raise: the reason is said, and the run goes on
            self._say(error)
            return kept
        self.num_graphs += 1
        return compiled

    def _say(self, error: Exception) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        if reason not in self.failures:
            self.failures.append(reason)
            why = f" ({reason})" if self._rank == 0 else ""
            text = f"WARNING: rank {self._rank}: train.compile: a part of a layer is not compiled and runs slower{why}"
            print(text, flush=True)


def _compute_cached(module: nn.Module) -> None:
    """Have the cached properties of what a module holds: up to Python 3.11 computing one breaks the graph for good."""
    for held in vars(module).values():
        for name in dir(type(held)):
            if isinstance(inspect.getattr_static(type(held), name), cached_property):
                getattr(held, name)
