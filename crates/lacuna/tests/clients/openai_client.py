"""The official OpenAI client against a Lacuna server, and one of a model that sees: `openai_client.py URL SEEING_URL`.

Prints one line, `{"openai": [what works]}`, and exits with 0 if everything is as the client's users
expect.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel

MODEL = "demo"
# What the model that sees is shown.
IMAGE = Path(__file__).parents[4] / "reference/vision/gemma3/image-0.png"
IMAGE_URL = "data:image/png;base64," + base64.b64encode(IMAGE.read_bytes()).decode()
SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE_URL}}]}]
QUESTION = [{"role": "user", "content": "What is ownership?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


class Point(BaseModel):
    name: Literal["here", "there"]
    reached: bool


class Route(BaseModel):
    """Goes from one point to another."""

    start: Point
    end: Point


class Area(BaseModel):
    """Looks around a point."""

    around: Point
    far: bool


NESTED = [openai.pydantic_function_tool(Route), openai.pydantic_function_tool(Area)]
NO_PARAMETERS = {"type": "function", "function": {"name": "now"}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PERSON}}


def models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "lacuna"


def chats(client):
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
    )
    text = whole.choices[0].message.content
    assert "rules" in text, text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 32
    assert whole.usage.prompt_tokens_details.cached_tokens is not None

    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage.completion_tokens == 32
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert sum(piece != "" for piece in pieces) > 16, "the reply comes in pieces"


def completions(client):
    request = {"model": MODEL, "prompt": "# Ownership\n\n", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**request, logprobs=3)
    choice = whole.choices[0]
    assert len(choice.logprobs.tokens) == 20
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)
    assert "".join(choice.logprobs.tokens) == choice.text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)]
    assert "".join(pieces) == choice.text


def several_choices(client):
    def ask():
        reply = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=11, temperature=1.5, max_tokens=16
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage.completion_tokens <= 48
        return [choice.message.content for choice in reply.choices]

    texts = ask()
    assert len(set(texts)) == 3, texts
    assert texts == ask(), "the same seed gives the same texts"


def logprobs(client):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=4,
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
    assert b"".join(bytes(token.bytes) for token in content).decode() == (
        reply.choices[0].message.content
    )


def structured(client):
    request = {
        "model": MODEL,
        "messages": QUESTION,
        "response_format": FORMAT,
        "max_tokens": 100,
        "seed": 1,
    }
    with client.chat.completions.stream(**request) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.content
    whole = client.chat.completions.create(**request).choices[0].message.content
    assert streamed == whole
    person = json.loads(whole)
    assert list(person) == ["name", "age"] and 0 <= person["age"] <= 120, person


def tools(client):
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=100
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    assert list(json.loads(call.function.arguments)) == ["name", "age"]


def further_fields(client):
    request = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    plain = client.chat.completions.with_raw_response.create(**request)
    assert "x-lacuna-ignored" not in plain.headers
    text = plain.parse().choices[0].message.content
    extra = {"ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
    routed = client.chat.completions.with_raw_response.create(**request, extra_body=extra)
    assert "x-lacuna-ignored" not in routed.headers
    assert routed.parse().choices[0].message.content == text
    unknown = client.chat.completions.with_raw_response.create(**request, extra_body={"colour": 1})
    assert unknown.headers["x-lacuna-ignored"] == "colour"
    assert unknown.parse().choices[0].message.content == text
    stop = text[4:7]
    ended = client.chat.completions.create(
        **request, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert ended.choices[0].message.content == text[: text.index(stop) + len(stop)]
    assert ended.choices[0].stop_reason == stop


def prompts(client):
    request = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    several = ["# Ownership\n\n", "fn main() {"]
    reply = client.completions.create(**request, prompt=several, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for index, prompt in enumerate(several):
        alone = client.completions.create(**request, prompt=prompt)
        for choice in reply.choices[2 * index : 2 * index + 2]:
            assert choice.text == alone.choices[0].text
    # As harnesses score texts: the prompt's own tokens, and one more that nobody looks at.
    scored = client.completions.create(
        model=MODEL, prompt=several[0], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    scores = scored.choices[0].logprobs
    assert len(scores.tokens) == scored.usage.prompt_tokens + 1
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    for token, score, top in list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs))[1:]:
        assert top[token] == score <= max(top.values()) <= 0


def nested_tools(client):
    def call(choice):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=NESTED + [NO_PARAMETERS],
            tool_choice=choice,
            max_tokens=120,
            seed=3,
        )
        return reply.choices[0].message.tool_calls

    models = {"Route": Route, "Area": Area}
    for name, model in models.items():
        [called, *_] = call({"type": "function", "function": {"name": name}})
        assert called.function.name == name
        model.model_validate_json(called.function.arguments)
    [called, *_] = call("required")
    if called.function.name in models:
        models[called.function.name].model_validate_json(called.function.arguments)
    [called, *_] = call({"type": "function", "function": {"name": "now"}})
    assert (called.function.name, called.function.arguments) == ("now", "{}")
    # Whether a tool is called is the model's to say, but the schemas are taken.
    call("auto")


def errors(client):
    for wrong, kind in [
        ({"model": "other"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError),
        ({"logit_bias": {"1": 101}}, openai.BadRequestError),
        ({"messages": SHOWN}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, openai.BadRequestError),
    ]:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **wrong})
        except kind as error:
            assert error.body["message"] and error.type == "invalid_request_error", error.body
        else:
            raise AssertionError(f"{wrong} was accepted")


def images(client):
    [model] = client.models.list().data
    assert model.architecture["input_modalities"] == ["text", "image"], model

    def ask(*urls, **more):
        shown = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
        content = [*shown, {"type": "text", "text": "A B C"}]
        request = {"model": MODEL, "temperature": 0, "max_tokens": 8, **more}
        return client.chat.completions.create(**request, messages=[{"role": "user", "content": content}])

    without, one, two = ask(), ask(IMAGE_URL), ask(IMAGE_URL, IMAGE_URL)
    tokens = [reply.usage.prompt_tokens for reply in (without, one, two)]
    assert tokens[2] - tokens[1] == tokens[1] - tokens[0] > 4, tokens
    text = one.choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(IMAGE_URL, stream=True) if chunk.choices]
    assert "".join(pieces) == text != ""
    for wrong in ["https://example.com/cat.png", "data:image/png;base64,AAAA", IMAGE_URL[:200]]:
        try:
            ask(wrong)
        except openai.BadRequestError as error:
            assert error.body["message"] and error.type == "invalid_request_error", error.body
        else:
            raise AssertionError(f"{wrong[:60]} was accepted")


def main():
    urls = [url + "/v1" for url in sys.argv[1:]]
    client, seeing = [OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) for url in urls]
    checks = [
        models,
        chats,
        completions,
        several_choices,
        logprobs,
        structured,
        tools,
        nested_tools,
        further_fields,
        prompts,
        errors,
    ]
    for check in checks:
        check(client)
    images(seeing)
    checks.append(images)
    print(json.dumps({"openai": [check.__name__ for check in checks]}))


main()
