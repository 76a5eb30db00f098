"""Writing of one rank's safetensors file box by box, without building it in memory.

8 bytes: length of the header | header: {"w[0:2,0:4]": {"dtype", "shape", "data_offsets"}, ...} | bytes of the boxes
(https://github.com/huggingface/safetensors, "Format"; little-endian, boxes without holes between them)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from megatron3d.checkpoint.index import StoredBox, StoredTensor
from megatron3d.checkpoint.piece import CHUNK_BYTES, DTYPES, Piece, dtype_name, raw_bytes
from megatron3d.runtime.files import fsync

ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}


def write_boxes(path: Path, pieces: Iterable[Piece]) -> dict[str, StoredTensor]:
    """Write the pieces that are not empty to a new file and fsync it; return the stored boxes by tensor.

    Needs memory for one box where pieces are not contiguous on the host, else none.  Creates no file without pieces.
    Raises OSError where the file cannot be written.
    """
    nonempty = sorted((piece for piece in pieces if piece.tensor.numel()), key=lambda piece: ORDER[piece.tensor.dtype])
    keys = [piece.key for piece in nonempty]
    assert len(set(keys)) == len(keys), f"{path.name} was given twice: {[key for key in keys if keys.count(key) > 1]}"
    if not nonempty:
        return {}
    with path.open("xb") as file:
        file.write(_header(nonempty))
        checksums = [_write(file, piece) for piece in nonempty]
    fsync(path)
    stored: dict[str, StoredTensor] = {}
    for piece, checksum in zip(nonempty, checksums, strict=True):
        box = StoredBox(box=piece.box, file=path.name, key=piece.key, checksum=checksum)
        before = stored[piece.name].boxes if piece.name in stored else ()
        dtype = dtype_name(piece.tensor.dtype)
        stored[piece.name] = StoredTensor(shape=piece.shape, dtype=dtype, boxes=(*before, box))
    return stored


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return the header, padded with spaces so that the first box starts at a multiple of 8 bytes."""
    assert sys.byteorder == "little", "safetensors files are little-endian"
    table, end = {}, 0
    for piece in pieces:
        begin, end = end, end + piece.tensor.nbytes
        entry = {"dtype": DTYPES[piece.tensor.dtype], "shape": list(piece.tensor.shape), "data_offsets": [begin, end]}
        table[piece.key] = entry
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, piece: Piece) -> str:
    """Write a box and return its checksum, computed chunk by chunk while the chunk is in the CPU's cache."""
    content, digest = raw_bytes(piece.compute() if piece.compute else piece.tensor), xxhash.xxh3_64()
    assert len(content) == piece.tensor.nbytes, f"{piece.key} has {len(content)} bytes, not {piece.tensor.nbytes}"
    for start in range(0, len(content), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        digest.update(chunk)
        file.write(chunk)
    return digest.hexdigest()
