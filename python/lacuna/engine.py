"""The engine: a model that writes, under one byte budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy
from numpy.typing import NDArray

from lacuna import _native, sampling, settings, streams
from lacuna.closing import Closing
from lacuna.output import Output, Piece, output
from lacuna.sampling import SamplingParams
from lacuna.session import Session
from lacuna.tokens import LISTS, Tokens, listed, token_ids

if TYPE_CHECKING:
    import openai

    from lacuna.server import Server

Prompt = str | Tokens
Message = Mapping[str, Any]
Path = str | os.PathLike[str]


class Engine(Closing):
    """A model, ready to run. Any number of threads and tasks may use it; their requests share batches and pages.

    Args:
        model: `"demo"`, a GGUF file, a Hugging Face folder, or a hub id, which is downloaded.
        budget: Bytes that may be committed for all of it, such as `"2GiB"`. What the system can spare if it is None.
        ctx: Tokens that the context holds. What the model was made for if it is None.
        kv: How KV memory is held: `"sparse"`, `"dense"`, `"paged"` and more.
        kv_type: Storage of KV elements, such as `"q8_0"`.
        threads: Threads that compute. One per core if it is None.
        prefix_cache: Whether prompts that begin alike are computed once.
        weights: How weights are had: `"mmap"`, `"pread"`, `"direct"` or `"auto"`.
        max_running: Texts that are generated at once at most.
        max_queue: Requests that may wait; those beyond are refused as `Busy`.
        kv_cache: A folder in which computed prompts outlive the process.
        request_timeout: Seconds that a chat, or a request over HTTP, may take.
        more: Further settings by the names of `lacuna serve`, such as `kv_swap="4GiB"` or `max_batched_tokens=512`.

    Raises:
        ModelError: when the model cannot be found, read, or used for this.
        BudgetExceeded: when the budget, or the system, does not hold what the first token needs.
        InvalidRequest: for a setting that is none.
    """

    def __init__(
        self,
        model: Path,
        *,
        budget: str | int | None = None,
        ctx: int | None = None,
        kv: str | None = None,
        kv_type: str | None = None,
        threads: int | None = None,
        prefix_cache: bool = True,
        weights: str | None = None,
        max_running: int | None = None,
        max_queue: int | None = None,
        kv_cache: Path | None = None,
        request_timeout: float | None = None,
        **more: str | int | bool | Path | None,
    ) -> None:
        self.model = os.fspath(model)
        given: dict[str, object] = {
            "budget": budget,
            "ctx": ctx,
            "kv": kv,
            "kv_type": kv_type,
            "threads": threads,
            "no_prefix_cache": not prefix_cache,
            "weights": weights,
            "max_running": max_running,
            "max_queue": max_queue,
            "kv_cache": kv_cache,
            **more,
        }
        self._native = _native.Engine(self.model, settings.written(given), request_timeout)
        self.tokenizer = Tokenizer(self._native)

    @classmethod
    def from_pretrained(cls, model: Path, **more: Any) -> Engine:
        """The same as `Engine(model, ...)`, by the name that other libraries have for it."""
        return cls(model, **more)

    @property
    def name(self) -> str:
        """What it is called by clients: a hub id as it is; of a path, the last part without `.gguf`."""
        return self._native.name

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and what follows it may have together."""
        return self._native.context_tokens

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        **more: Any,
    ) -> list[Output]:
        """Generates after one prompt or many, as text or as tokens.

        The outputs are in the order of the prompts; they are computed in batches, as many at once as fit. All prompts
        are checked before the first is computed. `more` has fields of `SamplingParams`, which come before those of
        `sampling`.

        Raises:
            InvalidRequest: for a prompt or a field that cannot be used.
            BudgetExceeded: for a request that would not fit if it were alone.
        """
        fields = _written(sampling, more)
        return [output(native) for native in self._native.generate(_prompts(prompts), fields)]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **more: Any
    ) -> streams.Items[Piece]:
        """The pieces of a text as they come. Dropping or closing the iterator ends it within a step."""
        stream = self._native.stream(_prompt(prompt), _written(sampling, more))
        return streams.pieces(stream, self._native)

    def astream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **more: Any
    ) -> streams.AsyncItems[Piece]:
        """The same for tasks: `async for piece in engine.astream(...)`. Cancelling the task ends it within a step."""
        stream = self._native.stream(_prompt(prompt), _written(sampling, more))
        return streams.async_pieces(stream, self._native)

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[False] = False, **fields: Any
    ) -> dict[str, Any]: ...

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[True], **fields: Any
    ) -> streams.Items[dict[str, Any]]: ...

    def chat(
        self, messages: Sequence[Message], *, stream: bool = False, **fields: Any
    ) -> dict[str, Any] | streams.Items[dict[str, Any]]:
        """A chat completion as OpenAI has it, or its chunks.

        `fields` are those of `POST /v1/chat/completions` of the server: `tools`, `response_format`, `max_tokens`,
        `temperature` and all others.
        """
        reply = self._chat(messages, stream, fields)
        return streams.chunks(reply, self._native) if stream else streams.whole(reply).json()

    async def achat(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        """`chat` for tasks."""
        return (await streams.async_whole(self._chat(messages, False, fields))).json()

    def achat_stream(
        self, messages: Sequence[Message], **fields: Any
    ) -> streams.AsyncItems[dict[str, Any]]:
        """`chat(..., stream=True)` for tasks."""
        return streams.async_chunks(self._chat(messages, True, fields), self._native)

    def _chat(
        self, messages: Sequence[Message], stream: bool, fields: Mapping[str, Any]
    ) -> _native.Reply:
        object = {**fields, "messages": _messages(messages), "stream": stream}
        body = sampling.as_json(object).encode()
        return self._native.call("POST", "/v1/chat/completions", body)

    def openai(self) -> openai.OpenAI:
        """The official client, over this engine and no network: `engine.openai().chat.completions.create(...)`.

        It needs `pip install lacuna[openai]`.
        """
        from lacuna.openai_client import client

        return client(self._native)

    def async_openai(self) -> openai.AsyncOpenAI:
        """The same for tasks."""
        from lacuna.openai_client import async_client

        return async_client(self._native)

    def logits(self, tokens: Prompt, all: bool = False) -> NDArray[numpy.float32]:
        """Logits after the last of `tokens`, of shape `(vocabulary,)`; after each, `(tokens, vocabulary)`, with `all`.

        The array is the memory that they were computed into. Other requests go on between the steps.
        """
        return self._native.logits(self._tokens(tokens), all)

    def session(self, tokens: Prompt | None = None) -> Session:
        """A text that is gone on with, forked and cut back by its owner, beside the requests. It begins with `tokens`."""
        session = Session(self, self._native.session()[0])
        if tokens is not None:
            session.append(tokens)
        return session

    def load_session(self, path: Path) -> Session:
        """The session that was saved in the file at `path`; nothing of it is computed again. Its `note` is there, too.

        Raises:
            InvalidRequest: for a file that is damaged, or of another model or other settings.
        """
        native, note = self._native.session(os.fspath(path))
        return Session(self, native, note)

    def memory(self) -> dict[str, Any]:
        """Where every byte is: the budget's parts, the pages of each request, the cache. As `GET /memory` has it."""
        return _call(self._native, "GET", "/memory")

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of KV pages that a request, a session or the cache has at this moment."""
        return self._native.kv_bytes[0]

    def set_budget(self, budget_bytes: int) -> None:
        """Makes so many bytes the budget, from the next step on. No answer changes.

        Raises:
            BudgetExceeded: with the least that works.
        """
        self._native.set_budget(budget_bytes)

    def serve(
        self, host: str = "127.0.0.1", port: int = 0, api_keys: Sequence[str] = ()
    ) -> Server:
        """Serves this engine over HTTP beside what the process does with it; port 0 takes any that is free.

        Raises:
            InvalidRequest: for an address that other machines reach, without keys.
        """
        from lacuna.server import Server

        if isinstance(api_keys, str):
            # To Python it is a list of its letters.
            raise TypeError("api_keys are one text, expected a list of keys")
        return Server(self._native.listen(host, port, list(api_keys)), self._native)

    def close(self) -> None:
        """Ends everything under way and gives all memory back."""
        self._native.close()

    def __repr__(self) -> str:
        return f"Engine({self.model!r})"

    def _tokens(self, tokens: Prompt) -> list[int]:
        prompt = _prompt(tokens)
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


class Tokenizer:
    """An engine's tokenizer and chat template."""

    def __init__(self, native: _native.Engine) -> None:
        # Not the engine, which has this: in a circle it would keep its memory until the collector comes by.
        self._native = native

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Tokens of a text. With `parse_special`, special tokens that it spells out are those, and not their letters."""
        return self._native.tokenize(text, add_special_tokens, parse_special)

    def decode(self, tokens: Tokens, *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return self._native.detokenize(token_ids(tokens), skip_special_tokens)

    @property
    def eos_ids(self) -> list[int]:
        """Tokens by which the model says that it is done."""
        return self._native.eos_ids

    @property
    def vocab_size(self) -> int:
        """Tokens there are."""
        return self._native.vocab_size

    @property
    def chat_template(self) -> str | None:
        """The source of the model's own chat template."""
        return self._native.chat_template

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the model is to answer."""
        return _call(self._native, "POST", "/tokenize", {"messages": _messages(messages)})["tokens"]


def _call(
    native: _native.Engine, method: str, path: str, fields: Mapping[str, Any] | None = None
) -> Any:
    body = b"" if fields is None else sampling.as_json(fields).encode()
    return streams.whole(native.call(method, path, body)).json()


def _messages(messages: Any) -> list[dict[str, Any]]:
    kind = type(messages).__name__
    if isinstance(messages, (str, bytes, bytearray, Mapping)):
        # To Python they are lists, of letters or of names.
        raise TypeError(f"messages are a {kind}, expected a list of messages")
    return [_message(message) for message in cast("Sequence[Any]", messages)]


def _message(message: Any) -> dict[str, Any]:
    try:
        return dict(message)
    except (TypeError, ValueError):
        kind = type(message).__name__
        raise TypeError(
            f'a message is a {kind}, expected a mapping such as {{"role": "user", "content": "Hello"}}'
        ) from None


def _written(given: SamplingParams | None, more: Mapping[str, Any]) -> str:
    return sampling.written(given, more)


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, LISTS):
        raise TypeError(f"a prompt is a {type(prompt).__name__}, expected a text or a list of tokens")
    return token_ids(prompt)


def _prompts(prompts: Any) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, LISTS):
        raise TypeError(f"prompts are a {type(prompts).__name__}, expected a text or a list")
    each = listed(prompts)
    if each and isinstance(each[0], (int, numpy.integer)):
        return [_prompt(each)]
    return [_prompt(prompt) for prompt in each]
