"""Fact: batch-size ramp-up is a function of the consumed samples: Megatron's, and the same after any restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader, PrefetchingLoader
from megatron3d.data.ramp_plan import Batch, Batches, Ramp
from megatron3d.parallel.mesh import Mesh
from megatron3d.verify.layouts import RandomSamples

CPU = torch.device("cpu")


@st.composite
def ramps(draw: st.DrawFn, unit: int = 1) -> Ramp:
    start, increment = draw(st.integers(1, 6)) * unit, draw(st.integers(1, 4)) * unit
    return Ramp(start, increment, draw(st.integers(1, 200)), start + increment * draw(st.integers(0, 6)))


def megatron(ramp: Ramp, consumed: int) -> int:
    """Compute the ramp as Megatron's microbatch calculator does."""
    if consumed > ramp.num_samples or ramp.start == ramp.end:
        return ramp.end
    per_increment = ramp.num_samples / ((ramp.end - ramp.start) / ramp.increment)
    return ramp.start + int(consumed / per_increment + 1e-9) * ramp.increment


@given(ramp=ramps(), consumed=st.integers(0, 400))
def test_a_ramp_equals_megatrons(ramp: Ramp, consumed: int) -> None:
    assert ramp.at(consumed) == megatron(ramp, consumed)


@given(size=ramps(), length=ramps(), num_iterations=st.integers(0, 120))
def test_closed_forms_of_a_ramp_equal_its_iterations(size: Ramp, length: Ramp, num_iterations: int) -> None:
    batches, consumed, tokens = Batches(size, length), 0, 0
    for _ in range(num_iterations):
        batch = batches.at(consumed)
        consumed, tokens = consumed + batch.num_samples, tokens + batch.num_tokens
    assert batches.consumed_samples(num_iterations) == consumed
    assert batches.num_tokens(consumed) == tokens
    lengths = [n for start, stop, n in batches.spans(consumed) for _ in range(start, stop)]
    assert len(lengths) == consumed and sum(lengths) == tokens


def update_train_iters(ramp: Ramp, num_samples: int) -> int:
    """Compute the iterations of a run of samples as Megatron-LM's function of this name does."""
    if ramp.start == ramp.end:
        return num_samples // ramp.end
    iterations = consumed = 0
    while consumed <= ramp.num_samples and consumed <= num_samples:
        consumed += megatron(ramp, consumed)
        iterations += 1
    return iterations + max(num_samples - consumed, 0) // ramp.end


@given(size=ramps(), length=ramps(), num_samples=st.integers(1, 600))
def test_the_iterations_of_a_run_of_samples_are_megatrons(size: Ramp, length: Ramp, num_samples: int) -> None:
    assert Batches(size, length).num_iterations(num_samples) == update_train_iters(size, num_samples)


@settings(max_examples=20)
@given(size=ramps(unit=12), length=ramps(), data_ranks=st.sampled_from([1, 2, 3]), micro=st.sampled_from([1, 2]))
def test_the_ranks_read_every_sequence_once_in_batches_of_any_size(
    size: Ramp, length: Ramp, data_ranks: int, micro: int
) -> None:
    samples, batches = RandomSamples(1, 50, length.end), Batches(size, length)
    loaders = [
        PrefetchingLoader(BatchLoader(samples, Mesh((("data", data_ranks),), rank), (), micro, size.end, CPU), batches)
        for rank in range(data_ranks)
    ]
    consumed = 0
    for _ in range(6):
        batch = batches.at(consumed)
        expected = samples.read(consumed + np.arange(batch.num_samples))[:, : batch.seq_length + 1]
        found = [microbatch for loader in loaders for microbatch in loader.step(consumed)]
        in_order = sorted(found, key=lambda microbatch: microbatch.first_sample)
        assert np.array_equal(torch.cat([microbatch.tokens for microbatch in in_order]), expected)
        consumed += batch.num_samples


VALID = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16},
    "train": {"micro_batch_size": 2, "global_batch_size": 16},
}
BROKEN = {
    "rampup_batch_size": [
        ([20, 4, 10], "starts above train.global_batch_size=16; use a start of 1 to 16"),
        (
            [4, 8, 10],
            "from 4 in steps of 8 it does not reach train.global_batch_size=16; use steps of 2, 3, 4, 6 or 12",
        ),
        ([2, 2, 10], "multiples of micro_batch_size 2 x data parallel 2 = 4; use for example [4,4,10]"),
    ],
    "seq_length_warmup": [
        ([4, 8, 10], "from 4 in steps of 8 it does not reach model.seq_length=16; use steps of "),
        ([3, 1, 10], "must be multiples of 2, so that micro_batch_size 2 x length is a multiple of the 4 ranks"),
    ],
}


@pytest.mark.parametrize("key,value,words", [(key, *case) for key, cases in BROKEN.items() for case in cases])
def test_a_ramp_that_does_not_divide_is_refused_with_one_that_does(key: str, value: list[int], words: str) -> None:
    parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    config = Config.model_validate({**VALID, "parallel": parallel, "train": {**VALID["train"], key: value}})
    (problem,) = check(config, 8)
    assert problem.startswith(f"train.{key}={str(value).replace(' ', '')}: ") and words in problem


def test_batch_of_a_run_without_ramps() -> None:
    assert RunSpec(Config.model_validate(VALID)).batches.at(12345) == Batch(16, 16)
