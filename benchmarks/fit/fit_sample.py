"""A few made-up rows in the formats of the published runs, with which `fit_cost_model.py --quick` runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

NANOTRON, VTRAIN = "nanotron_h100_sample.csv", "vtrain_a100_sample.csv"
_NODE: Mapping[str, object] = {
    "status": "Success",
    "nodes": 1,
    "dp": 8,
    "tp": 1,
    "pp": 1,
    "after_pp_fix": True,
    "mbs": 1,
    "batch_accum": 4,
    "zero_stage": 0,
    "seq_len": 2048,
    "vocab_size": 32768,
    "num_layers": 8,
    "hidden_size": 1024,
    "num_heads": 16,
    "num_kv_heads": "",
    "interm_dim": "",
    "tie_word_embeddings": False,
    "AR Intra-node (GB/s)": 457,
    "AllReduce (GB/s)": 457,
    "tok/s/gpu": 60000,
    "Mem Res (GB)": 20,
}
_LAYOUTS: Sequence[Mapping[str, object]] = (
    {},
    {"mbs": 2, "Mem Res (GB)": 30},
    {"dp": 4, "tp": 2, "tok/s/gpu": 50000, "Mem Res (GB)": 15},
    {"dp": 2, "tp": 4, "tok/s/gpu": 40000, "Mem Res (GB)": 12},
    {"dp": 4, "pp": 2, "tok/s/gpu": 45000, "Mem Res (GB)": 16, "AR Intra-node (GB/s)": 425},
    {"dp": 4, "pp": 2, "after_pp_fix": False, "tok/s/gpu": 30000, "Mem Res (GB)": 25},
    {"status": "OOM", "mbs": 256},
)
_VTRAIN: Mapping[str, object] = {
    "GPUs": 8,
    "# layers": 8,
    "hidden size": 1024,
    "attention heads": 16,
    "sequence length": 2048,
    "global batch": 64,
    "micro batch": 1,
    "tensor parallelism": 2,
    "pipeline parallelism": 1,
    "iteration time (ms)": 500,
}


def write_sample(folder: Path) -> Path:
    """Write both tables; return their folder."""
    _write(folder / NANOTRON, [{**_NODE, **layout} for layout in _LAYOUTS])
    _write(folder / VTRAIN, [_VTRAIN])
    return folder


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
