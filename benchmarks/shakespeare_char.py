"""nanoGPT's published CPU setting: validation loss of several seeds, and 8 ranks in 3-D compared with one process.

    python benchmarks/shakespeare_char.py --input tinyshakespeare.txt --output benchmarks/results/shakespeare_char.json

nanoGPT publishes 1.88 after 2000 iterations (README.md of github.com/karpathy/nanoGPT).  The text is the one that
karpathy/char-rnn calls tinyshakespeare, 1,115,394 characters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.corpus import write_text
from common.report import write

PUBLISHED = 1.88
CONFIG = "configs/shakespeare_char.yaml"
NUM_COMPARED, QUICK_COMPARED = 100, 2
# Processes and shape of the layout that is compared with one process.
CUBE, QUICK_CUBE = (8, "2,2,2"), (2, "2,1,1")
QUICK = [
    "train.train_iters=4",
    "train.eval_interval=4",
    "train.eval_iters=1",
    "optimizer.lr_warmup_iters=1",
    "optimizer.lr_decay_iters=4",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the corpus, train each seed, compare the layouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="the text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if not (args.input or args.quick):
        parser.error("the following arguments are required: --input")
    count, (processes, shape) = (QUICK_COMPARED, QUICK_CUBE) if args.quick else (NUM_COMPARED, CUBE)
    if args.quick:
        args.seeds = [1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_quick(folder) if args.quick else prepare(args.input, folder)
        losses = {seed: validation_loss(data, seed, folder / f"seed{seed}") for seed in args.seeds}
        difference = largest_difference(data, folder, count, processes, shape)
    rows = [{"seed": seed, "validation_loss": loss} for seed, loss in losses.items()]
    mean = statistics.mean(losses.values())
    print(f"mean validation loss {mean:.4f} (nanoGPT publishes {PUBLISHED})")
    told = f"3d {shape} on {processes} ranks next to one process"
    print(f"losses of {count} iterations, {told}: at most {difference:.1e} apart")
    if args.output:
        write(args.output, rows, mean=mean, published=PUBLISHED, largest_relative_difference_of_8_ranks=difference)
    return 0


def prepare(text: Path, folder: Path) -> list[str]:
    """Write tokenizer and token files; return the overrides that name them."""
    tokenizer = folder / "tokenizer"
    python("tools/train_tokenizer.py", "--input", text, "--type", "char", "--output-prefix", tokenizer)
    typed = ["--tokenizer-type", "CharTokenizer", "--tokenizer-model", f"{tokenizer}.json"]
    python("tools/preprocess_data.py", "--input", text, "--output-prefix", folder / "corpus", *typed)
    return [f"data.tokenizer_model={tokenizer}.json", f"data.data_path={folder}/corpus_text_document"]


def prepare_quick(folder: Path) -> list[str]:
    """Prepare a short text of our own; return overrides with a run of a few iterations among them."""
    return [*prepare(write_text(folder / "text.txt"), folder), *QUICK]


def validation_loss(data: list[str], seed: int, folder: Path) -> float:
    """Return the validation loss after the last iteration."""
    rows = train(data, folder, [f"train.seed={seed}"])
    (*_, last) = (row["validation_loss"] for row in rows if "validation_loss" in row)
    print(f"seed {seed}: validation loss {last:.4f}", flush=True)
    return last


def largest_difference(data: list[str], folder: Path, count: int, processes: int, shape: str) -> float:
    """Return the largest relative difference of the loss of an iteration between one process and several."""
    short = [f"train.exit_interval={count}", "logging.log_interval=1"]
    cube = ["parallel.tensor_parallel_mode=3d", f"parallel.tensor_parallel_shape=[{shape}]"]
    one, several = train(data, folder / "one", short), train(data, folder / "several", short + cube, processes)
    pairs = [(a["lm_loss"], b["lm_loss"]) for a, b in zip(one, several, strict=True)]
    assert len(pairs) == count, f"{len(pairs)} iterations were logged"
    return max(abs(a - b) / a for a, b in pairs)


def train(data: list[str], folder: Path, overrides: list[str], processes: int = 1) -> list[dict[str, float]]:
    """Run to the end; return the lines of metrics.jsonl that have a loss."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    folders = [f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
    python(*launcher, "pretrain_gpt.py", "--config", CONFIG, *data, *folders, *overrides, may_stop=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if not {"lm_loss", "validation_loss"}.isdisjoint(row)]


def python(*arguments: object, may_stop: bool = False) -> None:
    """Run Python; the exit code of a requested stop (3) is accepted where `may_stop`."""
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode and not (may_stop and done.returncode == 3):
        raise SystemExit(done.stdout + done.stderr)


if __name__ == "__main__":
    sys.exit(main())
