"""Chat templates in the styles in use, rendered by Jinja2 in the environment transformers gives them."""

import datetime
import itertools
import json
import pathlib

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

NOW = datetime.datetime(2024, 7, 26, 12, 30, 5)

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}
        {%- set date_string = '26 Jul 2024' %}
    {%- endif %}
{%- endif %}
{%- set rest = messages %}
{%- set opening = '' %}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set opening = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- macro header(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- header('system') + 'Today is ' + date_string + '.\\n\\n' + opening + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.role not in ('user', 'assistant', 'tool') %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- elif message.role == 'tool' %}
        {{- header('ipython') }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- header(message.role) + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""

INSTRUCT = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must take turns: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions you may call:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set place = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = place %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or (not loop.last and thought)) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<result>' + content + '</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SYSTEM_IN_TURN = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{% set opening = messages[0]['content'] %}{% else %}{% set turns = messages %}{% set opening = false %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must take turns') }}{% endif %}"
    "{% if loop.index0 == 0 and opening != false %}"
    "{% set content = '<<SYS>>\\n' + opening + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# A family without a system role, whose template says so.
TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must take turns') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# The same, but the template leaves such a message out without a word.
SILENT_TURNS = """\
{% for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""

# Thoughts are a channel of their own, taken out of all earlier answers part by part.
CHANNELS = """\
{%- macro spoken(text) %}
    {%- set found = namespace(text='') %}
    {%- for part in text.split('<channel|>') %}
        {%- if '<|channel>' in part %}
            {%- set found.text = found.text + part.split('<|channel>')[0] %}
        {%- else %}
            {%- set found.text = found.text + part %}
        {%- endif %}
    {%- endfor %}
    {{- found.text | trim }}
{%- endmacro %}
{{- bos_token }}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{%- set first = messages[0]['role'] in ['system', 'developer'] %}
{%- if thinks or first %}
    {{- '<|turn>system\\n' }}
    {%- if thinks %}{{- '<|think|>\\n' }}{%- endif %}
    {%- if first %}{{- messages[0]['content'] | trim }}{%- endif %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages[1:] if first %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- spoken(message.content) if message.role == 'assistant' else message.content | trim }}
    {{- '<turn|>\\n' }}
{%- else %}
    {%- for message in messages %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {{- spoken(message.content) if message.role == 'assistant' else message.content | trim }}
        {{- '<turn|>\\n' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' }}
    {%- if not thinks %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}
{%- endif %}
"""

# The format of gpt-oss: channels, tools as TypeScript, and thoughts only until an answer has followed them.
HARMONY = """\
{%- macro type_of(schema) %}
    {%- if schema.type == 'array' %}
        {%- if not schema['items'] %}
            {{- 'any[]' }}
        {%- else %}
            {%- set inner = type_of(schema['items']) %}
            {{- (inner if inner | length <= 50 else 'any') ~ '[]' }}
        {%- endif %}
        {{- ' | null' if schema.nullable }}
    {%- elif schema.type is defined and schema.type is iterable and schema.type is not string %}
        {{- schema.type | join(' | ') }}
    {%- elif schema.oneOf %}
        {%- for variant in schema.oneOf %}
            {{- type_of(variant) ~ (' | ' if not loop.last else '') }}
        {%- endfor %}
    {%- elif schema.type == 'string' and schema.enum %}
        {{- '"' ~ schema.enum | join('" | "') ~ '"' }}
    {%- elif schema.type == 'string' %}
        {{- 'string | null' if schema.nullable else 'string' }}
    {%- elif schema.type in ('number', 'integer') %}
        {{- 'number' }}
    {%- elif schema.type == 'boolean' %}
        {{- 'boolean' }}
    {%- elif schema.type == 'object' and schema.properties %}
        {{- '{\\n' ~ fields(schema) ~ '}' }}
    {%- elif schema.type == 'object' %}
        {{- 'object' }}
    {%- else %}
        {{- 'any' }}
    {%- endif %}
{%- endmacro %}
{%- macro fields(schema) %}
    {%- for name, field in schema.properties.items() %}
        {{- '// ' ~ field.description ~ '\\n' if field.description }}
        {{- name ~ ('' if name in (schema.required or []) else '?') ~ ': ' ~ type_of(field) }}
        {%- if field.default is defined %}
            {{- ', // default: ' ~ (field.default if field.enum else field.default | tojson) }}
        {%- endif %}
        {{- ',\\n' }}
    {%- endfor %}
{%- endmacro %}
{%- macro message(header, body, end='<|end|>') %}
    {{- '<|start|>' ~ header ~ '<|message|>' ~ body ~ end }}
{%- endmacro %}
{%- macro unmarked(text) %}
    {%- if '<|channel|>analysis<|message|>' in text or '<|channel|>final<|message|>' in text %}
        {{- raise_exception('Give thoughts as thinking and answers as content, without <|channel|> tags') }}
    {%- endif %}
{%- endmacro %}
{%- macro opening() %}
    {%- if model_identity is not defined %}
        {%- set model_identity = 'You are ChatGPT, a large language model trained by OpenAI.' %}
    {%- endif %}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = 'medium' %}
    {%- endif %}
    {{- model_identity ~ '\\nKnowledge cutoff: 2024-06\\nCurrent date: ' ~ strftime_now('%Y-%m-%d') }}
    {{- '\\n\\nReasoning: ' ~ reasoning_effort }}
    {{- '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
    {%- if tools -%}
        {{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
    {%- endif -%}
{%- endmacro %}
{{- message('system', opening()) }}
{%- set instructed = messages and messages[0].role in ('developer', 'system') %}
{%- set instructions = messages[0].content if instructed else '' %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\\n\\n' ~ instructions ~ '\\n\\n' if instructions }}
    {%- if tools %}
        {{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- '// ' ~ tool.description ~ '\\ntype ' ~ tool.name ~ ' = ' }}
            {%- if tool.parameters and tool.parameters.properties %}
                {{- '(_: {\\n' ~ fields(tool.parameters) ~ '}) => any;\\n\\n' }}
            {%- else %}
                {{- '() => any;\\n\\n' }}
            {%- endif %}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for said in (messages[1:] if instructed else messages) %}
    {%- if said.role == 'assistant' %}
        {{- unmarked(said.content or '') ~ unmarked(said.thinking or '') }}
        {%- if 'tool_calls' in said %}
            {%- set rest = (messages[1:] if instructed else messages)[loop.index:] %}
            {%- set answered = rest | selectattr('role', 'equalto', 'assistant') | selectattr('tool_calls', 'undefined') | list %}
            {%- if said.content and said.thinking %}
                {{- raise_exception('A message that calls a tool has content or thinking, not both') }}
            {%- elif (said.content or said.thinking) and not answered %}
                {{- message('assistant<|channel|>analysis', said.content or said.thinking) }}
            {%- endif %}
            {%- set call = said.tool_calls[0].function or said.tool_calls[0] %}
            {{- message('assistant to=functions.' ~ call.name ~ '<|channel|>commentary json', call.arguments | tojson, '<|call|>') }}
            {%- set called.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- message('assistant<|channel|>analysis', said.thinking) if 'thinking' in said }}
            {{- message('assistant<|channel|>final', said.content, '<|return|>') }}
        {%- else %}
            {{- message('assistant<|channel|>final', said.content) }}
            {%- set called.name = none %}
        {%- endif %}
    {%- elif said.role == 'tool' %}
        {%- if called.name is none %}
            {{- raise_exception('A tool has answered that was not called') }}
        {%- endif %}
        {{- message('functions.' ~ called.name ~ ' to=assistant<|channel|>commentary', said.content | tojson) }}
    {%- elif said.role == 'user' %}
        {{- message('user', said.content) }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""

# Statements on lines of their own, which trim_blocks and lstrip_blocks make vanish, and the rarer syntax.
ODDS_AND_ENDS = """\
{# A comment on its own line leaves nothing. #}
{% set seen = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 6 %}
        {% break %}
    {% endif %}
    {% set seen.count = seen.count + 1 %}
{{ loop.index }}/{{ loop.length }}{{ ' first' if loop.first }}{{ ' last' if loop.last else '' }}
  {{ message['role'] | upper }}: {{ message['content'] | replace('\\n', ' / ') | default('nothing') }}
    {% if message.get('parts') %}
  {% for part in message.parts if part.type == 'text' %}
  - {{ part.text }}
  {% else %}
  - no text
  {% endfor %}
    {% endif %}
{% endfor %}
{% for key, value in (extra or {}) | items %}
{{ key }}={{ value | tojson }};
{% endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 3 }} {{ 7 / 2 }} {{ -1 }} {{ 1 < 2 and not false }} {{ none is none }} {{ [1, 2.5, 'x'] }}
{{ 'abc'[1:] ~ 'abc'[-1] ~ 'a,b,c'.split(',')[1] ~ ' t '.strip() ~ 'Ab'.lower() ~ 'hello world'.title() }}
{{ seen.count }} {{ (extra or {}) | tojson }} {{ 'x' in ['x'] }} {{ missing is defined }}{{ missing }}
end"""

USER = {"role": "user", "content": "Hello there!"}
SYSTEM = {"role": "system", "content": "  You are a careful helper.\n"}
ANSWER = {"role": "assistant", "content": " Hi.\nHow can I help? "}
QUESTION = {"role": "user", "content": "What is 2 + 2?\n\nShow <b>\"work\"</b> & caf\u00e9."}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln", "days": 2}}},
        {"type": "function", "function": {"name": "time", "arguments": "{\"zone\": \"CET\"}"}},
    ],
}
RESULT = {"role": "tool", "content": "{\"temperature\": 21.5}"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city's <next> days & nights",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TALK = [SYSTEM, USER, ANSWER, QUESTION]
SHORT = [USER]
LONG = [USER, ANSWER, QUESTION, THOUGHT, USER]
TOOLS_TALK = [SYSTEM, QUESTION, CALL, RESULT, RESULT]
THINKING_TALK = [QUESTION, THOUGHT, USER, THOUGHT]
REASONED = [QUESTION, CALL | {"reasoning_content": "I should look."}, RESULT, ANSWER | {"reasoning_content": "\nFine.\n"}]
DISORDER = [USER, USER]
CHANNELLED = {"role": "assistant", "content": "<|channel>thought\nFour, surely.<channel|>Four. <|channel>b<channel|>Yes."}
PARTS = [USER | {"parts": [{"type": "text", "text": "one"}, {"type": "image"}]}, ANSWER | {"parts": [{"type": "image"}]}]

# Every kind of type that a parameter may have.
TYPED = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books a room.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where, e.g. K\u00f6ln"},
                "class": {"type": "string", "enum": ["first", "second"], "default": "second"},
                "nights": {"type": "integer", "default": 1},
                "price": {"type": ["number", "null"]},
                "names": {"type": "array", "items": {"type": "string"}, "nullable": True},
                "ages": {"type": "array", "items": {"type": "integer"}},
                "anything": {"type": "array"},
                "guest": {"type": "object", "properties": {"vip": {"type": "boolean", "default": False}}, "required": ["vip"]},
                "extra": {"type": "object"},
                "note": {"type": "string", "nullable": True},
                "when": {"oneOf": [{"type": "string"}, {"type": "number"}]},
                "rest": {},
            },
            "required": ["city", "names"],
        },
    },
}
NOW_TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}
CALLED = [QUESTION, {k: v for k, v in CALL.items() if k != "content"} | {"thinking": "I should look."}, RESULT]
PREAMBLE = [QUESTION, CALL | {"content": "One moment."}, RESULT]
THOUGHT_AND_SAID = [QUESTION, CALL | {"content": "One moment.", "thinking": "Hm."}, RESULT]

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
EXTRA = {"a": 1, "b": [True, None, 1.5], "c": {"d": "\u00e9<&>'\""}}

CASES = [
    ("chatml", CHATML, {}, [SHORT, TALK, LONG]),
    ("chatml", CHATML, {"add_generation_prompt": True}, [SHORT, TALK]),
    ("headers", HEADERS, LLAMA3, [SHORT, TALK, []]),
    ("headers", HEADERS, LLAMA3 | {"add_generation_prompt": True}, [TALK, [USER, RESULT, {"role": "tool", "content": EXTRA}]]),
    ("headers", HEADERS, LLAMA3 | {"date_string": "1 Jan 2020"}, [SHORT, [USER, {"role": "critic", "content": "no"}]]),
    ("instruct", INSTRUCT, TOKENS, [SHORT, TALK, LONG, DISORDER]),
    ("thinking", THINKING, {}, [SHORT, TALK, LONG, TOOLS_TALK, THINKING_TALK, REASONED]),
    ("thinking", THINKING, {"add_generation_prompt": True, "tools": [TOOL, TOOL]}, [SHORT, TOOLS_TALK]),
    ("thinking", THINKING, {"add_generation_prompt": True, "enable_thinking": False}, [TALK]),
    ("thinking", THINKING, {"add_generation_prompt": True, "enable_thinking": True}, [THINKING_TALK]),
    ("system-in-turn", SYSTEM_IN_TURN, TOKENS, [SHORT, TALK, LONG, DISORDER]),
    ("odds-and-ends", ODDS_AND_ENDS, {"extra": EXTRA}, [TALK, PARTS, LONG + TALK]),
    ("odds-and-ends", ODDS_AND_ENDS, {}, [SHORT]),
    ("turns", TURNS, TOKENS, [SHORT, TALK, [SYSTEM, SYSTEM, USER, ANSWER], DISORDER]),
    ("turns", TURNS, TOKENS | {"add_generation_prompt": True}, [TALK, [SYSTEM]]),
    ("silent-turns", SILENT_TURNS, TOKENS, [SHORT, TALK]),
    ("channels", CHANNELS, TOKENS, [SHORT, TALK, [QUESTION, CHANNELLED, USER]]),
    ("channels", CHANNELS, TOKENS | {"add_generation_prompt": True}, [[SYSTEM, QUESTION, CHANNELLED, USER]]),
    ("channels", CHANNELS, TOKENS | {"add_generation_prompt": True, "enable_thinking": True}, [SHORT, TALK]),
    ("harmony", HARMONY, {"add_generation_prompt": True}, [SHORT, TALK, LONG, CALLED, PREAMBLE, THOUGHT_AND_SAID, [USER, RESULT]]),
    ("harmony", HARMONY, {"add_generation_prompt": True, "reasoning_effort": "high", "tools": [TYPED, NOW_TOOL]}, [TALK, [*CALLED, ANSWER, USER]]),
    ("harmony", HARMONY, {"model_identity": "You are someone."}, [TALK, [USER, ANSWER | {"thinking": "Hm."}], [USER, ANSWER | {"content": "<|channel|>final<|message|>Hi"}]]),
]
# Templates without a place for system messages: their text goes before the first message of the user.
FOLDED = ("turns", "silent-turns", "odds-and-ends")


def folded(messages: list[dict]) -> list[dict]:
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    system = [message["content"].strip() for message in leading]
    rest = messages[len(leading) :] or [{"role": "user", "content": ""}]
    text = "\n\n".join([*system, rest[0]["content"]] if rest[0]["content"] else system)
    return [rest[0] | {"content": text}, *rest[1:]]


def render(template: str, variables: dict) -> dict:
    compiled = _compile_jinja_template(template)
    try:
        return {"rendered": compiled.render(**variables, strftime_now=NOW.strftime)}
    except jinja2.TemplateError as error:
        return {"error": error.message}


def make(out: pathlib.Path) -> None:
    folder = out / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    templates, cases = {}, []
    for name, template, more, message_lists in CASES:
        templates[name] = template
        for messages in message_lists:
            variables = {"messages": messages, "add_generation_prompt": False} | more
            given = variables | {"messages": folded(messages)} if name in FOLDED else variables
            cases.append({"name": name, "variables": variables} | render(template, given))
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    head = json.dumps({"now": NOW.isoformat(), "templates": templates}, ensure_ascii=False)[:-1]
    (folder / "templates.json").write_text(f'{head}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
