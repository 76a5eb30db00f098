"""Fact: models of Megatron-LM compute the same here and train on as there; nothing in their files can run code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.index import read_meta
from megatron3d.config.read import read_config
from megatron3d.config.run_spec import LRPhases, RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.convert.conversion import WrittenBox, write_torch_folder
from megatron3d.convert.megatron_checkpoint import ACCEPT
from megatron3d.convert.torch_folder import TorchFolder
from megatron3d.data.loader import BatchLoader
from megatron3d.optim.optimizer import learning_rate
from megatron3d.train.checkpointing import load_state, load_weights
from megatron3d.train.state import TrainState, build_state, connect
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support import megatron_core
from tests.support.checkpoints import save_state
from tests.support.megatron_core import MODELS, TOKENS
from tools import convert_checkpoint

STORED = Path(__file__).parent / "data" / "megatron"
# A YAML file that describes the stored model.
MODEL: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 8,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Initialize megatron-core for one process."""
    with megatron_core.one_process(tmp_path_factory.mktemp("store") / "store"):
        yield


def convert(direction: str, source: Path, target: Path, *options: str) -> int:
    return convert_checkpoint.main([direction, "--input", str(source), "--output", str(target), *options])


def state_of(folder: Path) -> TrainState:
    config = read_config(folder / "config.yaml").config
    assert config.model.vocab_size is not None, "the conversion writes it"
    spec = RunSpec(config, 1, config.model.vocab_size, 0)
    return build_state(spec, connect(spec), torch.device("cpu"))


def logits(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits of all positions, computed by the training code."""
    state = state_of(folder)
    load_weights(store.resolve(folder), state, {})
    return torch.stack([state.executor.logits(tokens, position) for position in range(tokens.shape[1])], dim=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Copy the stored checkpoint."""
    return Path(shutil.copytree(STORED, tmp_path / "megatron"))


def test_the_stored_checkpoint_computes_the_stored_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("from-megatron", STORED, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "15 tensors of iteration 3" in said and "checkpoint.no_load_optim=true" in said and ACCEPT in said
    theirs = torch.tensor(json.loads((STORED / "logits.json").read_text()))
    torch.testing.assert_close(logits(tmp_path / "run", TOKENS), theirs, rtol=1e-5, atol=1e-5)
    meta = read_meta(store.resolve(tmp_path / "run"))
    assert (meta.iteration, meta.consumed_samples) == (3, 12)
    config = read_config(tmp_path / "run" / "config.yaml").config
    assert (config.optimizer.lr, config.train.global_batch_size, config.train.precision) == (0.01, 4, "fp32")


def test_a_file_describes_the_model(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of the file has the first 15 of 16 rows of the vocabulary."""
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({"model": {**MODEL, "vocab_size": 15}}))
    (checkpoint / "iter_0000003" / "common.pt").write_bytes(b"not read")
    assert convert("from-megatron", checkpoint, tmp_path / "run", "--config", str(path)) == 0
    assert "rows of the vocabulary beyond 15 of 16 are left out" in capsys.readouterr().out
    theirs = torch.tensor(json.loads((STORED / "logits.json").read_text()))[:1, :1, :15]
    torch.testing.assert_close(logits(tmp_path / "run", TOKENS[:1, :1]), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_megatron_core(theirs: None, name: str, tmp_path: Path) -> None:
    model = megatron_core.build(MODELS[name])
    megatron_core.save(tmp_path / "megatron", MODELS[name], model)
    assert convert("from-megatron", tmp_path / "megatron", tmp_path / "run") == 0
    tokens = torch.cat((TOKENS, TOKENS + 16))
    with torch.no_grad():
        wanted = megatron_core.logits(model, tokens)
    torch.testing.assert_close(logits(tmp_path / "run", tokens), wanted, rtol=1e-5, atol=1e-5)


def test_a_run_of_samples_stays_one(theirs: None, tmp_path: Path) -> None:
    """Megatron-LM sets the iterations of such a run itself: they are not a second length."""
    samples = {"train_samples": 83, "lr_decay_samples": 80, "lr_warmup_samples": 8, "lr_warmup_fraction": None}
    arguments = {**MODELS["dense"], **samples, "train_iters": 20}
    model = megatron_core.build(arguments)
    optimizer = megatron_core.make_optimizer(model, arguments)
    tokens = torch.zeros(4, arguments["seq_length"] + 1, dtype=torch.int64)
    megatron_core.train(model, optimizer, [tokens])
    megatron_core.save(tmp_path / "megatron", arguments, model, 3, optimizer)
    assert convert("from-megatron", tmp_path / "megatron", tmp_path / "run") == 0
    config = read_config(tmp_path / "run" / "config.yaml").config
    spec = RunSpec(config)
    assert (config.train.train_iters, config.train.train_samples, spec.train_iters) == (None, 83, 20)
    assert spec.lr_phases == LRPhases(True, 8, 80, 8, 83) and check(config, 1, 32) == []
    assert convert("to-megatron", tmp_path / "run", tmp_path / "back") == 0
    common = torch.load(tmp_path / "back" / "iter_0000003" / "common.pt", weights_only=False)
    assert (common["args"].train_iters, common["args"].train_samples) == (20, 83)
    schedule = common["opt_param_scheduler"]
    assert (schedule["lr_warmup_steps"], schedule["lr_decay_steps"], schedule["wd_incr_steps"]) == (8, 80, 83)


@pytest.mark.parametrize("metadata", [{"singleton_local_shards": True}, {"non_homogeneous_layers": True}], ids=str)
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_layers_and_experts_with_names_of_their_own(
    theirs: None, name: str, metadata: dict[str, bool], tmp_path: Path
) -> None:
    model = megatron_core.build(MODELS[name])
    found = []
    for place, each in enumerate(({}, metadata)):
        megatron_core.save(tmp_path / f"megatron{place}", MODELS[name], model, **each)
        assert convert("from-megatron", tmp_path / f"megatron{place}", tmp_path / f"run{place}") == 0
        found.append(logits(tmp_path / f"run{place}", TOKENS))
    assert torch.equal(*found)


def advance(config: Config, state: TrainState, num_steps: int) -> list[float]:
    """Train more steps on random samples; return the losses."""
    train, arch, mesh = config.train, state.model.arch, state.model.comm.mesh
    samples = RandomSamples(0, arch.vocab_size, arch.seq_length)
    micro, batch = train.micro_batch_size, train.global_batch_size
    loader = BatchLoader(samples, mesh, state.spec.mode.batch_axes, micro, batch, torch.device("cpu"))
    settings = StepSettings(train.seed, batch * arch.seq_length, batch)
    losses, phases = [], state.spec.lr_phases
    for _ in range(num_steps):
        position = phases.position(state.iteration + 1, state.consumed_samples + batch)
        lr = learning_rate(config.optimizer, phases, position)
        losses.append(train_step(state, loader.step(state.consumed_samples), lr, settings).loss.item())
    return losses


@pytest.mark.parametrize("name", ["dense", "gpt2", "experts"])
def test_training_goes_on_as_in_megatron_core(theirs: None, name: str, tmp_path: Path) -> None:
    """The first loss shows the weights, the others the moments, their number of updates and what is decayed."""
    arguments, num_steps = MODELS[name], 3
    model = megatron_core.build(arguments)
    optimizer = megatron_core.make_optimizer(model, arguments)
    samples, size = RandomSamples(0, arguments["padded_vocab_size"], arguments["seq_length"]), 4
    batches = [torch.from_numpy(samples.read(np.arange(size) + size * step)) for step in range(2 * num_steps)]
    megatron_core.train(model, optimizer, batches[:num_steps])
    megatron_core.save(tmp_path / "megatron", arguments, model, num_steps, optimizer)
    wanted = megatron_core.train(model, optimizer, batches[num_steps:])
    assert convert("from-megatron", tmp_path / "megatron", tmp_path / "run") == 0
    state, config = state_of(tmp_path / "run"), read_config(tmp_path / "run" / "config.yaml").config
    load_state(store.resolve(tmp_path / "run"), state, {})
    assert (state.iteration, state.consumed_samples, state.optimizer.num_steps.item()) == (3, 12, 3)
    np.testing.assert_allclose(advance(config, state, num_steps), wanted, rtol=0, atol=1e-5)
    assert convert("to-megatron", tmp_path / "run", tmp_path / "back") == 0
    assert_same_bits(tmp_path / "megatron", tmp_path / "back")
    assert convert("from-megatron", tmp_path / "back", tmp_path / "again") == 0
    folders = [store.resolve(tmp_path / name) for name in ("run", "again")]
    assert read_meta(folders[0]) == read_meta(folders[1])
    assert read_config(tmp_path / "again" / "config.yaml").config.optimizer == config.optimizer
    if name != "experts":  # whose norms have another name than Transformer Engine's
        other = megatron_core.build(arguments, seed=4)
        megatron_core.load(tmp_path / "back" / "iter_0000003", other)
        optimizer, schedule = megatron_core.load_optimizer(tmp_path / "back" / "iter_0000003", other)
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, arguments["weight_decay"]}
        np.testing.assert_allclose(
            megatron_core.train(other, optimizer, batches[num_steps:]), wanted, rtol=0, atol=1e-5
        )
        assert (schedule.num_steps, schedule.max_lr, schedule.lr_decay_steps) == (12, 0.01, 80)


def tensors(folder: Path) -> dict[str, tuple[torch.dtype, Tensor]]:
    """Return the tensors of a Megatron-LM checkpoint, of which one name of the norm before an MLP is replaced."""
    files = TorchFolder(next(folder.glob("iter_*")))
    whole = {name: tuple((0, size) for size in each.shape) for name, each in files.tensors.items()}
    return {
        name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): (each.dtype, files.read(name, whole[name]))
        for name, each in files.tensors.items()
    }


def assert_same_bits(folder: Path, other: Path) -> None:
    mine, others = tensors(folder), tensors(other)
    assert mine.keys() == others.keys()
    for name, (dtype, values) in mine.items():
        assert dtype is others[name][0] and torch.equal(values, others[name][1]), name


def test_there_and_back_changes_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("from-megatron", STORED, tmp_path / "run") == 0
    assert convert("to-megatron", tmp_path / "run", tmp_path / "back") == 0
    assert "> 9 tensors of iteration 3" in capsys.readouterr().out
    assert_same_bits(STORED, tmp_path / "back")
    assert convert("from-megatron", tmp_path / "back", tmp_path / "again") == 0
    assert read_meta(store.resolve(tmp_path / "again")) == read_meta(store.resolve(tmp_path / "run"))


def in_shards(name: str, values: Tensor) -> Iterator[WrittenBox]:
    """Yield a tensor of the optimizer as versions before 0.14 save it: a grid of shards, each with flat elements."""
    stacked = name.startswith("optimizer.state") and ".layers." in name
    grid = [size if stacked and dim == 0 else 2 for dim, size in enumerate(values.shape)]
    sizes = [size // count for size, count in zip(values.shape, grid, strict=True)]
    for place in product(*map(range, grid)):
        rows = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, sizes, strict=True))
        flat = values[rows].reshape((1,) * len(grid) + (-1,))
        yield WrittenBox(name, (*grid, flat.shape[-1]), (*place, 0), flat)


def test_moments_come_whole_or_in_shards_with_weights_in_fp32(tmp_path: Path) -> None:
    """A run of ours has moments to begin with."""
    assert convert("from-megatron", STORED, tmp_path / "run") == 0
    state, config = state_of(tmp_path / "run"), read_config(tmp_path / "run" / "config.yaml").config
    load_weights(store.resolve(tmp_path / "run"), state, {})
    advance(config, state, 1)
    save_state(tmp_path / "trained", state, {})
    assert convert("to-megatron", tmp_path / "trained", tmp_path / "whole") == 0
    whole = tensors(tmp_path / "whole")
    assert sum(name.startswith("optimizer.state.exp_avg") for name in whole) == 2 * 9
    shutil.copytree(tmp_path / "whole", tmp_path / "sharded")
    boxes = (
        box
        for name, (_, values) in whole.items()
        for box in (
            in_shards(name, values)
            if name.startswith("optimizer.")
            else [WrittenBox(name, tuple(values.shape), (0,) * values.ndim, values)]
        )
    )
    write_torch_folder(tmp_path / "sharded" / "iter_0000001", boxes)
    assert convert("to-megatron", tmp_path / "trained", tmp_path / "half", "--dtype", "bf16") == 0
    half = tensors(tmp_path / "half")
    assert half["output_layer.weight"][0] is torch.bfloat16 and "optimizer.state.fp32_param.output_layer.weight" in half
    for name in ("whole", "sharded", "half"):
        assert convert("from-megatron", tmp_path / name, tmp_path / f"{name}-run") == 0
        assert convert("to-megatron", tmp_path / f"{name}-run", tmp_path / f"{name}-back") == 0
        assert_same_bits(tmp_path / "whole", tmp_path / f"{name}-back")
        meta = read_meta(store.resolve(tmp_path / f"{name}-run"))
        assert (meta.iteration, meta.optimizer_steps) == (1, 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_loads_what_is_written(theirs: None, name: str, tmp_path: Path) -> None:
    """Layers of megatron-core alone have another name than Transformer Engine's for the norm before experts."""
    model = megatron_core.build(MODELS[name])
    megatron_core.save(tmp_path / "megatron", MODELS[name], model)
    assert convert("from-megatron", tmp_path / "megatron", tmp_path / "run") == 0
    assert convert("to-megatron", tmp_path / "run", tmp_path / "back") == 0
    assert_same_bits(tmp_path / "megatron", tmp_path / "back")
    if "experts" not in "".join(dict(model.named_parameters())):
        other = megatron_core.build(MODELS[name], seed=4)
        megatron_core.load(tmp_path / "back" / "iter_0000003", other)
        for key, values in model.named_parameters():
            assert torch.equal(values, other.get_parameter(key)), key


OPTIONS = {
    "normalization": "BiaslessLayerNorm",
    "activation": "geglu",
    "logit_softcap": 30.0,
    "attention_softcap": 50.0,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_megatron_has_not_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({"model": {**MODEL, name: OPTIONS[name]}}))
    assert convert("from-megatron", STORED, tmp_path / "run", "--config", str(path)) == 0
    assert convert("to-megatron", tmp_path / "run", tmp_path / "back") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"model.{name}=" in said and not (tmp_path / "back").exists()


class Evil:
    """An object whose pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def hostile_metadata(folder: Path) -> None:
    (folder / "iter_0000003" / ".metadata").write_bytes(pickle.dumps(Evil(folder / "evil")))


def hostile_arguments(folder: Path) -> None:
    torch.save({"args": Evil(folder / "evil")}, folder / "iter_0000003" / "common.pt")


def hostile_tensors(folder: Path) -> None:
    for path in folder.glob("iter_*/*.distcp"):
        path.write_bytes(pickle.dumps(Evil(folder / "evil")) + bytes(path.stat().st_size))


def in_legacy_format(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000003")
    (folder / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    (folder / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(pickle.dumps(Evil(folder / "evil")))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no Megatron folder": (shutil.rmtree, "is no checkpoint of Megatron-LM"),
    "a tracker of another": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("../x"),
        "not the number of an iteration",
    ),
    "a missing file": (lambda folder: next(folder.glob("iter_*/__0_1.distcp")).unlink(), "does not exist"),
    "a short file": (lambda folder: next(folder.glob("iter_*/__0_1.distcp")).write_bytes(b""), "has 0 bytes"),
    "another format": (
        lambda folder: (folder / "iter_0000003" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "format zarr; save it with --ckpt-format torch_dist",
    ),
    "the legacy format": (in_legacy_format, "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"),
    "no arguments": (lambda folder: torch.save({}, folder / "iter_0000003" / "common.pt"), "with --config"),
    "hostile metadata": (hostile_metadata, "could run code"),
    "hostile arguments": (hostile_arguments, "could run code"),
    "hostile tensors": (hostile_tensors, "is damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_has_one_message(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = WRONG[name]
    damage(checkpoint)
    assert convert("from-megatron", checkpoint, tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said
    assert not (tmp_path / "run").exists() and not (checkpoint / "evil").exists()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "more tensors": ({"qk_layernorm": True}, "decoder.layers.self_attention.q_layernorm.weight of the model is not in"),
    "fewer tensors": (
        {"normalization": "PlainLayerNorm"},
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight is not in the model",
    ),
    "other shapes": ({"num_query_groups": 4}, "linear_qkv.weight is [2, 16, 8], and [2, 24, 8] in the model"),
    "tied": ({"tie_embeddings": True}, "output_layer.weight differs from embedding.word_embeddings.weight"),
    "what Megatron-LM has not": ({"norm_placement": "sandwich"}, "no tensor layers.N.attention_output_norm.weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_is_refused_with_the_names(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = CHANGES[name]
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({"model": {**MODEL, **changes}}))
    assert convert("from-megatron", checkpoint, tmp_path / "run", "--config", str(path)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
