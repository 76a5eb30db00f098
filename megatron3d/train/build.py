"""From a resolved configuration to a run that is ready to train; each phase is stamped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from megatron3d.checkpoint.async_saver import CheckpointSaver
from megatron3d.checkpoint.lock import FolderLock
from megatron3d.checkpoint.publish import is_non_persistent
from megatron3d.checkpoint.retention import RetentionPolicy
from megatron3d.checkpoint.store import latest, resolve
from megatron3d.checkpoint.verify import newest_intact, verify_on_all_ranks
from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import background_comm
from megatron3d.comm.run_on_all_ranks import run_on_all_ranks
from megatron3d.config.read import Resolved
from megatron3d.config.report import batch_arithmetic, write_resolved
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.checkpoint import is_own
from megatron3d.data.corpus.blended import BlendedSamples
from megatron3d.data.corpus.corpus import Corpus, describe_plan, open_corpus
from megatron3d.data.corpus.stream import StreamedSamples
from megatron3d.data.loader import BatchLoader, PrefetchingLoader
from megatron3d.data.token_files.indexed import BLOCK, IndexedDataset
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError
from megatron3d.hardware.peaks import device_peak
from megatron3d.metrics import MetricsWriter, peak_memory_bytes
from megatron3d.metrics.timers import Timers
from megatron3d.runtime.process import Phases, Runtime
from megatron3d.train.checkpointing import Loading, load_state
from megatron3d.train.monitor.pipeline_trace import trace_folder
from megatron3d.train.monitor.profiling import check_history, profile_folder
from megatron3d.train.monitor.startup_report import attention_line, check_built, startup_report
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState, build_state, connect


def build_run(resolved: Resolved, runtime: Runtime, phases: Phases) -> Run:
    """Read the corpus, connect the ranks, build the model, load a checkpoint, and open the output folder last."""
    config, is_first = resolved.config, runtime.rank == 0
    check_history(config.logging, runtime.device)
    with phases("tokenizer and corpus"):
        tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
        spec = RunSpec(config, runtime.world_size, tokenizer.vocab_size, runtime.rank)
        packing = spec.packing(tokenizer.eod)
        corpus = open_corpus(spec.corpus, tokenizer, packing)
    if is_first:
        arithmetic = batch_arithmetic(spec)
        plan = describe_plan(corpus, spec.batches.consumed_samples(config.train.train_iters), config.data.max_epochs)
        print("> " + "\n".join((arithmetic, *plan)).replace("\n", "\n> "), flush=True)
    baseline_bytes = peak_memory_bytes(runtime.device)
    with phases("process groups"):
        comm = connect(spec)
    with phases("model and optimizer"):
        state = build_state(spec, comm, runtime.device)
        check_built(state)
        attention_line(state)  # every rank refuses what its kernels cannot do
        state.stream = corpus.train if isinstance(corpus.train, StreamedSamples) else None
    if runtime.watchdog is not None:
        runtime.watchdog.follow(lambda: state.iteration, lambda: (comm.num_started, comm.last_started))
    identity = identity_of(config, tokenizer, corpus)
    with phases("checkpoint"):
        saver = make_saver(config, comm)
        resume(config, state, identity, comm, saver)
    if state.iteration == 0 and any(dataset.manifest is None for dataset in corpus.datasets):
        with phases("token ids of the corpus, which has no manifest"):
            check_token_ids(corpus, state)
    with phases("peak of the device"):
        peak = device_peak(runtime.device, config.train.precision, config.logging.peak_tflops)
    if is_first:
        print(startup_report(state, peak), flush=True)

    def loader(samples: BlendedSamples | StreamedSamples) -> BatchLoader:
        train, batch_axes = config.train, spec.mode.batch_axes
        return BatchLoader(
            samples, comm.mesh, batch_axes, train.micro_batch_size, train.global_batch_size, runtime.device
        )

    timers = Timers(runtime.device, is_off=config.logging.timing_log_level == 0)
    comm.set_wait_hook(timers.waiting)
    lock, metrics = open_outputs(resolved, comm, state)
    return Run(
        runtime,
        state,
        PrefetchingLoader(loader(corpus.train), spec.batches),
        loader(corpus.valid) if corpus.valid else None,
        metrics,
        saver,
        lock,
        identity,
        comm,
        timers,
        peak,
        baseline_bytes,
        packing,
        lambda num_samples: corpus.train.consumed_tokens(spec.batches.spans(num_samples)),
        lambda: corpus.faults,
    )


def identity_of(config: Config, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, JsonValue]:
    """What must not change when a run is continued, since the samples would be others."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "corpus": corpus.fingerprint,
        "packing of data": packing_identity(config),
        "data.split": config.data.split,
        "train.seed": config.train.seed,
    }


def packing_identity(config: Config) -> str | None:
    """The options that change what a sample means, None where all are as usual."""
    defaults = type(config.data)()
    keys = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "pad_token_id", "goldfish_k", "goldfish_h")
    values = {key: getattr(config.data, key) for key in keys}
    return ", ".join(f"{key}={value}" for key, value in values.items() if value != getattr(defaults, key)) or None


def make_saver(config: Config, comm: Comm) -> CheckpointSaver | None:
    """What writes checkpoints; in the background with connections of its own."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return None

    def tell(line: str) -> None:
        if comm.mesh.rank == 0:
            print(f"> {line}", flush=True)

    objects = background_comm(comm.mesh) if checkpoint.async_save else comm
    return CheckpointSaver(Path(checkpoint.save), objects, RetentionPolicy.of(checkpoint), checkpoint.async_save, tell)


def resume(
    config: Config, state: TrainState, identity: dict[str, JsonValue], comm: Comm, saver: CheckpointSaver | None = None
) -> None:
    """Continue from `checkpoint.load`; only where it is the folder of this very run may there be nothing yet."""
    load = config.checkpoint.load
    if load is None:
        return
    folder, passed = newest_intact(Path(load), comm) if is_own(config) else (named_by(config, comm), [])
    if folder is None:
        run_on_all_ranks(comm, lambda: check_is_new(Path(load), passed))
    if folder is not None:
        load_state(folder, state, identity, Loading.of(config.checkpoint))
    if folder is not None and saver is not None and not is_non_persistent(folder):
        saver.saved_at = state.iteration
    if comm.mesh.rank == 0:
        for refused, why in passed:
            print(f"> passing over {refused}: {why}", flush=True)
        how = "continuing from" if not config.checkpoint.finetune else "beginning with the weights of"
        print(f"> {how} {folder}" if folder else f"> {load} has no checkpoint yet: starting anew", flush=True)


def named_by(config: Config, comm: Comm) -> Path:
    """The checkpoint that `checkpoint.load` means, as rank 0 sees it; raises UserError where it is damaged."""
    found = run_on_all_ranks(comm, lambda: resolve(Path(str(config.checkpoint.load))))
    folder: Path = comm.broadcast_object(found and found[0])
    verify_on_all_ranks(folder, comm, "" if Loading.of(config.checkpoint).optimizer else "model.")
    return folder


def check_is_new(root: Path, passed: Sequence[tuple[Path, str]]) -> None:
    """Nothing good was found in a run's folder; raises UserError unless that is because nothing was ever saved."""
    lost = [f"checkpoint.load={root}: {folder.name}: {why}" for folder, why in passed]
    if lost:
        raise UserError(*lost[:-1], f"{lost[-1]}; load another checkpoint, or save to a new folder to begin anew")
    latest(root)


def check_token_ids(corpus: Corpus, state: TrainState) -> None:
    """Read all token files without a manifest, which would tell: those that Megatron made, each rank a part.

    Raises UserError where a token is outside the vocabulary.
    """
    for data in (dataset for dataset in corpus.datasets if dataset.manifest is None):
        _check_token_ids(data, state)


def _check_token_ids(data: IndexedDataset, state: TrainState) -> None:
    comm, vocab_size = state.model.comm, state.model.arch.vocab_size
    starts = range(comm.mesh.rank * BLOCK, data.num_tokens, comm.mesh.world_size * BLOCK)
    blocks = (data.tokens(start, min(start + BLOCK, data.num_tokens)) for start in starts)
    gathered = comm.gather_object([(int(block.min()), int(block.max())) for block in blocks])
    bounds = comm.broadcast_object(gathered and [bound for part in gathered for bound in part])
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"data.data_path={data.prefix}: its token ids are {low} to {high}, outside the vocabulary of {vocab_size}; "
            "set data.tokenizer_type and data.tokenizer_model to the tokenizer that made the corpus"
        )


def open_outputs(resolved: Resolved, comm: Comm, state: TrainState) -> tuple[FolderLock | None, MetricsWriter | None]:
    """Rank 0's hold on the folder, and its metrics, beside the resolved configuration; None on other ranks.

    All ranks raise where that fails.
    """
    config = resolved.config
    save = Path(config.checkpoint.save) if config.checkpoint.save else None
    locks: list[FolderLock] = []
    opened: list[MetricsWriter] = []

    def write() -> None:
        make_folder("logging.tensorboard_dir", config.logging.tensorboard_dir)
        make_folder("checkpoint.save", config.checkpoint.save)
        if save is not None:
            locks.append(FolderLock(save))
        make_folder("checkpoint.save", str(trace_folder(save)) if save and config.logging.trace_iterations else None)
        make_folder("checkpoint.save", str(profile_folder(save)) if save and config.logging.profile else None)
        opened.append(MetricsWriter(save, config, state.iteration))
        if save is not None:
            write_resolved(resolved, save / "config.yaml", state.model.arch.vocab_size)

    try:
        run_on_all_ranks(comm, lambda: write() if comm.mesh.rank == 0 else None)
    except Exception:
        for lock in locks:
            lock.release()
        raise
    return locks[0] if locks else None, opened[0] if opened else None


def make_folder(key: str, folder: str | None) -> None:
    """Make the folder of a key if it has one."""
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}={folder}: cannot be made ({error.strerror}); use a folder that you own") from error
