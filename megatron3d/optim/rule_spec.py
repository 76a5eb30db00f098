"""Update rules of the optimizer by name: the state that each keeps, how it groups parameters, and what a step costs.

What stores, reshards, counts or predicts optimizer state reads these declarations.  A new rule is an entry in `RULES`,
a file with its update, which `optimizer.UPDATES` names, and a value of `optimizer.optimizer` in the schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron3d.config.schema import ITEMSIZES, OptimizerConfig
from megatron3d.parallel.layout import ParamSpec, Shape


@dataclass(frozen=True)
class StateTensor:
    """Optimizer state in the shape of the parameter, sharded like its master weights.

    Attributes:
        name: checkpoints store it as `optimizer.<name>.<logical tensor>`.
        dtype_key: key of the optimizer's configuration with its dtype; without a key or a value, it has that of the
            master weights.
    """

    name: str
    dtype_key: str | None = None

    def dtype(self, config: OptimizerConfig) -> str | None:
        """Return the name of the configured dtype, None for that of the master weights."""
        return None if self.dtype_key is None else getattr(config, self.dtype_key)


# Moving average of the weights, next to the state of whichever rule: bytes that a step reads and writes, and FLOPs.
EMA = StateTensor("ema")
EMA_BYTES, EMA_FLOPS = 8 + 4, 3


@dataclass(frozen=True)
class MatrixState:
    """Optimizer state of a whole logical matrix, in the dtype of the master weights, on the home rank of the matrix.

    Attributes:
        name: checkpoints store it as `optimizer.<name>.<logical tensor>`.
        shape: returns its shape for a matrix of a shape; None where such a matrix has no state of this kind.
        is_identity: it begins as the identity; otherwise at 0.
    """

    name: str
    shape: Callable[[Shape, OptimizerConfig], Shape | None]
    is_identity: bool = False


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated by their gradients.

    Attributes:
        moved_bytes: bytes that a step reads and writes per parameter, in fp32.
        flops: FLOPs of a step per parameter.
        matrix_flops: FLOPs of a step for a whole logical matrix of a shape, where it needs whole matrices.
        slab_flops: FLOPs of a step for one of `count` slabs of a matrix.
        matrix_work: numbers that a step allocates next to a matrix of a shape, or a slab of it with as many elements.
        matrix_states: state of whole matrices.
        matrix_dtype_key: key of the optimizer's configuration with the dtype in which matrices travel.
        computes_wide: it computes matrices in the dtype of the master weights; otherwise in that in which they travel.
        takes: pattern over the path and the spec of a parameter that it updates; `others` updates the rest.
        max_home_elements: most elements of a matrix that one home computes; larger ones are divided among all.
        scales_grads: kernels of the update clip and unscale gradients; otherwise a pass before them does.
        needs_matrices: the update computes on whole logical matrices, each on its home rank.
        piece_numbers: numbers of the weights' dtype that the update allocates for each element of a piece that it
            computes at once; `piece_numbers_narrow` if its state is narrower than the weights.
    """

    name: str
    states: tuple[StateTensor, ...]
    moved_bytes: float
    flops: float
    matrix_flops: Callable[[Shape, OptimizerConfig], float] = lambda shape, config: float(math.prod(shape))
    slab_flops: Callable[[Shape, OptimizerConfig, int], float] = lambda shape, config, count: 0.0
    max_home_elements: Callable[[OptimizerConfig], float] = lambda config: math.inf
    matrix_work: Callable[[Shape, OptimizerConfig, int], int] = lambda shape, config, numel: 0
    matrix_states: tuple[MatrixState, ...] = ()
    matrix_dtype_key: str | None = None
    computes_wide: bool = False
    takes: Callable[[str, ParamSpec], bool] = lambda path, spec: True
    others: UpdateRule | None = None
    scales_grads: bool = False
    needs_matrices: bool = False
    piece_numbers: int = 0
    piece_numbers_narrow: int = 0

    def of(self, path: str, spec: ParamSpec) -> UpdateRule:
        """Return the rule that updates a parameter: this one, or that of the parameters it does not take."""
        return self if self.others is None or self.takes(path, spec) else self.others.of(path, spec)

    @property
    def all(self) -> tuple[UpdateRule, ...]:
        """This rule and those of the parameters that it does not take."""
        return self, *(self.others.all if self.others else ())

    def state_itemsizes(self, config: OptimizerConfig, main_itemsize: int) -> tuple[int, ...]:
        """Return the bytes of an element of each of its own state tensors, given those of the master weights."""
        names = [state.dtype(config) for state in self.states]
        return tuple(main_itemsize if name is None else ITEMSIZES[name] for name in names)

    def matrix_dtype(self, config: OptimizerConfig) -> str:
        """Return the name of the dtype in which matrices travel, unless the master weights are in fp64."""
        return "fp32" if self.matrix_dtype_key is None else getattr(config, self.matrix_dtype_key)

    def matrix_state_numel(self, shape: Shape, config: OptimizerConfig) -> int:
        """Return the numbers of state of a whole logical matrix."""
        return sum(math.prod(found) for each in self.matrix_states if (found := each.shape(shape, config)) is not None)


class GroupSpec(NamedTuple):
    """Parameters that are updated alike: by one rule, with factors of the learning rate and of weight decay."""

    rule: UpdateRule
    lr_mult: float
    wd_mult: float


def group_of(config: OptimizerConfig, path: str, spec: ParamSpec) -> GroupSpec:
    """Return the group of a parameter."""
    rule, lr_mult, wd_mult = rule_of(config).of(path, spec), spec.lr_mult, float(spec.decay)
    for each in config.param_groups:
        if each.names([part.name for part in spec.parts]):
            wd_mult = wd_mult if each.wd_mult is None else each.wd_mult
            return GroupSpec(rule if each.optimizer is None else RULES[each.optimizer], each.lr_mult * lr_mult, wd_mult)
    return GroupSpec(rule, lr_mult, wd_mult)


def groups_of(config: OptimizerConfig, specs: Mapping[str, ParamSpec]) -> dict[str, GroupSpec]:
    """Return the group of each parameter, in the order in which flat buffers hold them: group after group."""
    groups = {path: group_of(config, path, spec) for path, spec in specs.items()}
    order = [each.name for each in rule_of(config).all]
    places = {each: (order.index(each.rule.name), -each.wd_mult, each.lr_mult) for each in groups.values()}
    return dict(sorted(groups.items(), key=lambda item: places[item[1]]))


def in_groups(config: OptimizerConfig, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return parameters in the order in which a flat buffer holds them."""
    return {path: specs[path] for path in groups_of(config, specs)}


def is_hidden_matrix(path: str, spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix between hidden features: no embedding, LM head, norm, bias or router."""
    is_end = path.startswith(("embedding.", "head."))
    return len(spec.layout) == 2 and not is_end and not path.endswith((".router.weight", ".shared_gate.weight"))


def newton_schulz_flops(shape: Shape, config: OptimizerConfig, num_slabs: int = 1) -> float:
    """Return the FLOPs of orthogonalizing a matrix: X X^T, its square, and their product with X, in each iteration.

    Each home of a slab computes its part of the first and last, and all of the square.
    """
    small, large = sorted(shape)
    return config.muon_num_ns_steps * (4.0 * small * small * large / num_slabs + 2.0 * small**3)


def newton_schulz_work(shape: Shape, config: OptimizerConfig, numel: int) -> int:
    """Return the elements of an iteration's input and result, and of two products of the whole's smaller side."""
    return 2 * (numel + min(shape) ** 2)


def has_basis(size: int, config: OptimizerConfig) -> bool:
    """Return whether SOAP rotates a dim of this size."""
    return size <= config.soap_max_precond_dim


def soap_flops(shape: Shape, config: OptimizerConfig) -> float:
    """Return the FLOPs of a step of SOAP: rotations there and back, Grams, and its part of a refresh of the bases.

    A refresh multiplies Gram and basis, and the new basis with the old one; the QR of a square matrix with its factor Q
    takes 8/3 n^3 (Golub and Van Loan, Matrix Computations, section 5.2).  It rotates the first moment as well.
    """
    numel = math.prod(shape)
    sides = [size for size in shape if has_basis(size, config)]
    each_step = sum(6.0 * numel * size for size in sides)
    refresh = sum((4 + 8 / 3) * size**3 + 2.0 * numel * size for size in sides)
    return each_step + refresh / config.soap_precondition_frequency


def soap_work(shape: Shape, config: OptimizerConfig, numel: int) -> int:
    """Return the most numbers that a step of SOAP allocates for a matrix.

    They are a matrix in fp32 if it travels in bf16; one that is rotated, twice; in a refresh the image of a basis with
    its factors Q and R, or the rotation with a moment.
    """
    sides = [size for size in shape if has_basis(size, config)]
    copied = numel if config.soap_dtype == "bf16" else 0
    return max([copied, *(max(2 * numel, 3 * size**2, size**2 + numel) for size in sides)])


def _side(dim: int) -> Callable[[Shape, OptimizerConfig], Shape | None]:
    """Return the shape of the state of a dim of a matrix."""
    return lambda shape, config: (shape[dim], shape[dim]) if has_basis(shape[dim], config) else None


_ADAM = UpdateRule(
    "adam",
    (StateTensor("exp_avg", "exp_avg_dtype"), StateTensor("exp_avg_sq", "exp_avg_sq_dtype")),
    moved_bytes=16 + 12,  # read gradient, weight and moments; write weight and moments
    flops=14,
    scales_grads=True,
    piece_numbers_narrow=5,  # when it computes, and when it rounds a moment
)
_LION = UpdateRule(
    "lion",
    (StateTensor("exp_avg"),),
    moved_bytes=12 + 8,  # read gradient, weight and moment; write weight and moment
    flops=9,
    piece_numbers=2,
    piece_numbers_narrow=2,
)
_MUON = UpdateRule(
    "muon",
    (StateTensor("momentum"),),
    # Read gradient and momentum, write momentum and what is sent; read and write the weights, read what came back.
    moved_bytes=8 + 8 + 12,
    flops=8,
    matrix_flops=newton_schulz_flops,
    slab_flops=newton_schulz_flops,
    max_home_elements=lambda config: config.muon_max_home_elements,
    matrix_work=newton_schulz_work,
    matrix_dtype_key="muon_dtype",
    takes=is_hidden_matrix,
    others=_ADAM,
    needs_matrices=True,
)
_SOAP = UpdateRule(
    "soap",
    (),
    # Read the gradient, write what is sent; read and write the weights, read what came back.
    moved_bytes=4 + 4 + 12,
    flops=4,
    matrix_flops=soap_flops,
    matrix_work=soap_work,
    matrix_states=(
        MatrixState("rotated_exp_avg", lambda shape, config: shape),
        MatrixState("rotated_exp_avg_sq", lambda shape, config: shape),
        MatrixState("left_gram", _side(0)),
        MatrixState("right_gram", _side(1)),
        MatrixState("left_basis", _side(0), is_identity=True),
        MatrixState("right_basis", _side(1), is_identity=True),
    ),
    matrix_dtype_key="soap_dtype",
    computes_wide=True,
    takes=is_hidden_matrix,
    others=_ADAM,
    needs_matrices=True,
)
RULES: Mapping[str, UpdateRule] = {rule.name: rule for rule in (_ADAM, _LION, _MUON, _SOAP)}


def rule_of(config: OptimizerConfig) -> UpdateRule:
    """Return the configured rule."""
    return RULES[config.optimizer]
