"""Joins token files, in the order in which they are named: the shards of `preprocess_data.py --shard i/n`, or any.

    python tools/merge_datasets.py --input 'data/web_shard-*_text_document' --output-prefix data/web_text_document

The shards of one job become the very bytes that one task would have written; they are refused if one is missing.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import ToolParser, add_overwrite, require_free
from megatron3d.runtime.program import byte_progress, parse_first, run_tool


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="merge_datasets", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--input", nargs="+", required=True, help="prefixes of .bin and .idx, globs of them, or folders"
    )
    parser.add_argument("--output-prefix", type=Path, required=True, help="the token files without their endings")
    add_overwrite(parser)
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.data.token_files.files import with_suffix
from megatron3d.data.token_files.indexed import IndexedDataset, Manifest, read_manifest
from megatron3d.data.token_files.writer import IndexedWriter, corpus_files, publish

MAX_NAMED = 8
"""Missing parts that a message names."""


def merge(arguments: argparse.Namespace) -> None:
    """Join the corpora, and print the counts of the result."""
    prefixes = find_prefixes(arguments.input)
    inputs = [path for prefix in prefixes for path in corpus_files(prefix)]
    require_free("--output-prefix", corpus_files(arguments.output_prefix), inputs, arguments.overwrite)
    made = [read_manifest(prefix) for prefix in prefixes]
    UserError.collect(manifest_problems(prefixes, made))
    parts = [
        IndexedDataset(prefix)
        for prefix, manifest in zip(prefixes, made, strict=True)
        if manifest is None or manifest.num_documents or with_suffix(prefix, ".bin").stat().st_size
    ]
    UserError.collect(
        f"--input {part.prefix}: its tokens are {part.dtype.name}, but those of {parts[0].prefix} {parts[0].dtype.name}"
        "; join corpora of one tokenizer only"
        for part in parts
        if part.dtype != parts[0].dtype
    )
    for part in parts:
        if part.manifest and not (part.manifest.bin_sha256 and part.manifest.idx_sha256):
            print(
                f"WARNING: --input {part.prefix}: its manifest has no checksums, so damage is not seen", file=sys.stderr
            )
    if not parts:
        raise UserError(f"--input {' '.join(arguments.input)}: no documents in any of them; name others")
    with IndexedWriter(arguments.output_prefix, parts[0].dtype) as writer, byte_progress() as progress:
        task = progress.add_task("joining", total=sum(part.num_tokens * part.dtype.itemsize for part in parts))
        for part in parts:
            writer.copy(part)
            progress.advance(task, part.num_tokens * part.dtype.itemsize)
        written = writer.written
        counted = {name: getattr(written, name) for name in ("num_documents", "num_tokens", "max_token_id")}
        unknown = dict.fromkeys(("bin_sha256", "idx_sha256", "job", "part"))
        # Corpora made by Megatron have no manifest: their tokenizer is not known.
        manifest = made[0].model_copy(update=counted | unknown) if made[0] else None
        publish(arguments.output_prefix, parts[0].dtype, written, manifest)
    counts = f"{written.num_documents} documents, {written.num_tokens} tokens"
    print(f"{arguments.output_prefix}: {counts} of {len(parts)} corpora")


def find_prefixes(patterns: Sequence[str]) -> list[Path]:
    """Return the prefixes that names, globs and folders stand for, the latter two sorted; raises UserError."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if with_suffix(path, ".idx").is_file():
            found.append(path)
            continue
        folder, name = (path, "*") if path.is_dir() else (path.parent, path.name)
        matches = sorted(idx.with_name(idx.name.removesuffix(".idx")) for idx in folder.glob(f"{name}.idx"))
        if not matches:
            raise UserError(f"--input {pattern}: no .idx file there; name prefixes of .bin and .idx, globs or folders")
        found += matches
    return found


def manifest_problems(prefixes: Sequence[Path], made: Sequence[Manifest | None]) -> Iterator[str]:
    """Yield what prevents joining: different tokenizers, different jobs, parts missing or out of order."""
    first = made[0]
    for prefix, manifest in zip(prefixes, made, strict=True):
        if _tokenizer(manifest) != _tokenizer(first):
            yield f"--input {prefix}: made with another tokenizer than {prefixes[0]}; join those of one only"
        elif manifest and first and manifest.job != first.job:
            yield f"--input {prefix}: a part of another job than {prefixes[0]}; join all parts of one job only"
    if first and first.job and first.part:
        found, count = [m.part for m in made if m], int(first.part.partition("/")[2])
        wanted = [f"{number}/{count}" for number in range(min(count, len(found) + MAX_NAMED))]
        if found != wanted:
            missing = [part for part in wanted if part not in found][:MAX_NAMED]
            what = f"part {', '.join(missing)} is missing" if missing else "parts are not in order"
            yield f"--input: {what} of the {count} that {prefixes[0]} is of; name all, in order"


def _tokenizer(manifest: Manifest | None) -> tuple[str, int, str] | None:
    return None if manifest is None else (manifest.tokenizer_type, manifest.vocab_size, manifest.fingerprint)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(merge, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
