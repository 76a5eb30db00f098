"""torch.compile for the layers of a model; what cannot be compiled ends the run with the reason and a way out.

    one graph for all layers of one kind;  a module that communicates stays eager, but for some functions, and splits it

No part falls back to eager execution: a run would be slower, for days, than its configuration says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from megatron3d.errors import UserError

Graph = Callable[..., Any]
Backend = Callable[[fx.GraphModule, Sequence[Tensor]], Graph]
WAY_OUT = (
    "install what torch.compile needs (a C++ compiler such as g++, and Python's headers), or use train.compile=false"
)
# Graphs of one piece of code, of which torch allows 8: a layer has one for each kind and length, trained and evaluated.
MAX_GRAPHS = 64
# Attributes of modules with functions of tensors alone that are worth a kernel of their own.
FUNCTIONS = ("activation", "rotate")


def inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
    """Compile a graph with torch's Inductor, forward and backward at once, so that failures of both are raised here."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(force_non_lazy_backward_lowering=True):
        return cast(Graph, compile_fx(graph, inputs))


def uncompiled() -> AbstractContextManager[None]:
    """Return a context in which compiled layers run eagerly."""
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))


class CompileError(RuntimeError):
    """A graph does not compile; torch takes some exceptions of a backend for a request to run eagerly, not this one."""


class Compiler:
    """Compiles the layers of one model, and forgets what the process has compiled for others.

    torch keeps graphs by the code that they come from, which all models share: those of the model before would count
    towards `MAX_GRAPHS`, and sizes in which the models differ would be symbolic, with slower kernels.

    Args:
        is_opaque: returns whether a module inside a layer stays out of its graph, which is necessary if the module
            communicates or if its Python code depends on the step.
        has_one_length: each length of sequences gets graphs of its own; otherwise the second one compiles graphs for
            all lengths.

    Attributes:
        num_graphs: graphs compiled so far.
    """

    def __init__(
        self,
        is_opaque: Callable[[nn.Module], bool] = lambda module: False,
        backend: Backend = inductor,
        has_one_length: bool = False,
    ) -> None:
        import torch._dynamo.config

        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # the default is a warning and eager execution
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        self._is_opaque, self._compile = is_opaque, backend
        self._dynamic = False if has_one_length else None
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._opaque_classes: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {}
        self.num_graphs = 0

    def block(self, block: nn.Module) -> nn.Module:
        """Make the first call of `block` compile it, and return it with unchanged paths and parameters.

        A call raises UserError if the block cannot be compiled, as one graph where no module in it is opaque.
        """
        for module in block.modules():
            _compute_cached(module)
        is_whole = not any(map(self._is_opaque, block.modules()))
        self._replace_opaque(block)
        block.forward = self._compiled(block.forward, is_whole, self._dynamic)
        return block

    def _compiled(self, function: Callable[..., Any], is_whole: bool, dynamic: bool | None) -> Callable[..., Any]:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        compiled = torch.compile(function, backend=self._backend, fullgraph=is_whole, dynamic=dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                raise UserError(f"train.compile: a layer cannot be compiled ({_reason(error)}): {WAY_OUT}") from error

        return call

    def _replace_opaque(self, parent: nn.Module) -> None:
        """Replace each opaque child by an equivalent module that the compiler leaves out of the graph.

        Its `FUNCTIONS` are compiled by themselves, for any number of rows.
        """
        for name, child in parent.named_children():
            self._replace_opaque(child)
            if self._is_opaque(child):
                opaque = self._opaque_class(type(child))(child)
                parent.register_module(name, opaque)
                for held in map(vars, opaque.modules()):
                    for key in FUNCTIONS:
                        if (plain := held.get(key)) and plain not in self._functions.values():
                            held[key] = self._function(plain)

    def _function(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function, one for all modules that have it."""
        if plain not in self._functions:
            self._functions[plain] = self._compiled(plain, True, True)
        return self._functions[plain]

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
        try:
            compiled = self._compile(graph, inputs)
        except Exception as error:  # a compiler may raise anything
            raise CompileError(_reason(error)) from error
        self.num_graphs += 1
        return compiled


def _reason(error: BaseException) -> str:
    """Return type and first line of an exception; of a failed graph, those of its cause."""
    cause = getattr(error, "inner_exception", None)
    if isinstance(cause, CompileError):
        return str(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def _compute_cached(module: nn.Module) -> None:
    """Evaluate the cached properties of a module's attributes: up to Python 3.11 evaluation in a graph breaks it."""
    for held in vars(module).values():
        for name in dir(type(held)):
            if isinstance(inspect.getattr_static(type(held), name), cached_property):
                getattr(held, name)
