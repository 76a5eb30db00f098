"""Peak memory of conversions from and to Hugging Face, of a random Llama of any size in a scratch folder.

The closed form: from Hugging Face at most two copies of the largest tensor (the mapped pages of its file, and the
rounded or transposed values, twice as large in fp32), to Hugging Face a third one (the last tensor of the file before).
The comparison of logits holds 10 bytes per parameter of one layer (8 of float64, 2 of the mapped bf16 file), 12 per
weight of its largest linear, and 16 for each number in 8240 rows of the embedding.  `imports` is the memory of the
program without a model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from common.report import Row, show, write

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.schema import ModelConfig
from megatron3d.convert.config_json import write_settings
from megatron3d.convert.hub_weights import divide, num_bytes, write_shards
from megatron3d.convert.tensor_names import FileTensor, file_tensors
from megatron3d.model.linear_spec import layer_linears, layer_weights

# Conversions, each of which reads what those before have written.
RUNS = ("from-hf", "from-hf, to fp32", "from-hf, logits", "to-hf", "to-hf, logits")
QUICK = ("from-hf", "to-hf")
TOOL = Path(__file__).parents[1] / "tools" / "convert_checkpoint.py"


def write_model(folder: Path, model: ModelConfig, shard_bytes: int) -> tuple[FileTensor, ...]:
    """Write a folder with random bf16 weights, tensor by tensor; return its table of tensors."""
    arch = resolve_architecture(model, model.vocab_size or 0)
    model_type, settings, _ = write_settings(arch)
    table = file_tensors(arch, model_type)

    def values() -> Iterator[torch.Tensor]:
        for tensor in table:
            yield torch.randn(tensor.shape, dtype=torch.bfloat16).mul_(0.02)

    folder.mkdir()
    write_shards(folder, divide(table, torch.bfloat16, shard_bytes), torch.bfloat16, values())
    (folder / "config.json").write_text(json.dumps(settings))
    return table


def peak_of(*arguments: str) -> tuple[int, float]:
    """Run the conversion tool in a process; return its peak resident memory in bytes, and the seconds it took."""
    before = time.perf_counter()
    process = subprocess.Popen([sys.executable, str(TOOL), *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{arguments} ended with status {status}"
    return usage.ru_maxrss * 1024, time.perf_counter() - before


def measure(model: ModelConfig, shard_bytes: int, scratch: Path, names: Collection[str]) -> list[Row]:
    """Return the predicted and measured peak of conversions."""
    table = write_model(scratch / "hub", model, shard_bytes)
    largest = max(num_bytes(tensor, torch.bfloat16) for tensor in table)
    total = sum(num_bytes(tensor, torch.bfloat16) for tensor in table)
    imports, _ = peak_of("--help")
    arch = resolve_architecture(model, model.vocab_size or 0)
    linear = max(each.num_weights for each in layer_linears(arch).values())
    compares = 10 * layer_weights(arch) + 12 * linear + 16 * 8240 * arch.hidden_size
    from_hf = ["from-hf", "--input", str(scratch / "hub"), "--tokenizer-type", "ByteTokenizer"]
    to_hf = ["to-hf", "--input", str(scratch / "run"), "--max-shard-size", "1GB", "--without-transformers"]
    runs = {
        "from-hf": ([*from_hf, "--output", str(scratch / "run"), "--without-logits"], 2 * largest),
        "from-hf, to fp32": (
            [*from_hf, "--output", str(scratch / "b"), "--without-logits", "--dtype", "fp32"],
            3 * largest,
        ),
        "from-hf, logits": ([*from_hf, "--output", str(scratch / "c"), "--without-transformers"], compares),
        "to-hf": ([*to_hf, "--output", str(scratch / "d"), "--without-logits"], 3 * largest),
        "to-hf, logits": ([*to_hf, "--output", str(scratch / "e")], compares),
    }
    rows: list[Row] = []
    for name in names:
        arguments, closed = runs[name]
        peak, seconds = peak_of(*arguments)
        figures = {"model_MB": total, "largest_MB": largest, "imports_MB": imports, "above_MB": peak - imports}
        figures["closed_form_MB"] = closed
        rows.append({"what": name, **{key: size / 1e6 for key, size in figures.items()}, "seconds": seconds})
        for folder in "bcde":
            subprocess.run(["rm", "-rf", str(scratch / folder)], check=True)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--scratch", type=Path, help="a folder on a disk with room for four times the model")
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden_size = 1, 64
    shape = {"num_layers": options.layers, "hidden_size": options.hidden_size, "num_attention_heads": 16}
    model = ModelConfig.model_validate({**shape, "family": "llama", "vocab_size": 32000, "seq_length": 2048})
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        rows = measure(model, 10**9, Path(scratch), QUICK if options.quick else RUNS)
    show(f"Llama of {options.layers} layers of {options.hidden_size}", rows)
    if options.output:
        write(options.output, rows, layers=options.layers, hidden_size=options.hidden_size)


if __name__ == "__main__":
    main()
