"""Sections of the configuration for the input and output of a run: data, checkpoints and logging."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron3d.config.section import Count, Positive, Section

DataPath = str | Annotated[tuple[str | float, ...], Field(strict=False)]


class DataConfig(Section):
    """The corpus and its tokenizer."""

    data_path: DataPath | None = Field(
        None, description="prefix of a .bin/.idx pair, or a blend of several, each after its weight"
    )
    split: str = Field("969,30,1", description="weights of train, valid and test")
    train_data_path: DataPath | None = Field(
        None, description="instead of data_path and split; `hf:NAME_OR_FOLDER[@CONFIG][:SPLIT]` streams a dataset"
    )
    valid_data_path: DataPath | None = Field(None, description="with train_data_path")
    test_data_path: DataPath | None = Field(None, description="with train_data_path")
    stream_key: str = Field("text", description="text column of a streamed dataset (hf:...)")
    stream_lanes: int = Field(8, ge=1, description="lanes of a streamed dataset that are read in parallel")
    stream_shuffle_rows: int = Field(
        1000, ge=1, description="size of the shuffle buffer of a streamed dataset, in rows"
    )
    on_bad_record: Literal["stop", "skip"] = Field(
        "stop", description="a bad row of a streamed dataset: stop, or skip and count it"
    )
    max_epochs: float = Field(4.0, gt=0, description="warn at launch if a corpus is read for more epochs than this")
    reset_position_ids: bool = Field(False, description="restart position ids at each document")
    reset_attention_mask: bool = Field(False, description="attend only within a document")
    mean_document_length: int | None = Field(
        None,
        ge=1,
        description="with reset_attention_mask: tokens of a document, by which predictions count attention; default: "
        "documents of the corpus in a run, whole sequences before it is read",
    )
    eod_mask_loss: bool = Field(False, description="no loss on the token that follows the end of a document")
    pad_token_id: int | None = Field(None, ge=0, description="no loss on this token; default: none")
    goldfish_k: int | None = Field(
        None, ge=2, description="goldfish loss: one of k tokens is excluded from the loss; default: none"
    )
    goldfish_h: int = Field(13, ge=1, description="goldfish loss: context tokens whose hash decides on the next one")
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer", "CharTokenizer"
    ] = "SentencePieceTokenizer"
    tokenizer_model: str | None = Field(
        None, description="tokenizer file; a mere file name is first looked for next to this file"
    )
    add_bos_token: bool | None = Field(
        None,
        description="begin prompts and streamed documents with the tokenizer's bos token; default: as it declares",
    )


class CheckpointConfig(Section):
    """Folders and options for saving and loading checkpoints."""

    save: str | None = None
    load: str | None = Field(
        None,
        description="a run, its checkpoint, or with finetune a Hugging Face folder; if equal to save: resume from the "
        "newest checkpoint there, if any",
    )
    save_interval: int | None = Field(None, ge=1, description="default: only at the end")
    non_persistent_save_interval: int | None = Field(
        None, ge=1, description="iterations between short-lived checkpoints in `non_persistent` of save; default: none"
    )
    keep_latest_k: int | None = Field(None, ge=1, description="number of permanent checkpoints to keep; default: all")
    save_retain_interval: int | None = Field(
        None, ge=1, description="keep checkpoints at its multiples permanently, next to the newest keep_latest_k (or 1)"
    )
    async_save: bool = Field(
        False, description="write in the background; training waits only for the copy to CPU memory"
    )
    finetune: bool = Field(False, description="load weights only; iteration, optimizer and data start from scratch")
    no_load_optim: bool = Field(False, description="load without optimizer state and loss scale")
    accept_changed: tuple[Literal["tokenizer", "corpus", "data.split", "train.seed"], ...] = Field(
        (), strict=False, description="what may differ from the run that is continued, which then reads other samples"
    )


class LoggingConfig(Section):
    """Reported values, and the outputs that they are written to."""

    log_interval: int = Field(10, ge=1)
    timing_log_level: Literal[0, 1, 2] = Field(
        1, description="phase timers: 0 off, 1 in metrics.jsonl, 2 also on the console"
    )
    straggler_factor: float | None = Field(
        1.5, gt=1, description="a rank is a straggler above this multiple of its peers' median time; null: no detection"
    )
    straggler_steps: int = Field(5, ge=1, description="consecutive logged steps before a straggler is reported")
    trace_iterations: tuple[Positive, ...] = Field(
        (), strict=False, description="iterations whose pipeline is traced and plotted in `traces` of checkpoint.save"
    )
    log_moments_interval: int | None = Field(
        None,
        ge=1,
        description="iterations between statistics of each layer's parameters, gradients and activations",
    )
    profile: bool = Field(False, description="write torch.profiler traces to `profiles` of checkpoint.save")
    profile_step_start: int = Field(10, ge=1, description="first profiled iteration")
    profile_step_end: int = Field(12, ge=2, description="iteration before which profiling stops")
    profile_ranks: tuple[Count, ...] = Field((0,), strict=False, min_length=1, description="profiled ranks")
    record_memory_history: bool = Field(
        False, description="with profile: snapshot of the allocator's history in these iterations; GPUs only"
    )
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    cluster: str | None = Field(
        None, description="description in hardware/clusters for step time prediction; default: local, if calibrated"
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="dense peak per device, for MFU; default: from the device's name"
    )
