"""Requests of OpenAI's completions and chat completions API, and their generation on all ranks.

    rank 0    request -> `CompletionRequest` -> `Work` --broadcast--> rank 1, 2, ...    all ranks: `generate_work`

(https://platform.openai.com/docs/api-reference/completions).  A choice's text is that of tools/generate.py for the same
prompt and seed; the n-th choice of a request has the seed + n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from megatron3d.data.tokenizers.special_tokens import with_beginning
from megatron3d.data.tokenizers.tokenizer import Tokenizer
from megatron3d.inference.chat import ChatTemplate
from megatron3d.inference.continuation import Continuation
from megatron3d.inference.sampling import Choice, Sampler, Text, generate
from megatron3d.pipeline.engine import PipelineExecutor
from megatron3d.runtime.arguments import MAX_SEED, shorten

MAX_CHOICES = 128
MAX_NEW_TOKENS = 10**7
# Tokens of an answer in a conversation where the request sets no limit.
CHAT_TOKENS = 1024


class RequestError(Exception):
    """A request that cannot be served, as OpenAI's API reports it; `param` is the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": _KINDS.get(status, "invalid_request_error")}
        self.error |= {"param": param, "code": code}  # type: ignore[dict-item]


_KINDS = {500: "server_error", 503: "server_error"}
TokenIds = Annotated[list[int], Field(min_length=1)]


class StreamOptions(BaseModel):
    """What a stream has besides its pieces."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class GenerationOptions(BaseModel):
    """Fields that completions and chat completions share; `top_k` is vLLM's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    # Fields of the API that only their default is known of.
    FIXED: ClassVar[Mapping[str, Any]] = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}

    model: str
    max_tokens: int | None = Field(None, ge=0, le=MAX_NEW_TOKENS)
    temperature: float | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether the last piece of a stream counts the tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationOptions):
    """The body of a request to /v1/completions."""

    FIXED: ClassVar[Mapping[str, Any]] = {**GenerationOptions.FIXED, "best_of": 1, "suffix": ""}

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as texts or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]


class TextPart(BaseModel):
    """A part of a message that is text; others are not supported."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[TextPart]
    name: str | None = None

    def values(self) -> dict[str, str]:
        """Return what a chat template reads."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ChatRequest(GenerationOptions):
    """The body of a request to /v1/chat/completions."""

    FIXED: ClassVar[Mapping[str, Any]] = {**GenerationOptions.FIXED, "logprobs": False, "top_logprobs": 0}

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_NEW_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def to_completion(self, template: ChatTemplate, tokenizer: Tokenizer) -> CompletionRequest:
        """Return the request for the text after the conversation; raises RequestError where the template refuses it.

        Its tokens are those of the template's text, which has what begins a text itself.
        """
        try:
            prompt = tokenizer.encode(template.render([message.values() for message in self.messages]))
        except ValueError as error:
            raise RequestError(
                f"messages: the chat template refuses them: {shorten(str(error))}", "messages"
            ) from error
        if not prompt:
            raise RequestError("messages: the chat template makes an empty text of them", "messages")
        given = {name: getattr(self, name) for name in GenerationOptions.model_fields}
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return CompletionRequest(**given | {"prompt": prompt, "max_tokens": CHAT_TOKENS if most is None else most})


Asked = TypeVar("Asked", bound=GenerationOptions)


def read_request(kind: type[Asked], body: object) -> Asked:
    """Return a request from its JSON; raises RequestError where it is none, or asks for what is not supported."""
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise RequestError(
            f"{shorten(where)}: {shorten(first['msg'])}", str(first["loc"][:1] and first["loc"][0])
        ) from error
    for name, value in kind.FIXED.items():
        if (given := getattr(request, name)) not in (None, value):
            raise RequestError(f"{name}={given!r} is not supported; leave it out", name)
    return request


@dataclass(frozen=True)
class Work:
    """Texts to generate, as every rank gets them.

    Attributes:
        logprobs: number of likeliest tokens whose log probabilities are told with each token; None: tell none.
    """

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stops: list[str]
    seed: int
    logprobs: int | None = None


def make_work(
    request: CompletionRequest, tokenizer: Tokenizer, begin: Sequence[int], new_seed: Callable[[], int]
) -> Work:
    """Return what a request asks for; raises RequestError for a prompt that the tokenizer cannot read."""
    prompts = [_encode(prompt, tokenizer, begin) for prompt in request.prompts]
    rows = [prompt for prompt in prompts for _ in range(request.n or 1)]
    if len(rows) > MAX_CHOICES:
        raise RequestError(f"prompt: {len(rows)} texts at once; ask for {MAX_CHOICES} at most", "prompt")
    if request.echo and request.logprobs is not None:
        raise RequestError("echo: not supported with logprobs, which are of new tokens; leave one out", "echo")
    return Work(
        prompts=rows,
        max_tokens=16 if request.max_tokens is None else request.max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        stops=request.stops,
        seed=new_seed() if request.seed is None else request.seed,
        logprobs=request.logprobs,
    )


def _encode(prompt: str | list[int], tokenizer: Tokenizer, begin: Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: half of a character ({error.reason}); send whole ones", "prompt") from error
        tokens = with_beginning(begin, tokenizer.encode(prompt))
    else:
        tokens = prompt
        if not all(0 <= token < tokenizer.vocab_size for token in tokens):
            raise RequestError(f"prompt: token ids are 0 to {tokenizer.vocab_size - 1}", "prompt")
    if not tokens:
        raise RequestError("prompt: no token; give at least one character", "prompt")
    return tokens


class TokenLogprobs(NamedTuple):
    """A generated token, its place in the continuation, its log probability, and those of the likeliest tokens."""

    token: str
    offset: int
    logprob: float
    top: dict[str, float]


class TextPiece(NamedTuple):
    """What a generated token adds to a text, and how the text ended, None where it has not."""

    row: int
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: Literal["stop", "length"] | None = None
    num_tokens: int = 1


def generate_work(
    work: Work,
    executor: PipelineExecutor,
    tokenizer: Tokenizer,
    device: torch.device,
    tell: Callable[[TextPiece], None],
    is_cancelled: Callable[[], bool],
) -> None:
    """Generate the texts, and `tell` each piece of them; every rank must make the same call.

    Args:
        is_cancelled: whether rank 0 wants no more of it; asked before each token.
    """
    comm, sampler = executor.model.comm, Sampler(executor, device)
    choice = Choice(work.temperature, work.top_k, work.top_p)
    texts = [
        Text([*prompt], torch.Generator().manual_seed(work.seed + row), work.max_tokens)
        for row, prompt in enumerate(work.prompts)
    ]
    shown = ["" for _ in texts]
    last = [torch.empty(0) for _ in texts]

    def show_in(row: int) -> Callable[[str], None]:
        def show(piece: str) -> None:
            shown[row] += piece

        return show

    rows = [Continuation(tokenizer, text, work.stops, show_in(row)) for row, text in enumerate(texts)]

    def next_tokens(texts: Sequence[Text]) -> list[list[int]]:
        if comm.broadcast_object(is_cancelled()):
            for text in texts:
                text.is_done = True
            return [[] for _ in texts]
        last[:] = sampler.next_logits([text.tokens for text in texts]).unbind()
        return [
            [] if text.is_done else [choice(logits_V, text.generator)]
            for text, logits_V in zip(texts, last, strict=True)
        ]

    def update(row: int, token: int) -> None:
        before = (
            len(tokenizer.decode(texts[row].tokens[:-1])) - len(rows[row].prompt) if work.logprobs is not None else 0
        )
        rows[row].update()
        found = [] if work.logprobs is None else [_logprobs(last[row], token, before, work.logprobs, tokenizer)]
        tell(TextPiece(row, shown[row], found))
        shown[row] = ""

    generate(next_tokens, texts, tokenizer.special.ends, update)
    for row, text in enumerate(texts):
        rows[row].finish()
        reason: Literal["stop", "length"] = "stop" if rows[row].is_stopped or text.num_left else "length"
        tell(TextPiece(row, shown[row], [], reason, 0))


def _logprobs(logits_V: Tensor, token: int, offset: int, num_top: int, tokenizer: Tokenizer) -> TokenLogprobs:
    """Return log probabilities of the model itself, before temperature, top k and top p."""
    logprobs_V = logits_V.double().log_softmax(-1)
    top = logprobs_V.topk(min(num_top, len(logprobs_V)))
    likeliest = {
        tokenizer.decode([i]): value for i, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    }
    return TokenLogprobs(tokenizer.decode([token]), offset, float(logprobs_V[token]), likeliest)
