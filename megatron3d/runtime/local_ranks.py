"""Launcher of ranks on this machine (scripts/launch_local.sh): signals reach them, and their exit code is its own.

The ranks are forked from this process after it has imported, once, what each of them needs.  After a stop on request
torchrun ends with a traceback and code 1; it also passes on fewer signals, and kills after 30 s ranks that are still
saving.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import contextlib
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import interrupt, process

MAX_RANKS = 1024
# After one rank has failed, the others get SIGTERM, and are killed after this time.
KILL_S = 30.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_COUNT_GPUS = "import torch; print(torch.accelerator.device_count())"


class Rank:
    """Forked process of one rank.

    Attributes:
        code: its exit code, -n if signal n killed it, None until it is known to have ended.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while the rank runs."""
        if self.code is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code

    def send(self, number: int) -> None:
        """Send a signal, unless the rank has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # a signal handler may interrupt `poll`
                os.kill(self._pid, number)


class LocalRanks:
    """Ranks of `PROGRAM [N] [ARGUMENT ...]` on this machine, by default one per GPU.

    PROGRAM works under `if __name__ == "__main__"` only.  Where it has a function `preload(argv, num_ranks)`, that
    imports what the ranks need, and raises what all of them would; it returns whether they go on without one that ends.
    """

    def __init__(self, program: str, arguments: Sequence[str]) -> None:
        self._begin_s = time.monotonic()
        self._program, self._arguments = program, list(arguments)
        self._num_ranks = 0
        self._ranks: list[Rank] = []
        self._outlive = False

    def prepare(self) -> int:
        """Import what the ranks need; raises UserError for what is wrong with the command line."""
        typed = _typed_ranks(self._arguments)
        if {"-h", "--help"} & {*self._arguments}:  # the program's, which ends here, before GPUs are counted
            sys.argv = [self._program, *self._arguments]
            runpy.run_path(self._program, run_name="__main__")
        self._num_ranks = typed or _num_gpus() or 1
        process.limit_threads(self._num_ranks)
        gc.disable()  # modules are no garbage
        module = runpy.run_path(self._program, run_name=Path(self._program).stem)
        if preload := module.get("preload"):
            self._outlive = bool(preload(self._arguments, self._num_ranks))
        return ExitCode.DONE

    def run(self) -> int:
        """Fork the ranks, which meet at a free port, and return the exit code; in a rank, run the program.

        It is that of the first rank that failed, 128 + n for one that signal n killed; else 3 if a rank was stopped on
        request, else 0.
        """
        assert threading.active_count() == 1, "a fork copies no thread but its own"
        ranks = "1 rank" if self._num_ranks == 1 else f"{self._num_ranks} ranks"
        print(f"> starting {ranks} after {time.monotonic() - self._begin_s:.1f} s", file=sys.stderr, flush=True)
        gc.freeze()  # a rank that looks for garbage in modules, at its end at the latest, would copy their memory
        gc.enable()
        with reserved_port() as held:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
            for rank in range(self._num_ranks):
                if (pid := os.fork()) == 0:
                    process.become_rank(rank, self._num_ranks, held.getsockname()[1])
                    held.close()
                    self._run_program(blocked)
                self._ranks.append(Rank(pid))
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            return wait_for_survivors(self._ranks) if self._outlive else wait(self._ranks)

    def pass_on(self, number: int, _: FrameType | None = None) -> None:
        """Send a signal to the ranks; where there is none yet, end this process."""
        if not self._ranks:
            interrupt.leave(number)
        for rank in self._ranks:
            rank.send(number)

    def _run_program(self, blocked: Iterable[int]) -> None:
        """Run the program and exit, as in a process of its own."""
        torch = sys.modules.get("torch")
        assert torch is None or not torch.cuda._is_in_bad_fork(), "CUDA was started before the fork"
        sys.argv = [self._program, *self._arguments]
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        main = ModuleType("__main__")
        main.__file__ = self._program
        sys.modules["__main__"] = main
        sys.excepthook = self._print_traceback
        for number in PASSED_ON:
            if signal.getsignal(number) == self.pass_on:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        interrupt.prepare()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        exec(compile(Path(self._program).read_bytes(), self._program, "exec"), vars(main))
        sys.exit(ExitCode.DONE)

    def _print_traceback(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an exception that the program did not handle, without the frames of this launcher."""
        while trace is not None and trace.tb_frame.f_code.co_filename != self._program:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)


def main() -> int:
    """Launch what the command line says, and return the exit code."""
    sys.argv = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as if it were run by itself
    ranks = LocalRanks(sys.argv[0], sys.argv[1:])
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, ranks.pass_on)
    return process.run_program(ranks.prepare) or ranks.run()


def _typed_ranks(arguments: list[str]) -> int | None:
    """Remove the number of ranks from the front of the arguments, and return it; None where there is none."""
    if not (arguments and arguments[0].isascii() and arguments[0].isdigit()):
        return None
    typed = arguments.pop(0)
    if len(typed) > 9 or not 1 <= int(typed) <= MAX_RANKS:
        raise UserError(f"{typed} ranks: this launcher starts 1 to {MAX_RANKS} on this machine; use 2, for example")
    return int(typed)


def _num_gpus() -> int:
    """Return the number of GPUs, counted by another process: to count them here may start CUDA."""
    return int(subprocess.run([sys.executable, "-c", _COUNT_GPUS], check=True, stdout=subprocess.PIPE).stdout)


def wait(ranks: Sequence[Rank]) -> int:
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
    ended = [code for code in codes if code is not None]
    failed = _first_failure(codes) if failed is None else failed
    code = max(ended) if failed is None else ended[failed]
    if code < 0:
        print(f"> rank {failed} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def wait_for_survivors(ranks: Sequence[Rank]) -> int:
    """Wait for all ranks, of which others go on where some end; return the exit code of those that finish.

    A rank that refuses what was typed ends all: the others would refuse it as well.
    """
    told = set[int]()
    while None in (codes := [rank.poll() for rank in ranks]):
        for rank, code in enumerate(codes):
            if code is not None and code < 0 and rank not in told:
                print(f"> rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
                told.add(rank)
        if ExitCode.USER_ERROR in codes:
            return wait(ranks)
        time.sleep(0.05)
    fine = [code for code in codes if code in (ExitCode.DONE, ExitCode.STOPPED)]
    return max(map(int, fine)) if fine else wait(ranks)


def _first_failure(codes: Sequence[int | None]) -> int | None:
    fine = (None, ExitCode.DONE, ExitCode.STOPPED)
    return next((rank for rank, code in enumerate(codes) if code not in fine), None)


def _send(ranks: Sequence[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send(number)  # to those that have not ended


@contextlib.contextmanager
def reserved_port() -> Iterator[socket.socket]:
    """Yield a socket at a TCP port that no other process is given while the block runs, and rank 0 can listen on.

    A port that is only found free, and not held, is given to a second launch that looks before rank 0 listens.  The
    system lets a server that sets SO_REUSEADDR, as the store of torch.distributed does, share what is bound like this.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        yield held


if __name__ == "__main__":
    sys.exit(main())
