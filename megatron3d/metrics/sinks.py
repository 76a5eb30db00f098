"""Where else the numbers go: tensorboard and Weights & Biases, each asked for by a key of `logging`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megatron3d.config.schema import Config
from megatron3d.errors import UserError


class Sink(Protocol):
    """Takes numbers by name."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step."""

    def close(self) -> None:
        """Finish writing."""


class TensorboardSink:
    """Event files; what an earlier run wrote after `start_iteration` is hidden."""

    def __init__(self, folder: Path, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder), purge_step=start_iteration + 1)
        except OSError as error:
            raise UserError(f"logging.tensorboard_dir={folder}: cannot be written: {error.strerror}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish writing."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases; offline it writes files under `folder` and needs no network."""

    def __init__(self, config: Config, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"logging.wandb_project={config.logging.wandb_project}: the package wandb is not installed; "
                f"pip install wandb, or leave the key out"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.logging.wandb_project,
                name=config.logging.wandb_name,
                mode=config.logging.wandb_mode,
                dir=str(folder),
                config=config.model_dump(mode="json"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logging.wandb_project={config.logging.wandb_project}: wandb did not start ({error}); "
                f"log in with `wandb login`, or set logging.wandb_mode=offline and `wandb sync` later"
            ) from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish writing."""
        self._run.finish()


def build_sinks(config: Config, folder: Path | None, start_iteration: int) -> tuple[Sink, ...]:
    """The sinks that the configuration asks for."""
    sinks: list[Sink] = []
    if config.logging.wandb_project is not None:
        sinks.append(WandbSink(config, folder or Path.cwd()))
    if config.logging.tensorboard_dir is not None:
        sinks.append(TensorboardSink(Path(config.logging.tensorboard_dir), start_iteration))
    return tuple(sinks)
