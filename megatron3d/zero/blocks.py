"""When a block's parameters must be whole: before its forward, and before its backward where that needs them.

The network does not know: hooks on modules and on the tensors between them say when.  Where parameters are shared out,
the next block is gathered under this one, and this one is forgotten when it is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron3d.zero.flat import Block


class Shards(Protocol):
    """What makes the parameters of a block whole."""

    def unshard(self, path: str) -> None:
        """Begin to."""
        ...

    def wait(self, path: str) -> None:
        """Wait until they are."""
        ...

    def reshard(self, path: str) -> None:
        """Forget them."""
        ...


def watch_blocks(shards: Shards, blocks: Sequence[Block]) -> None:
    """Install the hooks of all blocks, in the order of the forward pass."""
    for index, block in enumerate(blocks):
        after = blocks[index + 1] if index + 1 < len(blocks) else None
        before = blocks[index - 1] if index else None
        under_forward = after if after and after.stage == block.stage else None
        under_backward = before if before and before.stage == block.stage and before.in_backward else None
        _watch(shards, block, under_forward, under_backward)


def _watch(shards: Shards, block: Block, under_forward: Block | None, under_backward: Block | None) -> None:
    passing_back: set[str] = set()

    def use(neighbour: Block | None) -> None:
        shards.unshard(block.path)
        shards.wait(block.path)
        if neighbour:
            shards.unshard(neighbour.path)

    def before_backward(_: Tensor) -> None:
        passing_back.add(block.path)
        use(under_backward)

    def after_backward(_: Tensor) -> None:
        passing_back.discard(block.path)
        shards.reshard(block.path)

    def before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
        use(under_forward)
        x = next((arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad), None)
        if block.in_backward and x is not None and torch.is_grad_enabled():
            x.register_hook(after_backward)

    def after_forward(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if block.in_backward and torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(before_backward)
        if not passing_back:  # else this is a forward that backward repeats
            shards.reshard(block.path)

    block.module.register_forward_pre_hook(before_forward)
    block.module.register_forward_hook(after_forward)
