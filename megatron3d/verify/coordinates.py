"""Coordinate check of muP: sizes of activations over widths (Yang et al. 2022, arXiv:2203.03466, appendix D.1).

Each width is trained on one batch of random tokens, and the root mean square of what each kind of module has changed in
its output since initialization is taken: with muP it does not grow with the width, without it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor, nn

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, ParallelConfig
from megatron3d.data.loader import BatchLoader
from megatron3d.model.ends import Embedding
from megatron3d.model.modules import Linear
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import CPU, RandomSamples

LOGITS = "logits"
# Sizes of changes, by kind of module, for each number of steps from 1.
Changes = Mapping[str, Sequence[float]]


def with_width(config: Config, width: int) -> Config:
    """Return the model of another width on one process: heads keep their size, and there are more of them."""
    model, options = config.model, dict[str, Any]()
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        value = getattr(model, name)
        options[name] = None if value is None else value * width // model.hidden_size
    model = model.model_copy(update={**options, "hidden_size": width})
    return config.model_copy(update={"model": model, "parallel": ParallelConfig()})


def changes(config: Config, vocab_size: int, num_steps: int) -> Changes:
    """Return the sizes of the changes after 1, 2, ... `num_steps` steps at the configured learning rate."""
    spec = RunSpec(config, 1, vocab_size)
    state, train, length = build_state(spec, connect(spec), CPU), config.train, spec.arch.seq_length
    samples = RandomSamples(train.seed, spec.arch.vocab_size, length)
    sizes = train.micro_batch_size, train.global_batch_size
    batch = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, *sizes, CPU).step(0)
    settings = StepSettings(train.seed, train.global_batch_size * length, train.global_batch_size)
    tokens_BS = batch[0].tokens[:, :-1]
    before, found = _outputs(state, tokens_BS), dict[str, list[float]]()
    for _ in range(num_steps):
        train_step(state, batch, config.optimizer.lr, settings)
        for kind, outputs in _outputs(state, tokens_BS).items():
            squares = [(new - old).square().mean().item() for new, old in zip(outputs, before[kind], strict=True)]
            found.setdefault(kind, []).append(math.sqrt(sum(squares) / len(squares)))
    return found


def _outputs(state: TrainState, tokens_BS: Tensor) -> dict[str, list[Tensor]]:
    """Return what the modules of each kind compute, those of all layers together, and the logits of the last token."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for name, module in state.model.named_modules():
        if isinstance(module, Embedding | Linear):
            kind = name.rpartition("layers.")[2].partition(".")[2] or name

            def keep(_: nn.Module, args: tuple[Any, ...], y: Tensor, kind: str = kind) -> None:
                found.setdefault(kind, []).append(y.detach().clone())

            hooks.append(module.register_forward_hook(keep))
    found[LOGITS] = [state.executor.logits(tokens_BS, tokens_BS.shape[1] - 1)]
    for hook in hooks:
        hook.remove()
    return found


def growth(by_width: Mapping[int, Changes]) -> dict[str, float]:
    """Return for each kind the power of the width with which the last change grows: the slope of the logarithms."""
    widths = sorted(by_width)
    xs = [math.log(width) for width in widths]
    mean_x = sum(xs) / len(xs)
    slopes = {}
    for kind in by_width[widths[0]]:
        ys = [math.log(by_width[width][kind][-1]) for width in widths]
        mean_y = sum(ys) / len(ys)
        products = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        slopes[kind] = products / sum((x - mean_x) ** 2 for x in xs)
    return slopes


def plot(by_width: Mapping[int, Changes], title: str) -> Figure:
    """Return one panel per step: sizes of the changes over the width, a curve for each kind of module."""
    widths = sorted(by_width)
    num_steps = len(by_width[widths[0]][LOGITS])
    figure = Figure(figsize=(2.6 * num_steps + 2, 3.4), layout="constrained")
    panels = figure.subplots(1, num_steps, sharey=True, squeeze=False)[0]
    for step, panel in enumerate(panels):
        for kind in by_width[widths[0]]:
            panel.plot(widths, [by_width[width][kind][step] for width in widths], marker=".", label=kind)
        panel.set(xscale="log", yscale="log", xlabel="width", title=f"after {step + 1} step{'s' * (step > 0)}")
        panel.set_xticks(widths, [str(width) for width in widths], minor=False)
        panel.minorticks_off()
    panels[0].set_ylabel("rms of the change")
    panels[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(title)
    return figure
