"""Libraries that make models of pydantic out of replies, against a Lacuna server: `nested_models.py URL`.

instructor and pydantic-ai each send a nested model in every way that they have: as a tool that has to be
called, as one that may be, and as the schema of the reply; whole and streamed. Prints nothing and exits
with 0 if all of them come back as the model says.
"""

import asyncio
import sys
from typing import Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "demo"
QUESTION = "Which way did you go?"
# The seed and the bound keep the replies of a small model short and the same.
SETTINGS = {"max_tokens": 300, "seed": 5, "temperature": 0.5}


class Closed(BaseModel):
    """Without fields that nothing describes: the demo model would make some up for as long as it may."""

    model_config = ConfigDict(extra="forbid")


class Place(Closed):
    """A place on the way."""

    name: Literal["house", "river", "wood"]
    reached: bool


class Leg(Closed):
    """From one place to the next."""

    start: Place
    end: Place
    by: Literal["foot", "boat"] = "foot"


class Route(Closed):
    """A way through places."""

    legs: list[Leg] = Field(min_length=1, max_length=2)
    rest: Place | None


def check(route):
    assert isinstance(route, Route), route
    assert 1 <= len(route.legs) <= 2, route
    Route.model_validate(route.model_dump())


def with_instructor(url):
    plain = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
    modes = [
        instructor.Mode.TOOLS,
        instructor.Mode.TOOLS_STRICT,
        instructor.Mode.JSON_SCHEMA,
    ]
    for mode in modes:
        client = instructor.from_openai(plain, mode=mode)
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": QUESTION}],
            "response_model": Route,
            "max_retries": 0,
            **SETTINGS,
        }
        check(client.chat.completions.create(**request))
        if mode != instructor.Mode.TOOLS_STRICT:
            *_, last = client.chat.completions.create_partial(**request)
            check(Route.model_validate(last.model_dump()))


async def with_pydantic_ai(url):
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
    for output in [Route, ToolOutput(Route, name="route"), NativeOutput(Route)]:
        agent = Agent(model, output_type=output, model_settings=SETTINGS, retries=0)
        check((await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as stream:
            check(await stream.get_output())

    # A tool with a nested model as its argument, which the model may call and then sees the result of.
    agent = Agent(model, output_type=str, model_settings=SETTINGS, retries=3)

    @agent.tool_plain
    def measure(leg: Leg) -> str:
        """How far it is."""
        assert isinstance(leg, Leg)
        return "a mile"

    assert isinstance((await agent.run(QUESTION)).output, str)


def main():
    with_instructor(sys.argv[1])
    asyncio.run(with_pydantic_ai(sys.argv[1]))


main()
