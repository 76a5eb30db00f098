"""Serve a checkpoint over OpenAI's completions API: on one process, or under torchrun with `parallel.*` overrides.

Requests are served one after another.  With `--reload-latest` the newest checkpoint of a run that still trains is
loaded between two of them.
"""

from __future__ import annotations

import megatron3d.runtime.interrupt  # noqa: F401

import argparse
import importlib.util
import queue
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron3d.config.cli import ConfigParser
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime import process
from megatron3d.runtime.arguments import CHECKPOINT, add_iteration, add_weights, whole
from megatron3d.runtime.program import StopSignal, parse_first


def make_parser() -> ConfigParser:
    """Return the parser of `--load RUN [--host HOST] [--port PORT] ... [section.key=value ...]`."""
    parser = ConfigParser("serve.py", "Serve a checkpoint over OpenAI's completions API.")
    parser.add_argument("--load", type=Path, required=True, metavar="RUN", help=CHECKPOINT)
    add_iteration(parser)
    add_weights(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: only this machine")
    parser.add_argument("--port", type=whole(0, 65535), default=8000, help="0: a free one, which is printed")
    parser.add_argument("--served-model-name", metavar="NAME", help="of the model in requests; default: --load")
    parser.add_argument(
        "--reload-latest", action="store_true", help="before a request, load a newer checkpoint of the run"
    )
    parser.add_overrides("on the run's configuration")
    return parser


if __name__ == "__main__":
    parse_first(make_parser())

import torch

from megatron3d.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron3d.inference.chat import ChatTemplate, find_template
from megatron3d.inference.completions import CompletionRequest, RequestError, Work, generate_work, make_work
from megatron3d.inference.load import read_run, resolve, restore_state
from megatron3d.train.checkpointing import load_weights
from megatron3d.train.state import TrainState

if TYPE_CHECKING:
    from megatron3d.inference.server import Job, Service

LIBRARIES = ("starlette", "uvicorn")
POLL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Load the checkpoint and serve requests until Ctrl-C; return the exit code."""
    args = make_parser().parse_args(argv)
    UserError.collect(problems(args))
    env = process.launcher_env()
    folder = resolve(args.load, args.iteration)
    config = read_run(folder, args.overrides, env.world_size)
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    begin = tokenizer.special.before_text(config.data.add_bos_token)
    template = find_template(config.data.tokenizer_model)
    listening = listen(args.host, args.port) if env.rank == 0 else None
    with process.start() as here, torch.no_grad(), StopSignal() as stop:
        state = restore_state(config, tokenizer, folder, here, args.weights)
        model = Model(state, tokenizer, here.device, folder, args.weights)
        if listening is None:
            follow(model)
        else:
            serve(model, stop, args, begin, listening, template)
    return ExitCode.DONE


def problems(args: argparse.Namespace) -> list[str]:
    """Return a message per option that does not fit the others, and for libraries that are not installed."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    found = []
    if missing:
        found.append(f"{' and '.join(missing)}: not installed, and a server needs it; pip install 'megatron3d[serve]'")
    if args.reload_latest and args.iteration is not None:
        found.append(f"--reload-latest: with --iteration {args.iteration} the checkpoint is chosen; leave one out")
    return found


class Model:
    """The model on one rank; every rank must make the same calls."""

    def __init__(
        self,
        state: TrainState,
        tokenizer: Tokenizer,
        device: torch.device,
        folder: Path | None,
        weights: str = "model",
    ) -> None:
        self.state, self.tokenizer, self.device, self.folder = state, tokenizer, device, folder
        self.weights = weights
        self.comm = state.executor.model.comm

    def load(self, folder: Path) -> None:
        """Load another checkpoint of the run; raises UserError, on all ranks, where it cannot be read."""
        self.folder = None
        load_weights(folder, self.state, {"tokenizer": self.tokenizer.fingerprint}, self.weights)
        self.folder = folder


def follow(model: Model) -> None:
    """Do on this rank what rank 0 broadcasts, until it stops."""
    while (order := model.comm.broadcast_object(None))["do"] != "stop":
        if order["do"] == "wait":
            model.comm.barrier()
        elif order["do"] == "load":
            try:
                model.load(order["folder"])
            except UserError:
                continue  # rank 0 raises it as well, and answers
        elif order["do"] == "generate":
            work = Work(**order["work"])
            generate_work(work, model.state.executor, model.tokenizer, model.device, lambda piece: None, lambda: False)


def serve(
    model: Model,
    stop: StopSignal,
    args: argparse.Namespace,
    begin: Sequence[int],
    listening: socket.socket,
    template: ChatTemplate | None,
) -> None:
    """Serve requests on rank 0, one after another, until a signal asks to stop."""
    from megatron3d.inference.server import HttpServer, Service, make_app

    def to_work(request: CompletionRequest) -> Work:
        return make_work(request, model.tokenizer, begin, lambda: secrets.randbelow(2**31))

    name = args.served_model_name or str(args.load)
    service = Service(name, to_work, model.tokenizer, template)
    with HttpServer(make_app(service), listening):
        host, port = listening.getsockname()[:2]
        where = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        print(f"> serving {name} ({model.folder}) at {where}; Ctrl-C ends it", flush=True)
        while (job := next_job(model, service, stop)) is not None:
            answer(model, job, stop, args.load if args.reload_latest else None)
        print(f"> stopped by {stop.requested}", flush=True)
    tell_ranks(model, {"do": "stop"})


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; raises UserError where that cannot be."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        reason = str(error.strerror).partition(" (while")[0] if isinstance(error, OSError) else error
        raise UserError(
            f"--host {host} --port {port}: {reason}; use another port, or an address of this machine"
        ) from error


def tell_ranks(model: Model, order: dict[str, Any]) -> None:
    """Send an order to the ranks that follow."""
    model.comm.broadcast_object(order)


def next_job(model: Model, service: Service, stop: StopSignal) -> Job | None:
    """Return the next request; None where a stop is requested."""
    told_s = time.monotonic()
    while not stop.is_requested():
        try:
            return service.jobs.get(timeout=POLL_S)
        except queue.Empty:
            if time.monotonic() - told_s > process.IDLE_S:
                tell_ranks(model, {"do": "wait"})
                model.comm.barrier()
                told_s = time.monotonic()
    return None


def answer(model: Model, job: Job, stop: StopSignal, run: Path | None) -> None:
    """Serve one request; whatever is wrong with it is its answer.

    Args:
        run: folder whose newest checkpoint is loaded before; None: keep the model as it is.
    """
    if job.is_cancelled:
        return
    try:
        if run is not None:
            load_newest(model, run)
    except UserError as error:
        job.put(RequestError(f"the newest checkpoint cannot be loaded: {error}", status=503))
        return
    tell_ranks(model, {"do": "generate", "work": asdict(job.work)})
    try:
        generate_work(
            job.work,
            model.state.executor,
            model.tokenizer,
            model.device,
            job.put,
            lambda: job.is_cancelled or stop.is_requested(),
        )
    except Exception as error:
        if model.comm.mesh.world_size > 1:  # other ranks wait in collectives of this request
            raise
        traceback.print_exc()
        job.put(RequestError(f"{type(error).__name__} in the server; its console says more", status=500))
        return
    job.put(RequestError("the server stops", status=503) if stop.is_requested() else None)


def load_newest(model: Model, run: Path, attempts: int = 3) -> None:
    """Load the newest checkpoint of a run unless it is loaded; the run may remove it meanwhile for a newer one."""
    for left in reversed(range(attempts)):
        folder = resolve(run)
        if folder == model.folder:
            return
        tell_ranks(model, {"do": "load", "folder": folder})
        try:
            model.load(folder)
        except UserError:
            if not left:
                raise
            continue
        print(f"> loaded {folder}", flush=True)
        return


if __name__ == "__main__":
    sys.exit(process.run_program(main))
