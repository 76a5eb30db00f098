"""Convert checkpoints to and from Hugging Face: `convert_checkpoint.py {from-hf,to-hf} --load FOLDER --output FOLDER`.

`config --load FOLDER --output FILE` writes the configuration of a run that starts from a Hugging Face folder as it is.
`to-dcp --load RUN --output FOLDER` writes all tensors of a checkpoint for torch.distributed.checkpoint.
`from-megatron --load FOLDER --output RUN` reads a checkpoint that Megatron-LM saved with `--ckpt-format torch_dist`,
and `to-megatron --load RUN --output FOLDER` writes one.

Tensors are converted one by one.  EQUAL is printed after our GPT and the Hugging Face model have computed the same
logits for stored inputs.  Exit codes: 0 converted, 1 the logits differ, 2 wrong input; 1 and 2 write nothing.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron3d.convert.family_table import MODEL_TYPES
from megatron3d.convert.fields import DTYPE_NAMES
from megatron3d.data.option_table import TOKENIZER_TYPES
from megatron3d.errors import UserError
from megatron3d.runtime.arguments import ToolParser, add_iteration, add_weights, shorten, whole
from megatron3d.runtime.program import parse_first, run_tool

CONFIG, TO_TORCH, FROM_MEGATRON, TO_MEGATRON = "config", "to-dcp", "from-megatron", "to-megatron"
FROM_HF, TO_HF = "from-hf", "to-hf"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def make_parser() -> ToolParser:
    """Return the parser: both directions and the start of a run with one set of options."""
    parser = ToolParser("convert_checkpoint.py", description=__doc__.split(":")[0], allow_abbrev=False)
    parser.add_argument("direction", choices=(FROM_HF, TO_HF, CONFIG, TO_TORCH, FROM_MEGATRON, TO_MEGATRON))
    parser.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="a folder of Hugging Face or Megatron-LM; or a run, or its checkpoint",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="a folder, or with config a file, that does not exist yet"
    )
    parser.add_alias("--input", "--load")
    add_iteration(parser)
    add_weights(parser, None, f"with {TO_HF}; ")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of the weights that are written; default: as they are")
    parser.add_argument(
        "--max-shard-size", type=_size, help="of a safetensors file, such as 500MB; with to-hf; default: 5GB"
    )
    parser.add_argument(
        "--seq-length",
        type=whole(1, 10**7),
        help="of later training; with from-hf and config; default: the model's longest",
    )
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: the input's")
    parser.add_argument("--tokenizer-model", help="file of the tokenizer named by --tokenizer-type")
    parser.add_argument(
        "--model-type", choices=MODEL_TYPES, help="with to-hf; default: the origin's, or the first that fits the model"
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="with from-megatron: a YAML file that describes the model; default: Megatron-LM's arguments do",
    )
    parser.add_argument(
        "--without-transformers",
        action="store_true",
        help="do not run transformers' own model, which is in memory whole; a plain forward of the files always runs",
    )
    parser.add_argument(
        "--without-logits",
        action="store_true",
        help="run neither model, only convert the tensors; needs the least memory",
    )
    return parser


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}) ?(KB|MB|GB)", text.upper())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a size such as 500MB or 5GB")
    return int(found[1]) * UNITS[found[2]]


if __name__ == "__main__":
    parse_first(make_parser())

from megatron3d.checkpoint.publish import resolve
from megatron3d.convert.compare import has_transformers
from megatron3d.convert.conversion import (
    MAX_SHARD_BYTES,
    ConversionRequest,
    LogitsDiffer,
    from_hub,
    to_hub,
    to_torch,
    write_start,
)
from megatron3d.convert.hub_weights import DTYPES
from megatron3d.convert.megatron_checkpoint import from_megatron
from megatron3d.convert.megatron_output import to_megatron

_DIRECTIONS = {
    FROM_HF: from_hub,
    TO_HF: to_hub,
    CONFIG: write_start,
    TO_TORCH: to_torch,
    FROM_MEGATRON: from_megatron,
    TO_MEGATRON: to_megatron,
}
# Their logits are not compared.
_WITHOUT_LOGITS = (CONFIG, TO_TORCH, FROM_MEGATRON, TO_MEGATRON)
_USED_BY = {
    "seq_length": (FROM_HF, CONFIG),
    "max_shard_size": (TO_HF,),
    "model_type": (TO_HF,),
    "tokenizer_type": (FROM_HF, TO_HF, CONFIG, FROM_MEGATRON),
    "config": (FROM_MEGATRON,),
    "dtype": (FROM_HF, TO_HF, TO_MEGATRON),
    "without_transformers": (FROM_HF, TO_HF),
    "without_logits": (FROM_HF, TO_HF),
    "weights": (TO_HF,),
    "iteration": (TO_HF, TO_TORCH, TO_MEGATRON),
}
DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    try:
        return run_tool(convert, make_parser(), argv)
    except LogitsDiffer as error:
        print(f"DIFFERENT: {error}", file=sys.stderr)
        return DIFFERENT


def _unused(args: argparse.Namespace) -> Iterator[str]:
    """Yield a message per option that has no effect with the others."""
    for name, directions in _USED_BY.items():
        value = getattr(args, name)
        if value is not None and value is not False and args.direction not in directions:
            only = " and ".join(directions)
            yield f"--{name.replace('_', '-')}: not used with {args.direction}, only with {only}; leave it out"
    if args.tokenizer_model is not None and args.tokenizer_type is None:
        yield f"--tokenizer-model {args.tokenizer_model}: not used without --tokenizer-type; add that, or leave it out"


def convert(args: argparse.Namespace) -> None:
    """Convert the checkpoint, and unless told otherwise print the comparisons of the logits."""
    UserError.collect(_unused(args))
    request = ConversionRequest(
        source=args.load if args.iteration is None else resolve(args.load, args.iteration),
        target=args.output,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        max_shard_bytes=args.max_shard_size or MAX_SHARD_BYTES,
        seq_length=args.seq_length,
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        with_transformers=not args.without_transformers,
        with_logits=not args.without_logits,
        model_type=args.model_type,
        config=args.config,
        weights=args.weights or "model",
    )
    report = _DIRECTIONS[args.direction](request)
    for note in report.notes:
        print(f"> {note}")
    if args.direction in _WITHOUT_LOGITS:
        print(f"WRITTEN: {args.output}")
        return
    if args.without_logits:
        print("> logits were not compared (--without-logits)")
        print(f"CONVERTED: {args.output}")
        return
    if not args.without_transformers and not has_transformers():
        print("> transformers is not installed, so that its own model was not run")
    print("> logits for the stored inputs of conversion.json, weights rounded alike:")
    for agreement in report.agreements:
        print(f">   {agreement}")
    print(f"EQUAL: {args.output}")


if __name__ == "__main__":
    sys.exit(main())
