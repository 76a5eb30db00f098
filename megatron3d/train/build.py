"""Build of a run from a resolved configuration; each phase of the start is timed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

from megatron3d.checkpoint.async_saver import CheckpointSaver, Snapshot
from megatron3d.checkpoint.held import Held
from megatron3d.checkpoint.in_memory import InMemoryCheckpoints
from megatron3d.checkpoint.index import meta_of
from megatron3d.checkpoint.publish import LOCK_FILE, FolderLock, RetentionPolicy, is_non_persistent, newest_saved
from megatron3d.checkpoint.store import latest, resolve
from megatron3d.comm.interface import Comm
from megatron3d.comm.objects import background_comm, on_rank_0, run_on_all_ranks
from megatron3d.comm.peer_link import GlooPeerLink
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.read import Resolved
from megatron3d.config.report import batch_arithmetic, write_resolved
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.files import continues_own, is_hub_folder, is_own
from megatron3d.convert.hub_weights import HubFile, read_hub_index
from megatron3d.data.corpus.corpus import BlendedSamples, Corpus, open_corpus
from megatron3d.data.corpus.plan import check_token_ids
from megatron3d.data.corpus.stream import StreamedSamples
from megatron3d.data.loader import BatchLoader, PrefetchingLoader, SharingLoader, shared_axes
from megatron3d.data.packing import Packing, Starts
from megatron3d.data.token_files.indexed import BLOCK, IndexedDataset
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.errors import UserError
from megatron3d.forecast.memory.rank import in_memory_bytes, snapshot_bytes
from megatron3d.hardware.devices import device_peak
from megatron3d.metrics import MetricsWriter, process_memory
from megatron3d.metrics.timers import Timers
from megatron3d.metrics.writer import WANDB_ID
from megatron3d.model.group_plan import tied_links
from megatron3d.model.spec import changed_fields
from megatron3d.parallel.peers import kept_by, peer_of
from megatron3d.runtime.files import absent, remove
from megatron3d.runtime.machine import group_timeout
from megatron3d.runtime.process import Runtime
from megatron3d.runtime.program import StartupPhases
from megatron3d.train.checkpointing import (
    LoadOptions,
    SourceFormat,
    check_continued,
    find_best,
    load_newest,
    load_state,
    new_state,
    source_of,
)
from megatron3d.train.monitor.profiling import PROFILES, TRACES, check_memory_history
from megatron3d.train.monitor.reports import check_built, describe_connections, job_of, startup_report
from megatron3d.train.restore import restore
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState, build_state, connect

# Sequences whose documents stand for those of all, in predictions of a run.
TYPICAL_SEQUENCES = 16
HUGGING_FACE = SourceFormat(read_hub_index, HubFile, is_foreign=True)
# Most blocks of a file without a manifest that are read before the first step, of a million tokens each.
MAX_BLOCKS = 1024


def build_run(resolved: Resolved, runtime: Runtime, phases: StartupPhases, held: Held | None = None) -> Run:
    """Open the data, build the training state, load a checkpoint, and last open the output folder.

    Args:
        held: what this rank has in memory of a run that goes on after a loss of ranks; None: it begins with a launch.
    """
    config = resolved.config
    check_memory_history(config.logging, runtime.device)
    spec, tokenizer, corpus = open_data(config, runtime, phases)
    if runtime.rank == 0:
        print_data_plan(spec, corpus)
    timers = Timers(runtime.device, is_off=config.logging.timing_log_level == 0)
    baseline = process_memory(runtime.device)
    state, comm = build_model(spec, corpus, runtime, timers, phases)
    identity = identity_of(spec, tokenizer, corpus)
    with phases("checkpoint"):
        saver = make_saver(spec, comm, runtime.device)
        if saver is not None:
            saver.prepare(source_of(state))
            if runtime.watchdog is not None:
                runtime.watchdog.follow_saves(lambda: saver.num_bytes)
        memory = make_memory(state, comm, runtime.device)
        if runtime.members is not None:
            runtime.members.note_connections()
        if held is None or not go_on(state, identity, held, saver):
            resume(state, identity, comm, saver)
    if state.iteration == 0 and any(dataset.manifest is None for dataset in corpus.datasets):
        with phases("token ids of the corpus, which has no manifest"):
            check_without_manifest(corpus, state)
    with phases("peak of the device"):
        peak = device_peak(runtime.device, config.train.precision, config.logging.peak_tflops)
    if runtime.rank == 0:
        print(startup_report(state, peak, runtime.settings), flush=True)
    lock, metrics = open_outputs(resolved, comm, state)
    packing = spec.packing(tokenizer.eod)
    return Run(
        runtime=runtime,
        state=state,
        train_data=PrefetchingLoader(make_loader(corpus.train, spec, runtime, packing, comm), spec.batches),
        valid_data=make_loader(corpus.valid, spec, runtime, packing, comm) if corpus.valid else None,
        metrics=metrics,
        saver=saver,
        memory=memory,
        lock=lock,
        identity=identity,
        comm=comm,
        timers=timers,
        peak=peak,
        baseline=baseline,
        packing=packing,
        consumed_tokens=lambda num_samples: corpus.train.consumed_tokens(spec.batches.spans(num_samples)),
        faults=lambda: corpus.faults,
    )


def open_data(config: Config, runtime: Runtime, phases: StartupPhases) -> tuple[RunSpec, Tokenizer, Corpus]:
    """Load the tokenizer, resolve the run with its vocabulary, and open the corpus."""
    with phases("tokenizer and corpus"):
        tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
        spec = RunSpec(config, runtime.world_size, tokenizer.vocab_size, runtime.rank)
        packing = spec.packing(tokenizer.eod)
        corpus = open_corpus(spec.corpus, tokenizer, packing)
    return replace(spec, documents=first_documents(corpus, packing)), tokenizer, corpus


def first_documents(corpus: Corpus, packing: Packing) -> Starts | None:
    """Return where documents begin in the first sequences that are trained on; None where attention does not ask.

    A stream is not read before training: its sequences come in order, and its place is state.
    """
    if not packing.reset_attention_mask or isinstance(corpus.train, StreamedSamples):
        return None
    return packing.starts(torch.from_numpy(corpus.train.read(np.arange(TYPICAL_SEQUENCES))))


def print_data_plan(spec: RunSpec, corpus: Corpus) -> None:
    """Print the batch arithmetic, and how often the corpus is read."""
    num_samples = spec.batches.consumed_samples(spec.train_iters)
    plan = corpus.train.describe(num_samples, spec.config.data.max_epochs)
    print("> " + "\n".join((batch_arithmetic(spec), *plan)).replace("\n", "\n> "), flush=True)


def build_model(
    spec: RunSpec, corpus: Corpus, runtime: Runtime, timers: Timers, phases: StartupPhases
) -> tuple[TrainState, ProcessComm]:
    """Create the process groups, the model and the optimizer, and check that they are as configured."""
    with phases("process groups"):
        comm = connect(spec)
        connected = comm.warm_up(tied_links(spec.arch, spec.pipeline)) if runtime.device.type != "cpu" else []
        comm.set_wait_hook(timers.waiting)
    if runtime.rank == 0 and connected:
        print(describe_connections(connected), flush=True)
    run_on_all_ranks(comm, lambda: check_continued(spec) if runtime.rank == 0 else None)
    with phases("model and optimizer"):
        state = build_state(spec, comm, runtime.device)
        check_built(state)
        state = replace(state, stream=corpus.train if isinstance(corpus.train, StreamedSamples) else None)
    if runtime.watchdog is not None:
        folder = Path(spec.config.checkpoint.save) if spec.config.checkpoint.save else None
        runtime.watchdog.follow(lambda: state.iteration, comm.log.status, folder)
    return state, comm


def make_loader(
    samples: BlendedSamples | StreamedSamples, spec: RunSpec, runtime: Runtime, packing: Packing, comm: Comm
) -> BatchLoader:
    """Return the loader of this rank's microbatches of `samples`; a stream is read once for all ranks that need it."""
    train, batch_axes = spec.config.train, spec.mode.batch_axes
    arguments = samples, spec.mesh, batch_axes, train.micro_batch_size, train.global_batch_size, runtime.device
    if not isinstance(samples, StreamedSamples):
        return BatchLoader(*arguments, packing=packing)
    shared = shared_axes(spec.mesh, batch_axes, spec.parallel_state.group_axes)
    return SharingLoader(*arguments, seq_length=samples.seq_length, comm=comm, shared=shared, packing=packing)


def identity_of(spec: RunSpec, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, JsonValue]:
    """Return the values that must not change when a run is continued, since other samples would follow."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "corpus": corpus.fingerprint,
        "packing of data": spec.packing_identity,
        "data.split": spec.corpus.split,
        "train.seed": spec.corpus.seed,
    }


def make_saver(spec: RunSpec, comm: Comm, device: torch.device) -> CheckpointSaver | None:
    """Return the writer of checkpoints, None without a folder.

    Its ranks wait for each other as long as one writes, which a process group would not: its timeout is the watchdog's.
    """
    checkpoint = spec.config.checkpoint
    if checkpoint.save is None:
        return None

    def report(line: str) -> None:
        if comm.mesh.rank == 0:
            print(f"> {line}", flush=True)

    return CheckpointSaver(
        Path(checkpoint.save),
        background_comm(comm.mesh),
        RetentionPolicy.of(checkpoint),
        checkpoint.async_save,
        report,
        Snapshot(device) if checkpoint.async_save else None,
    )


def make_memory(state: TrainState, comm: Comm, device: torch.device) -> InMemoryCheckpoints | None:
    """Return the in-memory checkpoints, with all their memory; None where none are asked for or a rank is alone."""
    config, mesh = state.spec.config, comm.mesh
    interval = config.checkpoint.in_memory_interval
    if interval is None or mesh.world_size == 1:
        return None
    hosts: list[str] = comm.broadcast_object(comm.gather_object(socket.gethostname()))
    peer, source = peer_of(mesh.rank, hosts), kept_by(mesh.rank, hosts)

    def report(line: str) -> None:
        if mesh.rank == 0:
            print(f"> {line}", flush=True)

    timeout = group_timeout(60 * config.train.distributed_timeout_minutes)
    memory = InMemoryCheckpoints(background_comm(mesh), GlooPeerLink(peer, source, timeout), device, report)
    memory.prepare(source_of(state))
    job = job_of(state.spec, device)
    sent, kept = (f"{num_bytes / 2**30:.3g} GiB" for num_bytes in (snapshot_bytes(job), in_memory_bytes(job)))
    alone = ", on the only host, so that they do not outlive it" if len({*hosts}) == 1 else f" on {hosts[peer]}"
    report(
        f"in-memory checkpoints every {interval} iterations: rank 0 sends {sent} to rank {peer}{alone}; they take "
        f"{kept} of its host memory"
    )
    return memory


def load_options(spec: RunSpec, continues_started: bool) -> LoadOptions:
    """Return which parts of a checkpoint the run continues with: all of its own, once it has started elsewhere."""
    checkpoint = spec.config.checkpoint
    if continues_started:
        return LoadOptions()
    continues = not checkpoint.finetune
    optimizer = continues and not checkpoint.no_load_optim
    return LoadOptions(continues, optimizer, frozenset(checkpoint.accept_changed))


def resume(state: TrainState, identity: dict[str, JsonValue], comm: Comm, saver: CheckpointSaver | None) -> None:
    """Load the newest checkpoint of this run, or without one what `checkpoint.load` names.

    That may have none only where it is the folder of this run itself.
    """
    config = state.spec.config
    load, continues = config.checkpoint.load, on_rank_0(comm, lambda: continues_own(config))
    if load is None:
        return
    options = load_options(state.spec, continues and not is_own(config))
    if continues and config.checkpoint.save is not None:
        load = config.checkpoint.save
    folder, damaged = load_newest(Path(load), state, identity, options) if continues else (None, [])
    if not continues:
        is_hub = on_rank_0(comm, lambda: is_hub_folder(Path(load)))
        folder = Path(load) if is_hub else on_rank_0(comm, lambda: resolve(Path(load)))
        options = replace(options, source=HUGGING_FACE) if is_hub else options
        load_state(folder, state, identity, options)
    if folder is None:
        run_on_all_ranks(comm, lambda: check_nothing_lost(Path(load), damaged))
    elif saver is not None and not is_non_persistent(folder):
        saver.saved_at = state.iteration
    if saver is not None and continues and config.checkpoint.keep_best:
        saver.start_from(find_best(saver.root, state.iteration, comm))
    if comm.mesh.rank == 0:
        for refused, reason in damaged:
            print(f"> skipping checkpoint {refused}: {reason}", flush=True)
        how = "continuing from" if options.progress else "starting with the weights of"
        print(f"> {how} {folder}" if folder else f"> {load} has no checkpoint yet: starting from scratch", flush=True)
    if comm.mesh.rank == 0 and folder is not None:
        index = options.source.read_index(folder)
        meta = meta_of(folder, index)
        for name, saved, own in changed_fields(meta.model, state.model.arch):
            print(f"> model.{name}: {saved} in the checkpoint, {own} in this run", flush=True)
        for line in new_state(folder, index, state) if options.optimizer else ():
            print(f"> {line}", flush=True)


def go_on(state: TrainState, identity: dict[str, JsonValue], held: Held, saver: CheckpointSaver | None) -> bool:
    """Restore the newest complete step, from the memory of ranks or from disk; return whether there is one."""
    config = state.spec.config
    continued = config.checkpoint.save is not None and (continues_own(config) or held)
    root = Path(config.checkpoint.save) if continued and config.checkpoint.save is not None else None
    restored = restore(state, held, root, identity, load_options(state.spec, continues_started=True))
    if restored.iteration is None:
        return False
    comm = state.model.comm
    if saver is not None:
        saver.saved_at = on_rank_0(comm, lambda: newest_saved(saver.root, state.iteration))
    if saver is not None and config.checkpoint.keep_best:
        saver.start_from(find_best(saver.root, state.iteration, comm))
    if comm.mesh.rank == 0:
        for refused, reason in restored.skipped:
            print(f"> skipping checkpoint {refused}: {reason}", flush=True)
        print(f"> going on from {restored}", flush=True)
    return True


def check_nothing_lost(root: Path, damaged: Sequence[tuple[Path, str]]) -> None:
    """Raise UserError if a run's folder has only damaged checkpoints, instead of starting over in that folder."""
    lost = [f"checkpoint.load={root}: {folder.name}: {reason}" for folder, reason in damaged]
    if lost:
        raise UserError(
            *lost[:-1], f"{lost[-1]}; load another checkpoint, or save to a new folder to start from scratch"
        )
    latest(root)


def check_without_manifest(corpus: Corpus, state: TrainState) -> None:
    """Check tokens of the files without a manifest (made by Megatron), in a large one blocks at equal distances.

    Raises UserError if one is outside the vocabulary; every token is checked again when it is sampled.
    """
    for data in (dataset for dataset in corpus.datasets if dataset.manifest is None):
        _check_file(data, state)


def _check_file(data: IndexedDataset, state: TrainState) -> None:
    comm, vocab_size = state.model.comm, state.model.arch.vocab_size
    starts = range(0, data.num_tokens, BLOCK)
    starts = starts[:: -(-len(starts) // MAX_BLOCKS)][comm.mesh.rank :: comm.mesh.world_size]
    blocks = (data.tokens(start, min(start + BLOCK, data.num_tokens)) for start in starts)
    gathered = comm.gather_object(_bounds((int(block.min()), int(block.max())) for block in blocks))
    bounds = _bounds(pair for pair in gathered if pair is not None) if gathered else None
    low, high = comm.broadcast_object(bounds)
    check_token_ids(data.prefix, low, high, vocab_size)


def _bounds(pairs: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the smallest and the largest number of some pairs; None without any."""
    found = list(pairs)
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def open_outputs(resolved: Resolved, comm: Comm, state: TrainState) -> tuple[FolderLock | None, MetricsWriter | None]:
    """Lock the folder, open the metrics and write the resolved configuration, on rank 0.

    Returns the lock and the metrics on rank 0, None elsewhere; all ranks raise if rank 0 fails, and what it has made is
    removed.
    """
    config = resolved.config
    save = Path(config.checkpoint.save) if config.checkpoint.save else None
    locks: list[FolderLock] = []
    opened: list[MetricsWriter] = []
    places = [save / name for name in (LOCK_FILE, WANDB_ID.parent)] if save else []
    new = absent([*places, *map(Path, filter(None, [config.logging.tensorboard_dir]))])

    def write() -> None:
        make_folder("logging.tensorboard_dir", config.logging.tensorboard_dir)
        make_folder("checkpoint.save", config.checkpoint.save)
        if save is not None:
            locks.append(FolderLock(save))
        make_folder("checkpoint.save", str(save / TRACES) if save and config.logging.trace_iterations else None)
        make_folder("checkpoint.save", str(save / PROFILES) if save and config.logging.profile else None)
        opened.append(MetricsWriter(save, config, state.iteration))
        if save is not None:
            write_resolved(resolved, save / "config.yaml", state.model.arch.vocab_size)

    try:
        run_on_all_ranks(comm, lambda: write() if comm.mesh.rank == 0 else None)
    except Exception:
        for writer in opened:
            writer.close()
        if locks or save is None:  # another process may hold the lock, and then the folder is its own
            undo(new)
        for lock in locks:
            lock.release()
        raise
    return locks[0] if locks else None, opened[0] if opened else None


def undo(new: Sequence[Path]) -> None:
    """Remove what a launch that failed has made: its lock, wandb's files, and folders that are empty then."""
    for path in new:
        with contextlib.suppress(OSError):
            if path.name in (LOCK_FILE, WANDB_ID.parent.name):
                remove(path)
            else:
                path.rmdir()


def make_folder(key: str, folder: str | None) -> None:
    """Create the folder of a key, if one is given."""
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}={folder}: cannot be created ({error.strerror}); use a folder that you own") from error
