"""Calls in responses, the choice of a form, and messages with answers."""

import json
import time

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.environments.tools.formats import MAX_CALLS, Toolbox, choose_format
from semrl_jax.environments.tools.functions import Answer, Call, call, schemas
from tests.cases import refused

# Each has what its family's own template has: the loop over tools, and the words around a call.
QWEN = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}"""
LLAMA = """{% if tools is not none %}Respond with {"name": function, "parameters": values}.
{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}
{% if m.role == "tool" or m.role == "ipython" %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"""
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MISTRAL = "{%- if tools is not none %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]"
QWEN_CODER = QWEN.replace('{"name"', "<function=")


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: first.
      b: second.
    """
    return a + b


def hermes(response):
    return choose_format(None, "hermes").parse(response)


def llama3(response):
    return choose_format(None, "llama3").parse(response)


def blocks(response):
    return choose_format(None, "json").parse(response)


ADD = Call("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("parse", "response"),
    [
        (hermes, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (hermes, 'I add.\n<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call> Done.'),
        (hermes, '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}<|im_end|>\n'),
        (
            hermes,
            '<think><tool_call>{"name":"no"}</tool_call></think>'
            '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
        ),
        (llama3, '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>'),
        (llama3, ' {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}'),
        (llama3, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>'),
        (
            llama3,
            '{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}',
        ),
        (llama3, '{"name": "add", "parameters": {"a": 1, "b": 2}} That is it.'),
        (blocks, 'So:\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\nWait.'),
        (blocks, '```tool_call\n{"name": "add",\n "parameters": {"a": 1, "b": 2}}'),
    ],
)
def test_a_call_is_found(parse, response):
    assert parse(response) == [ADD]


@pytest.mark.parametrize(
    ("parse", "response"),
    [
        (hermes, '<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>'),
        (llama3, '{"name":"f"}; {"name":"g"}'),
        (llama3, '<|python_tag|>{"name":"f"}\n{"name":"g"}'),
        (blocks, '```json\n{"name":"f"}\n```\nand\n```json\n{"name":"g"}\n```'),
        (blocks, '```json\n[{"name":"f"}, {"name":"g"}]\n```'),
    ],
)
def test_several_calls_are_found_in_order(parse, response):
    assert parse(response) == [Call("f", {}), Call("g", {})]


@pytest.mark.parametrize(
    ("parse", "response"),
    [
        (hermes, "The answer is 3.<|im_end|>"),
        (hermes, '{"name": "add", "arguments": {}}'),
        (hermes, '<think>I may write <tool_call>{"name": "add"}</tool_call>'),
        (llama3, 'The answer is {"name": "add"}.'),
        (llama3, '{"answer": 3}'),
        (llama3, "{3}"),
        (blocks, '```json\n{"answer": 3}\n```'),
        (blocks, "```json\n{1, 2}\n```"),
        (blocks, '```python\n{"name": "add"}\n```'),
        (blocks, '{"name": "add", "arguments": {}}'),
    ],
)
def test_a_response_without_a_call_has_none(parse, response):
    assert parse(response) == []


def test_code_after_the_python_tag_is_a_call_of_python():
    assert llama3("<|python_tag|>print(1)\n<|eom_id|>") == [Call("python", {"code": "print(1)"})]


def test_a_mark_inside_a_text_of_json_is_text():
    arguments = {"text": "</tool_call><tool_call>```\n"}
    written = json.dumps({"name": "say", "arguments": arguments})
    assert hermes(f"<tool_call>{written}</tool_call>") == [Call("say", arguments)]


INVALID = "the call cannot be read: invalid JSON: "


@pytest.mark.parametrize(
    ("parse", "response", "error"),
    [
        (hermes, "<tool_call>", f"{INVALID}Expecting value at character 1"),
        (
            hermes,
            "<tool_call>\n{'name': 'add'}</tool_call>",
            f"{INVALID}Expecting property name enclosed in double quotes at character 2",
        ),
        (hermes, '<tool_call>{"name": "add", "argu', f"{INVALID}Unterminated string"),
        (hermes, '<tool_call>{"name": "a"} or {}</tool_call>', "there is text after the JSON"),
        (hermes, '<tool_call>["add"]</tool_call>', "a call must be a JSON object with a text"),
        (hermes, '<tool_call>{"name": 3}</tool_call>', "a call must be a JSON object with a text"),
        (hermes, '<tool_call>{"name": "add", "arguments": NaN}', f"{INVALID}NaN"),
        (hermes, f"<tool_call>{'[' * 100_000}", f"{INVALID}nested too deep"),
        (hermes, f"<tool_call>{'9' * 5000}", "the call cannot be read: "),
        (llama3, '{"name": "add", "parameters": [1, 2]}', '"parameters" must be a JSON object'),
        (llama3, '{"name": "add", "parameters": {"a": 1', f"{INVALID}Expecting ',' delimiter"),
        (llama3, '<|python_tag|>{"a": 1}', "a call must be a JSON object with a text"),
        (
            blocks,
            '```json\n{"name": "add", "arguments": {"a": }}\n```',
            f"{INVALID}Expecting value",
        ),
        (blocks, '```json\n{"name": "add"}}\n```', "there is text after the JSON object"),
        (blocks, '```json\n{"name": "add", "arguments": "x"}\n```', '"arguments" must be a JSON'),
    ],
)
def test_a_malformed_call_is_answered(parse, response, error):
    [found] = parse(response)
    assert error in found.error
    answer = call([add], found)
    assert answer.error == "malformed"
    assert answer.text.startswith("error: the call cannot be read: ")


def test_a_malformed_call_does_not_hide_the_next():
    found = hermes('<tool_call>{</tool_call><tool_call>{"name": "f"}</tool_call>')
    assert [bool(each.error) for each in found] == [True, False]


def test_calls_beyond_the_limit_are_one_error():
    found = hermes('<tool_call>{"name": "f"}</tool_call>' * 100_000)
    assert len(found) == MAX_CALLS + 1
    assert [each for each in found if each.error] == [found[-1]]


@pytest.mark.parametrize(
    "part", ["<tool_call>", "\n", "```json\n", "<|im_end|>\n", "{", ";", "<think>", '{"name": "f"}']
)
def test_time_is_linear(part):
    for parse in (hermes, llama3, blocks):
        start = time.process_time()
        parse(part * 200_000)
        assert time.process_time() - start < 2.0  # a quadratic form takes a minute


@given(st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": {}', "}", "[", "\n", "```json",
     "```", "<|python_tag|>", "<think>", "</think>", ";", " x "]
)).map("".join))  # fmt: skip
def test_no_response_makes_parsing_fail(response):
    for parse in (hermes, llama3, blocks):
        for found in parse(response):
            assert found.error or found.name in ("f", "python")


@pytest.mark.parametrize(
    ("template", "name", "in_template"),
    [
        (QWEN, "hermes", True),
        (LLAMA, "llama3", True),
        (PLAIN, "json", False),
        (None, "json", False),
    ],
)
def test_the_form_is_that_of_the_template(template, name, in_template):
    found = choose_format(template)
    assert (found.name, found.in_template) == (name, in_template)


@pytest.mark.parametrize("template", [MISTRAL, QWEN_CODER])
def test_a_template_with_an_unknown_form_needs_a_choice(template):
    refused("name one of hermes, llama3, json", choose_format, template)
    assert not choose_format(template, "json").in_template


def test_an_unknown_form_is_refused():
    refused(r"environment.tool_format='xml' must be one of auto", choose_format, QWEN, "xml")


def test_answers_in_the_template_are_messages_of_the_tool():
    form = choose_format(QWEN)
    assert form.instructions(schemas([add])) == ""
    assert form.messages([Answer("3"), Answer("no", "exception")]) == [
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "no"},
    ]


def test_answers_of_another_form_are_one_message_of_the_user():
    for form in (choose_format(PLAIN), choose_format(LLAMA, "hermes")):
        [message] = form.messages([Answer("3"), Answer("4")])
        assert message == {
            "role": "user",
            "content": "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>",
        }
        assert form.messages([]) == []


def rendered(template, messages, tools=None):
    return jinja2.Template(template).render(messages=messages, tools=tools)


def test_a_users_message_reads_as_the_message_of_a_tool_of_qwen():
    native, other = choose_format(QWEN), choose_format(QWEN, "json")
    assert rendered(QWEN, native.messages([Answer("3")])) == rendered(
        QWEN, other.messages([Answer("3")])
    )


def test_a_call_that_a_template_writes_is_parsed():
    called = {"role": "assistant", "content": "", "tool_calls": [ADD._asdict()]}
    text = rendered(QWEN, [called], tools=schemas([add]))
    assert hermes(text.partition("assistant\n")[2]) == [ADD]


@pytest.mark.parametrize("form", ["hermes", "llama3", "json"])
def test_tools_are_told_and_called(form):
    tools = Toolbox([add])
    tools.form = choose_format(None, form)
    system, user = tools.told([{"role": "user", "content": "What is 1 + 2?"}])
    assert json.dumps(schemas([add])[0]) in system["content"]
    written = tools.form.example.replace("NAME", "add")
    assert written.replace("add", "NAME") in system["content"]
    assert (system["role"], user["content"]) == ("system", "What is 1 + 2?")
    called = written.replace('{"ARGUMENT": VALUE}', '{"a": 1, "b": 2}')
    assert tools.answers(called, 1000) == [Answer("3")]
    [malformed] = tools.answers(written, 1000)
    assert malformed.error == "malformed" and "invalid JSON" in malformed.text
    assert tools.answers("3", 1000) == []


def test_instructions_follow_the_system_message():
    tools = Toolbox([add])
    system, user = tools.told(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    )
    assert (
        system["content"].startswith("S\n\nYou can call these tools:\n") and user["content"] == "U"
    )
    tools.form = choose_format(QWEN)
    assert tools.told([user]) == [user]
    assert Toolbox([]).told([user]) == [user] and Toolbox([]).answers(written_add(), 1000) == []


def test_answers_of_one_response_share_the_limit():
    def repeat(count: int) -> str:
        """Writes a letter.

        Args:
          count: how often.
        """
        return "z" * count

    tools = Toolbox([repeat])
    call_of = '```json\n{"name": "repeat", "arguments": {"count": 5000}}\n```\n'
    one, two = tools.answers(call_of, 1000), tools.answers(2 * call_of, 1000)
    assert [answer.text.count("z") for answer in one] == [920]
    assert [answer.text.count("z") for answer in two] == [420] * 2
    assert len(tools.form.messages(two)[0]["content"]) <= 1000


def written_add():
    return '```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```'
