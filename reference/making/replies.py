"""Replies in Harmony, taken apart by openai-harmony, and the template's prompts against its renderer.

openai-harmony wants the published vocabulary: it downloads `o200k_base.tiktoken`, or finds it in the folder
that TIKTOKEN_ENCODINGS_BASE names.
"""

import json
import pathlib

import openai_harmony as harmony

from making import spoken, templates

# Of each reply the text and the control tokens by turns, text first.
REPLIES = [
    # An answer after a thought.
    ["", "<|channel|>", "analysis", "<|message|>", "Simple sum.", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "2 + 2 = 4.", "<|return|>"],
    # No thought; characters of two, three and four bytes.
    ["", "<|channel|>", "final", "<|message|>", "K\u00f6ln \u2014 \u4f60\u597d \U0001f600\n\nBye.\n", "<|return|>"],
    # Whom a call goes to after the channel, and its type as a mark.
    ["", "<|channel|>", "analysis", "<|message|>", "Need the weather.", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "commentary to=functions.get_weather ", "<|constrain|>", "json", "<|message|>", '{"location": "San Francisco"}', "<|call|>"],
    # Before the channel, and its type as a word.
    [" to=functions.get_weather", "<|channel|>", "commentary json", "<|message|>", '{"location":"K\u00f6ln"}', "<|call|>"],
    ["", "<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "", "<|start|>", "assistant to=functions.now", "<|channel|>", "commentary", "<|message|>", "{}", "<|call|>"],
    # Without a space before the mark.
    ["", "<|channel|>", "commentary to=functions.generate_file", "<|constrain|>", "json", "<|message|>", '{"path": "index.html"}', "<|call|>"],
    # A preamble before the call, and several thoughts.
    ["", "<|channel|>", "analysis", "<|message|>", "First.", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "Second.\nThird.", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "commentary", "<|message|>", "**Action plan**:\n1. Write it\n---\n", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "commentary to=functions.write ", "<|constrain|>", "json", "<|message|>", '{"text": "<b>\\n</b>"}', "<|call|>"],
    # A preamble and an answer.
    ["", "<|channel|>", "commentary", "<|message|>", "One moment.", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Here.", "<|return|>"],
    # An answer of a stated type.
    ["", "<|channel|>", "final ", "<|constrain|>", "json", "<|message|>", '{"items": []}', "<|return|>"],
    # A tool that is none of the request's, asked for in the thought.
    ["", "<|channel|>", "analysis to=python code", "<|message|>", "print(2 + 2)", "<|call|>"],
    # Markup that is quoted and not used.
    ["", "<|channel|>", "analysis", "<|message|>", "They ask about <|end|> and <|channel|>final<|message|>.", "<|end|>", "", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "A message ends with <|end|>, a reply with <|return|>.", "<|return|>"],
    # Nothing at all, and a thought that is cut short.
    ["", "<|channel|>", "final", "<|message|>", "", "<|return|>"],
    ["", "<|channel|>", "analysis", "<|message|>", "It goes on and", ""],
]


def parts(reply: list[str]) -> list[tuple[str, bool]]:
    return [(text, index % 2 == 1) for index, text in enumerate(reply) if text]


def messages(encoding: harmony.HarmonyEncoding, reply: list[str]) -> list[dict]:
    parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
    for text, special in parts(reply):
        for token in encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=()):
            parser.process(token)
    parser.process_eos()
    return [
        {"channel": message.channel, "recipient": message.recipient, "text": message.content[0].text}
        for message in parser.messages
    ]


def check_prompts(encoding: harmony.HarmonyEncoding) -> None:
    """Where the template and the renderer mean to write the same, they do."""
    system = harmony.SystemContent.new().with_conversation_start_date(templates.NOW.strftime("%Y-%m-%d"))
    tool = templates.TOOL["function"]
    described = harmony.ToolDescription.new(tool["name"], tool["description"], parameters=tool["parameters"])
    instructions = templates.SYSTEM["content"]
    developer = harmony.DeveloperContent.new().with_instructions(instructions).with_function_tools([described])
    user = harmony.Message.from_role_and_content(harmony.Role.USER, templates.USER["content"])
    thought = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, "So.").with_channel("analysis")
    answer = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, templates.ANSWER["content"]).with_channel("final")
    first = harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)
    second = harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer)
    given = templates.ANSWER | {"thinking": "So."}
    cases = [
        ([first, user], {"messages": [templates.USER]}),
        ([first, user, thought, answer, user], {"messages": [templates.USER, given, templates.USER]}),
        ([first, second, user], {"messages": [templates.SYSTEM, templates.USER], "tools": [templates.TOOL]}),
    ]
    for conversation, variables in cases:
        tokens = encoding.render_conversation_for_completion(
            harmony.Conversation.from_messages(conversation), harmony.Role.ASSISTANT
        )
        rendered = templates.render(templates.HARMONY, variables | {"add_generation_prompt": True})
        assert rendered == {"rendered": encoding.decode(tokens)}, (rendered, encoding.decode(tokens))


def make(out: pathlib.Path) -> None:
    folder = out / "replies"
    folder.mkdir(parents=True, exist_ok=True)
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    check_prompts(encoding)
    cases = [{"reply": reply, "messages": messages(encoding, reply)} for reply in REPLIES]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    spoken.make(out)
    (folder / "harmony.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
