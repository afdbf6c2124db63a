"""The official Anthropic client against a Lacuna server, and one of a model that sees:
`anthropic_client.py URL SEEING_URL`.

Prints one line, `{"anthropic": [what works]}`, and exits with 0 if everything is as the client's users
expect.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Literal

import anthropic
from anthropic import Anthropic
from pydantic import BaseModel

MODEL = "demo"
# What the model that sees is shown.
IMAGE = Path(__file__).parents[4] / "reference/vision/gemma3/image-0.png"
QUESTION = [{"role": "user", "content": "What is ownership?"}]
REQUEST = {"model": MODEL, "messages": QUESTION, "max_tokens": 32}
GREEDY = {"extra_body": {"temperature": 0}}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
    },
}


class Answer(BaseModel):
    word: Literal["yes", "no"]
    sure: bool


def models(client):
    [model] = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).created_at.year > 2020


def whole(client):
    message = client.messages.create(**REQUEST, **GREEDY, system="Be brief.")
    assert message.type == "message" and message.role == "assistant" and message.model == MODEL
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 32
    [block] = message.content
    assert block.type == "text" and block.text


def stream(client):
    expected = client.messages.create(**REQUEST, **GREEDY).content[0].text
    with client.messages.stream(**REQUEST, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == message.content[0].text == expected
    assert len(pieces) > 16, "the reply comes in pieces"
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 32


def tools(client):
    """The model asks for the weather, is told, and goes on."""
    asked = [{"role": "user", "content": "What is the weather in Rome?"}]
    request = {"model": MODEL, "max_tokens": 100, "tools": [WEATHER]}
    choice = {"type": "tool", "name": "weather"}
    with client.messages.stream(**request, messages=asked, tool_choice=choice) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use", message
    used = message.content[-1]
    assert used.type == "tool_use" and used.input["city"] in ["Rome", "Paris"], used
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "Sunny."}
    turns = asked + [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(
        **request, messages=turns, tool_choice={"type": "none"}, **GREEDY
    )
    assert again.content[0].text
    assert again.usage.cache_read_input_tokens is not None


def count_tokens(client):
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=[WEATHER])
    used = client.messages.create(**REQUEST, tools=[WEATHER]).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def caching(client):
    """The second turn finds the first one's prompt."""
    system = [
        {
            "type": "text",
            "text": "You answer questions about programs. " * 40,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }
    ]
    first = client.messages.create(**REQUEST, system=system)
    turns = QUESTION + [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "Why?"},
    ]
    usage = client.messages.create(**{**REQUEST, "messages": turns}, system=system).usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens > prompt / 2, usage


def thinking(client):
    """The demo model does not think; it is asked to all the same."""
    on = {"type": "enabled", "budget_tokens": 1024}
    reply = client.messages.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=1100, thinking=on, stop_sequences=["."]
    )
    assert reply.headers["x-lacuna-ignored"] == "thinking.budget_tokens"
    assert reply.parse().content[0].type == "text"


def structured(client):
    message = client.messages.parse(
        model=MODEL, messages=QUESTION, max_tokens=100, output_format=Answer
    )
    assert isinstance(message.parsed_output, Answer), message


def errors(client):
    for wrong, kind in [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, anthropic.BadRequestError),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "https://x.example"}}
                        ],
                    }
                ]
            },
            anthropic.BadRequestError,
        ),
    ]:
        try:
            client.messages.create(**{**REQUEST, **wrong})
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        else:
            raise AssertionError(f"{wrong} was accepted")


def images(client):
    data = base64.b64encode(IMAGE.read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    text = {"type": "text", "text": "A B C"}

    def asked(*blocks):
        return {"model": MODEL, "messages": [{"role": "user", "content": [*blocks, text]}]}

    def tokens(usage):
        return usage.input_tokens + usage.cache_read_input_tokens

    image = {"type": "image", "source": source}
    without = client.messages.create(**asked(), max_tokens=8, **GREEDY)
    shown = client.messages.create(**asked(image), max_tokens=8, **GREEDY)
    assert shown.content[0].text
    assert tokens(shown.usage) - tokens(without.usage) > 4, shown.usage
    counted = client.messages.count_tokens(**asked(image))
    assert counted.input_tokens == tokens(shown.usage)
    elsewhere = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}
    try:
        client.messages.create(**asked(elsewhere), max_tokens=8)
    except anthropic.BadRequestError as error:
        assert "fetches no addresses" in error.body["error"]["message"], error.body
    else:
        raise AssertionError("an address was followed")


def main():
    url, seeing = sys.argv[1:]
    checks = [models, whole, stream, tools, count_tokens, caching, thinking, structured, errors]
    for keys in [{"api_key": "none"}, {"auth_token": "none"}]:
        client = Anthropic(base_url=url, max_retries=0, timeout=120, **keys)
        for check in checks:
            check(client)
    images(Anthropic(base_url=seeing, max_retries=0, timeout=120, api_key="none"))
    checks.append(images)
    print(json.dumps({"anthropic": [check.__name__ for check in checks]}))


main()
