"""Sections of gpu_day.py about kernels: rates of the cost model, and whether a side stream runs during a GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from gpu.gpu_timing import Place, Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron3d.attention.packed import Visible, choose, packed_attention
from megatron3d.attention.rotary import rotary_tables, rotate
from megatron3d.attention.rotary_spec import Rotary
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.schema import OptimizerConfig
from megatron3d.hardware.devices import NAMES, usable
from megatron3d.linear.gemm import add_product, product, put_product
from megatron3d.ops.cross_entropy import LOSS_KERNELS, VocabShard, loss_kernel
from megatron3d.ops.norm import norm
from megatron3d.optim.adamw import ParamGroup, update_fused
from megatron3d.optim.rule_spec import RULES
from megatron3d.parallel.mesh import Mesh

BF16 = torch.bfloat16
# Tokens, input and output features: projections of 1B, 8B and 70B models, whole and on one of 8 ranks, and a head.
GEMMS = (
    (8192, 8192, 8192),
    (8192, 2048, 8192),
    (8192, 4096, 14336),
    (8192, 4096, 1792),
    (8192, 14336, 4096),
    (8192, 8192, 3584),
    (4096, 4096, 128256),
    (1024, 4096, 128256),
)
# Head size, query heads, key/value heads, length.
ATTENTION = ((64, 32, 8, 4096), (128, 32, 8, 2048), (128, 32, 8, 4096), (128, 32, 8, 8192), (128, 8, 8, 8192))
# Tokens, input and output features of an expert of each of some experts, with even loads.
EXPERTS = (8, 16384, 2048, 1408)
# Head size, query heads, key/value heads, length of a sequence and of its documents.
DOCUMENTS = (128, 32, 8, 8192, 2048)
# Elements of activations and of optimizer state: more than a cache holds.
ELEMENTS = 2**27
# Accesses of an element: a sum reads two and writes one.
SUM_ACCESSES = 3


def kernels(place: Place) -> Iterator[Row]:
    """Yield the rate of each kernel, then a proposal for the accelerator's sheet."""
    gemms = list(gemm_rows(place))
    yield from gemms
    attention = list(attention_rows(place))
    yield from attention
    streams = list(stream_rows(place))
    yield from streams
    for rows in (loss_rows, layer_rows, document_rows, fp8_rows, expert_rows):
        yield from _shown(place, rows)
    launch = {"kernel": "launch", "us": launch_us(place)}
    yield launch
    yield from proposal(place, gemms, attention, streams, launch)


def _shown(place: Place, rows: Callable[[Place], Iterator[Row]]) -> Iterator[Row]:
    """Yield rows, or that they failed, so that a kernel that a machine lacks does not end the section."""
    try:
        yield from rows(place)
    except (RuntimeError, AttributeError, ValueError) as error:
        yield {"kernel": rows.__name__, "error": (str(error).splitlines() or [""])[0][:200]}


def _random(place: Place, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=place.device).to(dtype)


def gemm_rows(place: Place) -> Iterator[Row]:
    """Yield the TFLOP/s of Y, dX, and dW that overwrites and adds to fp32, for each shape."""
    for m, k, n in [(64, 32, 48)] if place.quick else GEMMS:
        x, w, dy = _random(place, m, k), _random(place, n, k), _random(place, m, n)
        dw = torch.zeros(n, k, device=place.device)
        calls: dict[str, Callable[[], object]] = {
            "Y": partial(product, x, w),
            "dX": partial(product, dy, w.T),
            "dW": partial(put_product, dw, dy.T, x.T),
            "dW added": partial(add_product, dw, dy.T, x.T),
        }
        rates = {name: 2e-12 * m * n * k / place.seconds(call) for name, call in calls.items()}
        yield {"kernel": "gemm", "m": m, "k": k, "n": n, **rates}


def attention_rows(place: Place) -> Iterator[Row]:
    """Yield the TFLOP/s of causal attention forward and backward, half of the scores counted, by kernel."""
    for size, heads, groups, seq in [(16, 4, 2, 64)] if place.quick else ATTENTION:
        q, k, v = (_random(place, 1, seq, count, size).transpose(1, 2) for count in (heads, groups, groups))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        flops = 4 * heads * seq * seq * size / 2
        for backend, name in NAMES.items():
            with sdpa_kernel(backend):
                if backend in (SDPBackend.OVERRIDEABLE, SDPBackend.MATH) or name not in usable(q, k):
                    continue
                forward_s, backward_s = _attention_s(place, q, k, v)
            what = {"kernel": name, "size": size, "heads": heads, "groups": groups, "seq": seq}
            rates = {"forward": flops / forward_s, "backward": 2.5 * flops / backward_s}
            yield {**what, **{kind: rate / 1e12 for kind, rate in rates.items()}}


def _attention_s(place: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    y = forward()
    dy = torch.randn_like(y)

    def backward() -> None:
        torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)

    with torch.no_grad():
        forward_s = place.seconds(forward)
    return forward_s, place.seconds(backward)


def document_rows(place: Place) -> Iterator[Row]:
    """Yield the TFLOP/s of attention within documents, forward and backward, half of the scores counted."""
    size, heads, groups, seq, length = (16, 4, 2, 64, 16) if place.quick else DOCUMENTS
    q, k, v = (_random(place, 1, seq, count, size).transpose(1, 2) for count in (heads, groups, groups))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    visible = Visible((tuple(range(length, seq, length)),))
    y = packed_attention(q, k, v, visible)
    dy, flops = torch.randn_like(y), 4 * heads * seq * length * size / 2

    def backward() -> None:
        torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)

    forward_s, backward_s = place.seconds(partial(packed_attention, q, k, v, visible)), place.seconds(backward)
    what = {"kernel": f"documents, {choose(q, k).name}", "size": size, "seq": seq, "length": length}
    yield {**what, "forward": 1e-12 * flops / forward_s, "backward": 2.5e-12 * flops / backward_s}


def fp8_rows(place: Place) -> Iterator[Row]:
    """Yield the TFLOP/s of fp8 GEMMs, operands quantised before, with a scale per tensor and per row."""
    for m, k, n in [(64, 32, 48)] if place.quick else GEMMS[:4]:
        a, b = (_random(place, rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        scales = {"tensor": [torch.ones((), device=place.device)] * 2}
        scales["rows"] = [torch.ones(shape, device=place.device) for shape in ((m, 1), (1, n))]
        row: Row = {"kernel": "fp8", "m": m, "k": k, "n": n}
        for name, (scale_a, scale_b) in scales.items():
            call = partial(torch._scaled_mm, a, b.T, scale_a, scale_b, out_dtype=BF16, use_fast_accum=True)
            row[name] = 2e-12 * m * n * k / place.seconds(call)
        yield row


def expert_rows(place: Place) -> Iterator[Row]:
    """Yield the TFLOP/s of the grouped GEMM of experts: Y, and dW, which it rounds to bf16."""
    experts, rows, k, n = (4, 64, 32, 48) if place.quick else EXPERTS
    x, w, dy = _random(place, rows, k), _random(place, experts, n, k), _random(place, rows, n)
    ends = torch.arange(1, experts + 1, device=place.device, dtype=torch.int32) * (rows // experts)
    calls = {"Y": partial(F.grouped_mm, x, w.mT, offs=ends), "dW": partial(F.grouped_mm, dy.T, x, offs=ends)}
    rates = {name: 2e-12 * rows * k * n / place.seconds(call) for name, call in calls.items()}
    yield {"kernel": "experts", "experts": experts, "rows": rows, "k": k, "n": n, **rates}


def stream_rows(place: Place) -> Iterator[Row]:
    """Yield the GB/s of a copy, a sum and AdamW, counting each access once."""
    count = 2**12 if place.quick else ELEMENTS
    x, y = _random(place, count), _random(place, count)
    out = torch.empty_like(x)
    yield {"kernel": "copy", "gb_s": 2 * x.nbytes / place.seconds(lambda: out.copy_(x)) / 1e9}
    yield {"kernel": "sum", "gb_s": SUM_ACCESSES * x.nbytes / place.seconds(lambda: torch.add(x, y, out=out)) / 1e9}
    flats = [[torch.rand(count, device=place.device)] for _ in range(4)]
    group, config = ParamGroup(0.1, flats[0], flats[1], (flats[2], flats[3])), OptimizerConfig()
    steps, skipped = torch.tensor(1.0, device=place.device), torch.tensor(0.0, device=place.device)
    took = place.seconds(lambda: update_fused(group, config, 1e-4, steps, skipped))
    yield {"kernel": "AdamW", "gb_s": RULES["adam"].moved_bytes * count / took / 1e9}


def loss_rows(place: Place) -> Iterator[Row]:
    """Yield the bytes that each kernel of the loss could have copied per logit in its time, for chunks of 1 GiB."""
    comm = ProcessComm(Mesh((("x", 1),)), [])
    tokens, vocab_size = (16, 250) if place.quick else (2048, 128256)
    labels = torch.randint(vocab_size, (tokens,), device=place.device)
    logits = torch.randn(tokens, vocab_size, device=place.device)
    copy_s = place.seconds(partial(torch.empty_like(logits).copy_, logits))
    for name, kernel in LOSS_KERNELS.items():
        if name != "triton" or loss_kernel(place.device.type != "cpu", torch.float32) == name:
            shard = VocabShard(0, vocab_size, (), comm)
            took = place.seconds(partial(kernel, logits, labels, tokens, 1.0, shard, BF16))
            yield {"kernel": f"loss, {name}", "ms": 1e3 * took, "logit_bytes": 8 * took / copy_s}


def layer_rows(place: Place) -> Iterator[Row]:
    """Yield the accesses per element that norm and rotary embedding could have copied in their times."""
    tokens, hidden = (64, 64) if place.quick else (8192, 4096)
    x, dy = _random(place, tokens, hidden), _random(place, tokens, hidden)
    weight = _random(place, hidden).requires_grad_()
    out = torch.empty_like(x)
    copy_s = place.seconds(lambda: out.copy_(x))
    tables = rotary_tables(tokens, Rotary(1e4, 64), x)
    comm = ProcessComm(Mesh((("x", 1),)), [])
    kernels: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
        "norm": (lambda x: norm(x, weight, None, 1e-5, (), comm), x.shape),
        "rotary": (lambda x: rotate(x, tables), (1, tokens, hidden // 64, 64)),
    }
    for name, (kernel, shape) in kernels.items():
        given = x.view(shape).detach().requires_grad_()
        y = kernel(given)
        wanted = [given, *([weight] if name == "norm" else [])]

        def backward(y: Tensor = y, wanted: list[Tensor] = wanted) -> None:
            torch.autograd.grad(y, wanted, dy.view(y.shape), retain_graph=True)

        forward_s, backward_s = place.seconds(partial(kernel, given)), place.seconds(backward)
        yield {"kernel": name, "forward": 2 * forward_s / copy_s, "backward": 2 * backward_s / copy_s}


def launch_us(place: Place) -> float:
    """Return the microseconds between tiny kernels that are launched one after another."""
    x = torch.zeros(16, device=place.device)
    return 1e6 * place.seconds(lambda: x.add_(1))


def proposal(place: Place, gemms: list[Row], attention: list[Row], streams: list[Row], launch: Row) -> Iterator[Row]:
    """Yield lines for the accelerator's sheet in megatron3d/hardware; a person reads them before they go there."""
    peak = place.peak_tflops("bf16") or max(row["Y"] for row in gemms)
    large = [row for row in gemms if min(row["m"], row["k"], row["n"]) >= 2048] or gemms
    rate = median(row[kind] for row in large for kind in ("Y", "dX", "dW added"))
    fractions = [max((row[kind] for row in attention), default=0.0) / peak for kind in ("forward", "backward")]
    bandwidth = {row["kernel"]: row["gb_s"] for row in streams}
    lines = [
        f"matmul_fraction: {rate / peak:.2f}",
        f"attention_fractions: [{fractions[0]:.2f}, {fractions[1]:.2f}]",
        f"# divide by the sheet's stream_gb_s for stream_fraction: {bandwidth['sum']:.0f}",
        f"launch_us: {launch['us']:.1f}",
    ]
    yield from ({"proposal": line} for line in lines)


def overlap(place: Place) -> Iterator[Row]:
    """Yield how much of a copy on a side stream is hidden by GEMMs, with streams of both priorities.

    1 is all of it, 0 none: then a collective would not run during a GEMM either.
    """
    if place.device.type == "cpu":
        yield {"overlap": "a CPU has no streams"}
        return
    side = 1024 if place.quick else 8192
    a, b = _random(place, side, side), _random(place, side, side)
    source = _random(place, 2 ** (20 if place.quick else 28))
    target = torch.empty_like(source)
    for priority in (0, -1):
        stream = torch.Stream(device=place.device, priority=priority)

        def copy(stream: torch.Stream = stream) -> None:
            stream.wait_stream(torch.accelerator.current_stream(place.device))
            with stream:
                target.copy_(source)
            torch.accelerator.current_stream(place.device).wait_stream(stream)

        def both(stream: torch.Stream = stream) -> None:
            stream.wait_stream(torch.accelerator.current_stream(place.device))
            torch.mm(a, b)
            with stream:
                target.copy_(source)
            torch.accelerator.current_stream(place.device).wait_stream(stream)

        gemm_s, copy_s, both_s = place.seconds(lambda: torch.mm(a, b)), place.seconds(copy), place.seconds(both)
        times = {"gemm_ms": 1e3 * gemm_s, "copy_ms": 1e3 * copy_s, "both_ms": 1e3 * both_s}
        yield {"overlap": (gemm_s + copy_s - both_s) / min(gemm_s, copy_s), "priority": priority, **times}
