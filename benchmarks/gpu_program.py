"""Train a byte model on this repository's source with pretrain_gpt.py: `gpu_program.py --output FOLDER [overrides]`.

Every rank writes the same small corpus to a folder of its own, so that no file system needs to be shared.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron3d.data.token_files.indexed import token_dtype
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[1]
KEYS = (
    "data.tokenizer_type=ByteTokenizer",
    "data.tokenizer_model=null",
    "data.split=90,10,0",
    "train.train_iters=20",
    "train.eval_interval=null",
    "optimizer.lr_warmup_iters=0",
    "logging.log_interval=1",
)


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


def main() -> int:
    """Write the corpus and train; return the exit code of pretrain_gpt.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command(write_corpus(Path(folder) / "bytes"), args.output, overrides)).returncode


if __name__ == "__main__":
    sys.exit(main())
