"""Train a byte model on this repository's source with pretrain_gpt.py: `gpu_program.py --output FOLDER [overrides]`.

Every rank writes the same small corpus to a folder of its own, so that no file system needs to be shared for it.
Rank 0 prints a JSON line with step time and bubble, measured and predicted, and removes the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron3d.data.token_files.indexed import token_dtype
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.runtime.process import launcher_env

ROOT = Path(__file__).parents[2]
KEYS = (
    "data.tokenizer_type=ByteTokenizer",
    "data.tokenizer_model=null",
    "data.split=90,10,0",
    "train.train_iters=20",
    "train.eval_interval=null",
    "optimizer.lr_warmup_iters=0",
    "logging.log_interval=1",
)
ALONE = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.sequence_parallel=false",
    "parallel.pipeline_model_parallel_size=1",
    "parallel.virtual_pipeline_model_parallel_size=null",
)
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=8",
    "model.seq_length=64",
    "model.max_position_embeddings=64",
    "model.vocab_size=256",
    "train.precision=fp32",
)
SMALL_BYTES = (*(key for key in SMALL if not key.startswith("model.vocab_size")), "model.vocab_size=null")
HIDE_GPU = ("env", "CUDA_VISIBLE_DEVICES=")


def write_corpus(prefix: Path) -> Path:
    """Write the sources of the package as a token file of bytes, one document each."""
    tokenizer = ByteTokenizer(None)
    kind = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(prefix, kind) as writer:
        for path in sorted((ROOT / "megatron3d").rglob("*.py")):
            ids = tokenizer.encode(path.read_text(encoding="utf-8"))
            writer.add(np.array(ids, kind), np.array([len(ids)], np.int32))
        writer.finish(tokenizer)
    return prefix


def command(corpus: Path, output: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains on a corpus; `--config` may be among the overrides."""
    config = [] if "--config" in overrides else ["--config", str(ROOT / "configs" / "llama-1b.yaml")]
    places = [f"data.data_path={corpus}", f"checkpoint.save={output}", f"checkpoint.load={output}"]
    return [sys.executable, str(ROOT / "pretrain_gpt.py"), *config, *KEYS, *places, *overrides]


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(output: Path) -> dict[int, float]:
    """Return the loss of every logged iteration of a run."""
    return {row["iteration"]: row["lm_loss"] for row in rows_of(output) if "lm_loss" in row}


def summary(output: Path) -> dict[str, Any]:
    """Return step time and bubble of the second half of a run, and what was predicted if its cluster is known."""
    rows = rows_of(output)
    steps = [row for row in rows if "lm_loss" in row]
    late = steps[len(steps) // 2 :]
    names = ("elapsed_ms", "mfu", "pipeline_bubble", "peak_memory_bytes")
    found = {name: median(row[name] for row in late) for name in names if all(row.get(name) for row in late)}
    for row in rows:
        predicted = row.get("start", {}).get("step_s", {})
        if "total" in predicted:
            schedule_s = predicted["total"] - predicted["parts"].get("update", 0.0)
            bubble = predicted["parts"].get("bubble", 0.0) / schedule_s
            found |= {"predicted_ms": 1e3 * predicted["total"], "predicted_bubble": bubble}
    return found


def remove_checkpoints(output: Path) -> None:
    """Remove a run's checkpoints, which are large, and the file that names the last one."""
    (output / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)
    for checkpoint in output.glob("iter_*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def main() -> int:
    """Write the corpus and train; return the exit code of pretrain_gpt.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU")
    parser.add_argument("--quick", action="store_true", help="a small model, which only shows that it works")
    args, overrides = parser.parse_known_args()
    typed = [*(SMALL_BYTES if args.quick else ()), *overrides]
    with tempfile.TemporaryDirectory() as folder:
        program = command(write_corpus(Path(folder) / "bytes"), args.output, typed)
        code = subprocess.run([*(HIDE_GPU if args.cpu else ()), *program]).returncode
    if launcher_env().rank == 0:
        remove_checkpoints(args.output)
        if code == 0:
            print(json.dumps(summary(args.output)), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
