"""Step time of mixtures of experts on two data-parallel ranks: ours, and transformers' Mixtral under DDP and FSDP2.

python benchmarks/moe.py [--experts 4 16] [--output benchmarks/results/moe.json]

The same processes, one thread each, run all contestants interleaved; the time of a step is that of the slowest rank.
Ours holds all experts on each rank, or half of them (EP 2) with each dispatcher.  With --topk, the dispatchers are
compared at several experts per token, with the bytes that each sends, of which the closed form names the crossover.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.report import Row, interleaved, milliseconds, show, times_faster, write
from common.shapes import CPU, LR, SEED, Size
from tensor_parallel import check_same_loss, slowest_rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.loader import Microbatch
from megatron3d.parallel.modes.mode import DISPATCHERS
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step

NUM_RANKS = 2
FULL = Size(num_layers=4, hidden_size=256, num_attention_heads=8, vocab_size=2048, seq_length=256, batch_size=8)
QUICK = Size(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, seq_length=32, batch_size=4)
Step = Callable[[Tensor], Tensor]


def config(size: Size, experts: int, topk: int, ranks: int, parallel: Mapping[str, Any]) -> Config:
    """Return our configuration of Mixtral's architecture, one microbatch for each rank."""
    model = {
        "family": "llama",
        "num_layers": size.num_layers,
        "hidden_size": size.hidden_size,
        "num_attention_heads": size.num_attention_heads,
        "ffn_hidden_size": 2 * size.hidden_size,
        "seq_length": size.seq_length,
        "norm_epsilon": 1e-5,
        "rotary_base": 10000.0,
        "num_moe_experts": experts,
        "moe_router_topk": topk,
    }
    batch = size.batch_size // NUM_RANKS
    train = {"micro_batch_size": batch, "global_batch_size": batch * ranks}
    optimizer = {"lr": LR, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.01, "clip_grad": 1.0}
    sections = {"model": model, "train": train, "optimizer": optimizer, "parallel": dict(parallel)}
    return Config.model_validate(sections)


def build(size: Size, experts: int, topk: int, ranks: int, parallel: Mapping[str, Any]) -> tuple[TrainState, Recorder]:
    """Return our training state of this rank, or of a world of one."""
    rank = dist.get_rank() if ranks > 1 else 0
    spec = RunSpec(config(size, experts, topk, ranks, parallel), ranks, size.vocab_size, rank)
    recorder = Recorder(connect(spec))
    return build_state(spec, recorder, CPU), recorder


class OurStep:
    """Our training step on this rank's sequences."""

    def __init__(self, size: Size, experts: int, topk: int, parallel: Mapping[str, Any]) -> None:
        self._state, self.recorder = build(size, experts, topk, NUM_RANKS, parallel)
        self._settings = StepSettings(SEED, size.num_tokens, size.batch_size)
        self._first = dist.get_rank() * (size.batch_size // NUM_RANKS)

    def __call__(self, tokens: Tensor) -> Tensor:
        return train_step(self._state, [Microbatch(tokens, self._first)], LR, self._settings).loss


def mixtral(size: Size, experts: int, topk: int, wrap: Callable[[MixtralForCausalLM], nn.Module]) -> Step:
    """Return the step of transformers' Mixtral with our initial weights; the loss is each rank's own mean."""
    settings = MixtralConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=2 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_attention_heads,
        num_local_experts=experts,
        num_experts_per_tok=topk,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        max_position_embeddings=size.seq_length,
        use_cache=False,
    )
    model = MixtralForCausalLM(settings).train()
    model.load_state_dict(_their_weights(size, experts, topk))
    wrapped = wrap(model)
    adamw = torch.optim.AdamW(wrapped.parameters(), lr=LR)

    def step(tokens: Tensor) -> Tensor:
        logits = wrapped(tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    return step


_NAMES = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.proj": "self_attn.o_proj",
    "mlp.router": "mlp.gate",
}


def _their_weights(size: Size, experts: int, topk: int) -> dict[str, Tensor]:
    """Return our initial weights under Mixtral's names."""
    state, recorder = build(size, experts, topk, 1, {})
    shapes = {name: spec.local_shape(recorder.mesh) for name, spec in state.buffers.specs.items()}
    found = {}
    for name, _, flat in state.buffers.shards("main"):
        value, path = flat.detach().view(shapes[name]).clone(), name.removesuffix(".weight")
        ends = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
        if path in ends:
            found[f"{ends[path]}.weight"] = value
            continue
        _, layer, rest = path.split(".", 2)
        there = f"model.layers.{layer}"
        if rest == "attention.qkv":
            found |= {f"{there}.self_attn.{k}_proj.weight": v for k, v in zip("qkv", value.chunk(3), strict=True)}
        elif rest.startswith("mlp.experts"):
            leaf = {"mlp.experts.fc1": "gate_up_proj", "mlp.experts.fc2": "down_proj"}[rest]
            found[f"{there}.mlp.experts.{leaf}"] = value.unflatten(0, (experts, -1))
        else:
            found[f"{there}.{_NAMES[rest]}.weight"] = value
    return found


def ddp(model: MixtralForCausalLM) -> nn.Module:
    """Wrap with DDP, whose gradients are views of its buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: MixtralForCausalLM) -> nn.Module:
    """Wrap with FSDP2, one unit per layer and one for the rest."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[return-value]


def expert_parallel(dispatcher: str) -> dict[str, Any]:
    """Return the keys of experts that are distributed over both ranks."""
    return {"expert_model_parallel_size": NUM_RANKS, "moe_token_dispatcher_type": dispatcher}


def _mean(loss: Tensor) -> float:
    """Return the mean over ranks: ours is that already, a peer's is that of its own share."""
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / NUM_RANKS


def measure(experts: int, tokens: Tensor, options: argparse.Namespace) -> list[Row]:
    """Return a row for each contestant, the same on all ranks."""
    keys: dict[str, dict[str, Any]] = {"ours": {}, "ours, ZeRO 3": {"zero_stage": 3}}
    keys |= {f"ours, EP 2, {name}": expert_parallel(name) for name in DISPATCHERS}
    ours: dict[str, Step] = {name: OurStep(options.size, experts, 2, each) for name, each in keys.items()}
    wraps = {"Mixtral, DDP": ddp, "Mixtral, FSDP2": fsdp}
    peers = {name: mixtral(options.size, experts, 2, wrap) for name, wrap in wraps.items()}
    everyone = {name: partial(step, tokens) for name, step in (ours | peers).items()}
    check_same_loss({name: _mean(step()) for name, step in everyone.items()})
    turns = slowest_rank(interleaved(everyone, options.rounds, options.warmup, dist.barrier))
    best = min(ours, key=lambda name: milliseconds(turns[name])["step_ms"])
    return [
        {
            "experts": experts,
            "contestant": name,
            "best_of_ours_over_this": times_faster(turns, best, name),
            **milliseconds(turns[name]),
        }
        for name in everyone
    ]


def crossover(topk: int, tokens: Tensor, options: argparse.Namespace) -> list[Row]:
    """Return the step time and the bytes of both dispatchers for one number of experts per token."""
    steps = {name: OurStep(options.size, 16, topk, expert_parallel(name)) for name in DISPATCHERS}
    sent = {}
    for name, step in steps.items():
        step(tokens)
        sent[name] = sum(call.wire_bytes for call in step.recorder.calls)
    everyone = {name: partial(step, tokens) for name, step in steps.items()}
    turns = slowest_rank(interleaved(everyone, options.rounds, options.warmup, dist.barrier))
    return [
        {"topk": topk, "contestant": name, **milliseconds(turns[name]), "sent_mb": sent[name] / 1e6}
        for name in everyone
    ]


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Measure on one of the ranks; rank 0 prints, and writes its rows to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    tokens, rows = options.size.tokens().chunk(NUM_RANKS)[rank], list[Row]()
    for experts in options.experts:
        found = measure(experts, tokens, options)
        if rank == 0:
            show(f"{experts} experts, 2 of each token, fp32, 2 ranks of 1 thread over gloo", found)
        rows += found
    for topk in options.topk:
        found = crossover(topk, tokens, options)
        if rank == 0:
            show(f"16 experts, {topk} of each token, EP 2", found)
        rows += found
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder, options), nprocs=NUM_RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    if options.output:
        write(options.output, rows, rounds=options.rounds)


def arguments() -> argparse.Namespace:
    """Parse the options; `--quick` is a round of four experts and a tiny size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experts", nargs="*", type=int, default=[4, 16])
    parser.add_argument("--topk", nargs="*", type=int, default=[1, 2, 4], help="experts per token of the crossover")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per contestant; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    options.size = QUICK if options.quick else FULL
    if options.quick:
        options.experts, options.topk, options.rounds, options.warmup = [4], [1], 1, 0
    return options


if __name__ == "__main__":
    main()
