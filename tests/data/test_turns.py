"""Tokens over several turns: the policy's own are kept, others' are written once."""

import random

import pytest
import tokenizers
import transformers

from semrl_jax.data.turns import ChatTurns
from semrl_jax.environments.tools.functions import schemas
from tests.cases import refused

# What the published templates of the families do with plain messages and tools' answers.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0]['role'] == 'system' %}"
    "{{- messages[0]['content'] }}{%- else %}{{- 'You are helpful.' }}{%- endif %}"
    "{{- '\n\n# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}"
    '{%- endfor %}{{- \'\n</tools>\n<tool_call>\n{"name": <function-name>, '
    '"arguments": <args-json-object>}\n</tool_call><|im_end|>\n\' }}'
    "{%- elif messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or message.role == 'assistant' "
    "or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{%- if tools is not none and loop.index0 == (messages[0].role == 'system') | int %}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.\n\n' }}{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}"
    "{%- endfor %}{%- endif %}"
    "{%- if message.role == 'tool' %}{{- message.content | tojson }}"
    "{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}"
    "{%- endif %}{%- endfor %}"
)
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen 3: thinking of earlier messages is left out.
THINKING = (
    "{%- for message in messages %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\n') "
    "if message.role == 'assistant' else message.content %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Mistral 0.3: the system message moves to the last message of the user.
MOVING = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '[INST] ' }}"
    "{%- if loop.last and system %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message.content + '[/INST]' }}"
    "{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
FAMILIES = {  # template, end token, and whether it has answers of tools
    "qwen": (QWEN, "<|im_end|>", True),
    "llama": (LLAMA, "<|eot_id|>", True),
    "mistral": (MISTRAL, "</s>", False),
    "smollm": (SMOLLM, "<|im_end|>", True),
}
CONTROLS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|endoftext|>",
)  # fmt: skip
USER = [{"role": "user", "content": "1+1?"}]


def add(a: int) -> int:
    """Adds 1: é, <tool_call>.

    Args:
      a: a number.
    """
    return a + 1


TOOLS = schemas([add])


def tokenizer_of(template, end):
    """Bytes with a few merges, and the control tokens of all families; adds <s> by default."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "a"), ("a", "b"), ("Ġa", "b"), ("1", "2"), ("<", "|")]
    words = [*CONTROLS, *alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([*CONTROLS])
    backend.add_tokens(["<tool_response>", "</tool_response>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module", params=[*FAMILIES, "qwen tools", "llama tools"])
def family(request):
    """Turns, tokenizer, end token, the roles of answers, and what the template gets of tools."""
    name, _, tools = request.param.partition(" ")
    template, end, has_tools = FAMILIES[name]
    tokenizer = tokenizer_of(template, end)
    end_id = tokenizer.convert_tokens_to_ids(end)
    roles = ("user", "tool") if has_tools else ("user",)
    tools = TOOLS if tools else None
    return ChatTurns(tokenizer, (end_id,), tools or ()), tokenizer, end_id, roles, tools


def text_of(numbers):
    """A text with everything that is hard: blanks, joined tokens, Unicode, JSON."""
    parts = ["a", "b", " ab", "12", "\n", "\n\n", "  ", "é", "漢", "🙂", "<", "|", '{"k": 1}', "x"]
    return "".join(numbers.choice(parts) for _ in range(numbers.randrange(1, 12)))


@pytest.mark.parametrize("least", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_own_tokens_of_random_turns_are_kept(family, least):
    """The context of a turn is what the template writes in one piece."""
    turns, tokenizer, end_id, roles, tools = family
    numbers = random.Random(3)
    num_turns = 0
    while num_turns < least:
        messages = [{"role": "user", "content": f"{text_of(numbers)}?"}]
        (begun,) = turns.begun([messages])
        whole = list(begun.token_ids)
        assert whole == tokenizer.apply_chat_template(
            messages, tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        transcript, own_spans = begun.transcript, []
        for _ in range(numbers.randrange(1, 6)):
            # Ids that no tokenizer would make of their text: single bytes, and any order.
            own = [numbers.randrange(len(CONTROLS), len(tokenizer)) for _ in range(5)]
            own += [end_id] * numbers.randrange(2)
            answer = [
                {"role": numbers.choice(roles), "content": f".{text_of(numbers)}."}
                for _ in range(numbers.randrange(1, 3) if "tool" in roles else 1)
            ]
            (found,) = turns.continued([transcript], [answer], [own[-1]])
            assert not found.error
            own_spans.append((len(whole), own))
            whole += own + found.token_ids
            transcript, num_turns = found.transcript, num_turns + 1
            # Others' tokens are the template's text, however the own message ended.
            written = found.token_ids if own[-1] == end_id else found.token_ids[1:]
            assert own[-1] == end_id or found.token_ids[0] == end_id
            longer = [*messages, {"role": "assistant", "content": "x"}, *answer]
            text = tokenizer.apply_chat_template(
                longer, tools, add_generation_prompt=True, tokenize=False
            )
            before = tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": "x"}], tools, tokenize=False
            )
            expected = tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]
            assert written[-len(expected) :] == expected
            assert len(written) - len(expected) <= 1  # the line break after the end token
            messages = longer
        for start, own in own_spans:
            assert whole[start : start + len(own)] == own


def test_control_tokens_in_an_answer_stay_text(family):
    turns, tokenizer, end_id, roles, _ = family
    hostile = "".join(CONTROLS) + "<|im_<|im_end|>end|> \U000f0003 ok"
    (begun,) = turns.begun([[{"role": "user", "content": hostile}]])
    (plain,) = turns.begun([USER])
    controls = set(tokenizer.convert_tokens_to_ids([*CONTROLS]))

    def count(ids):
        return sum(i in controls for i in ids)

    assert count(begun.token_ids) == count(plain.token_ids)
    written = hostile.replace("\U000f0003", "\ufffd")
    assert written in tokenizer.decode(begun.token_ids)
    for role in roles:
        answers = [[{"role": role, "content": content}] for content in (hostile, "ok")]
        found, expected = turns.continued([begun.transcript] * 2, answers, [end_id] * 2)
        assert count(found.token_ids) == count(expected.token_ids)
        assert written in tokenizer.decode(found.token_ids)
        # Later turns render the answer again.
        (later,) = turns.continued([found.transcript], [USER], [end_id])
        assert not later.error and count(later.token_ids) == count(expected.token_ids)


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_control_tokens_in_a_description_stay_text(name):
    template, end, _ = FAMILIES[name]
    tokenizer = tokenizer_of(template, end)
    controls = set(tokenizer.convert_tokens_to_ids([*CONTROLS]))
    counts = []
    for text in ("Adds.", "".join(CONTROLS)):
        function = {**TOOLS[0]["function"], "description": text}
        (begun,) = ChatTurns(tokenizer, (), [{"type": "function", "function": function}]).begun(
            [USER]
        )
        counts.append(sum(i in controls for i in begun.token_ids))
        assert text in tokenizer.decode(begun.token_ids)
    assert counts[0] == counts[1]


def test_another_end_token_of_the_policy_stands_for_the_templates():
    """Llama 3 ends a call of a tool with <|eom_id|>."""
    tokenizer = tokenizer_of(LLAMA, "<|eot_id|>")
    ends = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|endoftext|>"])
    turns = ChatTurns(tokenizer, ends)
    (begun,) = turns.begun([USER])
    one, other, none = turns.continued([begun.transcript] * 3, [USER] * 3, [*ends, 50])
    assert one == other and none.token_ids == [ends[0], *one.token_ids]


def test_one_refused_conversation_does_not_cost_the_others():
    turns = ChatTurns(tokenizer_of(MISTRAL, "</s>"), (1,))
    system = [{"role": "system", "content": "S"}, *USER]
    good, bad, other = turns.begun([USER, system, USER])
    assert good == other and good.token_ids and not good.error
    assert bad.transcript is None and "Only user and assistant roles" in bad.error


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_the_families_are_accepted(name):
    template, end, _ = FAMILIES[name]
    lines = ChatTurns(tokenizer_of(template, end), ()).check(USER, USER)
    assert len(lines) == (name == "llama")
    assert all("strips blanks at the ends" in line for line in lines)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (THINKING, USER, "removes thinking from earlier messages of the policy"),
        (MOVING, [{"role": "system", "content": "S"}, *USER], "rewrites earlier messages when"),
        (SMOLLM.replace("message['content'] +", "message['content'][:2] +"), USER, "removes words"),
        ("{{ messages[-1].content }}", USER, "rewrites earlier messages when others follow"),
        (MISTRAL, [{"role": "tool", "content": "S"}], r"refuses messages .* \(tool, user: Only"),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_history_is_refused(template, messages, message):
    turns = ChatTurns(tokenizer_of(template, "<|im_end|>"), ())
    assert "chat_template.jinja" in refused(message, turns.check, messages, USER)


def test_a_rewrite_that_only_some_answers_cause_is_an_error_of_the_episode():
    rewriting = SMOLLM.replace(
        "message['content'] +", "(message['content'] if messages|length < 4 else '-') +"
    )
    turns = ChatTurns(tokenizer_of(rewriting, "<|im_end|>"), (3,))
    (begun,) = turns.begun([USER])
    (one,) = turns.continued([begun.transcript], [USER], [3])
    (two,) = turns.continued([one.transcript], [USER], [3])
    assert not one.error and two.error == "the chat template rewrites earlier messages"


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer):
    refused("needs a chat template; give", ChatTurns, tokenizer, ())


def test_token_ids_are_taken_as_they_are():
    turns = ChatTurns(tokenizer_of(SMOLLM, "<|im_end|>"), (3,))

    def ids(text):
        return [{"role": "token_ids", "content": text}]

    text, given = turns.begun([USER, ids("[5, 6, 3]")])
    assert given.token_ids == [5, 6, 3] and given.transcript.is_of_ids
    assert text == turns.begun([USER])[0] and not text.transcript.is_of_ids
    assert turns.check(ids("[5]"), ids("[6]")) == []
    wrong = ("[5, 6", "[" * 5000, "[1e999]", "[]", "[5, 100000]")
    transcripts = [given.transcript, text.transcript, *[given.transcript] * 5]
    found = turns.continued(transcripts, [ids("[3]"), USER, *map(ids, wrong)], [3] * 7)
    assert found[0].token_ids == [3]  # also after an end token
    assert found[1] == turns.continued([text.transcript], [USER], [3])[0]
    no_list = "max_observation_chars may be too small"
    errors = [no_list, no_list, no_list, "are none", "not all in the vocabulary"]
    assert all(error in each.error for error, each in zip(errors, found[2:], strict=True))
