"""Texts from prompts: in order, batched, by the settings that vLLM has names for."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy
import pytest

import lacuna
from lacuna import SamplingParams

QUESTIONS = [f"Question {number}: what is ownership?" for number in range(40)]


def test_many_prompts_come_back_in_order_and_as_each_does_alone(engine: lacuna.Engine) -> None:
    lengths = [4 + number % 7 for number in range(len(QUESTIONS))]
    together = engine.generate(QUESTIONS, temperature=0, max_tokens=10)
    assert len(together) == len(lengths)
    for question, output in zip(QUESTIONS, together, strict=True):
        (one,) = engine.generate(question, temperature=0, max_tokens=10)
        assert (one.text, one.token_ids) == (output.text, output.token_ids)
        assert output.usage.prompt_tokens == len(engine.tokenizer.encode(question))
        assert output.usage.completion_tokens == len(output.token_ids)


def test_text_and_its_tokens_are_the_same_prompt(engine: lacuna.Engine) -> None:
    tokens = engine.tokenizer.encode(QUESTIONS[0])
    prompts: list[Any] = [tokens, [tokens], numpy.array(tokens), numpy.array([tokens]), tuple(tokens)]
    expected = engine.generate(QUESTIONS[0], temperature=0)[0].token_ids
    for prompt in prompts:
        assert engine.generate(prompt, temperature=0)[0].token_ids == expected


def test_it_is_what_the_program_says(engine: lacuna.Engine) -> None:
    arguments = ["run", "demo", "--raw", "-p", QUESTIONS[0], "-n", "20", "--temp", "0", "--json"]
    done = subprocess.run([lacuna.program(), *arguments], capture_output=True, check=True)
    said = json.loads(done.stdout)
    assert engine.generate(QUESTIONS[0], temperature=0, max_tokens=20)[0].text == said["text"]


def test_the_fields_of_vllm_have_their_meaning(engine: lacuna.Engine) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    (plain,) = engine.generate(QUESTIONS[0], greedy)
    assert plain.finish_reason == "length" and len(plain.token_ids) == 12

    word = plain.text.split()[2]
    (stopped,) = engine.generate(QUESTIONS[0], greedy, stop=[word])
    assert stopped.finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == word
    assert stopped.text == plain.text[: plain.text.index(word)]

    third = plain.token_ids[2]
    (by_token,) = engine.generate(QUESTIONS[0], greedy, stop_token_ids=[third])
    assert by_token.outputs[0].stop_reason == third

    (several,) = engine.generate(QUESTIONS[0], greedy, temperature=0.9, n=3, seed=7)
    assert len({choice.text for choice in several.outputs}) > 1
    (again,) = engine.generate(QUESTIONS[0], greedy, temperature=0.9, n=3, seed=7)
    assert several.outputs == again.outputs

    (scored,) = engine.generate(QUESTIONS[0], greedy, logprobs=2, prompt_logprobs=1)
    assert scored.token_ids == plain.token_ids
    assert scored.logprobs is not None and scored.prompt_logprobs is not None
    for token, found in zip(scored.token_ids, scored.logprobs, strict=True):
        assert found.rank == 1 and found.top[0] == (token, found.logprob) and len(found.top) == 2
    assert len(scored.prompt_logprobs) == scored.usage.prompt_tokens - 1

    (bare,) = engine.generate(QUESTIONS[0], temperature=0)
    assert len(bare.token_ids) == 16, "as vLLM has it"


def test_output_keeps_to_a_schema(engine: lacuna.Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    given = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    (output,) = engine.generate(QUESTIONS[0], response_format=given, max_tokens=100)
    assert output.finish_reason == "length" or isinstance(json.loads(output.text)["a"], bool)


def test_a_stream_says_the_same(engine: lacuna.Engine) -> None:
    (whole,) = engine.generate(QUESTIONS[1], temperature=0, max_tokens=20)
    pieces = list(engine.stream(QUESTIONS[1], temperature=0, max_tokens=20))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token_id for piece in pieces if piece.token_id is not None] == whole.token_ids
    assert pieces[-1].finish_reason == whole.finish_reason


async def test_a_stream_for_tasks_says_the_same(engine: lacuna.Engine) -> None:
    (whole,) = engine.generate(QUESTIONS[1], temperature=0, max_tokens=20)
    text = ""
    async for piece in engine.astream(QUESTIONS[1], temperature=0, max_tokens=20):
        text += piece.text
    assert text == whole.text


def test_logits_are_the_models_and_in_one_piece_of_memory(engine: lacuna.Engine) -> None:
    tokens = engine.tokenizer.encode(QUESTIONS[2])
    every = engine.logits(tokens, all=True)
    assert every.shape == (len(tokens), engine.tokenizer.vocab_size)
    assert every.dtype == numpy.float32 and every.flags.c_contiguous
    assert every.base is not None, "a view of the memory they were computed in"
    last = engine.logits(tokens)
    assert (last == every[-1]).all()
    (greedy,) = engine.generate(tokens, temperature=0, max_tokens=1)
    assert greedy.token_ids == [int(last.argmax())]
    arguments = ["logits", "demo", "--tokens", ",".join(map(str, tokens)), "--json", "--ctx", "1024"]
    done = subprocess.run([lacuna.program(), *arguments], capture_output=True, check=True)
    told = numpy.array(json.loads(done.stdout)["logits"], dtype=numpy.float32)
    assert (told.reshape(-1) == last).all()


def test_the_tokenizer_goes_there_and_back(engine: lacuna.Engine) -> None:
    tokenizer = engine.tokenizer
    for text in ["fn main() {}", "Grüße, 世界 🦀"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    messages = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(messages)
    assert "Hello" in tokenizer.decode(prompt, skip_special_tokens=False)
    chat = engine.chat(messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == len(prompt)
    assert tokenizer.eos_ids and all(token < tokenizer.vocab_size for token in tokenizer.eos_ids)


@pytest.mark.parametrize("size", ["8KiB", 1 << 20])
def test_a_budget_that_is_too_small_says_what_works(size: str | int) -> None:
    with pytest.raises(lacuna.BudgetExceeded, match="MiB"):
        lacuna.Engine("demo", budget=size)


def test_a_plan_says_every_byte_before_it_is_used() -> None:
    plan = lacuna.plan("qwen3-4b", ctx=32768, budget="8GiB")
    done = subprocess.run(
        [lacuna.program(), "plan", "qwen3-4b", "--ctx", "32768", "--budget", "8GiB", "--json"],
        capture_output=True,
        check=False,
    )
    assert plan == json.loads(done.stdout)
    with pytest.raises(lacuna.InvalidRequest, match="nothing-like-it"):
        lacuna.plan("nothing-like-it")
    for wrong in [{"no_such": True}, {"ctx": -1}, {"kv_typ": "q8_0"}, {"help": True}]:
        with pytest.raises(lacuna.InvalidRequest) as refused:
            lacuna.plan("qwen3-4b", **wrong)
        message = str(refused.value)
        assert "--" not in message and "Usage" not in message and "\n" not in message
