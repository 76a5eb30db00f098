"""Launcher of ranks on this machine (scripts/launch_local.sh): signals reach them, and their exit code is its own.

After a stop on request torchrun ends with a traceback and code 1; it also passes on fewer signals, and kills after 30 s
ranks that are still saving.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process

MAX_RANKS = 1024
# After one rank has failed, the others get SIGTERM, and are killed after this time.
KILL_S = 30.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main() -> int:
    """Launch `PROGRAM [N] [ARGUMENT ...]` as N ranks, by default one per GPU, and return the exit code."""
    program, *arguments = sys.argv[1:]
    if arguments and arguments[0].isascii() and arguments[0].isdigit():
        typed = arguments.pop(0)
        if len(typed) > 9 or not 1 <= int(typed) <= MAX_RANKS:
            raise UserError(f"{typed} ranks: this launcher starts 1 to {MAX_RANKS} on this machine; use 2, for example")
        return launch([sys.executable, program, *arguments], int(typed))
    import torch

    return launch([sys.executable, program, *arguments], torch.accelerator.device_count() or 1)


def launch(command: Sequence[str], num_ranks: int) -> int:
    """Run a command as ranks that meet at a free port, and return the exit code.

    It is that of the first rank that failed, 128 + n for one that signal n killed; else 3 if a rank was stopped on
    request, else 0.
    """
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, pass_on)
    with reserved_port() as port:
        for rank in range(num_ranks):
            ranks.append(subprocess.Popen(command, env=process.environ_of_rank(rank, num_ranks, port)))
        return wait(ranks)


def wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks and return the exit code; once one has failed, end the others."""
    failed: int | None = None
    failed_s = 0.0
    while None in (codes := [rank.poll() for rank in ranks]):
        if failed is None:
            failed, failed_s = _first_failure(codes), time.monotonic()
            if failed is not None:
                _send(ranks, signal.SIGTERM)
        elif time.monotonic() - failed_s > KILL_S:
            _send(ranks, signal.SIGKILL)
        time.sleep(0.05)
    failed = _first_failure(codes) if failed is None else failed
    code = max(rank.returncode for rank in ranks) if failed is None else ranks[failed].returncode
    if code < 0:
        print(f"> rank {failed} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def _first_failure(codes: Sequence[int | None]) -> int | None:
    fine = (None, ExitCode.DONE, ExitCode.STOPPED)
    return next((rank for rank, code in enumerate(codes) if code not in fine), None)


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)  # to those that have not ended


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port of this machine that no other process is given while the block runs, and rank 0 can listen on.

    A port that is only found free, and not held, is given to a second launch that looks before rank 0 listens.  The
    system lets a server that sets SO_REUSEADDR, as the store of torch.distributed does, share what is bound like this.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        yield int(held.getsockname()[1])


if __name__ == "__main__":
    sys.exit(process.run_program(main))
