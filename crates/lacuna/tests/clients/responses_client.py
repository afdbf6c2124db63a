"""OpenAI's responses with its official client, also of a model that sees, and its agents over them:
`responses_client.py URL SEEING_URL`.

Prints one line for each client, `{NAME: [what works]}`, and exits with 0 if everything is as their users
expect.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Literal

import openai
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MODEL = "demo"
# What the model that sees is shown.
IMAGE = Path(__file__).parents[4] / "reference/vision/gemma3/image-0.png"
REQUEST = {"model": MODEL, "input": "What is ownership?", "temperature": 0, "max_output_tokens": 32}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
    },
}


class Answer(BaseModel):
    word: Literal["yes", "no"]
    sure: bool


def whole(client):
    response = client.responses.create(**REQUEST, instructions="Be brief.")
    assert response.status == "incomplete" and response.output_text
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 32


def stream(client):
    expected = client.responses.create(**REQUEST).output_text
    events = list(client.responses.create(**REQUEST, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert len(deltas) > 16, "the reply comes in pieces"
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    finished = {"model": MODEL, "input": "Is it?", "text_format": Answer, "max_output_tokens": 100}
    with client.responses.stream(**finished) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def tools(client):
    """The model asks for the weather, is told, and goes on."""
    asked = [{"role": "user", "content": "What is the weather in Rome?"}]
    request = {"model": MODEL, "tools": [WEATHER], "max_output_tokens": 100}
    response = client.responses.create(**request, input=asked, tool_choice="required")
    [call] = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ["Rome", "Paris"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    again = client.responses.create(
        **request, input=[*asked, *response.output, result], tool_choice="none"
    )
    assert again.output_text
    by_name = client.responses.create(
        **request, previous_response_id=response.id, input=[result], tool_choice="none"
    )
    assert by_name.usage.input_tokens == again.usage.input_tokens


def previous_response(client):
    first = client.responses.create(**REQUEST)
    second = client.responses.create(
        **{**REQUEST, "input": "Why?"}, previous_response_id=first.id
    )
    assert second.usage.input_tokens > first.usage.input_tokens + 32
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    try:
        client.responses.retrieve(second.id)
    except openai.NotFoundError as error:
        assert error.code == "response_not_found"
    else:
        raise AssertionError("it was deleted")
    unkept = client.responses.create(**REQUEST, store=False)
    try:
        client.responses.create(**REQUEST, previous_response_id=unkept.id)
    except openai.BadRequestError as error:
        assert error.code == "previous_response_not_found"
    else:
        raise AssertionError("it was kept")


def structured(client):
    response = client.responses.parse(
        model=MODEL, input="Is it?", text_format=Answer, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Answer), response


def errors(client):
    for wrong, kind in [
        ({"model": "other"}, openai.NotFoundError),
        ({"input": []}, openai.BadRequestError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"background": True}, openai.BadRequestError),
        ({"input": "word " * 9000}, openai.BadRequestError),
    ]:
        try:
            client.responses.create(**{**REQUEST, **wrong})
        except kind as error:
            assert error.body["message"], error.body
        else:
            raise AssertionError(f"{wrong} was accepted")


def images(client):
    url = "data:image/png;base64," + base64.b64encode(IMAGE.read_bytes()).decode()
    request = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    text = {"type": "input_text", "text": "A B C"}

    def asked(*parts):
        return [{"role": "user", "content": [*parts, text]}]

    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    without = client.responses.create(**request, input=asked())
    first = client.responses.create(**request, input=asked(image))
    assert first.output_text
    tokens = first.usage.input_tokens - without.usage.input_tokens
    assert tokens > 4, tokens
    # The image is still there, by the name of the reply as in items that are sent again.
    turns = [*asked(image), *first.output, *asked()]
    again = client.responses.create(**request, input=turns)
    by_name = client.responses.create(**request, input=asked(), previous_response_id=first.id)
    assert by_name.output_text == again.output_text
    assert by_name.usage.input_tokens == again.usage.input_tokens
    for wrong in [{"image_url": "https://example.com/cat.png"}, {"file_id": "file-1"}]:
        try:
            client.responses.create(**request, input=asked({"type": "input_image", "detail": "auto", **wrong}))
        except openai.BadRequestError as error:
            assert error.body["message"], error.body
        else:
            raise AssertionError(f"{wrong} was accepted")


calls = []


@function_tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather in a city."""
    calls.append(city)
    return "Sunny."


def agent(client, **settings):
    model = OpenAIResponsesModel(model=MODEL, openai_client=client)
    return Agent(
        name="helper",
        instructions="You help.",
        model=model,
        tools=[weather],
        # A reply that is cut short is a failure to agents, and the demo model would go on and on.
        output_type=Answer,
        model_settings=ModelSettings(max_tokens=200, temperature=0, **settings),
    )


def agent_calls_tool(client):
    calls.clear()
    result = asyncio.run(
        Runner.run(agent(client, tool_choice="required"), "What is the weather?", max_turns=4)
    )
    assert calls and isinstance(result.final_output, Answer), result


def agent_streams(client):
    async def run():
        result = Runner.run_streamed(agent(client, tool_choice="none"), "What is ownership?")
        events = [event async for event in result.stream_events()]
        return result.final_output, events

    output, events = asyncio.run(run())
    assert isinstance(output, Answer) and any(event.type == "raw_response_event" for event in events)


def main():
    url, seeing = [url + "/v1" for url in sys.argv[1:]]
    settings = {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 120}
    checks = [whole, stream, tools, previous_response, structured, errors]
    for check in checks:
        check(OpenAI(**settings))
    images(OpenAI(**{**settings, "base_url": seeing}))
    checks.append(images)
    print(json.dumps({"openai (responses)": [check.__name__ for check in checks]}))
    set_tracing_disabled(True)
    checks = [agent_calls_tool, agent_streams]
    for check in checks:
        check(AsyncOpenAI(**settings))
    print(json.dumps({"openai-agents": [check.__name__ for check in checks]}))


main()
