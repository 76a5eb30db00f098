"""Shows what token files hold: statistics, a complete check, and documents as text.

    python tools/inspect_dataset.py data/web_text_document                          counts and lengths of documents
    python tools/inspect_dataset.py data/web_text_document --verify                 every entry, and the checksums
    python tools/inspect_dataset.py data/web_text_document --documents 0 7 -1 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/web.model    some documents, decoded
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron3d.data.option_table import TOKENIZER_TYPES
from megatron3d.errors import UserError, one_line
from megatron3d.runtime.arguments import MAX_NUMBER, ToolParser, naming_options, positive, whole
from megatron3d.runtime.program import parse_first, run_tool, spinner


def make_parser() -> ToolParser:
    """Return the parser of the command line."""
    parser = ToolParser(prog="inspect_dataset", description=__doc__.partition("\n")[0])
    parser.add_argument("prefix", nargs="+", type=Path, help="prefix of .bin and .idx")
    parser.add_argument("--verify", action="store_true", help="check every entry of the index, and the checksums")
    parser.add_argument(
        "--documents", nargs="+", type=whole(-MAX_NUMBER), help="numbers of documents to show; -1 is the last"
    )
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="to show text; default: token ids")
    parser.add_argument("--tokenizer-model", help="file of the tokenizer named by --tokenizer-type")
    parser.add_argument("--max-tokens", type=positive, default=1000, help="of each sequence")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


def inspect(arguments: argparse.Namespace) -> None:
    """Print the statistics or documents of each corpus."""
    for prefix in arguments.prefix:
        data = IndexedDataset(str(prefix).removesuffix(".bin").removesuffix(".idx"))
        if arguments.verify:
            with spinner(f"verifying {prefix}"):
                data.verify()
        if arguments.documents:
            show_documents(data, arguments)
        else:
            show_statistics(data, arguments.verify)


def show_statistics(data: IndexedDataset, is_verified: bool) -> None:
    """Print counts, tokenizer, and lengths of documents."""
    table = Table(title=Text(one_line(data.prefix)), show_header=False)
    for name, value in [*facts(data), *length_facts(data)]:
        table.add_row(name, Text(one_line(value)))
    if is_verified:
        table.add_row("verified", "every entry" + (", checksums" if data.manifest and data.manifest.bin_sha256 else ""))
    Console(width=max(80, Console().width)).print(table)


def facts(data: IndexedDataset) -> Iterator[tuple[str, str]]:
    """Yield what is known without reading the index."""
    yield "documents", f"{data.num_documents:,}"
    if data.num_sequences != data.num_documents:
        yield "sequences", f"{data.num_sequences:,}"
    yield "tokens", f"{data.num_tokens:,}"
    yield "type", f"{data.dtype.name}, {data.num_tokens * data.dtype.itemsize / 1e6:,.1f} MB"
    if data.manifest is None:
        yield "manifest", "none: made by Megatron"
        return
    made = data.manifest
    yield "tokenizer", f"{made.tokenizer_type} {made.fingerprint[:12]}, {made.vocab_size:,} tokens"
    yield "largest token", f"{made.max_token_id:,}"
    if made.part:
        yield "part", f"{made.part} of job {(made.job or '')[:12]}"


def length_facts(data: IndexedDataset) -> Iterator[tuple[str, str]]:
    """Yield quantiles of the documents' lengths, from a histogram of bounded size."""
    edges = np.unique(np.round(1.02 ** np.arange(1500)).astype(np.int64))  # within 2 % of any length
    longest = empty = 0
    counts: npt.NDArray[np.int64] = np.zeros(len(edges) + 1, np.int64)
    for lengths in data.document_lengths():
        counts += np.bincount(np.searchsorted(edges, lengths, side="right"), minlength=len(counts))
        longest, empty = max(longest, int(lengths.max())), empty + int((lengths == 0).sum())
    shares = np.cumsum(counts) / data.num_documents
    for quantile in QUANTILES[1:-1]:
        place = int(np.searchsorted(shares, quantile))
        yield f"length, {quantile:.0%} are at most about", f"{min(int(edges[min(place, len(edges) - 1)]), longest):,}"
    yield "longest document", f"{longest:,}"
    yield "mean length", f"{data.num_tokens / data.num_documents:,.1f}"
    yield "empty documents", f"{empty:,}"


def show_documents(data: IndexedDataset, arguments: argparse.Namespace) -> None:
    """Print documents by number, negative ones from the end, decoded if a tokenizer is given."""
    decode = None
    if arguments.tokenizer_type is not None:
        with naming_options():
            tokenizer = build_tokenizer(arguments.tokenizer_type, arguments.tokenizer_model)
        if data.manifest and data.manifest.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"--tokenizer-model {arguments.tokenizer_model}: {data.prefix} was made with "
                f"{data.manifest.tokenizer_type} {data.manifest.fingerprint[:12]}, not {tokenizer.fingerprint[:12]}; "
                "name the tokenizer that made the corpus"
            )
        decode = partial(decoded, data, tokenizer)
    for number in arguments.documents:
        if not -data.num_documents <= number < data.num_documents:
            last = data.num_documents - 1
            raise UserError(
                f"--documents {number}: {data.prefix} has {data.num_documents}; use 0 to {last}, or -1, -2 ..."
            )
        index = number % data.num_documents
        for part, ids in enumerate(sequences := data.sequences(index)):
            of = f", sequence {part}" if len(sequences) > 1 else ""
            shown = ids[: arguments.max_tokens].tolist()
            more = f" ... {len(ids) - len(shown)} more tokens" if len(shown) < len(ids) else ""
            print(f"== document {index}{of}, {len(ids)} tokens\n{decode(shown) if decode else shown}{more}")


def decoded(data: IndexedDataset, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids; raises UserError for ids that this tokenizer does not have."""
    wrong = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if wrong is not None:
        raise UserError(
            f"--tokenizer-type: {data.prefix} holds token {wrong}, outside the vocabulary of {tokenizer.vocab_size}; "
            "name the tokenizer that made the corpus"
        )
    return tokenizer.decode(ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool(inspect, make_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
