"""Command line of the training program, and the parser of programs that take a configuration; loads no library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron3d.parallel.mesh import PIPELINE
from megatron3d.runtime.arguments import MAX_RANKS, ToolParser, shorten, whole

CONFIG = "--config"
# Options of Megatron-LM for what is always so here.
NEEDLESS: Mapping[str, str] = {"moe_router_dtype": "routers compute in fp32, or in fp64 where the model does"}


class ConfigParser(ToolParser):
    """Parser with `section.key=value` as positional arguments, which names the key that an unknown option is here."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(program, description=description, allow_abbrev=False)

    def add_overrides(self, about: str) -> None:
        """Add `overrides`, a list of `section.key=value`."""
        self.add_argument("overrides", nargs="*", metavar="section.key=value", help=about)

    def parse_args(  # type: ignore[override]  # argparse also takes objects of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse options and overrides in any order; exit with code 2 and one message for all unknown options."""
        words = sys.argv[1:] if args is None else list(args)
        needs_config = CONFIG in self._option_string_actions and self._option_string_actions[CONFIG].required
        if needs_config and not any(word.partition("=")[0] == CONFIG for word in words):
            for word in words:
                if word.endswith((".yaml", ".yml")) and "=" not in word:
                    self.error(f"{word}: a configuration is given as {CONFIG} {word}")
        typed, unknown = self.parse_known_intermixed_args(words, namespace)
        following = dict(pairwise([*words, "-"]))
        if problems := [self._problem(word, following.get(word, "-")) for word in unknown if word.startswith("-")]:
            self.error("\n".join(problems))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return typed

    def _options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _problem(self, word: str, after: str) -> str:
        """Return what to write in place of an unknown option, which the word `after` follows."""
        from megatron3d.config.read import nearest, nearest_key, value_of

        flag, equals, given = word.partition("=")
        section, _, name = flag.lstrip("-").rpartition(".")
        if why := NEEDLESS.get(name.replace("-", "_")):
            return f"{shorten(word)}: no option of this program; leave it out: {why}"
        value = value_of(name) or given or ("VALUE" if equals or after.startswith("-") or "=" in after else after)
        own, key = nearest(flag, self._options(), 0.88), nearest_key(section, name)
        if own or key:
            return f"{shorten(word)}: no option of this program; use {own or f'{key}={shorten(value)}'}"
        return f"{shorten(word)}: no option of this program; --help lists them, docs/configuration.md the keys"


@dataclass(frozen=True)
class Arguments:
    """Parsed command line."""

    config: Path
    overrides: tuple[str, ...] = ()
    check: bool = False
    world_size: int | None = None
    dry_run: bool = False
    ranks: str = PIPELINE
    picture: Path | None = None
    elsewhere: bool = False
    details: bool = False
    join: bool = False


def make_parser() -> ConfigParser:
    """Return the parser of `--config F [--check [--details] | --dry-run] [--world-size N] [section.key=value ...]`."""
    parser = ConfigParser("pretrain_gpt.py", "Pretrain a GPT in any parallel layout.")
    parser.add_argument(CONFIG, type=Path, required=True, metavar="FILE", help="a YAML file, such as those in configs/")
    parser.add_argument("--check", action="store_true", help="report every problem of the configuration and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="simulate one training step without tensor values and stop"
    )
    parser.add_argument("--world-size", type=whole(1, MAX_RANKS), metavar="N", help="check or dry-run for N processes")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="with --check: the files are on another machine; those missing here are reported, not refused",
    )
    parser.add_argument(
        "--details", action="store_true", help="with --check: print every key as well, with its value and origin"
    )
    parser.add_argument(
        "--ranks",
        default=PIPELINE,
        metavar="RANKS",
        help="dry run only: pipeline (one rank per pipeline rank), all, or ranks such as 0,5",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="join the elastic run of checkpoint.save that is under way, as further ranks",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="dry run only: plot memory by kind over the step (.svg, .png, .pdf)",
    )
    parser.add_overrides("values that replace those in the file")
    return parser


def parse_args(argv: Sequence[str]) -> Arguments:
    """Parse the command line, with options and overrides in any order; exits with code 2 on anything else."""
    parser = make_parser()
    typed = parser.parse_args(argv)
    is_trial, launcher = typed.check or typed.dry_run, "a launcher (torchrun, srun) sets the number of processes"
    for problem, is_wrong in {
        f"--world-size needs --check or --dry-run; {launcher}": typed.world_size and not is_trial,
        "--check and --dry-run exclude each other; a dry run checks first": typed.check and typed.dry_run,
        "--elsewhere needs --check; a dry run reads no corpus and no checkpoint": typed.elsewhere and not typed.check,
        "--details needs --check": typed.details and not typed.check,
        "--ranks needs --dry-run": typed.ranks != PIPELINE and not typed.dry_run,
        "--picture needs --dry-run": typed.picture and not typed.dry_run,
        "--join joins a run that trains: leave out --check and --dry-run": typed.join and is_trial,
    }.items():
        if is_wrong:
            parser.error(problem)
    return Arguments(**{**vars(typed), "overrides": tuple(typed.overrides)})
