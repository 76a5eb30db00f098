"""torch.compile for blocks of a model: every failure prints a warning, and what failed to compile runs eagerly.

    one graph for all blocks of one kind;  a module that communicates stays eager and breaks the graph

A graph that fails to compile runs eagerly in its place.  Nothing before it runs twice, since that may have been a
collective.
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
    """Compile a graph with torch's Inductor, forward and backward at once, so that failures of both are raised here."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(force_non_lazy_backward_lowering=True):
        return cast(Graph, compile_fx(graph, inputs))


class Compiler:
    """Compiles the blocks of one model.

    Args:
        rank: rank in the warnings; every rank prints that a part is not compiled, and rank 0 also prints the reason.
        is_opaque: returns whether a module inside a block stays out of its graph, which is necessary if the module
            communicates or if its Python code depends on the step.

    Attributes:
        num_graphs: graphs compiled so far.
        failures: the distinct reasons of failed compilations.
    """

    def __init__(
        self, rank: int = 0, is_opaque: Callable[[nn.Module], bool] = lambda module: False, backend: Backend = inductor
    ) -> None:
        self._rank, self._is_opaque = rank, is_opaque
        self._compile = backend
        self._opaque_classes: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {}
        self.num_graphs, self.failures = 0, list[str]()

    def block(self, block: nn.Module) -> nn.Module:
        """Make the first call of `block` compile it, and return it with unchanged paths and parameters."""
        import torch._dynamo.config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        torch._dynamo.config.fail_on_recompile_limit_hit = True  # the default is a warning and eager execution
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
        """Replace each opaque child by an equivalent module that the compiler leaves out of the graph."""
        for name, child in parent.named_children():
            self._replace_opaque(child)
            if self._is_opaque(child):
                parent.register_module(name, self._opaque_class(type(child))(child))

    def _opaque_class(self, plain: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
        """Return a subclass of `plain` whose forward is never compiled.

        All modules of one class get the same subclass, since a function per module would need a graph per module.  An
        instance shares parameters, children, hooks and all other state with the module that it is made from.
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
        except Exception as error:  # a compiler may raise anything; the run continues eagerly
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
    """Evaluate the cached properties of a module's attributes: up to Python 3.11 evaluation in a graph breaks it."""
    for held in vars(module).values():
        for name in dir(type(held)):
            if isinstance(inspect.getattr_static(type(held), name), cached_property):
                getattr(held, name)
