"""Throughput of checksums on one core, compared with a copy of the same bytes."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from common.report import Row, interleaved, show, write

NUM_BYTES, QUICK_BYTES = 2**26, 2**20


def contestants(content: bytes) -> Mapping[str, Callable[[], object]]:
    """Return checksums to compare: the standard library's, xxhash's, google-crc32c and blake3 where installed."""
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    into = tensor.clone()
    found: dict[str, Callable[[], object]] = {
        "copy": lambda: into.copy_(tensor),
        "zlib.crc32": lambda: zlib.crc32(content),
        "hashlib.sha256": lambda: hashlib.sha256(content).digest(),
        "hashlib.blake2b": lambda: hashlib.blake2b(content).digest(),
        "xxhash.xxh64": lambda: xxhash.xxh64_intdigest(content),
        "xxhash.xxh3_64": lambda: xxhash.xxh3_64_intdigest(content),
        "xxhash.xxh3_128": lambda: xxhash.xxh3_128_intdigest(content),
    }
    for module, call in (("google_crc32c", "value"), ("blake3", "blake3")):
        try:
            function = getattr(importlib.import_module(module), call)
        except ImportError:
            continue
        found[module] = lambda function=function: getattr(function(content), "digest", int)()  # type: ignore[misc]
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    num_bytes = QUICK_BYTES if options.quick else NUM_BYTES
    rounds = 1 if options.quick else options.rounds
    torch.set_num_threads(1)
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().tobytes()
    turns = interleaved(contestants(content), rounds, warmup=2)
    rows: list[Row] = []
    for name, each in turns.items():
        seconds = sorted(turn.wall_s for turn in each)
        median, best = seconds[len(seconds) // 2], seconds[0]
        rows.append({"what": name, "GB/s": num_bytes / 1e9 / median, "best_GB/s": num_bytes / 1e9 / best})
    show(f"{num_bytes / 2**20:.0f} MiB on one thread", rows)
    if options.output:
        write(options.output, rows, rounds=rounds, num_bytes=num_bytes)


if __name__ == "__main__":
    main()
