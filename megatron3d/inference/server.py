"""HTTP server of OpenAI's completions API, as far as it concerns text (https://platform.openai.com/docs/api-reference).

    thread of the server     POST /v1/completions -> Job --jobs--> the main thread, which generates one after another
                             response or events  <--pieces-- Job

Needs starlette and uvicorn, the extra `serve`; `megatron3d.inference.completions` needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.errors import UserError
from megatron3d.inference.chat import ChatTemplate
from megatron3d.inference.completions import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    TextPiece,
    TokenLogprobs,
    Work,
    read_request,
)

MAX_BODY_BYTES = 2**24
WAIT_S = 0.5


@dataclass
class Job:
    """A request that waits for its turn or is served: the main thread puts pieces, then None or an error.

    Attributes:
        is_cancelled: whether the client has gone.
    """

    work: Work
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[TextPiece | RequestError | None] = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False

    def put(self, piece: TextPiece | RequestError | None) -> None:
        """Hand a piece, the end or an error to the server's thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


@dataclass(frozen=True)
class Service:
    """What the server says of its model, and how it makes work of requests.

    Attributes:
        template: writes conversations as text; None: there are no chat completions.
    """

    name: str
    to_work: Callable[[CompletionRequest], Work]
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    jobs: queue.Queue[Job] = field(default_factory=queue.Queue)
    created: int = field(default_factory=lambda: int(time.time()))

    def model(self) -> dict[str, Any]:
        """Return the description of the model."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "megatron3d"}

    def check_model(self, name: str) -> None:
        """Raise RequestError for the name of another model."""
        if name != self.name:
            message = f"the model {name[:200]!r} does not exist; use {self.name!r}"
            raise RequestError(message, "model", 404, "model_not_found")


def make_app(service: Service) -> Starlette:
    """Return the application."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.model()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(service.model())

    async def completions(request: Request) -> Response:
        asked = read_request(CompletionRequest, await _json(request))
        service.check_model(asked.model)
        return await _complete(service, asked, request, Answer)

    async def chat(request: Request) -> Response:
        if service.template is None:
            raise RequestError("chat completions: the tokenizer has no chat template; use /v1/completions")
        asked = read_request(ChatRequest, await _json(request))
        service.check_model(asked.model)
        return await _complete(service, asked.to_completion(service.template, service.tokenizer), request, ChatAnswer)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/health", health),
        ],
        exception_handlers={
            RequestError: _refuse,
            UserError: _refuse_user_error,
            HTTPException: _refuse_http,
            Exception: _fail,
        },
    )


def _error(error: RequestError) -> Response:
    return JSONResponse({"error": error.error}, error.status)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "of this handler"
    return _error(error)


async def _refuse_user_error(request: Request, error: Exception) -> Response:
    return _error(RequestError(str(error)))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "of this handler"
    return _error(RequestError(f"{request.method} {request.url.path[:200]}: {error.detail}", status=error.status_code))


async def _fail(request: Request, error: Exception) -> Response:
    return _error(RequestError(f"{type(error).__name__} in the server; its console says more", status=500))


async def _json(request: Request) -> object:
    """Return the body of a request as JSON; raises RequestError where it is none, or too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}"[:200]) from error


async def _complete(service: Service, asked: CompletionRequest, request: Request, kind: type[Answer]) -> Response:
    work = service.to_work(asked)
    job = Job(work, asyncio.get_running_loop())
    answer = kind(service, asked, work)
    service.jobs.put(job)
    if asked.stream:
        first = await _next(job, request)  # what cannot be served at all is answered with its status
        if isinstance(first, RequestError):
            raise first
        return StreamingResponse(_events(answer, job, request, first), media_type="text/event-stream")
    asked_s = time.monotonic()
    while (piece := await _next(job, request)) is not None:
        if isinstance(piece, RequestError):
            raise piece
        answer.add(piece)
        if time.monotonic() - asked_s > WAIT_S:  # pieces that come without a pause hide that the client has gone
            asked_s, job.is_cancelled = time.monotonic(), await request.is_disconnected()
    return JSONResponse(answer.whole())


async def _next(job: Job, request: Request) -> TextPiece | RequestError | None:
    """Return the next piece of a job; it is cancelled where the client has gone."""
    while True:
        try:
            return await asyncio.wait_for(job.pieces.get(), WAIT_S)
        except asyncio.TimeoutError:
            if await request.is_disconnected():
                job.is_cancelled = True
                return RequestError("the client has gone", status=499)


async def _events(answer: Answer, job: Job, request: Request, first: TextPiece | None) -> AsyncIterator[str]:
    """Yield the events of a stream, whose last one is [DONE] unless the generation failed."""
    piece: TextPiece | RequestError | None = first
    try:
        for begun in answer.first_chunks():
            yield _event(begun)
        while piece is not None:
            if isinstance(piece, RequestError):
                yield _event({"error": piece.error})
                return
            answer.add(piece)
            if piece.text or piece.logprobs or piece.finish_reason:
                yield _event(answer.chunk(piece))
            piece = await _next(job, request)
        if answer.asked.includes_usage:
            yield _event({**answer.head(), "choices": [], "usage": answer.usage()})
        yield "data: [DONE]\n\n"
    finally:
        job.is_cancelled = True


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class Answer:
    """The response to a request for a completion, of its pieces."""

    ID = "cmpl"
    OBJECT = OBJECT_OF_EVENT = "text_completion"

    def __init__(self, service: Service, asked: CompletionRequest, work: Work) -> None:
        self._service, self.asked, self.work = service, asked, work
        self._id, self._created = f"{self.ID}-{uuid.uuid4().hex}", int(time.time())
        self._pieces: list[list[TextPiece]] = [[] for _ in work.prompts]

    def add(self, piece: TextPiece) -> None:
        """Add the next piece of a choice."""
        self._pieces[piece.row].append(piece)

    def prompt(self, row: int) -> str:
        """Return the text before a choice's continuation where `echo` asks for it."""
        return self._service.tokenizer.decode(self.work.prompts[row]) if self.asked.echo else ""

    def head(self, kind: str | None = None) -> dict[str, Any]:
        """Return the fields that all events share, or with its kind of object the response."""
        kind = kind or self.OBJECT_OF_EVENT
        return {"id": self._id, "object": kind, "created": self._created, "model": self.asked.model}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens; a prompt counts once, however many choices it has."""
        read = sum(map(len, self.work.prompts[:: self.asked.n or 1]))
        new = sum(piece.num_tokens for pieces in self._pieces for piece in pieces)
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first piece."""
        for row in range(len(self.work.prompts)) if self.asked.echo else ():
            yield self.chunk(TextPiece(row, self.prompt(row), [], None, 0))

    def chunk(self, piece: TextPiece) -> dict[str, Any]:
        """Return the event of a piece."""
        return {**self.head(), "choices": [self._choice(piece.row, piece.text, piece.logprobs, piece.finish_reason)]}

    def whole(self) -> dict[str, Any]:
        """Return the response that is no stream."""
        choices = []
        for row, pieces in enumerate(self._pieces):
            text = self.prompt(row) + "".join(piece.text for piece in pieces)
            logprobs = [each for piece in pieces for each in piece.logprobs]
            choices.append(self._choice(row, text, logprobs, pieces[-1].finish_reason))
        return {**self.head(self.OBJECT), "choices": choices, "usage": self.usage()}

    def _choice(self, row: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict[str, Any]:
        told = (
            None
            if self.work.logprobs is None or not logprobs
            else {
                "tokens": [each.token for each in logprobs],
                "token_logprobs": [each.logprob for each in logprobs],
                "top_logprobs": [each.top for each in logprobs],
                "text_offset": [each.offset for each in logprobs],
            }
        )
        return {"text": text, "index": row, "logprobs": told, "finish_reason": reason}


class ChatAnswer(Answer):
    """The response to a request for the next message of a conversation."""

    ID = "chatcmpl"
    OBJECT, OBJECT_OF_EVENT = "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        for row in range(len(self.work.prompts)):
            yield self._delta({"role": "assistant", "content": ""}, row, None)

    def chunk(self, piece: TextPiece) -> dict[str, Any]:
        return self._delta({"content": piece.text} if piece.text else {}, piece.row, piece.finish_reason)

    def _delta(self, delta: dict[str, str], row: int, reason: str | None) -> dict[str, Any]:
        choice = {"index": row, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self.head(), "choices": [choice]}

    def _choice(self, row: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": row, "message": message, "logprobs": None, "finish_reason": reason}


class HttpServer:
    """While entered, a thread answers the requests that reach a socket."""

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=3)
        self._server, self._socket = uvicorn.Server(config), listening
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="http", daemon=True
        )

    def __enter__(self) -> HttpServer:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
