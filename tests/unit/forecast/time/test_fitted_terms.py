"""Fact: neutral terms change no prediction, each term slows a step down as it says, and those in use are in bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.breakdown import HOST
from megatron3d.forecast.time.hardware import load_accelerator, load_cluster
from megatron3d.forecast.time.practices import NEUTRAL, ON, OURS, ZERO_BUBBLE, FittedTerms, fitted_terms, practice
from megatron3d.forecast.time.step import make_machine, predict_time, step_time
from tests.unit.forecast.time.held_out import ROWS, step_for

MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 8192}


def seconds(fitted: FittedTerms, is_degraded: bool = False, **parallel: object) -> float:
    layout = {"tensor_model_parallel_size": 2, "zero_stage": 1, **parallel}
    train = {"global_batch_size": 64, "precision": "bf16"}
    config = Config.model_validate({"model": MODEL, "parallel": layout, "train": train})
    cluster = load_cluster("eos").model_copy(update={"is_degraded": is_degraded})
    accelerator = load_accelerator(cluster.accelerator)
    return predict_time(
        RunSpec(config, 32), make_machine(cluster, accelerator, "bf16", 32, replace(OURS, fitted=fitted))
    ).step_s


@pytest.mark.parametrize(
    "term",
    [
        {"products": 1.2},
        {"attention": 2.0},
        {"memory": 2.0},
        {"hidden_tax": 0.5},
        {"host_layer_us": 5000.0},
        {"host_tensor_us": 5000.0},
        {"call_us": 100.0},
        {"hop_us": 500.0},
        {"inner": 3.0},
        {"outer": 3.0},
        {"fall": 1.0},
    ],
    ids=str,
)
def test_each_term_slows_a_step_down(term: dict[str, float]) -> None:
    """A host that needs 5 ms for a layer decides; the others add less."""
    neutral, slower = seconds(NEUTRAL), seconds(FittedTerms(**term))
    assert slower > 1.001 * neutral
    if "host" in str(term):
        assert slower >= 8 * 4 * 5e-3  # eight layers and four microbatches


def test_host_time_of_tensor_parallelism_needs_it() -> None:
    alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    terms = FittedTerms(host_tensor_us=5000, degraded_host_us=5000, degraded_host_tensor_us=5000, host_nodes=1)
    assert seconds(terms, True, **alone) == seconds(NEUTRAL, True, **alone)
    assert HOST == "waiting for the host"


def test_host_time_grows_with_the_other_tensor_ranks_and_their_nodes() -> None:
    """Eight layers; each doubling of tensor ranks halves the data ranks, and doubles the microbatches."""
    us, sizes = 50_000, (2, 4, 8)
    of_tensor = [seconds(FittedTerms(host_tensor_us=us), tensor_model_parallel_size=size) for size in sizes]
    each = [step_s / (microbatches * 8 * us * 1e-6) for step_s, microbatches in zip(of_tensor, (4, 8, 16), strict=True)]
    assert each == pytest.approx([1, 3, 7], rel=0.05)
    across = {"tensor_model_parallel_size": 16}
    far, near = (seconds(FittedTerms(host_layer_us=us, host_nodes=value), **across) for value in (1, 0))
    assert far == pytest.approx(2 * near, rel=0.05)
    in_a_node = (seconds(FittedTerms(host_layer_us=us, host_nodes=value)) for value in (1, 0))
    assert len({*in_a_node}) == 1


@pytest.mark.parametrize("stages", [1, 2])
def test_the_state_of_a_cluster_and_no_pipeline_costs_more_host_time(stages: int) -> None:
    us, split = 50_000, {"pipeline_model_parallel_size": stages, "tensor_model_parallel_size": 4}
    alone = seconds(FittedTerms(host_tensor_us=us), **split)
    for more in (
        FittedTerms(host_tensor_us=us, degraded_host_us=3 * us),
        FittedTerms(host_tensor_us=us, degraded_host_tensor_us=us),
    ):
        assert seconds(more, **split) == alone
        assert seconds(more, True, **split) == pytest.approx(2 * alone, rel=0.05)


def test_jitter_grows_with_the_logarithm_of_data_parallel_ranks() -> None:
    assert seconds(FittedTerms(jitter=0.01)) == pytest.approx(1.04 * seconds(NEUTRAL))


def test_steps_of_a_ring_count_between_nodes_only() -> None:
    inside = {"tensor_model_parallel_size": 8, "zero_stage": 0}
    assert seconds(FittedTerms(hop_us=500), **inside) == seconds(NEUTRAL, **inside)


def test_fitted_terms_belong_to_practices() -> None:
    for key, terms in fitted_terms().items():
        name, _, kind = key.partition(ON)
        assert terms.spread[0] <= 1 <= terms.spread[1] and practice(name, f"{kind}_part.yaml").fitted == terms
    assert OURS.fitted == NEUTRAL


def test_terms_of_a_kind_of_accelerator_hold_for_its_parts() -> None:
    """Other accelerators have the terms that are fitted to all of them."""
    on_a100, on_h100 = (practice("PyTorch FSDP", part).fitted for part in ("a100_40gb", "h100_sxm"))
    everywhere = practice("PyTorch FSDP").fitted
    assert on_a100 != on_h100 != everywhere == practice("pytorch fsdp", "b200").fitted
    assert practice("nanotron", "h100_sxm").fitted == practice("nanotron").fitted


def test_of_zero_bubble_schedules_the_slowest_rank_decides() -> None:
    """Without a barrier a step is shorter by the warm-up of the last rank; a schedule without W waits as before."""
    shorter = {}
    for name in ("14.6B, 48 microbatches, ZB-2p", "1.5B, 24 microbatches, 1F1B"):
        (step,) = (step_for(row) for row in ROWS if row["name"] == name)
        later = replace(step.machine, profile=replace(step.machine.profile, validates_later=True))
        shorter[name] = step_time(replace(step, machine=later)).step_s / step_time(step).step_s
    waits, none = shorter.values()
    assert 0.9 < waits < 0.97 and none == 1
    assert ZERO_BUBBLE.validates_later
