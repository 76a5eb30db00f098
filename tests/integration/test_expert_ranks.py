"""Fact: experts that are distributed over ranks of any axes compute the numbers of one process, in float64.

Loss, gradient norm, gradients, parameters and the validation loss of two steps agree, losses of routers included.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.rules import check
from megatron3d.experts import router
from megatron3d.experts.plan import expert_sizes, stage_axes
from megatron3d.parallel.modes.mode import DISPATCHERS
from megatron3d.verify.layouts import differences
from tests.support.equality import MODELS, TOLERANCE, VOCAB_SIZE, configure, reference, run_trace
from tests.support.turn_ranks import run_turns

MODEL = "experts, shared experts, losses of routers"
GPT_OSS = "gpt-oss's layers, Cohere's norms"
BATCH, NUM_LAYERS = 8, 2
SEQUENCES = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CUBE = {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8}
# Keys of the layout, number of ranks, axes of the experts.
LAYOUTS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "data": ({"expert_model_parallel_size": 2, "zero_stage": 3}, 2, ("data",)),
    "replicas": (
        {"expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2, "zero_stage": 2},
        4,
        ("data",),
    ),
    "context": ({"expert_model_parallel_size": 2, "context_parallel_size": 2, "zero_stage": 2}, 4, ("context",)),
    "data and context": (
        {"expert_model_parallel_size": 4, "context_parallel_size": 2, "zero_stage": 1},
        4,
        ("data", "context"),
    ),
    "pipeline": (
        {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        4,
        ("data",),
    ),
    "data and tensor": ({"expert_model_parallel_size": 4, **SEQUENCES, "zero_stage": 1}, 4, ("data", "t")),
    "a piece of data": ({"expert_model_parallel_size": 2, "zero_stage": 3}, 4, ("data.1",)),
    "a piece of data, and tensor": (
        {"expert_model_parallel_size": 4, **SEQUENCES, "zero_stage": 2},
        8,
        ("data.1", "t"),
    ),
    "a piece of tensor": ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 4}, 4, ("t.1",)),
    "a piece of context": (
        {"expert_model_parallel_size": 2, "context_parallel_size": 4, "zero_stage": 1, "cp_comm_type": "p2p"},
        4,
        ("context.1",),
    ),
    "split over tensor": (
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, **SEQUENCES, "zero_stage": 3},
        8,
        ("data.1",),
    ),
    "split over data": ({"expert_tensor_parallel_size": 2, "zero_stage": 1}, 4, ()),
    "three pieces of data": (
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "zero_stage": 2},
        8,
        ("data.1",),
    ),
    "over replicas": (
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "num_distributed_optimizer_instances": 4,
            "zero_stage": 3,
        },
        8,
        ("replica.1",),
    ),
    "some tensor axes": ({"expert_model_parallel_size": 4, **CUBE}, 8, ("y", "z")),
}


# Layouts with pieces of axes, or with experts that are split, meet one dispatcher each, the others both.
FOLDED = [name for name in LAYOUTS if "split" in name or "piece" in name or "replicas" in name]
CASES = [
    *((name, dispatcher) for name in LAYOUTS if name not in FOLDED for dispatcher in DISPATCHERS),
    *((name, DISPATCHERS[place % 2]) for place, name in enumerate(FOLDED)),
]


@pytest.mark.parametrize("name, dispatcher", CASES)
def test_distributed_experts_equal_one_process(name: str, dispatcher: str) -> None:
    parallel, num_ranks, axes = LAYOUTS[name]
    if axes:
        parallel = parallel | {"moe_token_dispatcher_type": dispatcher}
    rows = 4 if "tensor_parallel_mode" in parallel else 2 if num_ranks < 8 or "sequence_parallel" in parallel else 1
    train: dict[str, Any] = {"micro_batch_size": rows}
    if name == "data and context":
        train |= {"recompute_granularity": "full", "recompute_num_layers": 2}
    config = configure({**MODELS[MODEL], "num_layers": NUM_LAYERS}, parallel, global_batch_size=BATCH, **train)
    assert check(config, num_ranks, VOCAB_SIZE) == []
    assert RunSpec(config, num_ranks).mode.experts == axes
    got = run_turns(run_trace, num_ranks, config, 2)[0]
    assert list(differences(reference(MODEL, NUM_LAYERS, BATCH), got, TOLERANCE)) == []


RECOMPUTATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute_granularity": "full"},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp_act")},
    {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "shared_experts")},
    {"recompute_granularity": "selective", "recompute_modules": ("mlp_act", "shared_experts")},
    {"recompute_granularity": "selective", "recompute_modules": ("mlp_act", "moe")},
)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_recomputation_repeats_no_choice(dispatcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of recomputation gives the bits of none, and routes each token as often."""
    tokens, traces, original = list[int](), list[Any](), router.top_experts

    def top_experts(choice_ME: Tensor, count: int) -> Tensor:
        tokens[-1] += len(choice_ME)
        return original(choice_ME, count)

    monkeypatch.setattr(router, "top_experts", top_experts)
    parallel = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": dispatcher}
    for recompute in RECOMPUTATIONS:
        train = {"micro_batch_size": 2, "global_batch_size": BATCH, **recompute}
        tokens.append(0)
        traces.append(run_turns(run_trace, 2, configure({**MODELS[MODEL], "num_layers": 2}, parallel, **train), 1)[0])
    assert len(set(tokens)) == 1
    assert [line for other in traces[1:] for line in differences(traces[0], other, 0.0)] == []


BIASED: tuple[dict[str, Any], ...] = (
    *({"expert_model_parallel_size": 2, "moe_token_dispatcher_type": each} for each in DISPATCHERS),
    {"expert_tensor_parallel_size": 2},
)


@pytest.mark.parametrize("folding", BIASED, ids=(*DISPATCHERS, "split"))
def test_biases_of_distributed_experts(folding: dict[str, Any]) -> None:
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    config = configure({**MODELS[GPT_OSS], "num_layers": NUM_LAYERS}, folding | {"zero_stage": 2}, **sizes)
    got = run_turns(run_trace, 2, config, 2)[0]
    assert list(differences(reference(GPT_OSS, NUM_LAYERS, 4), got, TOLERANCE)) == []


ONE_CHOSEN = {
    "moe_router_topk": 1,
    "moe_router_score_function": "softmax",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such product": (
        {},
        {"expert_model_parallel_size": 3},
        "divide no axis of a stage (data 2) into whole pieces; use 1 or 2",
    ),
    "no product with these experts": (
        {},
        {"expert_tensor_parallel_size": 4, "expert_model_parallel_size": 2},
        "ETP x EP = 4 x 2 neighbouring ranks divide no axis of a stage (data 2) into whole pieces; use 1",
    ),
    "no experts": ({"num_moe_experts": None}, {"expert_model_parallel_size": 2}, "the model has no experts"),
    "odd experts": ({"num_moe_experts": 9}, {"expert_model_parallel_size": 2}, "2 does not divide"),
    "more chosen than there are": ({"moe_router_topk": 9}, {}, "more than model.num_moe_experts=8; use 1 to 8"),
    "one half of groups": ({"moe_router_group_topk": None}, {}, "not used without model.moe_router_group_topk"),
    "scores of no groups": (
        {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_group_score_topk": 1},
        {},
        "not used without model.moe_router_num_groups",
    ),
    "more scores than a group has": ({"moe_router_group_score_topk": 3}, {}, "a group has 2 experts, fewer than the 3"),
    "an activation with parameters": ({"activation": "xielu"}, {}, "has parameters of an MLP, and experts have none"),
    "groups of unequal size": ({"moe_router_num_groups": 3}, {}, "3 does not divide model.num_moe_experts=8"),
    "too few groups": ({"moe_router_group_topk": 1}, {}, "1 groups have 2 experts, fewer than model.moe_router_topk=3"),
    "softmax before sigmoid": ({"moe_router_pre_softmax": True}, {}, "not used with model.moe_router_score_function"),
    "a gate of nothing": ({"moe_shared_expert_intermediate_size": None}, {}, "there are no shared experts to gate"),
    "a factor of nothing": ({"moe_router_load_balancing_type": "none"}, {}, "not used with model.moe_router_load"),
    "a rate of nothing": (
        {"moe_router_enable_expert_bias": False},
        {},
        "not used without model.moe_router_enable_expert_bias=true",
    ),
    "no layer": ({"moe_layer_freq": (0,)}, {}, "layers has experts"),
    "no layer of those that there are": ({"moe_layer_freq": (*[0] * 64, 1)}, {}, "layers has experts"),
    "one expert of weight 1": (
        ONE_CHOSEN,
        {},
        "exactly 1, so that the router would never learn; use model.moe_router_pre_softmax=true, or "
        "model.moe_router_score_function=sigmoid",
    ),
    "a policy of nothing": (
        {"moe_token_drop_policy": "position", "moe_expert_capacity_factor": None},
        {},
        "drops nothing without model.moe_expert_capacity_factor",
    ),
    "padding without a capacity": (
        {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": None},
        {},
        "has no capacity to pad to without model.moe_expert_capacity_factor",
    ),
    "a loss twice": (
        {"moe_router_load_balancing_type": ("aux_loss", "aux_loss"), "moe_aux_loss_coeff": (0.1, 0.1)},
        {},
        "names a loss twice",
    ),
    "two losses and one factor": (
        {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": 0.1},
        {},
        "1 for 2 losses; give a list of 2",
    ),
    "a loss without a factor": (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0},
        {},
        "has no effect with model.moe_aux_loss_coeff=0; use for example model.moe_aux_loss_coeff=0.01",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    model, parallel, message = REFUSED[name]
    config = configure({**MODELS[MODEL], **model}, parallel, micro_batch_size=2, global_batch_size=4)
    assert message in "; ".join(check(config, 2, VOCAB_SIZE))


def test_the_sizes_are_products_of_the_last_axes() -> None:
    config = configure(MODELS[MODEL], {"context_parallel_size": 2, "tensor_model_parallel_size": 4}, micro_batch_size=4)
    sizes = expert_sizes(stage_axes(RunSpec(config, 24).mode, 3))
    assert sizes == {
        1: (),
        2: ("t.1",),
        4: ("t",),
        8: ("context", "t"),
        24: ("data", "context", "t"),
    }
    assert set(expert_sizes((("data", 4), ("t", 6)), 2)) == {1, 3, 6, 12}
