"""Fact: the server answers OpenAI's own client with the texts of tools/generate.py, and survives what it is sent."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import openai
import pytest

from megatron3d.checkpoint.publish import finished_checkpoints
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.data.tokenizers.tokenizer import HuggingFaceTokenizer
from megatron3d.errors import ExitCode, UserError
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import process
from tests.support.pool import Pool
from tests.support.processes import start
from tests.support.tiny_run import ROOT, run, write_config, write_corpus
from tools import generate, serve, train_tokenizer

PROMPT = "def fill(text, width=70"
ENDLESS: dict[str, Any] = {"prompt": "def f\n", "temperature": 0}
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in float64 with checkpoints of iterations 20 and 40."""
    place = tmp_path_factory.mktemp("serve")
    typed = ["train.precision=fp64", "train.train_iters=40", "checkpoint.save_interval=20"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert run(write_config(place), *typed).code == 0
    return place / "run"


@contextlib.contextmanager
def serving(load: Path, *typed: str, ranks: int = 1) -> Iterator[tuple[openai.OpenAI, subprocess.Popen[str]]]:
    """Start a server at a free port; yield a client, and the process, which is ended by Ctrl-C and must exit with 0."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "tools/serve.py", "--load", str(load), "--port", "0", *typed]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = start(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert program.stdout is not None
        said = program.stdout.readline()
        found = re.search(r"at (http://\S+/v1); Ctrl-C ends it", said)
        if found is None:
            raise AssertionError(said + program.communicate()[1])
        with openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=120) as client:
            yield client, program
        program.send_signal(signal.SIGINT if ranks == 1 else signal.SIGTERM)
        out, err = program.communicate(timeout=60)
        assert ranks > 1 or (program.returncode, err) == (0, ""), err
        assert f"> stopped by {'SIGINT' if ranks == 1 else 'SIGTERM'}\n" in out
    finally:
        program.kill()
        program.communicate()


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving(folder, "--served-model-name", "tiny") as (found, _):
        yield found


def text(folder: Path, capsys: pytest.CaptureFixture[str], *typed: str, prompt: str = PROMPT) -> str:
    """Return the continuation by tools/generate.py."""
    assert generate.main(["--load", str(folder), "--prompt", prompt, *typed]) == 0
    return capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")


TYPED = ("--max-new-tokens", "24", "--temperature", "1.2", "--seed", "7")


def test_a_completion_is_the_text_that_is_generated(
    client: openai.OpenAI, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPT, **SAMPLED)
    assert found.choices[0].text == text(folder, capsys, *TYPED)
    assert found.choices[0].finish_reason == "length" and found.choices[0].logprobs is None
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), 24)
    again = client.completions.create(model="tiny", prompt=[*PROMPT.encode()], echo=True, **SAMPLED)
    assert again.choices[0].text == PROMPT + found.choices[0].text
    narrow = client.completions.create(model="tiny", prompt=PROMPT, top_p=0.6, extra_body={"top_k": 9}, **SAMPLED)
    assert narrow.choices[0].text == text(folder, capsys, *TYPED, "--top-p", "0.6", "--top-k", "9")
    assert narrow.choices[0].text != found.choices[0].text
    greedy = client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert greedy.choices[0].text == text(folder, capsys, "--max-new-tokens", "16", "--temperature", "0")
    one, other = (client.completions.create(model="tiny", prompt=PROMPT, temperature=3).choices[0] for _ in "ab")
    assert one.text != other.text, "without a seed"


def test_choices_have_seeds_in_turn(client: openai.OpenAI, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = client.completions.create(model="tiny", prompt=["def ", "x"], n=2, **SAMPLED)
    expected = [
        text(folder, capsys, *TYPED[:4], "--seed", str(7 + place), prompt=prompt)
        for place, prompt in enumerate(["def ", "def ", "x", "x"])
    ]
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None and found.usage.prompt_tokens == 5


def test_a_stream_is_the_completion_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=["def ", "größe"], logprobs=2, **SAMPLED)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = client.completions.create(model="tiny", prompt=["def ", "größe"], logprobs=2, **SAMPLED, **options)
    assert last.choices == [] and last.usage == whole.usage
    for index, choice in enumerate(whole.choices):
        mine = [event.choices[0] for event in events if event.choices[0].index == index]
        assert "".join(piece.text for piece in mine) == choice.text
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None
        told = [piece.logprobs.token_logprobs for piece in mine if piece.logprobs]
        assert [*itertools.chain(*told)] == choice.logprobs.token_logprobs
        assert len(mine) > 10
    first, *_ = client.completions.create(model="tiny", prompt="def ", echo=True, stream=True, **SAMPLED)
    assert first.choices[0].text == "def "


def test_a_stop_string_ends_a_choice(client: openai.OpenAI, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = text(folder, capsys, *TYPED)
    place = next(place for place in range(3, 15) if whole[place : place + 3] not in whole[: place + 2])
    stops = ["never said", whole[place : place + 3]]
    found = client.completions.create(model="tiny", prompt=PROMPT, stop=stops, **SAMPLED).choices[0]
    assert (found.text, found.finish_reason) == (whole[:place], "stop")
    events = [*client.completions.create(model="tiny", prompt=PROMPT, stop=stops[1], stream=True, **SAMPLED)]
    assert "".join(event.choices[0].text for event in events) == whole[:place]
    assert events[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_models(client: openai.OpenAI) -> None:
    """Greedy tokens are the likeliest; those of a sampled text are unchanged by temperature and top k."""
    found = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=8, logprobs=3).choices[0]
    assert found.logprobs is not None
    tokens, logprobs, top, places = (
        getattr(found.logprobs, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert "".join(tokens) == found.text and places == [*range(8)]
    for token, logprob, likeliest in zip(tokens, logprobs, top, strict=True):
        assert len(likeliest) == 3 and max(likeliest.values()) == likeliest[token] == logprob <= 0
        assert math.fsum(map(math.exp, likeliest.values())) <= 1
    options: Any = {"temperature": 0.1, "extra_body": {"top_k": 1}, "max_tokens": 8, "logprobs": 0}
    sampled = client.completions.create(model="tiny", prompt=PROMPT, **options).choices[0].logprobs
    assert sampled is not None and sampled.token_logprobs == logprobs


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "megatron3d"
    with pytest.raises(openai.NotFoundError, match="the model 'other/one' does not exist; use 'tiny'"):
        client.models.retrieve("other/one")


BAD: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "another model": ({"model": "gpt-4"}, "the model 'gpt-4' does not exist; use 'tiny'", "model"),
    "no token": ({"prompt": ""}, "prompt: no token", "prompt"),
    "no prompt": ({"prompt": []}, "prompt", "prompt"),
    "a token that is none": ({"prompt": [1, 257]}, "prompt: token ids are 0 to 256", "prompt"),
    "half a character": ({"prompt": "a\ud800"}, "half of a character", "prompt"),
    "a number that is too large": ({"temperature": 1e9}, "temperature: Input should be less than", "temperature"),
    "no number": ({"top_p": "much"}, "top_p: Input should be a valid number", "top_p"),
    "an empty stop": ({"stop": ["a", ""]}, "stop", "stop"),
    "too many texts": ({"n": 100, "prompt": ["a", "b"]}, "200 texts at once; ask for 128 at most", "prompt"),
    "what is not supported": ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported", "presence_penalty"),
    "echo with logprobs": ({"echo": True, "logprobs": 1}, "echo: not supported with logprobs", "echo"),
    "an unknown field": ({"extra_body": {"topp": 1}}, "topp: Extra inputs are not permitted", "topp"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_in_openais_form(client: openai.OpenAI, name: str) -> None:
    changes, words, param = BAD[name]
    kind = openai.NotFoundError if name == "another model" else openai.BadRequestError
    typed = {key: value for key, value in changes.items() if key != "extra_body"}
    body = {"model": "tiny", "prompt": "a", **typed, **changes.get("extra_body", {})}
    status, answer = post(client, "completions", json.dumps(body).encode())
    assert status == (404 if name == "another model" else 400)
    assert words in answer["error"]["message"] and answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    if name != "half a character":  # which the client cannot send
        for stream in (False, True):
            with pytest.raises(kind):
                client.completions.create(**{"model": "tiny", "prompt": "a", **changes, "stream": stream})
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def post(client: openai.OpenAI, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
    """Return status and answer of a request that is sent as it is; a None body is a GET."""
    request = urllib.request.Request(f"{client.base_url}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", b"{", 400, "the body is not JSON"),
        ("completions", b"\xff\xfe", 400, "the body is not JSON"),
        ("completions", b"[" * 100_000, 400, "the body is not JSON"),
        ("completions", b"[]", 400, "valid dictionary"),
        ("completions", b'{"model": "tiny", "prompt": "a", "top_p": NaN}', 400, "top_p: Input should be a finite"),
        ("completions", b" " * (2**24 + 1), 413, "the body has more than"),
        ("completions", None, 405, "GET /v1/completions: Method Not Allowed"),
        ("embeddings", b"{}", 404, "POST /v1/embeddings: Not Found"),
        ("chat/completions", b"{}", 400, "chat completions: the tokenizer has no chat template; use"),
    ],
)
def test_bad_bytes_never_end_the_server(
    client: openai.OpenAI, path: str, body: bytes | None, status: int, words: str
) -> None:
    found, answer = post(client, path, body)
    assert found == status and words in answer["error"]["message"]
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_requests_wait_for_their_turn_and_lost_clients_for_none(client: openai.OpenAI) -> None:
    """A client that goes away during a text of ten million tokens does not keep the others waiting."""
    begun = client.completions.create(model="tiny", max_tokens=500, **ENDLESS).choices[0]
    assert begun.finish_reason == "length", "it repeats itself, and never ends"
    endless = client.completions.create(model="tiny", stream=True, max_tokens=10**7, **ENDLESS)
    next(iter(endless))
    with pytest.raises(openai.APITimeoutError):  # waits behind it, and goes away too
        client.with_options(timeout=0.5).completions.create(model="tiny", max_tokens=10**7, **ENDLESS)
    texts: list[str] = []

    def ask() -> None:
        texts.append(client.completions.create(model="tiny", prompt=PROMPT, **SAMPLED).choices[0].text)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    endless.close()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 3 and len(set(texts)) == 1


def test_a_newer_checkpoint_is_loaded_between_requests(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after one that is damaged, which is reported to the client."""
    root = tmp_path / "run"
    shutil.copytree(folder, root)
    newest = root / "iter_0000040"
    newest.rename(tmp_path / "kept")
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("20\n")
    expected = [text(folder / f"iter_{iteration:07d}", capsys, *TYPED) for iteration in (20, 40)]
    assert expected[0] != expected[1]
    with serving(root, "--reload-latest") as (client, _):

        def ask() -> str:
            return client.completions.create(model=str(root), prompt=PROMPT, **SAMPLED).choices[0].text

        assert ask() == expected[0]
        shutil.copytree(tmp_path / "kept", newest)
        (file,) = newest.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-9])
        tracker.write_text("40\n")
        with pytest.raises(openai.InternalServerError, match=r"the newest checkpoint cannot be loaded: .*iter_0000040"):
            ask()
        shutil.copy(tmp_path / "kept" / file.name, file)
        assert ask() == expected[1]
    assert sorted(finished_checkpoints(root)) == [20, 40]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if messages | length > 3 %}" + (
    "{{ raise_exception('too long') }}{% endif %}assistant:"
)


def test_a_conversation_is_continued_after_its_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to a completion of the text that the template makes, though the tokenizer puts a token before texts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train_tokenizer, "train_in_child", train_tokenizer.train)
    (tmp_path / "text.txt").write_text("a conversation of a user and an assistant\n" * 20)
    typed = ["--input", str(tmp_path / "text.txt"), "--type", "byte-bpe", "--vocab-size", "280"]
    assert train_tokenizer.main([*typed, "--output-prefix", str(tmp_path / "made")]) == 0
    (tmp_path / "made.tokenizer.json").rename(tmp_path / "tokenizer.json")
    settings = {"chat_template": TEMPLATE, "bos_token": "a", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert tokenizer.special.prepended
    config = write_config(tmp_path)
    write_corpus(tmp_path / "corpus", tokenizer=tokenizer)
    named = ["data.tokenizer_type=HuggingFaceTokenizer", f"data.tokenizer_model={tmp_path}"]
    assert run(config, *named).code == 0
    messages: list[Any] = [
        {"role": "system", "content": "größe"},
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
    ]
    options: Any = {"max_tokens": 9, "seed": 3, "temperature": 1.5}
    with serving(tmp_path / "run", "--served-model-name", "tiny") as (client, _):
        rendered = tokenizer.encode("system: größe\nuser: a b\nassistant:")
        plain = client.completions.create(model="tiny", prompt=rendered, **options).choices[0]
        found = client.chat.completions.create(model="tiny", messages=messages, n=2, **options)
        assert found.choices[0].message.role == "assistant" and found.object == "chat.completion"
        assert found.choices[0].message.content == plain.text != found.choices[1].message.content
        assert found.choices[0].finish_reason == plain.finish_reason
        assert found.usage is not None and found.usage.prompt_tokens == len(rendered)
        events = [*client.chat.completions.create(model="tiny", messages=messages, stream=True, **options)]
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(event.choices[0].delta.content or "" for event in events) == plain.text
        assert events[-1].choices[0].finish_reason == plain.finish_reason
        for changes, words in (
            ({"messages": messages * 2}, "messages: the chat template refuses them: too long"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
            ({"logprobs": True}, "logprobs=True is not supported"),
        ):
            given: dict[str, Any] = {"model": "tiny", "messages": messages, **changes}
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(**given)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)


def test_ctrl_c_ends_the_server_in_the_middle_of_a_text(folder: Path) -> None:
    with serving(folder) as (client, program):
        endless = client.completions.create(model=str(folder), stream=True, max_tokens=10**7, **ENDLESS)
        next(iter(endless))
        program.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server stops"):
            list(endless)
        assert program.wait(60) == 0


def test_ranks_serve_the_same_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["parallel.tensor_model_parallel_size=2"]
    with serving(folder, *layout, ranks=2) as (client, _):
        found = client.completions.create(model=str(folder), prompt=PROMPT, **SAMPLED)
        assert found.choices[0].text == text(folder, capsys, *TYPED)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="tiny", prompt=PROMPT)


def idled(rank: int, world_size: int) -> int:
    """Return the collectives of a rank of a server without a client, which stops after some of them."""
    comm = ProcessComm(Mesh((("data", world_size),), rank), [("data",)])
    model: Any = SimpleNamespace(comm=comm)
    stop: Any = SimpleNamespace(is_requested=lambda: comm.log.status().num_started >= 3)
    with mock.patch.object(process, "IDLE_S", 0.05):
        if rank == 0:
            assert serve.next_job(model, SimpleNamespace(jobs=queue.Queue()), stop) is None
            serve.tell_ranks(model, {"do": "stop"})
        else:
            serve.follow(model)
    return comm.log.status().num_started


def test_ranks_without_a_request_make_progress(pool: Pool) -> None:
    """Or the watchdog would end a server that nobody asks."""
    assert pool.run(idled, 2) == [3, 3]


def test_what_is_typed_wrong_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for typed, words in (
        (["--reload-latest", "--iteration", "20"], "--reload-latest: with --iteration 20 the checkpoint is chosen"),
        (["--host", "203.0.113.7"], "--host 203.0.113.7 --port 8000: "),
        (["--host", "no such host"], "--host no such host --port 8000: "),
    ):
        code = process.run_program(lambda: serve.main(["--load", str(folder), *typed]))  # noqa: B023
        assert code == ExitCode.USER_ERROR and words in capsys.readouterr().err
    with serve.listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match="in use; use another port"):
        serve.listen("127.0.0.1", taken.getsockname()[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (missing,) = serve.problems(serve.make_parser().parse_args(["--load", str(folder)]))
    assert missing == "starlette and uvicorn: not installed, and a server needs it; pip install 'megatron3d[serve]'"
