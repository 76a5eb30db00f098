"""Preprocessing jobs with a byte tokenizer, run in this process."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tools import preprocess_data

ROOT = Path(__file__).parents[2]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]


def documents(count: int = 400) -> list[dict[str, object]]:
    draw = random.Random(5)
    return [
        {"text": "".join(draw.choices("abc é\n", k=draw.choice([0, 5, 300]))), "title": f"t{i}"} for i in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(source: Path | str, prefix: Path, *more: str) -> int:
    return preprocess_data.main(
        ["--input", str(source), "--output-prefix", str(prefix), "--workers", "1", *BYTES, *more]
    )


def corpus(prefix: Path, key: str = "text") -> dict[str, bytes]:
    path = f"{prefix}_{key}_document"
    return {suffix: Path(path + suffix).read_bytes() for suffix in (".bin", ".idx", ".manifest.json")}
