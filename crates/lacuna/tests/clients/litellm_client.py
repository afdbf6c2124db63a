"""LiteLLM against a Lacuna server, by the interfaces that it knows it by: `litellm_client.py URL`.

Prints one line, `{"litellm": [what works]}`, and exits with 0 if everything is as its users expect.
"""

import json
import os
import sys

# Or it asks the network for prices while it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402

QUESTION = [{"role": "user", "content": "What is ownership?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
        },
    },
}
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"word": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
            "required": ["word", "sure"],
            "additionalProperties": False,
        },
    },
}


class Client:
    """What differs between the interfaces: the name of the model, and where it is."""

    def __init__(self, provider, address):
        self.settings = {"model": f"{provider}/demo", "api_base": address, "api_key": "none", "temperature": 0}

    def ask(self, **more):
        return litellm.completion(**{**self.settings, "messages": QUESTION, "max_tokens": 24, **more})


def whole(client):
    reply = client.ask()
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens == 24 and reply.usage.prompt_tokens > 0, reply.usage


def stream(client):
    expected = client.ask().choices[0].message.content
    deltas = [chunk.choices[0].delta.content or "" for chunk in client.ask(stream=True) if chunk.choices]
    assert "".join(deltas) == expected
    assert sum(bool(delta) for delta in deltas) > 8, "the reply comes in pieces"


def tools(client):
    asked = [{"role": "user", "content": "What is the weather in Rome?"}]
    reply = client.ask(messages=asked, tools=[WEATHER], tool_choice="required", max_tokens=128)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    told = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    reply = client.ask(messages=[*asked, called, told], tools=[WEATHER])
    assert reply.usage.completion_tokens > 0


def structured(client):
    reply = client.ask(response_format=ANSWER, max_tokens=64)
    answer = json.loads(reply.choices[0].message.content)
    assert answer["word"] in ("yes", "no") and isinstance(answer["sure"], bool)


def errors(client):
    try:
        client.ask(max_tokens=-1)
    except litellm.BadRequestError:
        return
    raise AssertionError("a negative number of tokens is refused")


def main():
    url = sys.argv[1]
    litellm.suppress_debug_info = True
    # Settings that an interface does not have are not what is tried here.
    litellm.drop_params = True
    litellm.num_retries = 0
    interfaces = [
        ("litellm (openai)", Client("openai", f"{url}/v1"), [whole, stream, tools, structured, errors]),
        ("litellm (anthropic)", Client("anthropic", url), [whole, stream, tools, errors]),
        ("litellm (ollama)", Client("ollama_chat", url), [whole, stream, structured]),
    ]
    for name, client, features in interfaces:
        for feature in features:
            feature(client)
        print(json.dumps({name: [feature.__name__ for feature in features]}))


main()
