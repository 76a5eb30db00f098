"""Models of megatron-core on the CPU, in one process over gloo, saved as Megatron-LM's training saves them.

`python -m tests.support.megatron_core FOLDER` writes the small checkpoint that tests read where megatron-core is not
installed (tests/unit/convert/data/megatron).  megatron-core: pip install --no-deps megatron-core
"""

from __future__ import annotations

import json
import queue
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

WHY = "megatron-core is not installed: pip install --no-deps megatron-core"
# What Megatron-LM's arguments say of each model; those of a dense model first, with changes of it.
DENSE: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "squared_relu": False,
    "bias_gelu_fusion": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": False,
    "apply_layernorm_1p": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "num_experts": None,
    "padded_vocab_size": 32,
    "make_vocab_size_divisible_by": 16,
    "params_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 20,
    "lr": 0.01,
    "min_lr": 0.01,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,
    "lr_decay_iters": None,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 0.0,
    "seed": 1234,
    "consumed_train_samples": 12,
}
GPT2: Mapping[str, Any] = {
    **DENSE,
    "group_query_attention": False,
    "num_query_groups": 1,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "bias_gelu_fusion": True,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
EXPERTS: Mapping[str, Any] = {
    **DENSE,
    "qk_layernorm": True,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_intermediate_size": 20,
}
SIGMOID: Mapping[str, Any] = {
    **EXPERTS,
    "qk_layernorm": False,
    "moe_layer_freq": [0, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.001,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": None,
}
MODELS: Mapping[str, Mapping[str, Any]] = {"dense": DENSE, "gpt2": GPT2, "experts": EXPERTS, "sigmoid": SIGMOID}


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings: megatron-core warns about packages that are not installed, and about its own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def core(module: str) -> Any:
    """Return a module of megatron-core; skip the test where that is not installed."""
    with quiet():
        return pytest.importorskip(f"megatron.core.{module}", reason=WHY)


@contextmanager
def one_process(store: Path) -> Iterator[None]:
    """Initialize torch.distributed and megatron-core's groups for one process on the CPU."""
    parallel_state, random = core("parallel_state"), core("tensor_parallel.random")
    writer, routers = core("dist_checkpointing.strategies.filesystem_async"), core("transformer.moe.moe_utils")
    with (
        quiet(),
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        mock.patch.object(writer, "_get_write_results_queue", queue.Queue),
        mock.patch.object(writer, "_process_memory", lambda: 0),
        mock.patch.object(writer.FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(_write_here)),
        mock.patch.object(routers, "te_general_gemm", None, create=True),
    ):
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.resolve()}", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _write_here(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write what megatron-core's processes of one rank write, in this process."""
    assert not use_msc and rank == 0, "one process writes to a disk"
    write, found = core("dist_checkpointing.strategies.filesystem_async").FileSystemWriterAsync, {}
    for place, bucket in enumerate(buckets):
        mine, counted = queue.Queue[Any](), queue.Queue[int]()
        counted.put(place)
        write.write_preloaded_data(transforms, place, bucket, mine, counted, True)
        found[place] = mine.get()[1]
    results.put(found)


@quiet()
def build(arguments: Mapping[str, Any], seed: int = 3) -> Any:
    """Return a GPTModel of the local layers, as Megatron-LM builds it from its arguments, with drawn weights."""
    model_module, specs = core("models.gpt.gpt_model"), core("models.gpt.gpt_layer_specs")
    config = _config(arguments)
    if arguments["num_experts"]:
        spec = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=arguments["normalization"]
        )
    else:
        spec = specs.get_gpt_layer_local_spec(
            None, False, arguments["qk_layernorm"], normalization=arguments["normalization"]
        )
    model = model_module.GPTModel(
        config,
        spec,
        arguments["padded_vocab_size"],
        arguments["max_position_embeddings"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type=arguments["position_embedding_type"],
        rotary_percent=arguments["rotary_percent"],
        rotary_base=arguments["rotary_base"],
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if isinstance(values, Tensor):
                center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                values.copy_(center + 0.2 * torch.randn(values.shape, generator=generator))
    return model


def _config(arguments: Mapping[str, Any]) -> Any:
    functional = torch.nn.functional
    layers, size = arguments["num_layers"], arguments["hidden_size"]
    layer = ("ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization", "qk_layernorm")
    keys = (*layer, "add_bias_linear", "add_qkv_bias", "hidden_dropout", "attention_dropout", "init_method_std")
    values = {key: arguments[key] for key in keys}
    values |= {key: value for key, value in arguments.items() if key.startswith("moe_")}
    groups = arguments["num_query_groups"] if arguments["group_query_attention"] else None
    return core("transformer.transformer_config").TransformerConfig(
        num_layers=layers,
        hidden_size=size,
        num_query_groups=groups,
        num_moe_experts=arguments["num_experts"],
        layernorm_epsilon=arguments["norm_epsilon"],
        gated_linear_unit=arguments["swiglu"],
        activation_func=functional.silu if arguments["swiglu"] else functional.gelu,
        bias_activation_fusion=arguments["bias_gelu_fusion"],
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        attention_backend=core("transformer.enums").AttnBackend.unfused,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        **values,
    )


@quiet()
def logits(model: Any, tokens_BS: Tensor) -> Tensor:
    """Return logits [B, S, V]."""
    num_sequences, length = tokens_BS.shape
    positions = torch.arange(length).expand(num_sequences, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    found: Tensor = model(tokens_BS, positions, mask)
    return found


def make_optimizer(model: Any, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the update rule of Megatron-LM, which does not decay biases and norms."""
    params = list(model.parameters())
    groups = [
        {"params": [each for each in params if (each.ndim > 1) is decays], "weight_decay": decay}
        for decays, decay in ((True, arguments["weight_decay"]), (False, 0.0))
    ]
    betas = arguments["adam_beta1"], arguments["adam_beta2"]
    return torch.optim.AdamW(groups, lr=arguments["lr"], betas=betas, eps=arguments["adam_eps"])


@quiet()
def train(model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> list[float]:
    """Take a step for each batch [B, S + 1]; return the losses."""
    losses = []
    for tokens in batches:
        found = logits(model, tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@quiet()
def save(
    folder: Path,
    arguments: Mapping[str, Any],
    model: Any,
    iteration: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    **metadata: Any,
) -> Path:
    """Save a model, and perhaps an optimizer's state, as Megatron-LM does with `--ckpt-format torch_dist`."""
    checkpointing, sharding = core("dist_checkpointing"), core("dist_checkpointing.optimizer")
    groups = {"dp_cp_group": torch.distributed.group.WORLD, **metadata}
    place = folder / f"iter_{iteration:07d}"
    place.mkdir(parents=True)
    state: dict[str, Any] = {
        "args": Namespace(**arguments, attention_backend=core("transformer.enums").AttnBackend.unfused),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    weights = model.sharded_state_dict(metadata=groups)
    if optimizer is not None:
        state["optimizer"] = sharded_optimizer(sharding, weights, optimizer)
    checkpointing.save({**state, **weights}, str(place), content_metadata=metadata)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


@quiet()
def load(place: Path, model: Any) -> None:
    """Load the weights of a model with megatron-core, which refuses tensors that are missing or have other shapes."""
    weights = model.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD})
    wanted = {name: each for name, each in weights.items() if not name.endswith("_extra_state")}
    found = core("dist_checkpointing").load(wanted, str(place))
    assert found["iteration"] == 3 and found["checkpoint_version"] == 3.0
    own = {name: found[name] for name in wanted}
    model.load_state_dict({**model.state_dict(), **own})


@quiet()
def load_optimizer(place: Path, model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Load an optimizer's state with megatron-core's own classes; return its update rule and its schedule."""
    modules = core("optimizer"), core("optimizer.optimizer"), core("optimizer_param_scheduler")
    config = core("optimizer.optimizer_config").OptimizerConfig(lr=0.5, min_lr=0.5)
    groups = modules[0]._get_param_groups([model], config, None)
    inner = torch.optim.AdamW(groups, lr=0.5)
    optimizer = object.__new__(modules[1].FP32Optimizer)  # whose own __init__ makes a tensor on a GPU
    modules[1].MegatronOptimizer.__init__(optimizer, inner, config, _init_state)
    optimizer.is_stub_optimizer = False
    weights = model.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD})
    wanted = {"optimizer": optimizer.sharded_state_dict(weights, is_loading=True)}
    found = core("dist_checkpointing").load(wanted, str(place))
    optimizer.load_state_dict(found["optimizer"])
    schedule = modules[2].OptimizerParamScheduler(
        optimizer, 0.0, 0.5, 0.5, 0, 9, "linear", 0.0, 0.0, 5, "constant", use_checkpoint_opt_param_scheduler=True
    )
    schedule.load_state_dict(found["opt_param_scheduler"])
    schedule.step(0)  # rates and decay of the groups, as training sets them before each step
    return inner, schedule


def _init_state(optimizer: torch.optim.Optimizer, config: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            state |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.ones_like(param),
            }


def sharded_optimizer(sharding: Any, weights: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state in the form of megatron-core's `FP32Optimizer`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = sharding.get_param_id_to_sharded_param_map(weights, params)
    state: dict[str, Any] = optimizer.state_dict()
    steps = [each["step"] for each in state["state"].values()]
    sharding.optim_state_to_sharding_state(state, ids, exclude_keys=("step",))
    state["state"]["common_step"] = steps[0]
    return state


# The stored checkpoint is of a smaller model.
STORED: Mapping[str, Any] = {**DENSE, "hidden_size": 8, "ffn_hidden_size": 8, "kv_channels": 2, "padded_vocab_size": 16}
TOKENS = torch.tensor([[0, 15, 3, 7, 7, 1, 9, 4], [2, 2, 8, 14, 5, 0, 11, 6]])


def main(folder: Path) -> None:
    """Write the checkpoint that is stored with the tests, and the model's logits of `TOKENS`."""
    with one_process(folder.with_name("store")):
        model = build(STORED)
        save(folder, STORED, model)
        with torch.no_grad():
            (folder / "logits.json").write_text(json.dumps(logits(model, TOKENS).tolist()) + "\n")
    folder.with_name("store").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
