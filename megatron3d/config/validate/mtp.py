"""Rules of multi-token prediction: every module has labels, and its linears fit the tensor axes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron3d.config.suggest import one_of
from megatron3d.config.validate.facts import Facts, describe_mode, near_multiples
from megatron3d.parallel.modes.mode import Mode

NUM, FACTOR = "model.mtp_num_layers", "model.mtp_loss_scaling_factor"


def mtp_problems(facts: Facts) -> Iterator[str]:
    """Yield the modules without labels in the shortest sequences, and a factor that nothing uses."""
    model, warmup = facts.config.model, facts.config.train.seq_length_warmup
    if not model.mtp_num_layers:
        if "mtp_loss_scaling_factor" in model.model_fields_set and model.mtp_loss_scaling_factor != 0.1:
            yield f"{facts.named(FACTOR)}: not used with {NUM}=0; leave it out, or use {NUM} 1"
        return
    length = min(model.seq_length, warmup[0] if warmup else model.seq_length)
    name = "model.seq_length" if length == model.seq_length else "the first length of train.seq_length_warmup,"
    most = length - 1
    if model.mtp_num_layers > most:
        yield (
            f"{facts.named(NUM)}: the last module predicts {model.mtp_num_layers + 1} tokens ahead, but {name} "
            f"{length} has labels for {most} modules at most; use {one_of(sorted({0, min(1, most), most}))}"
        )


def mtp_layout_problems(facts: Facts, mode: Mode) -> Iterator[str]:
    """Yield the tensor axes that do not divide the output of the modules' linears."""
    sizes, hidden = dict(mode.axes), facts.arch.hidden_size
    ranks = math.prod(sizes[axis] for axis in mode.inner[1])
    if facts.arch.mtp_num_layers and hidden % ranks:
        yield (
            f"{facts.named(NUM)}: model.hidden_size={hidden} is not a multiple of the {ranks} ranks that split the "
            f"output of its linears ({describe_mode(facts.spec)}); use model.hidden_size "
            f"{one_of(near_multiples(ranks, hidden))}, or {NUM} 0"
        )
