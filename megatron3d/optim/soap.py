"""SOAP (Vyas et al. 2024, arXiv:2409.11321): AdamW in the eigenbasis of Shampoo's preconditioner, of logical matrices.

    g' = L^T g R          m = b1 m + (1 - b1) g'          v = b2 v + (1 - b2) g'^2
    w = w - lr (L (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)) R^T + weight_decay w)
    A = b A + (1 - b) g g^T          B = b B + (1 - b) g^T g

The columns of L and R follow the eigenvectors of the Grams A and B, the largest eigenvalue first: they are sorted, v
with them, and one step of orthogonal iteration makes them Q of the QR of A L; m is rotated along.  This refresh comes
after each of the first steps, up to `soap_precondition_frequency`, and then at multiples of it.

The authors begin with eigh of the first Gram.  That of a few tokens has rank below its size, and the vectors of its
eigenvalue 0 follow the rounding, which is another in each layout.  So L and R begin as the identity, and the Gram that
is multiplied has `DAMPING` times its mean eigenvalue on its diagonal, more than rounding: what lies far below stays as
it is.  What gradients of the size of eps would add is there as well, since those that are 0 but for rounding have a
Gram, too.  Eigenvalues that are equal but for rounding are not sorted: heads that share a value, and read one token
each, give equal columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim.adamw import ParamGroup, Update
from megatron3d.optim.homes import MatrixExchange, Round

DAMPING = 1e-2


class _Decays(NamedTuple):
    """Weights of the new values of both moments and of the Grams, 0 in a skipped update, and the bias corrections."""

    first: Tensor
    second: Tensor
    gram: Tensor
    first_correction: Tensor
    second_correction: Tensor


def is_refreshed(iteration: int, config: OptimizerConfig) -> bool:
    """Return whether the bases are refreshed after a step, given the number of steps before it."""
    number, frequency = iteration + 1, config.soap_precondition_frequency
    return number < frequency or number % frequency == 0


def update_with_soap(exchange: MatrixExchange) -> Update:
    """Return the update of the matrices that `exchange` moves: gradients go to their homes, directions come back."""

    @torch.no_grad()
    def update(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
        is_skipped, applied = skipped != 0, 1 - skipped.double()
        rate = applied * lr
        decay = 1 - rate * group.weight_decay
        decays = _decays(config, num_steps, applied)
        refreshes = is_refreshed(group.iteration, config)

        def sources(round_: Round) -> dict[int, Tensor]:
            return {run: group.grads[run].clone() for run in round_.shards}

        def compute(matrices: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            matrices.masked_fill_(is_skipped, 0.0)  # they may not be finite
            step_matrices(matrices, states, decays, config.adam_eps)
            for side in ("left", "right") if refreshes else ():
                if f"{side}_basis" in states:
                    refresh(states, side, is_skipped, config.adam_eps)
            return matrices

        for run, direction in exchange.map(sources, compute):
            group.mains[run].mul_(decay).sub_(direction.mul_(rate))

    return update


def _decays(config: OptimizerConfig, num_steps: Tensor, applied: Tensor) -> _Decays:
    step = num_steps.double() + 1
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    shampoo_beta = beta2 if config.soap_shampoo_beta is None else config.soap_shampoo_beta
    first, second, gram = (applied * (1 - beta) for beta in (beta1, beta2, shampoo_beta))
    return _Decays(first, second, gram, 1 - beta1**step, 1 - beta2**step)


def step_matrices(matrices: Tensor, states: Mapping[str, Tensor], decays: _Decays, eps: float) -> None:
    """Update moments and Grams by gradients [count, rows, columns], which become the directions."""
    m, v = states["rotated_exp_avg"], states["rotated_exp_avg_sq"]
    g = matrices.to(m.dtype)
    if "left_gram" in states:
        states["left_gram"].lerp_(g @ g.mT, decays.gram.to(m.dtype))
    if "right_gram" in states:
        states["right_gram"].lerp_(g.mT @ g, decays.gram.to(m.dtype))
    left, right = states.get("left_basis"), states.get("right_basis")
    g = g if left is None else left.mT @ g
    g = g if right is None else g @ right
    m.lerp_(g, decays.first.to(m.dtype))
    v.lerp_(g.square_(), decays.second.to(m.dtype))
    root = torch.div(v, decays.second_correction, out=g).sqrt_().add_(eps)
    d = torch.div(m, root, out=root).div_(decays.first_correction)
    d = d if left is None else left @ d
    del g, root
    matrices.copy_(d if right is None else d @ right.mT)


def refresh(states: Mapping[str, Tensor], side: str, is_skipped: Tensor, eps: float) -> None:
    """Let the basis of a side follow the eigenvectors of its Gram, and the moments the basis."""
    gram, basis = states[f"{side}_gram"], states[f"{side}_basis"]
    moments = states["rotated_exp_avg"], states["rotated_exp_avg_sq"]
    m, v = moments if side == "left" else tuple(each.mT for each in moments)
    damping = DAMPING * gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) + eps**2 * m.shape[-1]
    image = gram @ basis
    # What lies below the damping, or is equal in bf16, keeps its order: the difference may be rounding.
    eigenvalues = (basis * image).sum(-2).clamp(min=damping).bfloat16()
    order = eigenvalues.sort(dim=-1, descending=True, stable=True).indices
    image = _columns(image, order)
    q, r = torch.linalg.qr(image.addcmul_(_columns(basis, order), damping[..., None]))
    q.mul_(torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :])
    del image, r
    rotation = q.mT @ basis
    torch.where(is_skipped, basis, q, out=basis)
    del q
    torch.where(is_skipped, m, rotation @ m, out=m)
    torch.where(is_skipped, v, _columns(v.mT, order).mT, out=v)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """Return the columns of matrices [count, rows, columns] in an order [count, columns]."""
    return x.gather(-1, order[:, None, :].expand_as(x))
