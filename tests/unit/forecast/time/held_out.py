"""Held-out published runs, which set no constant, and the cost model's predictions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import Config
from megatron3d.forecast.time.layer import Machine
from megatron3d.forecast.time.practices import PROFILES
from megatron3d.forecast.time.step import SimulatedStep, load_machine, step_time
from megatron3d.model.linear_spec import flops_per_token
from tests.unit.forecast.time.published import Row, read, step_of

TABLES = read("held_out")
GROUPS: Mapping[str, Row] = TABLES["groups"]
ROWS: tuple[Row, ...] = tuple(TABLES["rows"])


class Beside(NamedTuple):
    """A published number and the predicted one."""

    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Return by what fraction the model is too fast, for throughputs and times alike."""
        ratio = self.predicted / self.published
        return (1 / ratio if self.is_time else ratio) - 1

    is_time: bool = False


def config_of(row: Row) -> Config:
    """Return the configuration of a row."""
    group = GROUPS[row["group"]]
    sections = {name: {**group.get(name, {}), **row.get(name, {})} for name in ("model", "parallel", "train")}
    sections["train"] |= {"precision": group["precision"], "bucket_mb": 25.0}
    return Config.model_validate(sections)


def machine_for(row: Row) -> Machine:
    """Return the machine of a row; an accelerator with less memory bandwidth or power is that variant."""
    group = GROUPS[row["group"]]
    cluster = row.get("cluster", group.get("cluster"))
    machine = load_machine(cluster, group["precision"], row["gpus"], PROFILES[group["profile"]])
    slower = group.get("slower")
    if slower is None:
        return machine
    kernels, clock = machine.device.kernels, slower["clock"]
    less = {
        "stream_gb_s": slower["stream_gb_s"],
        "matmul_fraction": clock * kernels.matmul_fraction,
        "attention_fractions": tuple(clock * fraction for fraction in kernels.attention_fractions),
    }
    return replace(machine, device=replace(machine.device, kernels=kernels.model_copy(update=less)))


def step_for(row: Row) -> SimulatedStep:
    """Return the predicted step of a row."""
    return step_of(config_of(row), row["gpus"], machine_for(row))


def _model_flops(config: Config) -> float:
    assert config.model.vocab_size is not None, "published runs have a vocabulary"
    arch = resolve_architecture(config.model, config.model.vocab_size)
    return float(flops_per_token(arch) * config.train.global_batch_size * config.model.seq_length)


def _hardware_flops(config: Config) -> float:
    """Return the FLOPs of equation 3 of Narayanan et al. 2021, which include the recomputed forward."""
    h, layers, seq = config.model.hidden_size, config.model.num_layers, config.model.seq_length
    vocabulary = (config.model.vocab_size or 0) / (16 * layers * h)
    return float(96 * config.train.global_batch_size * seq * layers * h**2 * (1 + seq / (6 * h) + vocabulary))


MEASURES: Mapping[str, Callable[[Config], float]] = {
    "tokens_per_s_gpu": lambda config: config.train.global_batch_size * config.model.seq_length,
    "samples_per_s_gpu": lambda config: config.train.global_batch_size,
    "tflops_gpu": lambda config: _model_flops(config) / 1e12,
    "hardware_tflops_gpu": lambda config: _hardware_flops(config) / 1e12,
}


def beside(row: Row) -> Beside:
    """Return the published and the predicted numbers."""
    seconds, measure = step_time(step_for(row)).step_s, GROUPS[row["group"]]["measure"]
    if measure == "step_s":
        return Beside(row["name"], row["published"], seconds, is_time=True)
    return Beside(row["name"], row["published"], MEASURES[measure](config_of(row)) / seconds / row["gpus"])
