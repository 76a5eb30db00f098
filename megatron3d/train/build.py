"""From a resolved configuration to a run that is ready to train; each phase is stamped."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from megatron3d.checkpoint.store import latest, resolve
from megatron3d.checkpoint.together import together
from megatron3d.comm import Comm
from megatron3d.config.read import Resolved
from megatron3d.config.report import batch_arithmetic, write_resolved
from megatron3d.config.schema import Config
from megatron3d.data.corpus import Corpus, Samples, open_corpus
from megatron3d.data.loader import Loader
from megatron3d.data.tokenizer import Tokenizer, build_tokenizer
from megatron3d.hardware import device_peak
from megatron3d.metrics import MetricsWriter
from megatron3d.runtime import Phases, Runtime
from megatron3d.train.loop import Run
from megatron3d.train.report import check_built, startup_report
from megatron3d.train.resume import load_state
from megatron3d.train.state import TrainState, build_state, connect


def build_run(resolved: Resolved, runtime: Runtime, phases: Phases) -> Run:
    """Read the corpus, connect the ranks, build the model, load a checkpoint, and open the output folder last."""
    config, is_first = resolved.config, runtime.rank == 0
    if is_first:
        print("> " + batch_arithmetic(config, runtime.world_size).replace("\n", "\n> "), flush=True)
    with phases("tokenizer and corpus"):
        tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
        corpus = open_corpus(config, tokenizer)
    with phases("process groups"):
        arch, comm = connect(config, tokenizer.vocab_size, runtime.world_size, runtime.rank)
    with phases("model and optimizer"):
        state = build_state(config, arch, comm, runtime.device)
        check_built(state)
    identity = identity_of(config, tokenizer, corpus)
    with phases("checkpoint"):
        resume(config, state, identity, comm)
    with phases("peak of the device"):
        peak = device_peak(runtime.device, config.train.precision, config.logging.peak_tflops)
    if is_first:
        print(startup_report(state, peak), flush=True)

    def loader(samples: Samples) -> Loader:
        train, batch_axes = config.train, state.model.mode.batch_axes
        return Loader(samples, comm.mesh, batch_axes, train.micro_batch_size, train.global_batch_size, runtime.device)

    return Run(
        config,
        runtime,
        state,
        loader(corpus.train),
        loader(corpus.valid) if corpus.valid else None,
        open_outputs(resolved, comm, state),
        identity,
        peak.flops if peak else None,
    )


def identity_of(config: Config, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, JsonValue]:
    """What must not change when a run is continued, since the samples would be others."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "corpus": corpus.fingerprint,
        "data.split": config.data.split,
        "train.seed": config.train.seed,
    }


def resume(config: Config, state: TrainState, identity: dict[str, JsonValue], comm: Comm) -> None:
    """Continue from `checkpoint.load`; only where it is the folder of this very run may there be nothing yet."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None:
        return
    own = save is not None and Path(load).absolute() == Path(save).absolute()
    found = together(comm, lambda: latest(Path(load)) if own else resolve(Path(load)))
    folder = comm.broadcast_object(found[0] if found else None)
    if folder is not None:
        load_state(folder, state, identity)
    if comm.mesh.rank == 0:
        print(f"> continuing from {folder}" if folder else f"> {load} has no checkpoint yet: starting anew", flush=True)


def open_outputs(resolved: Resolved, comm: Comm, state: TrainState) -> MetricsWriter | None:
    """Rank 0's metrics, after the resolved configuration is written; None on other ranks."""
    save = resolved.config.checkpoint.save

    def write() -> MetricsWriter:
        if save is not None:
            Path(save).mkdir(parents=True, exist_ok=True)
            write_resolved(resolved, Path(save) / "config.yaml")
        return MetricsWriter(Path(save) if save else None, resolved.config, state.iteration)

    return write() if comm.mesh.rank == 0 else None
