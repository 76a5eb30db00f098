"""When a block's parameters must be whole: before its forward, and before its backward where that needs them.

    forward    embedding | layer 0 | layer 1 | norm, head |  layer 1 | layer 0     backward
    gathered   layer 0   | layer 1 | norm    | layer 1    |  layer 0               under it

The network does not know: hooks on modules and on the tensors between them say when.  Where parameters are shared out,
what is used next is gathered under a block, and what is through is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron3d.zero.flat_buffer import Block

# Backward begins with a norm, which is too short to gather a layer under it.
BLOCKS_UNDER_HEAD = 2


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


class Turn(NamedTuple):
    """A block, its neighbours in its stage, and what backward begins with if that comes right after this block."""

    block: Block
    before: Sequence[Block]
    after: Sequence[Block]
    backward: Sequence[Block]


def wait_for_blocks(shards: Shards, blocks: Sequence[Block]) -> None:
    """Have each block wait for its parameters, which are gathered once a step and stay."""
    for block in blocks:
        block.module.register_forward_pre_hook(lambda *_, path=block.path: shards.wait(path))


def watch_blocks(shards: Shards, blocks: Sequence[Block]) -> None:
    """Have each block gathered when it is needed, and forgotten after."""
    passing_back: set[str] = set()
    for turn in _turns(blocks):
        _watch_forward(shards, turn, passing_back)
        if turn.block.in_backward:
            _watch_backward(shards, turn, passing_back)


def _turns(blocks: Sequence[Block]) -> Iterator[Turn]:
    for stage in dict.fromkeys(block.stage for block in blocks):
        mine = [block for block in blocks if block.stage == stage]
        in_backward = [block for block in mine if block.in_backward]
        for index, block in enumerate(mine):
            is_head = block is mine[-1] and not block.in_backward
            before, after = mine[max(index - 1, 0) : index], mine[index + 1 : index + 2]
            yield Turn(
                block,
                [other for other in before if other.in_backward],
                after,
                in_backward[::-1][:BLOCKS_UNDER_HEAD] if is_head else [],
            )


def _use(shards: Shards, block: Block, following: Sequence[Block]) -> None:
    shards.unshard(block.path)
    shards.wait(block.path)
    for other in following:
        shards.unshard(other.path)


def _watch_forward(shards: Shards, turn: Turn, passing_back: set[str]) -> None:
    path = turn.block.path

    def before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
        is_repeated = path in passing_back
        backward = turn.backward if torch.is_grad_enabled() else []
        _use(shards, turn.block, [] if is_repeated else [*turn.after, *backward])

    def after_forward(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if path not in passing_back:  # else backward repeats this forward, and goes on with the block
            shards.reshard(path)

    turn.block.module.register_forward_pre_hook(before_forward)
    turn.block.module.register_forward_hook(after_forward)


def _watch_backward(shards: Shards, turn: Turn, passing_back: set[str]) -> None:
    path = turn.block.path

    def after_backward(path: str) -> None:
        passing_back.discard(path)
        shards.reshard(path)

    def before_backward(_: Tensor) -> None:
        for through in turn.after:
            after_backward(through.path)
        passing_back.add(path)
        _use(shards, turn.block, turn.before)

    def hook_y(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(before_backward)

    def hook_x(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = next((arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad), None)
        if x is not None and torch.is_grad_enabled():
            x.register_hook(lambda _: after_backward(path))

    turn.block.module.register_forward_hook(hook_y)
    if not turn.before:
        turn.block.module.register_forward_pre_hook(hook_x)
