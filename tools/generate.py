"""Generate text from a checkpoint in any layout: on one process, or under torchrun with `parallel.*` overrides.

It takes one prompt, several (`--prompt` repeated, or `--prompts FILE`), or a conversation with `--interactive`.  With
the KV cache a token costs the work of one position, until a text is longer than the model's context.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401
from megatron3d.runtime.interrupt import CtrlC, calling_every

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.arguments import CHECKPOINT, MAX_SEED, add_iteration, add_weights, real, whole
from megatron3d.runtime.program import parse_first


def make_parser() -> ConfigParser:
    """Return the parser of `--load RUN [--prompt TEXT] ... [section.key=value ...]`."""
    parser = ConfigParser("generate.py", "Sample text from a checkpoint.")
    parser.add_argument("--load", type=Path, required=True, metavar="RUN", help=CHECKPOINT)
    add_iteration(parser)
    add_weights(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="several make a line of JSON each; default: a new line")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt per line; a line of JSON for each")
    source.add_argument("--interactive", action="store_true", help="go on after each line; an empty one starts over")
    parser.add_argument(
        "--max-new-tokens", type=whole(0, 10**7), default=100, help="tokens that each text gets at most"
    )
    parser.add_argument("--temperature", type=real(0, 1000), default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=whole(), default=0, help="sample from the k likeliest tokens; 0: from all")
    parser.add_argument(
        "--top-p",
        type=real(0, 1),
        default=1.0,
        help="of these, from the fewest likeliest that have this probability together; 1: from all",
    )
    parser.add_argument(
        "--stop",
        action="append",
        type=some_text,
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    parser.add_argument("--stream", action="store_true", help="print each token of one prompt as it comes")
    parser.add_argument(
        "--num-speculative-tokens",
        type=whole(0, 1000),
        default=0,
        metavar="N",
        help="draft N tokens at once with the model's modules of multi-token prediction; 0: none",
    )
    parser.add_argument(
        "--seed", type=whole(0, MAX_SEED), default=1234, help="of the first prompt; the next one has the next"
    )
    parser.add_overrides("on the run's configuration")
    return parser


def some_text(text: str) -> str:
    """Return a text of at least one character, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is everywhere; give at least one character")
    return text


if __name__ == "__main__":
    parse_first(make_parser())

import torch

from megatron3d.comm.interface import Comm
from megatron3d.data.tokenizers.special_tokens import with_beginning
from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.inference.continuation import Continuation
from megatron3d.inference.load import read_run, resolve, restore
from megatron3d.inference.sampling import Choice, NextTokens, Sampler, Speculation, Text, generate


def main(argv: Sequence[str] | None = None) -> int:
    """Load the checkpoint, sample, and print on rank 0; return the exit code."""
    args = make_parser().parse_args(argv)
    env = process.launcher_env()
    folder = resolve(args.load, args.iteration)
    config = read_run(folder, args.overrides, env.world_size)
    UserError.collect(draft_problems(args.num_speculative_tokens, config.model.mtp_num_layers))
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    begin = tokenizer.special.before_text(config.data.add_bos_token)
    prompts = [] if args.interactive else encode(read_prompts(args), tokenizer, begin)
    with process.start() as here, torch.no_grad():
        num_drafts = args.num_speculative_tokens
        sampler = Sampler(
            restore(config, tokenizer, folder, here, args.weights), here.device, keeps_hidden=num_drafts > 0
        )
        speculation = Speculation(sampler, Choice(args.temperature, args.top_k, args.top_p), num_drafts)
        out = sys.stdout if here.rank == 0 else None
        if args.interactive:
            talk(speculation, tokenizer, begin, args, out)
        else:
            said = complete(speculation, prompts, tokenizer, args, out if args.stream else None)
            if out and not args.stream:
                print("\n".join(said if len(said) == 1 else [json.dumps({"text": text}) for text in said]))
        if num_drafts and here.rank == 0:
            print(speculation.report(), file=sys.stderr)
    return ExitCode.DONE


def draft_problems(num_drafts: int, num_modules: int) -> Iterator[str]:
    """Yield the message for more drafts than the model has modules."""
    if num_drafts > num_modules:
        wanted = f"use 0 to {num_modules}" if num_modules else "leave it out"
        yield (
            f"--num-speculative-tokens {num_drafts}: each draft takes a module of multi-token prediction, and the "
            f"model has model.mtp_num_layers={num_modules}; {wanted}"
        )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line or of a file.

    Raises UserError if the file cannot be read or is empty, and for several prompts with `--stream`.
    """
    prompts: list[str] = args.prompt or ["\n"]
    if args.prompts is not None:
        try:
            prompts = args.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--prompts {args.prompts}: cannot be read as text ({error}); give a prompt per line"
            ) from error
        if not prompts:
            raise UserError(f"--prompts {args.prompts}: is empty; give a prompt per line")
    if args.stream and len(prompts) > 1:
        raise UserError(f"--stream: prints one text as it comes, not {len(prompts)}; give one prompt, or leave it out")
    return prompts


def encode(prompts: Sequence[str], tokenizer: Tokenizer, begin: Sequence[int]) -> list[list[int]]:
    """Return the tokens of every prompt, after those that begin a text; raises UserError for one without tokens."""
    encoded = [with_beginning(begin, tokenizer.encode(prompt)) for prompt in prompts]
    UserError.collect(
        f"--prompt {prompt!r}: no token; give at least one character"
        for prompt, tokens in zip(prompts, encoded, strict=True)
        if not tokens
    )
    return encoded


def complete(
    next_tokens: NextTokens,
    prompts: Sequence[list[int]],
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    out: TextIO | None = None,
) -> list[str]:
    """Return each prompt with its continuation, equal on every rank; one prompt's is also written to `out` as it comes.

    A continuation ends at a token that ends a document, or before one of the stop strings.
    """
    texts = [
        Text(list(prompt), torch.Generator().manual_seed(args.seed + row), args.max_new_tokens)
        for row, prompt in enumerate(prompts)
    ]
    show = printer(out)
    rows = [Continuation(tokenizer, text, args.stop, show) for text in texts]
    if out:
        show(rows[0].prompt)
    generate(next_tokens, texts, tokenizer.special.ends, lambda row, _: rows[row].update())
    said = [row.prompt + row.finish() for row in rows]
    if out:
        show("\n")
    return said


def printer(out: TextIO | None) -> Callable[[str], None]:
    """Return the function that writes a piece of text at once; to None it writes nothing."""

    def show(piece: str) -> None:
        if out:
            print(piece, end="", file=out, flush=True)

    return show


HINT = "(Ctrl-C ends a generation, an empty line starts over, Ctrl-D ends the program)"


def talk(
    speculation: Speculation,
    tokenizer: Tokenizer,
    begin: Sequence[int],
    args: argparse.Namespace,
    out: TextIO | None,
    lines: TextIO | None = None,
) -> None:
    """Continue the conversation after each line that rank 0 reads, and print each token there, until input ends.

    Ctrl-C ends a continuation on all ranks after the same token.
    """
    comm = speculation.sampler.executor.model.comm
    generator, tokens = torch.Generator().manual_seed(args.seed), list[int]()
    show = printer(out)
    with CtrlC() as ctrl_c:

        def update(row: int, token: int) -> None:
            continuation.update()
            text.is_done |= comm.broadcast_object(ctrl_c.is_pressed)

        for line in _read_together(comm, lines or sys.stdin, ctrl_c, show):
            new = tokenizer.encode(line) if line.strip() else []
            tokens = (tokens + new if tokens else with_beginning(begin, new)) if new else []
            if not tokens:
                continue
            num_known, text = len(tokens), Text(tokens, generator, args.max_new_tokens)
            continuation = Continuation(tokenizer, text, args.stop, show)
            ctrl_c.is_pressed = False
            generate(speculation, [text], tokenizer.special.ends, update)
            continuation.finish()
            show("\n")
            if continuation.is_stopped:  # the conversation goes on after what was shown
                tokens[num_known:] = tokenizer.encode(continuation.shown)


def _read_together(comm: Comm, lines: TextIO, ctrl_c: CtrlC, show: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines that rank 0 reads, on every rank; while it waits, all meet now and then, which is no hang."""

    def wait() -> None:
        with ctrl_c.finishing():
            comm.broadcast_object(None)
            comm.barrier()

    while True:
        line = comm.broadcast_object(_read(lines, ctrl_c, show, wait) if comm.mesh.rank == 0 else None)
        if line is None:
            comm.barrier()
            continue
        if not line:
            return
        yield line


def _read(lines: TextIO, ctrl_c: CtrlC, show: Callable[[str], None], wait: Callable[[], None]) -> str:
    """Return a line, "" at the end of the input; at a terminal, ask for it, and again after Ctrl-C.

    Meanwhile `wait` is called every `IDLE_S`.
    """
    is_asked = lines.isatty()
    while True:
        try:
            with ctrl_c.interrupting(), calling_every(process.IDLE_S, wait):
                show("> " if is_asked else "")
                line = lines.readline()
        except KeyboardInterrupt:
            if not is_asked:
                raise
            show(f"\n{HINT}\n")
            continue
        if is_asked and not line:
            show("\n")
        return line


if __name__ == "__main__":
    sys.exit(process.run_program(main))
