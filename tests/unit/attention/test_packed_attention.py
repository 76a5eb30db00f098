"""Fact: attention by pairs of rows equals attention under a dense mask, forward and backward, in memory linear in S."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron3d.attention import packed as module
from megatron3d.attention.packed import ByPairs, VariableLength, Visible, document_bounds, packed_attention
from megatron3d.attention.pairs import CPU, PLAIN
from megatron3d.attention.plan import pairs_of_sequence
from tests.support.flash_attention import stand_in
from tests.support.shards import error, normal

NUM_HEADS, SIZE = 4, 8
Inputs = tuple[Tensor, Tensor, Tensor]


def projections(batch: int, seq: int, num_groups: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Return q, k and v [B, heads, S, D] as views of [B, S, heads, D], as the model has them."""
    q, k, v = (
        normal(batch, seq, n, SIZE, seed=seed).to(dtype).requires_grad_().transpose(1, 2)
        for seed, n in enumerate((NUM_HEADS, num_groups, num_groups))
    )
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Return attention under a mask [B, S, S] that is written down pair by pair."""
    batch, seq = q.shape[0], q.shape[2]
    document = torch.zeros(batch, seq, dtype=torch.long)
    for row, starts in enumerate(visible.starts or ()):
        for start in starts:
            document[row, start:] += 1
    at = torch.arange(seq)
    see = (at[:, None] >= at) & (at[:, None] - at < (visible.window or seq))
    see = see & (document[:, :, None] == document[:, None, :])
    return F.scaled_dot_product_attention(q, k, v, see.unsqueeze(1), enable_gqa=True)


def errors(got: Tensor, expected: Tensor, inputs: Inputs) -> list[float]:
    """Return the errors of the output and of the gradients."""
    dy = normal(*got.shape, seed=9).to(got.dtype)
    pairs = zip(*(torch.autograd.grad(y, inputs, dy) for y in (got, expected)), strict=True)
    return [error(got.detach(), expected.detach()), *((mine - theirs).abs().max().item() for mine, theirs in pairs)]


@given(
    starts=st.none() | st.lists(st.sets(st.integers(1, 39), max_size=5), min_size=3, max_size=3),
    window=st.none() | st.integers(1, 45),
    num_groups=st.sampled_from([1, 2, 4]),
    is_plain=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_pairs_equal_a_dense_mask(
    starts: list[set[int]] | None, window: int | None, num_groups: int, is_plain: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("SHORTEST", 4), ("LONGEST", 7)):
            patch.setattr(f"megatron3d.attention.plan.{name}", size)
        pairs_of_sequence.cache_clear()
        visible = Visible(starts and tuple(tuple(sorted(row)) for row in starts), window)
        inputs = projections(3, 40, num_groups)
        kernel = ByPairs(PLAIN, 5) if is_plain else ByPairs(CPU)
        patch.setattr(module, "KERNELS", [module.KernelChoice("", kernel, lambda q, k: True)])
        got, expected = packed_attention(*inputs, visible), dense(*inputs, visible)
        assert max(errors(got, expected, inputs)) < 1e-12
    pairs_of_sequence.cache_clear()


@pytest.mark.parametrize("window", [None, 300])
def test_long_sequences_equal_a_dense_mask_in_bf16(window: int | None) -> None:
    visible = Visible(((500, 510, 1500), ()), window)
    inputs = projections(2, 2100, 2, torch.bfloat16)
    q, k, v = (t.detach().double().requires_grad_() for t in inputs)
    exact = q, k, v
    got, expected = packed_attention(*inputs, visible), dense(*exact, visible)
    dy = normal(*got.shape, seed=9).bfloat16()
    grads = torch.autograd.grad(got, inputs, dy), torch.autograd.grad(expected, exact, dy.double())
    for mine, theirs in zip((got, *grads[0]), (expected, *grads[1]), strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_what_is_visible() -> None:
    assert Visible(None, 8).within(8) is None and Visible(((), ()), None).within(8) is None
    assert Visible(((), (3,)), 9).within(8) == Visible(((), (3,)), None)
    assert Visible(((), ()), 7).within(8) == Visible(((), ()), 7)
    assert Visible(((2,),), 2).mask(0, range(1, 4), range(4), torch.device("cpu")).tolist() == [
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


class Largest(TorchDispatchMode):
    """Most live bytes of tensors that are created while it is active, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.largest = 0, 0, 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in self._known:
                storage = leaf.untyped_storage()
                size = storage.nbytes()
                self._known[key] = weakref.ref(storage, partial(self._forget, key, size))
                self.live += size
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.live)
        return out

    def _forget(self, key: int, size: int, _: object) -> None:
        self.live -= size
        self._known.pop(key, None)


def test_variable_length_attention_is_attention_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In shapes and in numbers; the bounds of documents go to the device once for all layers, forward and backward."""
    stand_in(monkeypatch)
    inputs, visible = projections(3, 10, 2, torch.float64), Visible(((3, 4), (), (9,)), 5)
    kernels, found = (VariableLength(), ByPairs(PLAIN, 4)), []
    document_bounds.cache_clear()
    for kernel in kernels:
        out, lse = kernel.forward(*inputs, visible)
        found.append((out, lse, *kernel.backward(out.cos(), (*inputs, out, lse), visible)))
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    assert document_bounds.cache_info()[:2] == (1, 1)


@pytest.mark.parametrize("restricted", ["documents", "window"])
def test_memory_is_linear_in_the_sequence_length(restricted: str) -> None:
    peaks = []
    for seq in (2048, 4096):
        documents = ((1, seq // 3, seq // 3 + 5, 2 * seq // 3),)
        visible = Visible(documents) if restricted == "documents" else Visible(None, 64)
        q, k, v = (torch.empty(1, 1, seq, SIZE, requires_grad=True) for _ in range(3))
        with Largest() as seen, torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            packed_attention(q, k, v, visible).sum().backward()
        peaks.append(seen.peak)
        assert seen.largest < 4 * seq * 320, "a tensor as large as the scores"
    assert peaks[1] < 2.2 * peaks[0]


def test_arguments_of_variable_length_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on GPUs; its schema, and what it is given, can be checked anywhere."""
    inputs = projections(2, 10, 2, torch.bfloat16)
    visible = Visible(((3, 4), ()), 5)
    calls = {}

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        calls["forward"] = args, kwargs
        return args[0].clone(), torch.zeros(NUM_HEADS, 20), None, None, None  # type: ignore[return-value]

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        calls["backward"] = args, kwargs
        return args[1].clone(), args[2].clone(), args[3].clone()

    for name, noted in (("forward", forward), ("backward", backward)):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        assert {"window_size_left", "window_size_right"} <= {argument.name for argument in schema.arguments}
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{name}", noted)
    kernel = VariableLength()
    out, lse = kernel.forward(*inputs, visible)
    assert out.shape == inputs[0].shape and torch.equal(out, inputs[0])
    grads = kernel.backward(torch.ones_like(out), (*inputs, out, lse), visible)
    assert all(torch.equal(grad, x) for grad, x in zip(grads, inputs, strict=True))
    for name, num_tensors in (("forward", 3), ("backward", 5)):
        args, kwargs = calls[name]
        assert [tuple(t.shape) for t in args[:num_tensors]] == [
            (20, t.shape[1], SIZE) for t in ((inputs[0], *inputs, out) if name == "backward" else inputs)
        ]
        bounds = args[num_tensors + (name == "backward")]
        assert bounds.dtype == torch.int32 and bounds.tolist() == [0, 3, 4, 10, 20]
        assert args[num_tensors + 2 + (name == "backward")] == 10, "the longest document"
        assert kwargs == {"window_size_left": 4, "window_size_right": 0}
        assert any(each is True for each in args), "causal"


@pytest.mark.parametrize(("size", "expected"), [(64, "variable-length flash"), (36, "plain matmuls by pairs of rows")])
def test_flash_takes_heads_of_multiples_of_8(monkeypatch: pytest.MonkeyPatch, size: int, expected: str) -> None:
    """torch says yes to others, since its own attention pads them; found on an H100."""
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: True)
    q = torch.empty(2, 4, 129, size, dtype=torch.bfloat16, device="meta")
    assert module.choose(q, q).name == expected
