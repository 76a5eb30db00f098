"""Operations of a layer on one rank, for one microbatch, and those that most parts of a layer have.

Each operation has its GEMMs or its memory-bound kernel, its FLOPs, the storages that it reads and writes, those that
its backward needs, its collectives in both directions, and what its backward holds for a moment.  A storage has one
name, so that a view of a kept tensor, such as v in qkv's output, needs no further memory.  Shards are kept, never
gathered operands (`linear/matmul.py`).  Compare Korthikanti et al. 2022 (arXiv:2205.05198, section 4); docs/memory.md
has both side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron3d.linear.fp8_plan import QuantizedMatmul
from megatron3d.model.fp8_workspaces import fp8_work
from megatron3d.model.linear_spec import FC1, FC2, KV_UP, Q_UP, linear_size
from megatron3d.model.local_sizes import LocalMatmul, LocalSizes
from megatron3d.model.spec import DENSE_MLP, MLA_UP_PROJ, MLP_ACT, OUTPUTS_ALONE
from megatron3d.model.workspaces import linear_work, reduced_later
from megatron3d.parallel.matmul_plan import Flows, Traffic, flows, ring
from megatron3d.parallel.mesh import Axes

# Bytes of an index.
INDEX = 8
FINAL_NORM = "final_norm"


class Stored(NamedTuple):
    """Storage of one microbatch on a rank: the module that makes it or needs it, its description, and its bytes."""

    site: str
    what: str
    num_bytes: int


class MemoryKernel(NamedTuple):
    """Memory-bound kernel: its kind, which `ExecutionProfile` knows, the elements that it reads, and its launches."""

    kind: str
    elements: float
    launches: int = 1


class KernelBytes(NamedTuple):
    """Bytes that memory-bound kernels move in forward and in backward, and the number of the kernels of both."""

    forward: float
    backward: float
    num_forward: int
    num_backward: int


class LocalGemm(NamedTuple):
    """GEMMs of a rank with these sizes, as many as `batch`, that are no linear."""

    m: float
    n: float
    k: float
    batch: int = 1


class Scores(NamedTuple):
    """Attention of a rank: sequences times heads, queries and keys of each, channels of a head.

    Attributes:
        share: part of the causal half of the scores that windows and documents leave.
        is_plain: no fused kernel has these scores.
    """

    batch: int
    queries: int
    keys: int
    channels: int
    share: float
    is_plain: bool


Calls = tuple[Traffic, ...]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a layer.

    Attributes:
        name: path of its module.
        saves: storages that its backward needs.
        once: what forward finds and the recomputation of a whole layer does not find again.
        module: module that activation recomputation may choose, which this is a part of; `within`: larger ones, of
            which forward finds `once` what recomputation does not find again.
        result: what is kept where its module is recomputed, which leaves it out; None: it is recomputed as well.
        moves: bytes of further memory-bound kernels.
        matmul, has_bias: its linear; `fp8`: the matmul, or that of one expert, where its operands are quantized;
            `is_traced`: a compiled graph makes X and dY; `rows_packed`: rows of X that this rank quantizes and packs
            before they are sent to experts.
        held: what forward holds meanwhile without keeping it for backward.
        operand_bytes: of X and dY as a deferred wgrad keeps them.
        params: paths of parameters whose gradients its backward gives, other than those under its name.
        chunks: chunks of tokens of a linear whose forward computes dgrad and wgrad as well; 0: backward does. Nothing
            overlaps with the collectives of such a forward, which are `sent`; its gradient arrives with the last of
            `forward_peaks`.
        accumulates: its wgrad GEMM adds to main_grad, which is there meanwhile: in the last peak of backward, or in the
            last but one of forward.
        gemms: its GEMMs where it is no linear; `is_deferred`: their wgrad may be deferred.
        flops, backward_flops: of all of its GEMMs; `flops_in_module`: those recomputed with its module, None: `flops`.
        sent, sent_back: collectives of forward and of backward; of other linears they follow from the plan.
        sent_in_layer, sent_in_module: those of a forward that is recomputed with its layer, or with its module, whose
            result may be kept; None: as `sent`.
        hidden, hidden_back: those of both that run next to the operations `behind`; `hides_if`: their name among the
            collectives that a framework may leave exposed.
        busiest: bytes that the busiest rank sends, in multiples of this rank's.
        peaks: bytes that backward has for a moment beyond what is kept, by name; `forward_peaks`: forward;
            `peaks_again`: forward in the recomputation of its layer, if it differs; `wgrad_peak`: a deferred wgrad;
            `dgrad_peak`: backward without it.
        reduced_later: bytes of its dW whose reduction is in flight until the next linear has its dW.
        kept_weight: bytes of its gathered weight, if that is kept from the first forward to the last backward;
            `gather_peak`: bytes of that forward beside it.
        sums_gradients: behind its backward the gradient of the residual stream is a new sum of two.
        prefetched: bytes of its gathered weight, if that is gathered from the GEMM of the linear before it on, or of
            the one behind it in backward.
    """

    name: str
    reads: Sequence[Stored] = ()
    writes: Sequence[Stored] = ()
    saves: Sequence[Stored] = ()
    once: Sequence[Stored] = ()
    module: str | None = None
    within: Sequence[str] = ()
    result: Sequence[Stored] | None = None
    kernels: Sequence[MemoryKernel] = ()
    moves: Sequence[KernelBytes] = ()
    matmul: LocalMatmul | None = None
    has_bias: bool = False
    fp8: QuantizedMatmul | None = None
    is_traced: bool = False
    rows_packed: int = 0
    held: Sequence[Stored] = ()
    operand_bytes: int = 0
    params: Sequence[str] = ()
    chunks: int = 0
    accumulates: bool = False
    gemms: Sequence[LocalGemm] = ()
    is_deferred: bool = False
    scores: Scores | None = None
    flops: int = 0
    backward_flops: int = 0
    flops_in_module: int | None = None
    sent: Sequence[Traffic] = ()
    sent_back: Sequence[Traffic] = ()
    sent_in_layer: Sequence[Traffic] | None = None
    sent_in_module: Sequence[Traffic] | None = None
    hidden: Sequence[Traffic] = ()
    hidden_back: Sequence[Traffic] = ()
    behind: Sequence[str] = ()
    hides_if: str | None = None
    busiest: float = 1.0
    peaks: Mapping[str, int] = field(default_factory=dict)
    forward_peaks: Mapping[str, int] = field(default_factory=dict)
    peaks_again: Mapping[str, int] = field(default_factory=dict)
    wgrad_peak: int = 0
    dgrad_peak: int = 0
    reduced_later: int = 0
    kept_weight: int = 0
    gather_peak: int = 0
    prefetched: int = 0
    sums_gradients: bool = False

    @property
    def output(self) -> Stored:
        """The last storage that it writes."""
        return self.writes[-1]

    def flows(self, local: LocalSizes) -> Flows:
        """Return the collectives of its matmul."""
        assert self.matmul is not None, f"{self.name} is a linear"
        if self.fp8 is not None:
            return self.fp8.flows(local.itemsize, local.wgrad_itemsize)
        sizes = self.matmul.m, self.matmul.n, self.matmul.k, local.itemsize
        return flows(self.matmul.plan, local.mesh, *sizes, wgrad_itemsize=local.wgrad_itemsize)

    def sent_again(self, modules: Collection[object]) -> Sequence[Traffic]:
        """Return the collectives of its recomputation, with one of these modules or, if there are none, its layer."""
        found = self.sent_in_module if modules and not self.is_within(modules) else self.sent_in_layer
        return self.sent if found is None else found

    def flops_again(self, modules: Collection[object]) -> int:
        """Return the FLOPs of its recomputation, with one of these modules or, if there are none, its layer."""
        return self.flops_in_module if modules and self.flops_in_module is not None else self.flops

    def is_within(self, modules: Collection[object]) -> bool:
        """Return whether it is a part of one of these modules that is larger than its own."""
        return any(each in modules for each in self.within)

    def module_again(self, modules: Collection[object]) -> str | None:
        """Return which of these modules it is recomputed with: one that is larger than its own, or that."""
        return next((each for each in self.within if each in modules), self.module if self.module in modules else None)

    def is_again(self, modules: Collection[object]) -> bool:
        """Return whether it is recomputed where these modules are."""
        return (self.module in modules and self.result is None) or self.is_within(modules)


def kept_by(operations: Sequence[Operation], modules: Collection[object] = ()) -> list[tuple[Operation, list[Stored]]]:
    """Return each operation with the storages that are free once its backward has run, each storage once.

    A module that is recomputed keeps what it reads from outside, and its output where a linear outside saves it; the
    output of an activation or a norm is made again for those that save it, and autograd keeps what these save.
    """
    whole = OUTPUTS_ALONE.intersection(modules)
    inner = {each for each in modules if each not in whole}
    again = [each for each in operations if each.is_again(inner)]
    made = {stored[:2] for each in again for stored in each.writes}
    outputs = {each.output[:2] for each in operations if each.module in whole and not each.is_within(inner)}
    found: list[tuple[Operation, list[Stored]]] = []
    seen: set[tuple[str, str]] = set()
    for each in operations:
        if each.is_again(inner):
            saves = [stored for stored in each.reads if stored[:2] not in made | outputs]
            saves += each.once if each.is_within(inner) else ()
        elif each.module in inner:
            saves = list(each.result or ())
        elif each.module in whole:
            saves = [*each.reads, *each.saves]
        else:
            saves = [stored for stored in each.saves if stored[:2] not in outputs]
        new = {stored[:2]: stored for stored in saves if stored[:2] not in seen}
        seen |= new.keys()
        found.append((each, [*new.values()]))
    return found


def linear(local: LocalSizes, path: str, x: Stored, num_bytes: int, matmul: LocalMatmul | None = None) -> Operation:
    """Return a linear with its output of `num_bytes`; it keeps its input, in fp8 X^T in its place."""
    matmul = matmul or local.matmuls[path]
    flops, has_bias = matmul.flops(local.mesh), linear_size(local.arch, path).has_bias
    module = MLA_UP_PROJ if path in (Q_UP, KV_UP) else None
    fp8 = local.quantized(path, matmul)
    work = linear_work(local, matmul) if fp8 is None else fp8_work(local, matmul, fp8)
    whole_w = matmul.whole_w * local.itemsize if matmul.plan.w else 0
    kept_weight = whole_w * local.overlap.keep_gathered_weights
    operands = (matmul.x + matmul.y * local.mesh.size(matmul.plan.dy)) * local.itemsize
    saved = x
    if fp8 is not None:
        saved = Stored(path, "input in fp8", fp8.stored("KM").num_bytes)
        operands, whole_w = saved.num_bytes + fp8.multiplied("NM").num_bytes, fp8.multiplied("NK").num_bytes
    return Operation(
        name=path,
        reads=(x,),
        writes=(Stored(path, "output", num_bytes),),
        saves=(saved,),
        module=module,
        matmul=matmul,
        has_bias=has_bias,
        fp8=fp8,
        is_traced=local.is_traced(path, matmul.plan),
        held=() if saved is x else (x,),
        operand_bytes=operands,
        accumulates=not matmul.plan.w,
        flops=flops,
        backward_flops=2 * flops,
        peaks={f"backward of {path}": work.dgrad + local.residual, f"wgrad of {path}": work.wgrad + local.residual},
        dgrad_peak=work.dgrad_alone + local.residual,
        wgrad_peak=work.late,
        reduced_later=reduced_later(local, matmul),
        kept_weight=kept_weight,
        prefetched=whole_w * (bool(matmul.plan.w) and local.overlap.weight_gather and not kept_weight),
        gather_peak=work.forward - kept_weight + local.residual,
        forward_peaks={f"forward of {path}": work.again + local.residual},
    )


# Backward of a norm has in fp32, where axes split features: both gradients, normalized input, their products and sums.
_NORM_COPIES = 5
# RMSNorm by torch's operations frees the gradient of its output before the most of them live.
_COMPOSED_COPIES = 4


def norm(
    local: LocalSizes,
    site: str,
    x: Stored,
    *,
    rows: int,
    width: int,
    axes: Axes = (),
    module: str | None = None,
    what: str = "output",
    lacks_weight: bool = False,
) -> Operation:
    """Return a norm of [rows, width] features, whose statistics `axes` reduce.

    `lacks_weight`: it has none, where the model's other norms may.
    """
    composed = local.arch.is_rms_norm and not local.kernels.fused_rms_norm
    saves = list(_statistics(local, site, rows, width, bool(axes), lacks_weight))
    if not (composed and not axes) or local.itemsize == local.wide:
        saves.insert(0, x)
    sent, back = _sums_of_norm(local, rows, axes)
    copies = _NORM_COPIES if axes else _COMPOSED_COPIES if composed else 0
    peaks = {"norm in fp32": copies * rows * width * local.wide} if copies else {}
    return Operation(
        name=site,
        reads=(x,),
        writes=(Stored(site, what, rows * width * local.itemsize),),
        saves=saves,
        module=module,
        kernels=(MemoryKernel("norm", rows * width),),
        sent=sent,
        sent_back=back,
        peaks=peaks,
    )


def stream_norm(local: LocalSizes, site: str, x: Stored) -> Operation:
    """Return a norm of the residual stream, whose own gradient waits meanwhile, but for that behind the last layer."""
    axes = local.mesh.nontrivial(local.mode.residual[1])
    made = norm(local, site, x, rows=local.tokens, width=local.hidden, axes=axes)
    peaks = made.peaks or {f"backward of {site}": 2 * local.residual}  # one kernel has both gradients
    waiting = 0 if site == FINAL_NORM else local.residual
    return replace(made, peaks={name: size + waiting for name, size in peaks.items()})


def _statistics(
    local: LocalSizes, site: str, rows: int, width: int, split: bool, lacks_weight: bool
) -> Iterator[Stored]:
    is_layer_norm = not local.arch.is_rms_norm
    # Where there is no weight, ones, and where LayerNorm has no bias, unless sharded, zeros.
    lacking = (
        local.arch.num_norm_tensors == 0 or lacks_weight,
        is_layer_norm and not split and local.arch.num_norm_tensors < 2,
    )
    if made := sum(lacking) + local.arch.apply_layernorm_1p:
        yield Stored(site, "weight or bias", made * width * local.itemsize)
    if split:
        kept = "mean and scale" if is_layer_norm else "scale"
        yield Stored(site, kept, (1 + is_layer_norm) * rows * local.wide)
    elif is_layer_norm:
        wide = local.itemsize if local.kernels.narrow_statistics else local.wide
        yield Stored(site, "mean and scale", 2 * rows * wide)
    else:
        yield Stored(site, "scale", rows * local.wide)
        if not local.kernels.fused_rms_norm:
            # The scaled input is for the gradient of the weight.
            copies = (local.itemsize < local.wide) + (not lacks_weight)
            yield Stored(site, "input scaled, and widened", copies * rows * width * local.wide)


def _sums_of_norm(local: LocalSizes, rows: int, axes: Axes) -> tuple[Calls, Calls]:
    """Return the collectives of the statistics of a norm over features that `axes` split, and of their gradients."""
    if not axes:
        return (), ()
    num_bytes, centred = rows * local.wide, not local.arch.is_rms_norm
    gathered = Traffic("all_gather", axes, 2 * num_bytes * (local.mesh.size(axes) - 1))
    forward = gathered if centred else ring("all_reduce", axes, num_bytes, local.mesh)
    return (forward,), (ring("all_reduce", axes, (1 + centred) * num_bytes, local.mesh),)


# `ops/dropout.py` hashes indices in int64, in chunks of at most this many elements; two numbers are live per element.
_HASH_BYTES, HASH_CHUNK = 16, 2**16


def hash_bytes(numel: int) -> int:
    """Return the bytes of the hashes while a dropout mask of `numel` elements is made."""
    return _HASH_BYTES * min(numel, HASH_CHUNK)


def dropout(local: LocalSizes, site: str) -> Iterator[Operation]:
    """Yield dropout on the residual stream, which keeps its mask, if there is any."""
    if local.arch.hidden_dropout:
        numel = local.tokens * local.hidden
        yield Operation(
            name=site,
            writes=(Stored(site, "output", local.residual),),
            saves=(Stored(site, "mask", numel),),
            kernels=(MemoryKernel("dropout", numel),),
            forward_peaks={"hash of a dropout mask": hash_bytes(numel) + local.residual},
        )


def added(local: LocalSizes, site: str) -> Operation:
    """Return the addition of a module's output to the residual stream."""
    x = Stored(site, "residual stream", local.residual)
    return Operation(name=f"{site}_add", writes=(x,), kernels=(MemoryKernel("add", local.tokens * local.hidden),))


# What rules of differentiation read: relu's its output, which is the input of fc2 as well, those that are listed their
# input ("input", or "gate and up") and results on the way, in multiples of the output.
_ACTIVATIONS: Mapping[str, Sequence[str]] = {
    "gelu": ("input",),
    "gelu_tanh": ("input",),
    "relu": ("output",),
    "squared_relu": ("relu",),
    "xielu": ("input",),
    "swiglu": ("input", "gate activated"),
    "geglu": ("input", "gate activated"),
    "geglu_tanh": ("input", "gate activated"),
    "clamped_swiglu": ("input", "gate clamped", "sigmoid", "gate activated", "up clamped, plus 1"),
}


def activation(local: LocalSizes, site: str, x: Stored, numel: int) -> Operation:
    """Return the activation between two linears, with `numel` elements of output."""
    unit = numel * local.itemsize
    y = Stored(site, "output", unit)
    known = {"input": x, "output": y}
    saved = [known.get(what, Stored(site, what, unit)) for what in _ACTIVATIONS[local.arch.activation]]
    owner = site.removesuffix("activation")
    params = (f"{owner}alpha_p", f"{owner}alpha_n") if local.arch.activation == "xielu" else ()
    # The compiler leaves experts out, shared ones too, and MLPs that are recomputed as a whole.
    is_one_kernel = local.is_compiled and local.experts is None and DENSE_MLP not in local.recompute.chosen
    return Operation(
        name=site,
        reads=(x,),
        writes=(y,),
        saves=[x] if is_one_kernel and len(saved) > 1 else saved,  # which finds them again in backward
        module=MLP_ACT,
        params=params,
        kernels=(MemoryKernel("activation", numel * (1.5 if local.is_gated else 1)),),
    )


def mlp_operations(local: LocalSizes, x: Stored, fc1: str = FC1, fc2: str = FC2) -> list[Operation]:
    """Return the operations of an MLP on x."""
    parts = 2 if local.is_gated else 1
    first = linear(local, fc1, x, parts * local.inner(local.ffn))
    site = fc1.removesuffix("fc1") + "activation"
    between = activation(local, site, first.output, local.inner_tokens * local.ffn)
    peak = {f"backward of {site}": local.inner((1 + parts) * local.ffn) + local.residual}
    return [first, replace(between, peaks=peak), linear(local, fc2, between.output, local.residual)]
