"""Clients of embeddings against a Lacuna server of an encoder: `embeddings.py URL`.

The OpenAI client, LangChain's class and that of the `llm` tool. Prints nothing and exits with 0 if each has what the
server says.
"""

import os
import sys

import openai
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

TEXTS = ["abcd", "x y", "abcd"]
DIMENSIONS = 24
CLOSE = 1e-6


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) < CLOSE for a, b in zip(one, other, strict=True))


def check_openai(client: OpenAI, model: str) -> list[list[float]]:
    """The client asks for base64 unless told otherwise, and makes numbers of it."""
    reply = client.embeddings.create(input=TEXTS, model=model)
    vectors = [one.embedding for one in reply.data]
    assert [one.index for one in reply.data] == [0, 1, 2]
    assert all(len(vector) == DIMENSIONS for vector in vectors)
    assert vectors[0] == vectors[2] != vectors[1]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens == 10, reply.usage
    floats = client.embeddings.create(input=TEXTS[0], model=model, encoding_format="float").data[0].embedding
    assert close(floats, vectors[0])
    cut = client.embeddings.create(input=TEXTS[0], model=model, dimensions=5).data[0].embedding
    length = sum(element * element for element in vectors[0][:5]) ** 0.5
    assert close(cut, [element / length for element in vectors[0][:5]])
    for wrong in ({"input": ""}, {"input": ["a", "a " * 100]}, {"input": "a", "dimensions": 25}):
        try:
            client.embeddings.create(model=model, **wrong)
        except openai.BadRequestError as refused:
            assert refused.param in ("input[0]", "input[1]", "dimensions"), refused
        else:
            raise AssertionError(f"{wrong} was taken")
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}])
    except openai.NotFoundError as refused:
        assert "/v1/embeddings" in str(refused), refused
    else:
        raise AssertionError("an encoder chats")
    return vectors


def check_langchain(url: str, model: str, expected: list[list[float]]) -> None:
    # Otherwise it sends token ids of OpenAI's own vocabulary, to whatever server it is.
    embeddings = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    found = embeddings.embed_documents(TEXTS)
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))
    assert close(embeddings.embed_query(TEXTS[1]), expected[1])


def check_llm(url: str, model: str, expected: list[list[float]]) -> None:
    """The `llm` tool's class finds the server by the environment, as OpenAI's client does."""
    os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    from llm.default_plugins.openai_models import OpenAIEmbeddingModel

    tool = OpenAIEmbeddingModel(model, model)
    found = list(tool.embed_multi(TEXTS))
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))
    assert close(tool.embed(TEXTS[0]), expected[0])


def main() -> None:
    url = sys.argv[1]
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    expected = check_openai(client, model)
    check_langchain(url, model, expected)
    check_llm(url, model, expected)


main()
