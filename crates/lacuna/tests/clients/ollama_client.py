"""The official Ollama client against a Lacuna server, and one of a model that sees: `ollama_client.py URL SEEING_URL`,
or of an encoder:
`ollama_client.py URL embeddings`.

Prints one line, `{"ollama": [what works]}`, and exits with 0 if everything is as the client's users
expect.
"""

import json
import sys
from pathlib import Path
from typing import Literal

from ollama import Client, ResponseError
from pydantic import BaseModel

MODEL = "demo"
# What the model that sees is shown.
IMAGE = Path(__file__).parents[4] / "reference/vision/gemma3/image-0.png"
QUESTION = [{"role": "user", "content": "What is ownership?"}]
REQUEST = {"model": MODEL, "messages": QUESTION, "options": {"temperature": 0, "num_predict": 32}}


class Answer(BaseModel, extra="forbid"):
    word: Literal["yes", "no"]
    sure: bool


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city.
    """
    return f"Sunny in {city}."


def models(client):
    [model] = client.list().models
    assert model.model == MODEL and model.size > 1 << 20 and model.modified_at.year > 2020
    [running] = client.ps().models
    assert running.model == MODEL and running.context_length > 0
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"]


def whole(client):
    reply = client.chat(**REQUEST)
    assert reply.done and reply.done_reason == "length" and reply.eval_count == 32
    assert reply.message.content and reply.total_duration > 0


def stream(client):
    expected = client.chat(**REQUEST).message.content
    parts = list(client.chat(**REQUEST, stream=True))
    assert "".join(part.message.content for part in parts) == expected
    assert len(parts) > 16 and parts[-1].done, "the reply comes in pieces"


def generate(client):
    prompt = {"model": MODEL, "prompt": "# Ownership\n\n", "raw": True, "options": REQUEST["options"]}
    expected = client.generate(**prompt).response
    parts = list(client.generate(**prompt, stream=True, keep_alive="5m"))
    assert "".join(part.response for part in parts) == expected


def tools(client):
    """The demo model may call or not: what it is told of a call reaches it."""
    reply = client.chat(**REQUEST, tools=[weather])
    assert reply.message.content or reply.message.tool_calls
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = QUESTION + [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": weather("Rome")},
    ]
    again = client.chat(**{**REQUEST, "messages": turns}, tools=[weather], think=False)
    assert again.prompt_eval_count > reply.prompt_eval_count


def structured(client):
    reply = client.chat(**REQUEST, format=Answer.model_json_schema())
    Answer.model_validate_json(reply.message.content)


def errors(client):
    for wrong, status in [
        ({"model": "other"}, 404),
        ({"options": {"num_ctx": 1 << 30}}, 400),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
    ]:
        try:
            client.chat(**{**REQUEST, **wrong})
        except ResponseError as error:
            assert error.status_code == status and error.error, error
        else:
            raise AssertionError(f"{wrong} was accepted")


def images(client):
    assert "vision" in client.show(MODEL).capabilities
    options = {"temperature": 0, "num_predict": 8}

    def ask(*shown):
        message = {"role": "user", "content": "A B C", "images": list(shown)}
        return client.chat(model=MODEL, messages=[message], options=options)

    without, one = ask(), ask(IMAGE)
    assert one.message.content and one.prompt_eval_count - without.prompt_eval_count > 4
    generated = client.generate(model=MODEL, prompt="A B C", images=[IMAGE.read_bytes()], options=options)
    assert generated.response == one.message.content
    try:
        ask(b"no image")
    except ResponseError as error:
        assert error.status_code == 400 and error.error, error
    else:
        raise AssertionError("what is no image was accepted")


def embeddings(client):
    [model] = client.list().models
    assert client.show(model.model).capabilities == ["embedding"]
    reply = client.embed(model=model.model, input=["hello", "world"])
    [hello, world] = reply.embeddings
    assert len(hello) == len(world) > 5 and hello != world and reply.prompt_eval_count > 1
    assert client.embed(model=model.model, input="hello").embeddings == [hello]
    assert len(client.embed(model=model.model, input="hello", dimensions=5).embeddings[0]) == 5
    assert client.embed(model=model.model, input="hello " * 1000).embeddings
    assert client.embeddings(model=model.model, prompt="hello").embedding == hello
    for wrong, status in [
        ({"model": "other"}, 404),
        ({"input": "hello " * 1000, "truncate": False}, 400),
        ({"dimensions": 1 << 20}, 400),
    ]:
        try:
            client.embed(**{"model": model.model, "input": "hello", **wrong})
        except ResponseError as error:
            assert error.status_code == status and error.error, error
        else:
            raise AssertionError(f"{list(wrong)} was accepted")


def main():
    client = Client(host=sys.argv[1], timeout=120)
    checks = [models, whole, stream, generate, tools, structured, errors]
    if sys.argv[2:] == ["embeddings"]:
        checks = [embeddings]
    for check in checks:
        check(client)
    if checks != [embeddings]:
        images(Client(host=sys.argv[2], timeout=120))
        checks.append(images)
    print(json.dumps({"ollama": [check.__name__ for check in checks]}))


main()
