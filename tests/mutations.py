"""Seeded bugs: the covering array of layouts must catch each of them.

    python -m tests.mutations [--full] [NAME ...]

Each mutation replaces one snippet of one module in a copy of the repository, where tests/integration/test_equality.py,
or the tests that it names, run until the first failure.  With --full, the whole matrices run on mutations that are
missed.  The exit code is 1 if a mutation was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("megatron3d", "tests", "benchmarks", "tools", "configs", "pretrain_gpt.py", "pyproject.toml")
ARRAY = ("tests/integration/test_equality.py", "tests/integration/test_gloo_equality.py", "-k", "one_process")
MATRICES = ("tests/slow", "--full")
RECOMPUTE = ("tests/unit/ops/test_recompute.py",)
OPERATIONS = ("tests/integration/test_operations.py",)
PAIRS = (
    "tests/unit/attention/test_packed_attention.py",
    "tests/unit/attention/test_attention.py",
    "tests/unit/data/test_packing.py",
)
EXCHANGES = (
    "tests/unit/attention/context/test_ring_attention.py",
    "tests/unit/attention/context/test_context_attention.py",
    "tests/unit/attention/test_attention_pairs.py",
)
EXCHANGE_PEAKS = ("tests/unit/forecast/memory/test_exchange_peaks.py",)
CONTEXT = ("tests/integration/test_context.py",)
CONTEXT_PAIRS = ("tests/unit/attention/test_attention_pairs_plan.py",)
EXPERTS = ("tests/integration/test_expert_ranks.py",)
OPTIMIZER = ("tests/unit/optim/test_optimizer.py",)
MUP = ("tests/unit/model/test_mup.py",)
NOISE = ("tests/unit/train/test_noise_scale.py",)
EMA = ("tests/unit/optim/test_ema.py",)
QK_CLIP = ("tests/unit/optim/test_qk_clip.py",)
MUON = ("tests/unit/optim/test_muon.py",)
SOAP = ("tests/unit/optim/test_soap.py", "-k", "not memory")
EXPERT_EXCHANGE = ("tests/unit/experts/test_expert_exchange.py",)
ROUTER_PROOFS = ("tests/integration/test_router_proofs.py", "-k", "sequences")
CAPACITY = ("tests/unit/experts/test_expert_capacity.py",)
ROUTER_STATE = ("tests/unit/model/test_router_state.py",)
ROUTER = ("tests/unit/experts/test_router.py",)
GPT_OSS = ("tests/unit/model/test_peers.py", "-k", "gpt_oss")
SOFTMAX = ("tests/unit/attention/test_attention_softmax.py",)
AHEAD = ("tests/unit/model/test_mtp.py",)
LATENT = ("tests/unit/model/test_latent_attention.py",)
LATENT_LAYOUTS = ("tests/integration/test_latent_equality.py",)
LATENT_CACHE = ("tests/unit/inference/test_sampling.py", "-k", "latent")
FP8 = ("tests/unit/linear/test_fp8.py",)
FP8_EXPERTS = ("tests/integration/test_fp8_experts.py",)
FP8_PARAMS = ("tests/integration/test_fp8_params.py", "-k", "bits")
FP8_STATS = ("tests/unit/train/monitor/test_fp8_stats.py",)
FP8_LOSS = ("tests/unit/train/test_fp8_loss.py",)
FP8_ROWS = ("tests/unit/experts/test_fp8_rows.py",)
GEMM = ("tests/unit/linear/test_gemm.py",)
FLOPS = ("tests/unit/model/test_flops.py",)
GPU_RATES = ("tests/unit/tools/test_calibrate_gpus.py",)
DRAFTS = ("tests/unit/inference/test_speculation.py", "-k", "caches or distribution")

CACHE = ("tests/unit/inference/test_sampling.py", "-k", "context")
RINGS = ("tests/unit/inference/test_sampling.py",)
TEXTS = ("tests/unit/inference/test_continuation.py",)
SERVER = "tests/integration/tools/test_serve.py"
FROM_MEMORY = ("tests/integration/test_restore.py",)
COPIES = ("tests/unit/checkpoint/test_in_memory.py",)
ELASTIC = ("tests/integration/test_elastic.py",)
BEST = ("tests/integration/test_best_checkpoint.py", "-k", "stays or rollback")


class Mutation(NamedTuple):
    """A bug: `old`, which occurs exactly once in the module, is replaced by `new`; `tests` must catch it."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...] = ARRAY


FP8_PREDICTIONS = ("tests/integration/test_fp8_predictions.py",)
FP8_PARAM_PREDICTIONS = ("tests/integration/test_fp8_params.py", "-k", "predicted")
FP8_TIMES = ("tests/unit/forecast/time/test_fp8_times.py",)


MUTATIONS = [
    Mutation(
        "predictions gather scales also along dims that have one block",
        "linear/fp8_plan.py",
        "varying = {axis: dim for axis, dim in table.items() if blocks[dims.index(dim)] is not None}",
        "varying = dict(table)",
        FP8_PREDICTIONS,
    ),
    Mutation(
        "predictions find the largest values of dY before its all-gather, though it is quantized behind",
        "linear/fp8_plan.py",
        'self._layout("MN") if recipe.sends_dy else self._split("MN")',
        'self._layout("MN")',
        FP8_PREDICTIONS,
    ),
    Mutation(
        "predictions forget the all-reduce for X^T",
        "linear/fp8_plan.py",
        'forward += self._reduced("KM")',
        "forward += []",
        FP8_PREDICTIONS,
    ),
    Mutation(
        "predictions leave out the scales that X^T is kept with",
        "model/operation.py",
        'saved = Stored(path, "input in fp8", fp8.stored("KM").num_bytes)',
        'saved = Stored(path, "input in fp8", fp8.stored("KM").numel)',
        FP8_PREDICTIONS,
    ),
    Mutation(
        "predictions forget what is dequantized for a GEMM",
        "model/fp8_workspaces.py",
        "self.dead(self.born((wide + beside) * size.numel + wide * size.num_scales))\n"
        "        return self.born(size.numel * itemsize)",
        "return 0",
        FP8_PREDICTIONS,
    ),
    Mutation(
        "predictions leave out the scales of weights that are stored in fp8",
        "forecast/memory/flat_buffers.py",
        "else 2 * LARGEST_BYTES * self.blocks.num_blocks",
        "else 0 * LARGEST_BYTES * self.blocks.num_blocks",
        FP8_PARAM_PREDICTIONS,
    ),
    Mutation(
        "predictions forget that axes split a weight that is one block",
        "forecast/time/traffic.py",
        "(*by_shards.items(), *by_axes.items())",
        "by_shards.items()",
        FP8_PARAM_PREDICTIONS,
    ),
    Mutation(
        "predictions put weights that are stored in fp8 into the flat buffers of others",
        "forecast/memory/flat_buffers.py",
        'unit_of(path) if is_by_block else "", shared, count > 0',
        'unit_of(path) if is_by_block else "", shared, False',
        FP8_PARAM_PREDICTIONS,
    ),
    Mutation(
        "predictions transpose no weight that is stored in fp8",
        "model/fp8_workspaces.py",
        'shard = self.born(stored.num_bytes * (dims == "KN"))',
        "shard = 0",
        FP8_PARAM_PREDICTIONS,
    ),
    Mutation(
        "predictions quantize weights of fp16 in fp16",
        "model/fp8_workspaces.py",
        "return local.itemsize if recipe.has_powers and not local.is_fp16 else local.wide",
        "return local.itemsize if recipe.has_powers else local.wide",
        FP8_PARAM_PREDICTIONS,
    ),
    Mutation(
        "predictions forget the largest values of rows of split experts",
        "linear/fp8_plan.py",
        'forward, backward = self._reduced("MK"), self._reduced("MN", self._split("MN"))',
        'forward, backward = self._reduced("MK"), []',
        (*FP8_EXPERTS, "-k", "operations and split"),
    ),
    Mutation(
        "predictions forget gradients that are sent during the backward of shared experts",
        "model/expert_operations.py",
        "rows = local.gathered_tokens + _tokens_summed(local)",
        "rows = 0",
        (*FP8_EXPERTS, "-k", "peak and folded"),
    ),
    Mutation(
        "predictions take every GPU for one with kernels of fp8",
        "linear/fp8_plan.py",
        'return precision == "bf16" and capability is not None and capability >= CAPABILITIES[recipe_name]',
        "return True",
        FP8_TIMES,
    ),
    Mutation(
        "predictions add dW in its GEMM, which no kernel of fp8 does",
        "forecast/time/tasks.py",
        "accumulation._replace(accesses=FP8_GRAD_BYTES, behind=())",
        "accumulation",
        FP8_TIMES,
    ),
    Mutation(
        "predictions give RMSNorm a gradient that is freed before",
        "model/operation.py",
        "_COMPOSED_COPIES = 4",
        "_COMPOSED_COPIES = 5",
        ("tests/integration/test_peaks.py", "-k", "rms_norm"),
    ),
    Mutation(
        "a survivor goes on in the old epoch",
        "runtime/members.py",
        "            1 + last.number,\n            members,",
        "            last.number,\n            members,",
        (*ELASTIC, "-k", "spare_takes"),
    ),
    Mutation(
        "fewer ranks train on a smaller global batch",
        "forecast/search/nearby.py",
        'train = {"micro_batch_size": candidate.micro_batch_size,',
        'train = {"micro_batch_size": candidate.micro_batch_size, "global_batch_size": candidate.num_ranks,',
        (*ELASTIC, "-k", "zero"),
    ),
    Mutation(
        "a slow rank keeps its place",
        "runtime/members.py",
        "        self._slow |= {self._ranks[rank] for rank in slow}\n",
        "",
        (*ELASTIC, "-k", "slow_rank_is_left_out"),
    ),
    Mutation(
        "a process whose store is late leads nobody",
        "runtime/members.py",
        "while self._ask(number) is Liveness.YES and time.monotonic() < end_s:",
        "if self._ask(number) is Liveness.YES:",
        ("tests/unit/runtime/test_members.py",),
    ),
    Mutation(
        "a rank that has left and told nobody is waited for",
        "runtime/members.py",
        "if self._left[number] >= self.epoch.number:",
        "if self._left[number] > self.epoch.number:",
        ("tests/unit/runtime/test_members.py",),
    ),
    Mutation(
        "a process ends a connection of its own for another one",
        "runtime/connections.py",
        "if _name(connection.fileno()) != name:",
        "if not connection.fileno():",
        ("tests/unit/runtime/test_members.py",),
    ),
    Mutation(
        "a send that gloo forgets is waited for",
        "runtime/members.py",
        "        LOSSES.is_lost = self._lost.is_set\n",
        "",
        ("tests/unit/runtime/test_members.py",),
    ),
    Mutation(
        "a process waits at its end for a send that gloo forgot",
        "runtime/members.py",
        "    if not LOSSES.is_idle():",
        "    if False:",
        ("tests/unit/runtime/test_waits.py",),
    ),
    Mutation(
        "a process waits at its end for a collective that nobody waits for",
        "comm/process_comm.py",
        "            LOSSES.start(work)\n",
        "            pass\n",
        ("tests/unit/runtime/test_waits.py",),
    ),
    Mutation(
        "a broken connection to a live process is its end",
        "runtime/connections.py",
        "            continue\n        except OSError:",
        "            break\n        except OSError:",
        ("tests/unit/runtime/test_members.py",),
    ),
    Mutation(
        "a run is interrupted for processes that it has no use for",
        "train/replan.py",
        ".num_ranks > spec.world_size",
        ".num_ranks >= spec.world_size",
        (*ELASTIC, "-k", "gains_nothing"),
    ),
    Mutation(
        "processes that joined have no place in a layout",
        "runtime/epochs.py",
        "if has_new or len(here) < len(before.members)",
        "if len(here) < len(before.members)",
        (*ELASTIC, "-k", "processes_join"),
    ),
    Mutation(
        "a state whose update is half done is restored",
        "train/survival.py",
        "live = held_state(run.state, run.identity) if is_usable else ()",
        "live = held_state(run.state, run.identity, is_complete=True) if is_usable else ()",
        (*ELASTIC, "-k", "half"),
    ),
    Mutation(
        "gloo's threads poll connections that have ended",
        "runtime/connections.py",
        "                poll.unregister(descriptor)",
        "                pass",
        ("tests/unit/runtime/test_members.py", "-k", "polls"),
    ),
    Mutation(
        "connections of other processes to this one's store are polled no longer",
        "runtime/connections.py",
        """            if _is_internet(connection) and connection.getsockname()[1] not in kept_ports:
                poll""",
        """            if _is_internet(connection):
                poll""",
        ("tests/unit/runtime/test_members.py", "-k", "polls"),
    ),
    Mutation(
        "peers have no copies after a loss until the next interval",
        "train/loop.py",
        """describe(state, run.identity, run.config), best_loss=best_loss)
    if run.memory:""",
        """describe(state, run.identity, run.config), best_loss=best_loss)
    if False:""",
        (*ELASTIC, "-k", "copies_again"),
    ),
    Mutation(
        "a checkpoint that a loss has interrupted is not made up for",
        "train/build.py",
        "saver.saved_at = on_rank_0(comm, lambda: newest_saved(saver.root, state.iteration))",
        "saver.saved_at = state.iteration",
        (*ELASTIC, "-k", "disk_is_full"),
    ),
    Mutation(
        "the LM head of nanotron weighs nothing",
        "forecast/time/practices.py",
        "arch.num_layers * layer + arch.padded_vocab_size * hidden",
        "arch.num_layers * layer",
        ("tests/unit/forecast/time/test_stage_division.py",),
    ),
    Mutation(
        "a skipped update leaves Muon's momentum behind",
        "optim/muon.py",
        "torch.where(is_skipped, m, new, out=m)",
        "m.copy_(new)",
        MUON,
    ),
    Mutation(
        "a skipped update moves the average of the weights",
        "optim/optimizer.py",
        "torch.where(skipped != 0, 0.0, 1 - decay)",
        "1 - decay",
    ),
    Mutation(
        "the average of the weights is not restored at resume",
        "train/checkpointing.py",
        "restarts = not options.optimizer or lacks_averages(index, state)",
        "restarts = bool(state.optimizer.averages)",
        EMA,
    ),
    Mutation(
        "the weights do not come back after an evaluation of their average",
        "optim/optimizer.py",
        "        finally:\n            self._exchange_averages()",
        "        finally:\n            self.buffers.publish()",
        EMA,
    ),
    Mutation(
        "the average of the weights takes no memory",
        "forecast/memory/step_spec.py",
        "average = 0 if self.optimizer.ema_decay is None else self.local.wide",
        "average = 0",
        EMA,
    ),
    Mutation(
        "hidden matrices keep their learning rate with muP",
        "model/param_spec.py",
        "init=init, lr_mult=1 / width, blocks=blocks",
        "init=init, blocks=blocks",
        MUP,
    ),
    Mutation(
        "a group of parameters loses muP's factor of the learning rate",
        "optim/rule_spec.py",
        "each.lr_mult * lr_mult, wd_mult",
        "each.lr_mult, wd_mult",
        MUP,
    ),
    Mutation(
        "attention's scores are divided by the root of a head's size with muP",
        "config/model_defaults.py",
        "scale = 1 / head_size if",
        "scale = head_size**-0.5 if",
        MUP,
    ),
    Mutation(
        "an independent weight decay of a group follows its learning rate",
        "optim/optimizer.py",
        "decay = decay / group.lr_mult if self.config.independent_weight_decay else decay",
        "decay = decay if self.config.independent_weight_decay else decay",
        ("tests/unit/optim/test_optimizer.py", "-k", "independent"),
    ),
    Mutation(
        "the loss of a small batch is divided by the tokens of the global batch",
        "train/noise_scale.py",
        "num_tokens=settings.num_tokens // count",
        "num_tokens=settings.num_tokens",
        NOISE,
    ),
    Mutation(
        "the noise scale takes the norms of this rank's shards alone",
        "train/noise_scale.py",
        "model.comm.all_reduce(torch.stack(squares), model.comm.mesh.names).wait().sqrt()",
        "torch.stack(squares).sqrt()",
        NOISE,
    ),
    Mutation(
        "the averages of the noise scale begin from scratch at each launch",
        "train/noise_scale.py",
        'if KEY in row and row["iteration"] <= run.state.iteration:',
        'if KEY in row and row["iteration"] < 0:',
        NOISE,
    ),
    Mutation(
        "matrices come back in the order of the flat buffer",
        "optim/homes.py",
        "returned = sorted(range(len(mine)), key=homes.__getitem__)",
        "returned = list(range(len(mine)))",
        MUON,
    ),
    Mutation(
        "every copy of a matrix is sent home as if it were another shard",
        "optim/homes.py",
        "return self._copy_index(rank, copies) == self._copy_index(matrix.home, copies)",
        "return True",
        MUON,
    ),
    Mutation(
        "QK-clip goes by the logits of this rank's sequences",
        "optim/qk_clip.py",
        'largest = comm.all_reduce(largest, mesh.without(mesh.names, (PIPELINE,)), "max").wait()',
        "pass",
        ARRAY,
    ),
    Mutation(
        "rotated queries of latent attention shrink as the others",
        "optim/qk_clip.py",
        "torch.cat((plain**alpha, rotated), dim=1)",
        "torch.cat((plain**alpha, rotated**alpha), dim=1)",
        QK_CLIP,
    ),
    Mutation(
        "QK-clip clips after a skipped update",
        "optim/qk_clip.py",
        "(largest > threshold) & (skipped == 0)",
        "largest > threshold",
        QK_CLIP,
    ),
    Mutation(
        "a slab is divided by its own norm",
        "optim/muon.py",
        "norm = total(slabs.square().sum((-2, -1), keepdim=True)).sqrt()",
        "norm = slabs.square().sum((-2, -1), keepdim=True).sqrt()",
        MUON,
    ),
    Mutation(
        "the products of slabs are not summed",
        "optim/muon.py",
        "gram = total(x @ x.mT)",
        "gram = x @ x.mT",
        MUON,
    ),
    Mutation(
        "groups of parameters have the learning rate of the run",
        "optim/optimizer.py",
        "self.config, lr * group.lr_mult, self.num_steps",
        "self.config, lr, self.num_steps",
        OPTIMIZER,
    ),
    Mutation(
        "the last group that names a parameter counts",
        "optim/rule_spec.py",
        "for each in config.param_groups:",
        "for each in config.param_groups[::-1]:",
        OPTIMIZER,
    ),
    Mutation(
        "the second moment stays where sorted columns were",
        "optim/soap.py",
        "torch.where(is_skipped, v, _columns(v.mT, order).mT, out=v)",
        "torch.where(is_skipped, v, v, out=v)",
        SOAP,
    ),
    Mutation(
        "the first moment does not follow the basis",
        "optim/soap.py",
        "torch.where(is_skipped, m, rotation @ m, out=m)",
        "torch.where(is_skipped, m, m, out=m)",
        SOAP,
    ),
    Mutation(
        "a skipped update refreshes a basis",
        "optim/soap.py",
        "torch.where(is_skipped, basis, q, out=basis)",
        "basis.copy_(q)",
        SOAP,
    ),
    Mutation(
        "Grams without damping follow the rounding of a layout",
        "optim/soap.py",
        "image.addcmul_(_columns(basis, order), damping[..., None])",
        "image",
        SOAP,
    ),
    Mutation(
        "gradients that are 0 but for rounding choose a basis",
        "optim/soap.py",
        " + eps**2 * m.shape[-1]",
        "",
        SOAP,
    ),
    Mutation(
        "equal eigenvalues are sorted by their rounding",
        "optim/soap.py",
        ".clamp(min=damping).bfloat16()",
        ".clamp(min=damping)",
        SOAP,
    ),
    Mutation(
        "Grams decay like the second moment whatever their own decay is",
        "optim/soap.py",
        "shampoo_beta = beta2 if config.soap_shampoo_beta is None else config.soap_shampoo_beta",
        "shampoo_beta = beta2",
        SOAP,
    ),
    Mutation(
        "Grams are those of the first shard of rows",
        "optim/homes.py",
        "_at(round_, batches, place).copy_(values.view(place.sides))",
        "_at(round_, batches, place).copy_(values.view(place.sides)).mul_(place.box[0][0] == 0)",
        SOAP,
    ),
    Mutation(
        "a loaded run keeps the bases of a new one",
        "train/checkpointing.py",
        "own = list(_home_pieces(state)) if options.optimizer else []",
        'own = [each for each in _home_pieces(state) if "basis" not in each.name] if options.optimizer else []',
        SOAP,
    ),
    Mutation(
        "state of whole matrices that a checkpoint has not stays as it was",
        "train/checkpointing.py",
        "        each.reset()\n",
        "        pass\n",
        SOAP,
    ),
    Mutation(
        "homes store only the first matrix of a shape",
        "train/checkpointing.py",
        "for part, each in zip(parts, values, strict=True):",
        "for part, each in zip(parts[:1], values, strict=False):",
        SOAP,
    ),
    Mutation(
        "a refresh counts once in each step",
        "optim/rule_spec.py",
        "return each_step + refresh / config.soap_precondition_frequency",
        "return each_step + refresh",
        SOAP,
    ),
    Mutation(
        "matrices have no state at their homes",
        "forecast/memory/rank.py",
        "return of_shards + home_state_bytes(self._step, self._flats)",
        "return of_shards",
        ("tests/unit/optim/test_soap.py", "-k", "memory"),
    ),
    Mutation(
        "the shortest matrices choose their homes first",
        "parallel/home_plan.py",
        "key=lambda place: -self._work(found[place][2].shape)",
        "key=lambda place: self._work(found[place][2].shape)",
        MUON,
    ),
    Mutation(
        "experts go to ranks that hold none of them",
        "parallel/home_plan.py",
        "if not spec.part_axes:",
        "if len(spec.parts) > 0:",
        MUON,
    ),
    Mutation(
        "routers are orthogonalized",
        "optim/rule_spec.py",
        'not path.endswith((".router.weight", ".shared_gate.weight"))',
        'not path.endswith(".shared_gate.weight")',
        MUON,
    ),
    Mutation(
        "an update holds no directions",
        "forecast/memory/homes.py",
        "others + each.held + max(",
        "others + max(",
        MUON,
    ),
    Mutation(
        "buckets share one latency",
        "forecast/time/data_axis.py",
        "return num * machine.network.seconds(call._replace(wire_bytes=call.wire_bytes / num), mesh)",
        "return machine.network.seconds(call, mesh)",
        ("tests/unit/forecast/time/test_data_axis.py",),
    ),
    Mutation(
        "the same computation hides the collectives of each stage of a rank",
        "forecast/time/data_axis.py",
        "1 - hidden_s / total_s",
        "1 - 3 * hidden_s / total_s",
        ("tests/unit/forecast/time/test_data_axis.py",),
    ),
    Mutation(
        "experts are gathered by all data-parallel ranks",
        "forecast/time/data_axis.py",
        "shards = mesh.without(shared, mesh.without(shared, axes))",
        "shards = shared",
        ("tests/unit/forecast/time/test_data_axis.py",),
    ),
    Mutation(
        "terms of the first kind of accelerator for all",
        "forecast/time/practices.py",
        "if Path(accelerator).stem.startswith(kind)",
        "if kind",
        ("tests/unit/forecast/time/test_fitted_terms.py",),
    ),
    Mutation(
        "the first step of a run counts as a measured one",
        "forecast/search/rows.py",
        '"elapsed_ms" in row][1:]',
        '"elapsed_ms" in row]',
        ("tests/unit/forecast/search/test_run_rows.py",),
    ),
    Mutation(
        "every pipeline rank has logits in predictions",
        "forecast/memory/rank.py",
        "return size if any(stage.has_head for stage in step.stages) else 0",
        "return size",
        ("tests/unit/forecast/memory/test_reserved.py",),
    ),
    Mutation(
        "torch recomputes a layer as a whole in predictions",
        "forecast/time/practices.py",
        "OTHERS.also(stops_early, with_loss(44.0)",
        "OTHERS.also(with_loss(44.0)",
        ("tests/unit/forecast/time/test_recomputation.py",),
    ),
    Mutation(
        "a filled stage takes a layer more when it has its part exactly",
        "forecast/time/practices.py",
        ">= (stage + 1) * total",
        "> (stage + 1) * total",
        ("tests/unit/forecast/time/test_stage_division.py",),
    ),
    Mutation(
        "hosts launch the forwards of all microbatches in flight ahead",
        "forecast/memory/rank.py",
        "_DONE = 2",
        "_DONE = 0",
        ("tests/unit/forecast/memory/test_reserved.py",),
    ),
    Mutation(
        "buckets count where nothing is reduced",
        "forecast/memory/rank.py",
        "step.local.mesh.size(step.local.mesh.zero) > 1",
        "step.local.mesh.size(step.local.mesh.zero) > 0",
        ("tests/unit/forecast/memory/test_reserved.py",),
    ),
    Mutation(
        "predictions of other frameworks leave out what their allocators hold",
        "forecast/memory/rank.py",
        "reserved_for(rank_memory(here), here, profile, most)",
        "reserved_for(rank_memory(here), here, OURS, most)",
        ("tests/unit/forecast/memory/test_reserved.py",),
    ),
    Mutation(
        "results reach other pipeline ranks at once in predictions",
        "pipeline/simulate.py",
        "(arrives := ends[waits_for] + hop) > start",
        "(arrives := ends[waits_for]) > start",
        ("tests/unit/pipeline/test_simulate.py",),
    ),
    Mutation(
        "layouts of a group are looked at before better ones of the next group",
        "forecast/search/bounds.py",
        "opened[0][0] < groups[place].seconds",
        "opened[0][0] < 1.1 * groups[place].seconds",
        ("tests/unit/forecast/search/test_search.py",),
    ),
    Mutation(
        "hosts of a healthy cluster take the time of a degraded one",
        "forecast/time/step.py",
        "if others and machine.network.cluster.is_degraded:",
        "if others:",
        ("tests/unit/forecast/time/test_fitted_terms.py",),
    ),
    Mutation(
        "Tensor Cores load rows of any length",
        "forecast/time/hardware.py",
        "is_aligned = batch == 1 or not any(",
        "is_aligned = batch > 0 or not any(",
        ("tests/unit/forecast/time/test_kernels.py",),
    ),
    Mutation(
        "hosts of tensor-parallel ranks cost the same, however many wait for one another",
        "forecast/time/step.py",
        "math.prod(sizes.values()) - 1",
        "min(math.prod(sizes.values()) - 1, 1)",
        ("tests/unit/forecast/time/test_fitted_terms.py",),
    ),
    Mutation(
        "memory that counts transfers between stages twice",
        "forecast/memory/rank.py",
        "buffers=shards + sum(",
        "buffers=2 * shards + sum(",
        ("tests/unit/forecast/memory/test_pipeline_ranks.py",),
    ),
    Mutation(
        "gradients that arrive in one action are forgotten in the next one",
        "forecast/memory/sweep.py",
        "state.live, [*state.missing], 0, 0",
        "state.live, state.missing, 0, 0",
        ("tests/integration/test_peaks.py",),
    ),
    Mutation(
        "the reduction of a dW is over at once",
        "forecast/memory/sweep.py",
        "yield Event(event.name, now, 0, size, grads)",
        "yield Event(event.name, now, 0, now, next_grads)",
        ("tests/integration/test_peaks.py",),
    ),
    Mutation(
        "what a recomputed module bears again never dies",
        "forecast/memory/sweep.py",
        "total_bytes(mine.values()) - late",
        "total_bytes(kept) - late",
        ("tests/integration/test_peaks.py",),
    ),
    Mutation(
        "an operation is left out of the list",
        "model/operation.py",
        "replace(between, peaks=peak), linear(local, fc2, between.output, local.residual)]",
        "replace(between, peaks=peak)]",
        OPERATIONS,
    ),
    Mutation(
        "an operation is listed twice",
        "model/operations.py",
        "found.append(replace(stream_norm(local, site, x), module=LAYERNORM if site in INPUT_NORMS else None))",
        "found += 2 * [replace(stream_norm(local, site, x), module=LAYERNORM if site in INPUT_NORMS else None)]",
        OPERATIONS,
    ),
    Mutation(
        "a linear forgets that it keeps its input",
        "model/operation.py",
        "saves=(saved,),\n        module=module,",
        "saves=(),\n        module=module,",
        OPERATIONS,
    ),
    Mutation(
        "tensors are born in another order than that of the list",
        "model/operations.py",
        'sites = "embedding_norm", "hidden_norm"',
        'sites = "hidden_norm", "embedding_norm"',
        OPERATIONS,
    ),
    Mutation(
        "bounds of layouts that count a forward twice",
        "forecast/search/bounds.py",
        "(each.forward.total + each.backward.total for",
        "(2 * each.forward.total + each.backward.total for",
        ("tests/unit/forecast/search/test_search.py",),
    ),
    Mutation(
        "the rotary key of latent attention is not rotated",
        "model/layers.py",
        "k_pos = self.rotated(k_MP.view(-1, length, 1, k_MP.shape[1]), at)",
        "k_pos = k_MP.view(-1, length, 1, k_MP.shape[1])",
        LATENT,
    ),
    Mutation(
        "positions in the first channels of latent queries",
        "model/layers.py",
        "q, q_pos = q_MF.view(-1, at.local_length, q_MF.shape[1] // (plain + pos), plain + pos).split(\n"
        "            (plain, pos), dim=-1\n        )",
        "q_pos, q = q_MF.view(-1, at.local_length, q_MF.shape[1] // (plain + pos), plain + pos).split(\n"
        "            (pos, plain), dim=-1\n        )",
        LATENT,
    ),
    Mutation(
        "scores of latent attention scaled by the padded size of a head",
        "model/spec.py",
        "return 1.0 if self.key_size == self.kv_channels else math.sqrt(self.kv_channels / self.key_size)",
        "return 1.0",
        LATENT,
    ),
    Mutation(
        "the latent of keys and values is not normalized",
        "model/layers.py",
        "c_MR = self.kv_norm(c_MR.contiguous())",
        "c_MR = c_MR.contiguous()",
        LATENT,
    ),
    Mutation(
        "gradients of the rotary key are not summed over the axes of heads",
        "attention/attention.py",
        "grad = comm.reduce_scatter(grad, axes, 1).wait() if splits_heads else _own(grad, axes, 1, comm)",
        "grad = _own(grad, axes, 1, comm)",
        LATENT_LAYOUTS,
    ),
    Mutation(
        "the rotary key of another rank's tokens",
        "attention/attention.py",
        "return _own(whole, row_axes(plan), 0, comm).contiguous()",
        "return whole.chunk(comm.mesh.size(row_axes(plan)), 0)[0].contiguous()",
        LATENT_LAYOUTS,
    ),
    Mutation(
        "rejected drafts are replaced by draws from the whole distribution",
        "inference/sampling.py",
        "rest_V = (p_V - draft.q_V).clamp(min=0)",
        "rest_V = p_V",
        DRAFTS,
    ),
    Mutation(
        "caches of modules keep rejected drafts",
        "inference/sampling.py",
        "num_shared(seen, tokens) - self.num_drafts, 0)",
        "num_shared(seen, tokens), 0)",
        DRAFTS,
    ),
    Mutation(
        "positions that no module has read count as read",
        "inference/sampling.py",
        "known[row][: ends[row] + self.num_drafts]",
        "known[row][:]",
        DRAFTS,
    ),
    Mutation(
        "modules draft from hidden states of other positions",
        "attention/kv_cache.py",
        "kept[rows, positions_BS.clamp(max=kept.shape[1] - 1), 0]",
        "kept[rows, (positions_BS + 1).clamp(max=kept.shape[1] - 1), 0]",
        DRAFTS,
    ),
    Mutation(
        "predictions keep what is projected up again",
        "model/operation.py",
        "module = MLA_UP_PROJ if path in (Q_UP, KV_UP) else None",
        "module = None",
        ("tests/unit/forecast/memory/test_activations.py", "-k", "latent"),
    ),
    Mutation(
        "predictions project latents up once",
        "model/operation.py",
        "path in (Q_UP, KV_UP)",
        "path in (KV_UP,)",
        ("tests/integration/test_dry_run.py", "-k", "latent_attention"),
    ),
    Mutation(
        "a mixture of experts that is recomputed chooses again",
        "model/experts.py",
        "replace(at.saving(None), kept=KeptResults())",
        "at",
        ("tests/integration/test_expert_ranks.py", "-k", "repeats_no_choice"),
    ),
    Mutation(
        "predictions recompute a mixture beyond what is saved last",
        "model/expert_operations.py",
        "for operation in found[:end]] + found[end:]",
        "for operation in found]",
        ("tests/integration/test_dry_run.py", "-k", "test_experts and moe"),
    ),
    Mutation(
        "a run of samples ends with an incomplete batch",
        "data/ramp_plan.py",
        "return num_samples // self.size.end",
        "return -(-num_samples // self.size.end)",
        ("tests/unit/data/test_ramp.py",),
    ),
    Mutation(
        "the schedule of a run of samples counts iterations",
        "config/run_spec.py",
        "return consumed_samples if self.counts_samples else iteration",
        "return iteration",
        ("tests/integration/test_data_runs.py", "-k", "run_of_samples"),
    ),
    Mutation(
        "the cache of latents keeps the rotary key without its position",
        "model/layers.py",
        "torch.cat((c, self.rotated(k_pos, at)), dim=-1).squeeze(2)",
        "torch.cat((c, k_pos), dim=-1).squeeze(2)",
        LATENT_CACHE,
    ),
    Mutation(
        "absorbed attention scales scores by the size of latents",
        "attention/attention.py",
        "mask_BSL, softmax, scale)",
        "mask_BSL, softmax)",
        LATENT_CACHE,
    ),
    Mutation(
        "losses of a router ahead divided by its own labels",
        "model/gpt.py",
        "if is_recomputed else at)\n",
        "if is_recomputed else there)\n",
        AHEAD,
    ),
    Mutation(
        "parameters of modules ahead without those of experts",
        "model/linear_spec.py",
        "arch.mtp_num_layers * has_experts(arch, arch.num_layers - 1)",
        "0",
        FLOPS,
    ),
    Mutation(
        "gradients of experts summed over ranks that hold others",
        "model/param_spec.py",
        "used, init=std / scale, part_axes=self.mode.experts)",
        "used, init=std / scale, part_axes=())",
        EXPERTS,
    ),
    Mutation(
        "choices counted from the first expert of all",
        "experts/dispatch.py",
        "chosen_MK - ranks.rank * ranks.num_local",
        "chosen_MK",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "weights of experts without gradients from other ranks",
        "experts/dispatch.py",
        "self._weights_MK = gather_rows(routes.weights_MK, axes, comm)",
        "self._weights_MK = gather_rows(routes.weights_MK.detach(), axes, comm)",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "weights of choices are waited for behind the tokens, which nothing hides then",
        "experts/dispatch.py",
        """        self._weights_MK = gather_rows(routes.weights_MK, axes, comm)
        self._tokens = Pending(start(tokens, gathering(axes, comm))) if axes else completed(tokens)
""",
        """        self._tokens = Pending(start(tokens, gathering(axes, comm))) if axes else completed(tokens)
        self._weights_MK = gather_rows(routes.weights_MK, axes, comm)
""",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "shared experts hide tokens twice as long as their GEMMs take",
        "forecast/time/tasks.py",
        "2 if phases == WHOLE else 1",
        "2",
        ("tests/unit/forecast/time/test_expert_layer.py",),
    ),
    Mutation(
        "ranks that share experts choose tokens by their own logits",
        "pipeline/engine.py",
        "for axes in (mode.experts, mode.etensor):",
        "for axes in (mode.etensor,):",
        ("tests/unit/inference/test_expert_ranks.py",),
    ),
    Mutation(
        "outputs of experts are not summed",
        "experts/dispatch.py",
        "return moved(x, gathering(axes, comm).reversed()) if axes else x",
        "return x.chunk(comm.mesh.size(axes))[comm.mesh.index(axes)] if axes else x",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "partial outputs of split experts are not summed",
        "model/experts.py",
        "y_MH = reduce_rows(y_MH, *shared_by)",
        "y_MH = y_MH[: len(home_MH)]",
        EXPERTS,
    ),
    Mutation(
        "every rank that splits an expert adds its bias",
        "model/experts.py",
        "self.bias if self.adds_bias else 0 * self.bias",
        "self.bias",
        EXPERTS,
    ),
    Mutation(
        "experts of another piece of an axis",
        "parallel/mesh.py",
        "in reversed(self._pieces_of(name)):",
        "in self._pieces_of(name):",
        ("tests/unit/parallel/test_mesh.py",),
    ),
    Mutation(
        "gradients of experts not summed over the rest of an axis with pieces",
        "parallel/mesh.py",
        "gone = set(self.split(taken))",
        "gone = {piece for axis in taken for piece in self.split((axis.partition('.')[0],))}",
        EXPERTS,
    ),
    Mutation(
        "weights of split experts without gradients from other ranks",
        "experts/dispatch.py",
        "    weights_MK = gather_rows(routes.weights_MK, axes, comm)\n    tokens",
        "    weights_MK = gather_rows(routes.weights_MK.detach(), axes, comm)\n    tokens",
        EXPERTS,
    ),
    Mutation(
        "rows received as many as are sent",
        "experts/dispatch.py",
        "exchanging(sent, arrived, ranks.axes, ranks.comm)",
        "exchanging(sent, sent, ranks.axes, ranks.comm)",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "rows of experts in the order of the ranks that sent them",
        "experts/dispatch.py",
        "rows = self._by_expert(self._rows())",
        "rows = self._rows()",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "outputs return in the order of experts, not of ranks",
        "experts/dispatch.py",
        "moved(self._by_rank(Rows(y_RH)).values, self._move.reversed())",
        "moved(y_RH, self._move.reversed())",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "weights that were sent to other ranks without gradients",
        "experts/dispatch.py",
        "take_weights(routes.weights_MK, self._order, self._order.num_slots)",
        "take_weights(routes.weights_MK, self._order, self._order.num_slots).detach()",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "gradients of rows in the order of experts",
        "experts/rows.py",
        "dy_RH.index_select(0, inverse_R)",
        "dy_RH",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "counts of a sequence from one rank",
        "model/experts.py",
        "        if self.sequence_axes:\n",
        "        if self.sequence_axes and self.comm.mesh.rank < 0:\n",
        EXPERTS,
    ),
    Mutation(
        "losses of routers divided by this rank's tokens",
        "model/experts.py",
        "/ at.target.all_tokens",
        "/ len(logits_ME)",
        EXPERTS,
    ),
    Mutation(
        "ZeRO over axes that shard experts",
        "zero/flat_buffer.py",
        "own = sharding.without(spec.axes, mesh)",
        "own = sharding",
        EXPERTS,
    ),
    Mutation(
        "weights of rows in the order of tokens",
        "experts/rows.py",
        "weights_MK.flatten().index_select(0, order_R)",
        "weights_MK.flatten()[: len(order_R)]",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "an expert without rows keeps the last gradient",
        "linear/main_grad.py",
        "            elif not holds_gradient:\n                rows.zero_()\n",
        "",
        ROUTER,
    ),
    Mutation(
        "rows of split experts are scaled by one rank's features",
        "linear/fp8_rows.py",
        "self.format, self.plan.x_layout)",
        "self.format, ((), ()))",
        FP8_EXPERTS,
    ),
    Mutation(
        "output gradients of split experts are scaled by one rank's features",
        "linear/fp8_rows.py",
        "self.dy_format, (self.plan.m, self.plan.n))",
        "self.dy_format, ((), ()))",
        FP8_EXPERTS,
    ),
    Mutation(
        "experts multiply with the scales of another expert's rows",
        "experts/grouped_matmul.py",
        "rows.scales.split(list(counts))",
        "[rows.scales[:count] for count in counts]",
        FP8_ROWS,
    ),
    Mutation(
        "tokens that are sent in fp8 are multiplied by the scales of the first token",
        "linear/fp8_rows.py",
        "packed_MC[:, num_features:].contiguous()",
        "packed_MC[:1, num_features:].repeat(len(packed_MC), 1)",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "tokens in fp8 are predicted to be sent without their scales",
        "linear/fp8_plan.py",
        "return num_features + num_features //",
        "return num_features + 0 * num_features //",
        EXPERT_EXCHANGE,
    ),
    Mutation(
        "weights in fp8 have the scales of one rank's part of a block",
        "zero/buffers.py",
        "self._reduce_largest([(flat.sharding.axes, fp8.all_largest) for flat, fp8 in shards])",
        "",
        FP8_PARAMS,
    ),
    Mutation(
        "weights in fp8 have the scale of one tensor rank's shard",
        "zero/buffers.py",
        "(reduced_axes(each.stored.gemm.recipe.w, self.specs[name].layout, self.comm.mesh), fp8.largest[name])",
        "((), fp8.largest[name])",
        FP8_PARAMS,
    ),
    Mutation(
        "weights in fp8 stay those of the first step",
        "zero/buffers.py",
        "        for flat in self.flat_buffers:\n            flat.quantize()",
        "        for flat in self.flat_buffers if not flat.num_grads else ():\n            flat.quantize()",
        FP8_PARAMS,
    ),
    Mutation(
        "an expert multiplies with another one's scales",
        "linear/fp8_rows.py",
        "chunk(len(w_ENK))[expert]",
        "chunk(len(w_ENK))[0]",
        FP8_PARAMS,
    ),
    Mutation(
        "weights in fp8 are quantized from the master weights without rounding to bf16",
        "zero/flat_buffer.py",
        "Fp8Shard(self._held(specs, stored or {}, mesh), dtype, device)",
        "Fp8Shard(self._held(specs, stored or {}, mesh), self.main_dtype, device)",
        FP8_PARAMS,
    ),
    Mutation(
        "a row of an expert has the scale of all",
        "linear/fp8_rows.py",
        "return Blocks(1, self.recipe.x.summed)",
        "return self.recipe.x",
        FP8_ROWS,
    ),
    Mutation(
        "biases of experts have gradients of all rows",
        "experts/grouped_matmul.py",
        "[dy_RN[rows].sum(0) for rows in parts]",
        "[dy_RN.sum(0) for _ in parts]",
        GPT_OSS,
    ),
    Mutation(
        "biases of experts have gradients of rows without their weights",
        "experts/grouped_matmul.py",
        "(dy_RN[rows] * weights_R[rows].unsqueeze(1)).sum(0)",
        "dy_RN[rows].sum(0)",
        GPT_OSS,
    ),
    Mutation(
        "gradients of experts' biases not reduced over data ranks",
        "model/param_spec.py",
        "layout[:1], used, decay=False, part_axes=self.mode.experts)",
        "layout[:1], self.mode.home, decay=False, part_axes=self.mode.experts)",
    ),
    Mutation(
        "choices of the last microbatch alone",
        "model/router_state.py",
        "row[:num_experts] += ",
        "row[:num_experts] = ",
        ROUTER_STATE,
    ),
    Mutation(
        "choices of one rank",
        "model/router_state.py",
        "total = comm.all_reduce(mine, comm.mesh.names).wait()",
        "total = mine",
        ROUTER_STATE,
    ),
    Mutation(
        "a bias away from an even load",
        "model/router_state.py",
        "(total_L1 - mine_LE * mine_LE.shape[1])",
        "(mine_LE * mine_LE.shape[1] - total_L1)",
        ROUTER_STATE,
    ),
    Mutation(
        "a skipped step moves the bias",
        "model/router_state.py",
        "self._balance.bias_update_rate * done *",
        "self._balance.bias_update_rate *",
        ROUTER_STATE,
    ),
    Mutation(
        "a skipped step leaves its load",
        "model/router_state.py",
        "torch.where(done > 0, now_LE, load_LE)",
        "now_LE",
        ROUTER_STATE,
    ),
    Mutation(
        "the bias of the choice in the weights",
        "experts/router.py",
        "return Routes(chosen_MK, _weights(logits_ME, scores_ME, chosen_MK, experts), scores_ME)",
        "return Routes(chosen_MK, _weights(logits_ME, choice_ME, chosen_MK, experts), scores_ME)",
        ROUTER,
    ),
    Mutation(
        "a global load of another number of experts",
        "model/router_state.py",
        "(mine_LE * self._experts.topk / total_L1)",
        "(mine_LE / total_L1)",
        ROUTER_STATE,
    ),
    Mutation(
        "ties go to the higher expert",
        "experts/router.py",
        "torch.argsort(choice_ME, dim=-1, descending=True, stable=True)[:, :count]",
        "choice_ME.shape[1] - 1 - torch.argsort(choice_ME.flip(1), descending=True, stable=True)[:, :count]",
        ROUTER,
    ),
    Mutation(
        "a group's score of all its experts",
        "experts/router.py",
        "grouped.topk(experts.num_group_scores, dim=-1).values.sum(-1)",
        "grouped.sum(-1)",
        ROUTER,
    ),
    Mutation(
        "counts of all sequences together",
        "experts/router.py",
        "(sequence_M.unsqueeze(1) * num_experts + chosen_MK)",
        "(0 * sequence_M.unsqueeze(1) + chosen_MK)",
        ROUTER,
    ),
    Mutation(
        "a scaling factor that is not applied",
        "experts/router.py",
        "else weights_MK * experts.scaling_factor",
        "else weights_MK",
        ROUTER,
    ),
    Mutation(
        "a z-loss without its square",
        "experts/router.py",
        "torch.logsumexp(logits_ME, dim=-1).square()",
        "torch.logsumexp(logits_ME, dim=-1)",
        ROUTER,
    ),
    Mutation(
        "a balance loss that grows with the experts of a token",
        "experts/router.py",
        "(scores_ME.shape[1] / topk)",
        "scores_ME.shape[1]",
        ROUTER,
    ),
    Mutation(
        "slots in the order of scores",
        "experts/router.py",
        "return best_MK.sort(dim=-1).values",
        "return best_MK",
        ROUTER,
    ),
    Mutation(
        "entropy of scores that do not add up to one",
        "model/router_state.py",
        "scores_ME / scores_ME.sum(-1, keepdim=True)",
        "scores_ME",
        ROUTER_STATE,
    ),
    Mutation(
        "equal weights in the order in which ranks hold their tokens",
        "experts/router.py",
        "place_C.view(len(row_N), -1)[row_N.argsort()].flatten()",
        "place_C",
        CAPACITY,
    ),
    Mutation(
        "capacity of a rank's own positions",
        "experts/router.py",
        "    if axes:\n",
        "    if not axes:\n",
        CAPACITY,
    ),
    Mutation(
        "capacity of all sequences together",
        "experts/router.py",
        "(row_N // seq_length).unsqueeze(1) * num_experts",
        "0 * row_N.unsqueeze(1)",
        CAPACITY,
    ),
    Mutation(
        "an expert keeps the smallest weights",
        "experts/router.py",
        "argsort(descending=True, stable=True)",
        "argsort(stable=True)",
        CAPACITY,
    ),
    Mutation(
        "choices above capacity that go to the last expert",
        "model/experts.py",
        "where(kept_MK, self.experts.num_experts)",
        "where(kept_MK, self.experts.num_experts - 1)",
        ("tests/integration/test_router_proofs.py", "-k", "dropped"),
    ),
    Mutation(
        "a choice that recomputation makes again",
        "experts/router.py",
        "chosen_MK = once(choose)",
        "chosen_MK = choose()",
        EXPERTS,
    ),
    Mutation(
        "a sequence's load over this rank's positions",
        "model/experts.py",
        "/ at.seq_length",
        "/ at.local_length",
        ROUTER_PROOFS,
    ),
    Mutation(
        "an expert's load over steps that share a column of the report",
        "viz/curves.py",
        "return max((float(each[LOAD]) for each in found), default=math.nan)",
        "return min((float(each[LOAD]) for each in found), default=math.nan)",
        ("tests/unit/viz/test_expert_load.py",),
    ),
    Mutation(
        "a fused tensor's rows read from its start",
        "convert/hub_weights.py",
        "[place.start : place.start + num_rows * place.step : place.step]",
        "[: num_rows * place.step : place.step]",
        ("tests/unit/convert/test_families.py",),
    ),
    Mutation(
        "rows of groups one group apart",
        "convert/tensor_names.py",
        "group * rows, (group + 1) * rows, place",
        "0, rows, place",
        ("tests/unit/convert/test_streaming.py",),
    ),
    Mutation(
        "rows of striped experts next to one another",
        "convert/tensor_names.py",
        "step = len(parts) if self.is_striped else 1",
        "step = 1",
        ("tests/unit/convert/test_expert_files.py",),
    ),
    Mutation(
        "every expert read from the first",
        "convert/hub_weights.py",
        "else values[place.expert]",
        "else values[0]",
        ("tests/unit/convert/test_expert_files.py",),
    ),
    Mutation(
        "residual scale of attention alone",
        "model/layers.py",
        "sum_MH.add(self.mlp_dropout(y_MH, at), alpha=self.residual_scale)",
        "sum_MH.add(self.mlp_dropout(y_MH, at))",
        ("tests/unit/model/test_peers.py",),
    ),
    Mutation("bias added by every rank of K", "linear/matmul.py", "not (plan.k or rounds.x", "not (rounds.x"),
    Mutation(
        "dX not reduced over one axis",
        "linear/matmul.py",
        "self.gemm.dx(dy, w), plan.dx_moves, X_DIMS",
        "self.gemm.dx(dy, w), plan.dx_moves[1:], X_DIMS",
    ),
    Mutation("bias gradient dropped", "linear/matmul.py", "dy_MN.sum(0) if needs_db", "dy_MN.sum(0) * 0 if needs_db"),
    Mutation(
        "dX of a dY gathered in rounds not reduced",
        "linear/matmul.py",
        "reduce(dx_MK, plan.dx_moves, X_DIMS, comm)",
        "reduce(dx_MK, (), X_DIMS, comm)",
    ),
    Mutation("bias of a matmul in rounds dropped", "linear/matmul.py", "else y_MN.add_(bias_N)", "else y_MN"),
    Mutation(
        "empty microbatches repeat the first real one",
        "data/loader.py",
        "torch.full_like(each[: self._rows], EMPTY) for each",
        "each[: self._rows].clone() for each",
        ("tests/unit/data/test_loader.py",),
    ),
    Mutation(
        "largest values of fp8 blocks are those of this rank alone",
        "linear/fp8.py",
        "axes = reduced_axes(own, layout, self.comm.mesh)",
        "axes = ()",
        FP8,
    ),
    Mutation(
        "largest values of fp8 blocks are reduced over the axes of the other dim",
        "linear/fp8.py",
        "own = blocks.transposed if transposes else blocks",
        "own = blocks",
        FP8,
    ),
    Mutation(
        "X is kept for dW in blocks along K",
        "linear/fp8.py",
        "return self._quantized(values, self.recipe.x, fp8, layout, form.dtype, transposes=True)",
        "return Operand(operand.data.T.contiguous(), operand.scales.T.contiguous(), form._replace(is_transposed=True))",
        FP8,
    ),
    Mutation(
        "W of dX is quantized along K",
        "linear/fp8.py",
        "if at is Direction.FORWARD:",
        "if at is not None:",
        FP8,
    ),
    Mutation(
        "an overflow in fp8 becomes the end of the format",
        "linear/fp8.py",
        "torch.where(largest.isfinite(), inverse, torch.nan)",
        "inverse",
        FP8,
    ),
    Mutation(
        "scales of fp8 blocks are rounded up to powers of 2",
        "linear/fp8.py",
        "- exceeds.to(torch.int32)",
        "+ (1 - exceeds.to(torch.int32))",
        FP8,
    ),
    Mutation(
        "scales of rows are all-gathered along the rows' features",
        "linear/collectives.py",
        "if dims[name] not in whole}",
        "}",
        FP8,
    ),
    Mutation(
        "dims of a transposed operand are not exchanged in its all-gather",
        "linear/collectives.py",
        "dims = {name: 1 - dim for name, dim in dims.items()}",
        "dims = dict(dims)",
        FP8,
    ),
    Mutation(
        "output gradients of the hybrid format are in e4m3",
        "linear/fp8.py",
        "self.format, self.dy_format = (DTYPES[name] for name in fp8.formats)",
        "self.format = self.dy_format = DTYPES[fp8.formats.x]",
        FP8,
    ),
    Mutation(
        "the loss in precision is that of fp8",
        "model/gpt.py",
        "linear.matmul.multiply_by(self._build.gemm)",
        "linear.matmul.multiply_by(linear.matmul.gemm)",
        FP8_LOSS,
    ),
    Mutation(
        "the loss in precision has no dropout",
        "train/fp8_loss.py",
        "begin_passes(state, microbatches, settings)",
        "[replace(at, key=None) for at in begin_passes(state, microbatches, settings)]",
        FP8_LOSS,
    ),
    Mutation(
        "the loss in precision runs the compiled graphs of fp8",
        "model/gpt.py",
        "with uncompiled() if self._build.compiled else nullcontext():",
        "with nullcontext():",
        FP8_LOSS,
    ),
    Mutation(
        "linears go on in precision after a comparison of losses",
        "model/gpt.py",
        "linear.matmul.multiply_by(gemm)",
        "linear.matmul.multiply_by(linear.matmul.gemm)",
        FP8_LOSS,
    ),
    Mutation(
        "elements that are lost in fp8 are those of this rank",
        "train/monitor/fp8_stats.py",
        "comm.all_reduce(self._counts, comm.mesh.names).wait().tolist()",
        "self._counts.tolist()",
        FP8_STATS,
    ),
    Mutation(
        "scales of fp8 are reported of this rank",
        "train/monitor/fp8_stats.py",
        'comm.all_reduce(self._scales, comm.mesh.names, "max").wait().tolist()',
        "self._scales.tolist()",
        FP8_STATS,
    ),
    Mutation(
        "elements in fp8 are counted of the last microbatch",
        "train/monitor/fp8_stats.py",
        "self._counts[row, 1:] += torch.stack",
        "self._counts[row, 1:] = torch.stack",
        FP8_STATS,
    ),
    Mutation(
        "scales of fp8 are reported of the first blocks of a stored weight",
        "zero/fp8_shard.py",
        "Operand(own[piece.where], self.scales[name][piece.at])",
        "Operand(own[piece.where], self.scales[name][:1])",
        FP8_STATS,
    ),
    Mutation(
        "rows of zeros change the share of elements that are saturated",
        "train/monitor/fp8_stats.py",
        "saturated / values if values else 0.0",
        "saturated / total",
        FP8_STATS,
    ),
    Mutation(
        "matrices of experts are counted where they have rows",
        "linear/fp8_rows.py",
        'return operand if name == "W" else super()',
        "return super()",
        FP8_STATS,
    ),
    Mutation(
        "zeros count as lost in fp8",
        "train/monitor/fp8_stats.py",
        "is_value & (bits == 0)",
        "bits == 0",
        FP8_STATS,
    ),
    Mutation(
        "an output gradient that is quantized after its all-gather is not watched",
        "linear/fp8.py",
        """            self._watched("dY", dy.data, along_n)
""",
        "",
        FP8_STATS,
    ),
    Mutation(
        "blocks of fp8 may be cut by shards of tokens",
        "config/validate/fp8.py",
        "yield from _token_problems(facts, fp8, mode)",
        "yield from ()",
        ("tests/unit/config/validate/test_fp8.py",),
    ),
    Mutation(
        "scales of a GEMM's operand are not gathered",
        "linear/collectives.py",
        "Operand(data.wait(), scales.wait(), form)",
        "Operand(data.wait(), operand.scales, form)",
        GEMM,
    ),
    Mutation(
        "forward keeps the operand without its scales",
        "linear/matmul.py",
        "x, w_NK = matmul.gemm.kept(ctx.saved_tensors)",
        "x, w_NK = Operand(matmul.gemm.kept(ctx.saved_tensors)[0].data), matmul.gemm.kept(ctx.saved_tensors)[1]",
        GEMM,
    ),
    Mutation(
        "rows in rounds multiplied in another rank's place",
        "comm/matmul_rounds.py",
        "put(product[(mine - by) % ranks]",
        "put(product[(mine + by) % ranks]",
    ),
    Mutation(
        "part in rounds computed for another rank",
        "comm/matmul_rounds.py",
        "to = (mine + by) % ranks",
        "to = (mine - by) % ranks",
    ),
    Mutation(
        "sum in rounds without this rank's term",
        "comm/matmul_rounds.py",
        "return terms.sum(0)",
        "return terms.sum(0) - terms[mine]",
    ),
    Mutation(
        "reduce-scatter along the first dim always",
        "comm/process_comm.py",
        "if dim != 0 or order is not None:",
        "if order is not None:",
    ),
    Mutation(
        "norm of whole queries over local features",
        "model/layers.py",
        "() if self.norms_heads else build.mode.inner[1]",
        "()",
    ),
    Mutation(
        "kind of a layer by its index on later pipeline ranks only",
        "model/layers.py",
        "attention_kind(arch, index)",
        "attention_kind(arch, index * (build.comm.mesh.coord('pipeline') > 0))",
    ),
    Mutation(
        "base of RoPE in layers with a window scaled",
        "model/spec.py",
        "rotary = Rotary(arch.rope_local_base_freq, size, interleaved=arch.rotary_interleaved)",
        "rotary = Rotary(arch.rope_local_base_freq, size, arch.rotary_scaling, arch.rotary_interleaved)",
        ("tests/unit/model/test_peers.py",),
    ),
    Mutation(
        "the short list of longrope below the original length only",
        "attention/rotary_spec.py",
        "self.short_factor if seq_length <= length else",
        "self.short_factor if seq_length < length else",
        ("tests/unit/convert/test_families.py",),
    ),
    Mutation(
        "values not clipped",
        "model/layers.py",
        "q, k, v = (each.clamp(-self.clip, self.clip) for each in (q, k, v))",
        "q, k = (each.clamp(-self.clip, self.clip) for each in (q, k))",
        ("tests/unit/convert/test_families.py",),
    ),
    Mutation(
        "norms of heads before RoPE where they are behind it",
        "model/layers.py",
        "self.norms_heads and not self.rotates_first:",
        "self.norms_heads:",
        ("tests/unit/convert/test_families.py",),
    ),
    Mutation(
        "factors of queries a position late",
        "attention/rotary.py",
        "torch.arange(seq_length, device=like.device) + temperature.offset",
        "torch.arange(seq_length, device=like.device) - 1 + temperature.offset",
        ("tests/unit/convert/test_families.py",),
    ),
    Mutation(
        "MLP of a parallel residual reads the stream after attention",
        "model/layers.py",
        "(x_MH, normed_MH, sum_MH)[self.mlp_input]",
        "sum_MH",
        ("tests/unit/model/test_peers.py",),
    ),
    Mutation(
        "gradient of an attention sink without its weight",
        "attention/pairs.py",
        "-(weight_BNL * along_BNL).sum((0, 2))",
        "-along_BNL.sum((0, 2))",
        SOFTMAX,
    ),
    Mutation(
        "attention sink missing in the log-sum-exp for backward",
        "attention/pairs.py",
        "torch.logaddexp(lse, sink)",
        "lse",
        SOFTMAX,
    ),
    Mutation(
        "cap of scores without its slope",
        "attention/pairs.py",
        "1 - (scores.clamp(min=-softcap) / softcap).square()",
        "torch.ones_like(scores)",
        SOFTMAX,
    ),
    Mutation(
        "pieces of capped queries without the keys of later pieces",
        "attention/pairs.py",
        "mask, last = q_BNLD.new_ones((high - low, high), dtype=torch.bool).tril(low), high",
        "mask, last = q_BNLD.new_ones((high - low, high), dtype=torch.bool).tril(), high",
        SOFTMAX,
    ),
    Mutation(
        "sinks of the first heads on all ranks that exchange heads",
        "attention/context/exchanges.py",
        "first = self._moved.rank * self._num_heads",
        "first = 0",
        ("tests/integration/test_context_exchanges.py",),
    ),
    Mutation(
        "gradient of an activation's parameters not summed over features of other ranks",
        "model/param_spec.py",
        "used = DATA + sum(self.mode.inner, ())",
        "used = DATA + self.mode.inner[0]",
    ),
    Mutation(
        "gradient of attention sinks not summed over tokens of other ranks",
        "model/param_spec.py",
        "(self.arch.num_attention_heads,)), (features,), DATA + tokens, decay=False)",
        "(self.arch.num_attention_heads,)), (features,), DATA, decay=False)",
    ),
    Mutation(
        "softmax maximum of one vocabulary shard",
        "ops/cross_entropy.py",
        'comm.all_reduce(logits_CV.amax(-1), axes, "max").wait()',
        "logits_CV.amax(-1)",
    ),
    Mutation(
        "label of a shard's first token not found", "ops/cross_entropy.py", "(labels_C >= low)", "(labels_C > low)"
    ),
    Mutation(
        "sharded norm divides by the local features",
        "ops/norm.py",
        "x_MH.shape[-1] * ctx.comm.mesh.size(ctx.axes)",
        "x_MH.shape[-1]",
    ),
    Mutation(
        "variance between shards forgotten",
        "ops/norm.py",
        "variances.mean(-1, keepdim=True) + spread",
        "variances.mean(-1, keepdim=True)",
    ),
    Mutation(
        "tokens of other vocabulary shards embedded",
        "ops/embedding.py",
        "y_MH.masked_fill_(absent_M1, 0)",
        "pass",
    ),
    Mutation(
        "embedding gradient of absent tokens",
        "ops/embedding.py",
        "dy = dy.masked_fill(absent_M1, 0)",
        "pass",
    ),
    Mutation(
        "key/value groups counted from the gathered range",
        "attention/attention.py",
        "(group * self.size - low for group in self.group_span)",
        "(group * self.size for group in self.group_span)",
    ),
    Mutation(
        "attention dropout by local head",
        "attention/pairs.py",
        "torch.arange(*span, device=keys_T.device)",
        "torch.arange(span[1] - span[0], device=keys_T.device)",
    ),
    Mutation(
        "attention dropout by place in a piece of the queries",
        "attention/attention.py",
        "places, keys = positions_of(queries, device), torch",
        "places, keys = torch.arange(len(queries), device=device), torch",
        PAIRS,
    ),
    Mutation(
        "short documents of one pair see each other",
        "attention/packed.py",
        "see &= document[0].unsqueeze(1) == document[1]",
        "pass",
        PAIRS,
    ),
    Mutation(
        "a window sees one key more",
        "attention/packed.py",
        "see &= distance < self.window",
        "see &= distance <= self.window",
        PAIRS,
    ),
    Mutation(
        "a piece of a window without its first key",
        "attention/plan.py",
        "hidden = 0 if window is None else max(0, distance - window + 1)",
        "hidden = 0 if window is None else max(0, distance - window + 2)",
        PAIRS,
    ),
    Mutation(
        "keys of two pieces get the gradient of one",
        "attention/packed.py",
        "(total[keys].add_ if overlaps else total[keys].copy_)(part)",
        "total[keys].copy_(part)",
        PAIRS,
    ),
    Mutation(
        "mask of one sequence's documents used for all",
        "attention/packed.py",
        "place = (high - low, last - first, low - first, cuts)",
        "place = (high - low, last - first, low - first)",
        PAIRS,
    ),
    Mutation(
        "a document begins with the end of the one before",
        "data/packing.py",
        "append(place + 1)",
        "append(place)",
        PAIRS,
    ),
    Mutation(
        "hidden dropout by local feature",
        "model/modules.py",
        "torch.arange(*span(self.hidden_size, self.layout[1], self.mesh), device=x_MH.device)",
        "torch.arange(x_MH.shape[1], device=x_MH.device)",
    ),
    Mutation(
        "attention dropout without the microbatch's place",
        "model/layers.py",
        "at.first_sequence + first)",
        "first)",
    ),
    Mutation(
        "positions off by one on all ranks but the first",
        "model/microbatch.py",
        "torch.arange(offset + low, offset + high, device=device)",
        "torch.arange(offset + low, offset + high, device=device) + (low > 0)",
    ),
    Mutation(
        "data ranks read overlapping samples",
        "data/loader.py",
        "range(mesh.index(data_axes) * micro_batch_size,",
        "range(mesh.index(data_axes),",
    ),
    Mutation(
        "norm rule without copies",
        "zero/buffers.py",
        "square_sum(flat.grad) / flat.sync.copies",
        "square_sum(flat.grad)",
    ),
    Mutation(
        "tied embedding not summed over the pipeline",
        "zero/buffers.py",
        "if flat.sync.link is not None:",
        "if flat.sync.link is not None and flat.stage < 0:",
    ),
    Mutation(
        "weight decay by place in the shard",
        "zero/flat_buffer.py",
        "min(max(end - self.shard.start, 0), len(self.main))",
        "min(end, len(self.main))",
    ),
    Mutation(
        "ZeRO 3 frees a recomputed layer that backward uses next",
        "zero/buffers.py",
        "if in_backward_now.isdisjoint(used_next):",
        "if path not in in_backward_now:",
        ("tests/unit/zero/test_hooks.py",),
    ),
    Mutation("ZeRO 2 keeps the last microbatch only", "zero/flat_buffer.py", "elif self.num_reduced:", "elif False:"),
    Mutation(
        "HSDP replicas not summed",
        "zero/flat_buffer.py",
        "comm.mesh.without(reduced, axes) if axes else ()",
        "comm.mesh.without(reduced, (*axes, 'replica')) if axes else ()",
    ),
    Mutation(
        "gradient rule misses an axis",
        "parallel/layout.py",
        "mesh.without(self.token_axes, self.axes)",
        "mesh.without(self.token_axes[:-1], self.axes)",
    ),
    Mutation(
        "context ranks number their tokens in their own order",
        "model/microbatch.py",
        "positions[rows % self.local_length]",
        "rows % self.local_length",
    ),
    Mutation(
        "rotary positions begin at 0 on every context rank",
        "model/gpt.py",
        "cut_positions(each, chunks, dim=0) for each in tables",
        "each[: seq_length // self.order.num_ranks] for each in tables",
    ),
    Mutation(
        "labels taken after a sequence is split over context ranks",
        "model/gpt.py",
        "cut(packing.labels(tokens))",
        "(packing.labels(tokens) if not self.order.context else cut(tokens_BS).roll(-1, 1))",
    ),
    Mutation(
        "gathered keys in the order of context ranks",
        "attention/context/order.py",
        "sorted(places, key=lambda place: place[0])",
        "places",
    ),
    Mutation(
        "queries see the keys of their own chunks only",
        "attention/context/plan.py",
        "others = [segment for segment in every if segment.first not in first]",
        "others = [segment for segment in every if segment.first in first]",
    ),
    Mutation(
        "attention dropout by position on the context rank",
        "attention/attention.py",
        "for chunk in chunks for position in range(*chunk)]",
        "for chunk in chunks for position in range(chunk[1] - chunk[0])]",
    ),
    Mutation(
        "gradient of the first chunk's keys from another chunk",
        "attention/context/order.py",
        "zip(whole.split(sizes, dim=2), self._places, strict=True)",
        "zip(whole.roll(1, dims=2).split(sizes, dim=2), self._places, strict=True)",
    ),
    Mutation(
        "gradients of a part of the heads live while those of the next part are computed",
        "attention/context/attention.py",
        "            del dy_part, grads  # before those of the next part are computed\n",
        "",
        EXCHANGE_PEAKS,
    ),
    Mutation(
        "gradients of keys that are on their way round a ring are not counted",
        "model/attention_operations.py",
        "2 * bool(place)",
        "0",
        EXCHANGE_PEAKS,
    ),
    *(
        Mutation(*bug, EXCHANGES)
        for bug in (
            (
                "unseen rows of a pair have a log-sum-exp of 0",
                "attention/pairs.py",
                "lse.masked_fill(~mask_LT.any(-1), -math.inf)",
                "lse",
            ),
            (
                "the earlier output has the weight of the later one",
                "attention/pairs.py",
                "torch.sigmoid(new_lse - lse)",
                "torch.sigmoid(lse - new_lse)",
            ),
            (
                "a window sees one key too many",
                "attention/pairs.py",
                "(distance_LT < window)",
                "(distance_LT <= window)",
            ),
            (
                "documents that continue on another rank are other documents",
                "attention/plan.py",
                "pairwise((low, *starts[document:end], high)), document)",
                "pairwise((low, *starts[document:end], high)), document + 100 * bool(found))",
            ),
            (
                "a ring moves keys and values by one rank past steps that it leaves out",
                "attention/context/plan.py",
                "tuple(there - here for",
                "tuple(1 for",
            ),
            (
                "gradients of keys and values come home to a neighbour",
                "attention/context/exchanges.py",
                "homeward = plan.size - plan.steps[-1].behind",
                "homeward = 1",
            ),
            (
                "gradients of the steps before are not added",
                "attention/context/exchanges.py",
                "                dkv += before.wait()\n",
                "                before.wait()\n",
            ),
            (
                "half of a rank's own pairs has no gradient",
                "attention/context/exchanges.py",
                "grads.add(kv, own, plan.own_parts[1], self._kernels(part, 0))",
                "grads.add(kv, own, ())",
            ),
            (
                "heads received in the order of ranks, not of positions",
                "attention/context/order.py",
                "for _, rank, rows in self._places], dim=2)",
                "for _, rank, rows in self._places[::-1]], dim=2)",
            ),
            (
                "copies of key heads follow one another in the wrong order",
                "attention/context/exchanges.py",
                "t.repeat_interleave(copies, dim=1)",
                "t.repeat(1, copies, 1, 1)",
            ),
            (
                "backward of every part of the heads reads the output of the first part",
                "attention/context/exchanges.py",
                "return y_BNLD[:, slice(*part.queries)]",
                "return y_BNLD[:, : part.queries[1] - part.queries[0]]",
            ),
            (
                "dropout of the weights of every pair as of a rank's own keys",
                "attention/pairs.py",
                "_positions(held[self.place - behind], pair.keys, device)",
                "_positions(held[self.place], pair.keys, device)",
            ),
            (
                "dropout of every part of the heads as of the first",
                "attention/context/exchanges.py",
                "dropped.of(self.heads(part), behind)",
                "dropped.of((0, part.queries[1] - part.queries[0]), behind)",
            ),
            (
                "recomputed attention has the log-sum-exp of the first part",
                "attention/context/exchanges.py",
                "result[1][:, slice(*part.queries)])",
                "result[1][:, : part.queries[1] - part.queries[0]])",
            ),
            (
                "parts of key/value heads are put together in the wrong order",
                "attention/context/exchanges.py",
                "by_position([part[place] for part in parts]) for place in range(3)",
                "by_position([part[place] for part in parts[:: 1 if place == 0 else -1]]) for place in range(3)",
            ),
        )
    ),
    *(
        Mutation(*bug, CONTEXT)
        for bug in (
            (
                "every context rank counts the tokens of whole sequences",
                "train/step.py",
                "num_copies((DATA + model.mode.batch_axes,)",
                "num_copies((DATA + model.mode.expand.m,)",
            ),
            (
                "every context rank counts its loss as a copy",
                "train/step.py",
                "num_copies((DATA + model.mode.inner[0],)",
                "num_copies((DATA + model.mode.sequence_axes,)",
            ),
            (
                "validation loss added once for each context rank",
                "train/step.py",
                "torch.stack(losses).unbind(1)]) / loss_copies(model)",
                "torch.stack(losses).unbind(1)]) / loss_copies(model) * model.order.num_ranks",
            ),
            (
                "positions in documents begin at 0 on every context rank",
                "model/microbatch.py",
                "self.cut(self.documents.positions_BS).flatten()[low:high]",
                "self.documents.positions_BS[:, : self.local_length].flatten()[low:high]",
            ),
            (
                "documents of a microbatch's first sequences on every rank",
                "model/microbatch.py",
                "starts = starts[low - self.first_row : high - self.first_row]",
                "starts = starts[: high - low]",
            ),
        )
    ),
    *(
        Mutation(*bug, CONTEXT_PAIRS)
        for bug in (
            (
                "a document that begins with a chunk belongs to the one before",
                "attention/plan.py",
                "document, end = bisect_right(starts, low)",
                "document, end = bisect_left(starts, low)",
            ),
            (
                "queries of a later rank see one key more than the window",
                "attention/plan.py",
                "if distance + high - low <= window else",
                "if distance + high - low <= window + 1 else",
            ),
            (
                "the last key of a window on another rank is not seen",
                "attention/plan.py",
                "low + key.length - 1 - distance + window)",
                "low + key.length - 2 - distance + window)",
            ),
            (
                "a ring leaves out a step that some ranks need",
                "attention/context/plan.py",
                "if rank != reader:",
                "if rank < reader:",
            ),
            (
                "keys and values come from the rank ahead",
                "attention/context/plan.py",
                "held[rank - behind]",
                "held[(rank + behind) % len(held)]",
            ),
        )
    ),
    Mutation(
        "the second chunk of a context rank is not its zigzag partner",
        "attention/context/plan.py",
        "(rank, 2 * num_ranks - 1 - rank)",
        "(rank, num_ranks + rank)",
        ("tests/unit/attention/context/test_context.py",),
    ),
    *(
        Mutation(*bug, CONTEXT)
        for bug in (
            (
                "all sequences divided by the documents of the first",
                "attention/context/order.py",
                "self.order.held(self.seq_length, each) for each in self.starts",
                "self.order.held(self.seq_length, self.starts[0]) for each in self.starts",
            ),
            (
                "labels in the order of positions where documents divide them",
                "model/microbatch.py",
                "return held.cut(x_BS) if held else cut_positions",
                "return cut_positions",
            ),
            (
                "rotary positions of zigzag where documents divide sequences",
                "model/microbatch.py",
                "return self.held.mine_BL if self.held else None",
                "return None",
            ),
            (
                "gradients of gathered keys return to another rank",
                "attention/context/order.py",
                "whole.transpose(1, 2)[self._sequence_B1, self.place_CBL]",
                "whole.transpose(1, 2)[self._sequence_B1, self.place_CBL.flip(0)]",
            ),
            (
                "documents divided by zigzag in the ring only",
                "attention/context/plan.py",
                "held_chunks(order, seq_length, num_inner, documents), starts)",
                "held_chunks(order, seq_length, num_inner), starts)",
            ),
            (
                "attention dropout of a sequence at the positions of the first",
                "attention/pairs.py",
                "held = self.chunks[sequences[0] % len(self.chunks)]",
                "held = self.chunks[0]",
            ),
        )
    ),
    Mutation(
        "a rank may get more chunks than its share",
        "attention/context/plan.py",
        "if len(held[rank]) < count",
        "if len(held[rank]) <= count",
        ("tests/unit/attention/context/test_document_chunks.py",),
    ),
    Mutation(
        "log-sum-exps added without their maximum",
        "attention/pairs.py",
        "torch.logaddexp(lse, new_lse)",
        "(lse.exp() + new_lse.exp()).log()",
        EXCHANGES,
    ),
    Mutation(
        "heads come back in another order than they went",
        "attention/context/exchanges.py",
        "whole[:, :, :, place] = part.permute(1, 3, 0, 2, 4)\n    return whole.flatten(2, 4)",
        "whole[:, :, :, place] = part.permute(1, 3, 0, 2, 4)\n    return whole.transpose(2, 3).flatten(2, 4)",
        EXCHANGES,
    ),
    Mutation(
        "context ranks see the positions of the first rank's cache",
        "attention/kv_cache.py",
        "slots_BT * num_ranks + rank, window",
        "slots_BT * num_ranks, window",
        CACHE,
    ),
    Mutation(
        "new keys written to the slots of the position before",
        "attention/kv_cache.py",
        "columns = (rank - first_B1) % num_ranks",
        "columns = (rank + 1 - first_B1) % num_ranks",
        CACHE,
    ),
    *(
        Mutation(name, "attention/kv_cache.py", old, new, RINGS)
        for name, old, new in (
            (
                "a ring has no position more than the window",
                "return -(-(window + self.BACK) // num_ranks)",
                "return -(-(window - 1) // num_ranks)",
            ),
            (
                "padding of a shorter text overwrites its window",
                "is_kept = (slots_BN < ends_B1) & (slots_BN >= ends_B1 - size)",
                "is_kept = slots_BN >= ends_B1 - size",
            ),
            (
                "the first of a long prompt's positions overwrite the last",
                "is_kept = (slots_BN < ends_B1) & (slots_BN >= ends_B1 - size)",
                "is_kept = (slots_BN < ends_B1) & (slots_BN < slots_BN[:, :1] + size)",
            ),
            (
                "new tokens of a window in the wrong order",
                "torch.cat((old[:, :held], some), dim=1) for old, some in zip(ring, new, strict=True))",
                "torch.cat((old[:, :held], some.roll(1, 1)), dim=1) for old, some in zip(ring, new, strict=True))",
            ),
        )
    ),
    Mutation(
        "a text goes back behind the positions that a ring still has",
        "attention/kv_cache.py",
        "return not self.forgets or held - start <= self.BACK",
        "return True",
        RINGS,
    ),
    Mutation(
        "outputs of context ranks added without their weights",
        "attention/context/attention.py",
        "(lse - total).exp()",
        "(lse - lse).exp()",
        CACHE,
    ),
    Mutation("loss not divided by its copies", "train/step.py", "observer) / loss_copies(model)", "observer)"),
    Mutation(
        "a recomputed norm normalizes its output",
        "ops/recompute.py",
        "self._function, self._saved_x = function, saved_by_autograd(x)",
        "self._function, self._saved_x = function, saved_by_autograd(y)",
        RECOMPUTE,
    ),
    Mutation(
        "a recomputed norm keeps what it makes again",
        "ops/recompute.py",
        "        if not self._num_needed:\n            self._y = None\n",
        "",
        RECOMPUTE,
    ),
    Mutation(
        "an MLP that is recomputed as a whole keeps everything",
        "model/modules.py",
        "        if not self.recomputes_all:\n            return self.compute(x_MH, at)\n",
        "        if x_MH.dim():\n            return self.compute(x_MH, at)\n",
        OPERATIONS,
    ),
    Mutation(
        "predictions keep what an MLP recomputes as a whole",
        "model/operations.py",
        "found.extend(replace(each, within=(DENSE_MLP,)) for each in mlp_operations(local, x))",
        "found.extend(mlp_operations(local, x))",
        OPERATIONS,
    ),
    Mutation(
        "recomputed activation is its input",
        "ops/recompute.py",
        "            return function(*saved_x())\n\n    return _saving",
        "            return saved_x()[0]\n\n    return _saving",
    ),
    Mutation(
        "weights gathered before those of their FSDP unit",
        "linear/collectives.py",
        "            unshard()\n            self._in_flight",
        "            self._in_flight",
    ),
    Mutation(
        "every copy sends the first part of the residual",
        "pipeline/engine.py",
        "self.comm.mesh.index(self.copies) * size",
        "0",
    ),
    Mutation(
        "gradient of a microbatch used for all",
        "pipeline/engine.py",
        "self._deferred_wgrads[action.stage, action.mb] = deferred",
        "self._deferred_wgrads[action.stage, action.mb] = [*deferred, *deferred]",
    ),
    Mutation(
        "loss of a module ahead divided by another module's labels",
        "model/ends.py",
        "Target(cut(labels_BS).flatten(), count, scale)",
        "Target(cut(labels_BS).flatten(), counts[0], scale)",
        AHEAD,
    ),
    Mutation(
        "labels outside of the sequence counted",
        "train/step.py",
        "settings.num_tokens - places * num_sequences",
        "settings.num_tokens",
        AHEAD,
    ),
    Mutation(
        "module ahead reads the token before",
        "model/ends.py",
        "tokens_BT[:, places:].clamp(min=0), (0, places)",
        "tokens_BT[:, places - 1 :].clamp(min=0), (0, places)",
        AHEAD,
    ),
    Mutation(
        "label ahead in the next document counted",
        "data/packing.py",
        "range(places + 1 if kept else 0)",
        "range(places if kept else 0)",
        AHEAD,
    ),
    Mutation(
        "labels ahead not shifted",
        "data/packing.py",
        "ahead_BS[:, :kept] = labels_BS[:, places:]",
        "ahead_BS[:, :kept] = labels_BS[:, :kept]",
        AHEAD,
    ),
    Mutation(
        "a gather's own part counted as sent",
        "../tools/calibrate_gpus.py",
        "sent = (num_gpus - 1) * sizes.gathered * 4",
        "sent = num_gpus * sizes.gathered * 4",
        GPU_RATES,
    ),
    Mutation(
        "the ramp-up of a GEMM forgotten",
        "../tools/calibrate_gpus.py",
        'max(0.0, n["shallow"] / each_s - shallow)',
        "0.0",
        GPU_RATES,
    ),
    Mutation(
        "a second value of a fixed key wins silently",
        "forecast/search/problem.py",
        "if names[name] in values:",
        "if names[name] not in names:",
        ("tests/unit/forecast/search/test_fixed_keys.py",),
    ),
    Mutation(
        "a cut search is sure of everything",
        "forecast/search/search.py",
        "                least_s = min(least_s, bound.seconds)\n",
        "",
        ("tests/unit/forecast/search/test_cut_search.py",),
    ),
    Mutation(
        "recomputation that saves memory not shown",
        "forecast/search/search.py",
        "plan.total_bytes > (1 - WORTH) * faster.total_bytes",
        "plan.total_bytes > 0",
        ("tests/unit/forecast/search/test_search.py", "-k", "purpose"),
    ),
    Mutation(
        "losses ahead summed, not averaged",
        "model/gpt.py",
        "self.arch.mtp_loss_scaling_factor / max(self.arch.mtp_num_layers, 1)",
        "self.arch.mtp_loss_scaling_factor",
        AHEAD,
    ),
    Mutation(
        "embedding's gradient on the last stage forgotten",
        "model/param_spec.py",
        "return arch.tie_embeddings or arch.mtp_num_layers > 0",
        "return arch.tie_embeddings",
        AHEAD,
    ),
    Mutation(
        "gradient of a layout not changed back",
        "ops/relayout.py",
        "_changed(dy_MF, target, source, ctx.comm)",
        "_changed(dy_MF, target, source, ctx.comm) / 2",
        AHEAD,
    ),
    Mutation(
        "modules ahead cost the last stage nothing",
        "model/stage_plan.py",
        "head_flops_per_token(arch) + mtp_flops_per_token(arch)",
        "head_flops_per_token(arch)",
        AHEAD,
    ),
    Mutation(
        "signals that a compiler took are not taken again",
        "runtime/program.py",
        "            for number in self._previous:\n                signal.signal(number, self._record)\n",
        "            pass\n",
        ("tests/integration/test_resume.py", "-k", "took"),
    ),
    Mutation(
        "compiled layers keep what an activation finds on its way",
        "model/operation.py",
        "if is_one_kernel and len(saved) > 1",
        "if False",
        ("tests/unit/forecast/time/test_published.py", "-k", "h100"),
    ),
    Mutation(
        "top-p leaves the token out that reaches it",
        "inference/sampling.py",
        "rising_V.cumsum(-1) <= 1 - top_p",
        "rising_V.cumsum(-1) - rising_V <= 1 - top_p",
        TEXTS,
    ),
    Mutation(
        "what may begin a stop string is shown",
        "inference/continuation.py",
        "before[: len(before) - num_held_back(before, self._stops)]",
        "before[: len(before)]",
        TEXTS,
    ),
    Mutation(
        "a text ends behind its stop string",
        "inference/continuation.py",
        "return text[: min((place for stop",
        "return text[: min((place + len(stop) for stop",
        TEXTS,
    ),
    Mutation(
        "choices of a request have one seed",
        "inference/completions.py",
        "torch.Generator().manual_seed(work.seed + row)",
        "torch.Generator().manual_seed(work.seed)",
        (SERVER, "-k", "seeds_in_turn"),
    ),
    Mutation(
        "a stream without its client goes on",
        "inference/server.py",
        "    finally:\n        job.is_cancelled = True",
        "    finally:\n        pass",
        (SERVER, "-k", "lost_clients"),
    ),
    Mutation(
        "the watchdog sees no progress in inference",
        "inference/load.py",
        "here.watchdog.follow(lambda: None, comm.log.status)",
        "pass",
        ("tests/integration/tools/test_generate.py", "-k", "wait_for_a_line"),
    ),
    Mutation(
        "retention removes the best checkpoint",
        "checkpoint/publish.py",
        "if iteration != best and not policy.retains",
        "if not policy.retains",
        BEST,
    ),
    Mutation(
        "the first checkpoint stays the best one",
        "checkpoint/async_saver.py",
        "self.best is None or loss < self.best.loss",
        "self.best is None or loss < 0",
        BEST,
    ),
    Mutation(
        "boxes of two steps are mixed",
        "checkpoint/held.py",
        "if StepKey.of(step.meta) == StepKey.of(index.meta) else ()",
        "if StepKey.of(step.meta) else ()",
        FROM_MEMORY,
    ),
    Mutation(
        "a step is known by its iteration alone",
        "checkpoint/held.py",
        'return cls(meta["iteration"], meta["consumed_samples"])',
        'return cls(meta["iteration"], 0)',
        FROM_MEMORY,
    ),
    Mutation(
        "an element that no rank holds is not missed",
        "checkpoint/held.py",
        "< math.prod(shape):",
        "< 0:",
        FROM_MEMORY,
    ),
    Mutation(
        "a state is held while its update is half done",
        "train/state.py",
        "return not self._is_open and",
        "return",
        FROM_MEMORY,
    ),
    Mutation(
        "the place in the data is not restored",
        "train/checkpointing.py",
        "state.iteration, state.consumed_samples = meta.iteration, meta.consumed_samples",
        "state.iteration = meta.iteration",
        FROM_MEMORY,
    ),
    Mutation(
        "a peer's snapshot counts before it has arrived",
        "checkpoint/in_memory.py",
        "        self._link.swap(mine, theirs)\n",
        "        copy.their_step = HeldStep(meta, copy.their_pieces)\n        self._link.swap(mine, theirs)\n",
        COPIES,
    ),
    Mutation(
        "the only complete copy is overwritten",
        "checkpoint/in_memory.py",
        "copy = self._copies[self._num_taken % NUM_COPIES]",
        "copy = self._copies[0]",
        COPIES,
    ),
    Mutation(
        "an update does not wait for the copy in memory",
        "checkpoint/in_memory.py",
        "self._snapshots[(self._num_taken - 1) % NUM_COPIES].hold_update()",
        "self._snapshots[self._num_taken % NUM_COPIES].hold_update()",
        COPIES,
    ),
    Mutation(
        "a rollback keeps the later steps in memory",
        "checkpoint/in_memory.py",
        "        self.wait()\n        for copy in self._copies:",
        "        self.wait()\n        for copy in ():",
        COPIES,
    ),
]


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """Return the text of the mutated module.  Raises ValueError where the snippet is not found exactly once."""
    text = (root / "megatron3d" / mutation.module).read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: megatron3d/{mutation.module} has {count} times, not once: {mutation.old}")
    return text.replace(mutation.old, mutation.new)


def first_failure(folder: Path, arguments: Sequence[str]) -> str | None:
    """Run tests in a copy until one fails; return its name, or None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    assert done.returncode in (0, 1) and bool(failed) == bool(done.returncode), done.stdout + done.stderr
    return failed[0].split(" - ")[0].partition(" ")[2].rpartition("::")[2] if failed else None


def outcome(mutation: Mutation, full: bool) -> str:
    """Return "caught" or "missed", the test that failed, and the seconds taken."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        for each in COPIED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            copy(ROOT / each, folder / each)
        (folder / "megatron3d" / mutation.module).write_text(mutated(mutation), encoding="utf-8")
        begin = time.monotonic()
        if failure := first_failure(folder, mutation.tests):
            return f"caught  {time.monotonic() - begin:5.0f} s  {failure}"
        if full and (failure := first_failure(folder, MATRICES)):
            return f"MISSED, but the whole matrix catches it: {failure}"
        return "MISSED" + (" and by the whole matrix" if full else "")


def main(arguments: list[str]) -> int:
    """Run all mutations, or those with the given names, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutations to run; default: all")
    parser.add_argument("--full", action="store_true", help="run the whole matrices on what the array misses")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in MUTATIONS if not asked.names or mutation.name in asked.names]
    num_missed = 0
    for mutation in chosen:
        result = outcome(mutation, asked.full)
        num_missed += not result.startswith("caught")
        print(f"{mutation.name:50} {mutation.module:24} {result}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} caught")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
