"""Conversations: which tokens are learned, what is left out, what is refused."""

import inspect
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax import data
from semrl_jax.support.errors import UserError
from tests.cases import refused

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Without a generation prompt, as Mistral's: a response follows the mark of the user's message.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[A]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}<|im_end|>"
    "{% else %}{{ raise_exception('no system message, please') }}{% endif %}{% endfor %}"
)
# Qwen3's template does the same: only the last response is written with its thoughts.
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}",
)

SYSTEM = {"role": "system", "content": "Add."}
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "It is 2."}
AGAIN = {"role": "user", "content": "Caf\u00e9 \U0001f600?"}
OTHER = {"role": "assistant", "content": "\u00e9\U0001f600 sure"}
SURE = "\u00e9\U0001f600 sure<|im_end|>"
TURNS = [SYSTEM, USER, ANSWER, AGAIN, OTHER]


@pytest.fixture(scope="module")
def chat_tokenizer():
    return data.train_tokenizer(["It is 2. Add. sure"] * 4, 290)


@pytest.fixture
def tokenizer(chat_tokenizer):
    chat_tokenizer.chat_template = CHATML
    return chat_tokenizer


def load_file(file, tokenizer, **options):
    of_reader = inspect.signature(data.conversation_reader).parameters.keys() & options
    reader = data.conversation_reader(tokenizer, **{name: options.pop(name) for name in of_reader})
    return data.load_conversations([file] if file else [], tokenizer, reader, **options)


@pytest.fixture
def load(tokenizer, tmp_path):
    def load(*rows, name="chats.jsonl", **options):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_file(file, tokenizer, **options)

    return load


def learned(tokenizer, conversation):
    """The text of each run of tokens that is learned."""
    mask = conversation.loss_mask.astype(np.int8)
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(conversation.token_ids[slice(*edge)]) for edge in edges]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (CHATML, TURNS, ["It is 2.<|im_end|>", SURE]),
        (MARKED, TURNS, ["It is 2.<|im_end|>", SURE]),
        (BRACKETS, TURNS[1:], [" It is 2.<|im_end|>", " " + SURE]),
        (FORGETFUL, TURNS[:3], ["<think></think>It is 2.<|im_end|>"]),
        (CHATML, [SYSTEM, ANSWER, AGAIN, OTHER], ["It is 2.<|im_end|>", SURE]),
        (CHATML, [{**SYSTEM, "content": ""}, USER, ANSWER, AGAIN], ["It is 2.<|im_end|>"]),
    ],
    ids=["prefixes", "marks", "brackets", "last", "no user first", "user last"],
)
def test_assistant_tokens_and_their_ends_are_learned(tokenizer, load, template, turns, expected):
    tokenizer.chat_template = template
    (found,) = load({"messages": turns}).conversations
    assert learned(tokenizer, found) == expected
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    # The whole text, tokenised as a whole, up to the last token that is learned.
    whole = tokenizer(text)["input_ids"]
    assert found.token_ids.tolist() == whole[: len(found)]
    assert found.loss_mask[-1] and found.token_ids.dtype == np.int32
    assert tokenizer.decode(whole[len(found) :]).count("<|im_end|>") == (turns[-1] == AGAIN)


def test_a_token_across_the_border_is_not_learned(tokenizer, load):
    """A model samples after the prompt, so it never produces a token that begins in the prompt."""
    tokenizer.add_tokens(["\n\n!"])
    (found,) = load({"messages": [USER, {"role": "assistant", "content": "\n!2"}]}).conversations
    assert "\n\n!" in tokenizer.convert_ids_to_tokens(found.token_ids)
    assert learned(tokenizer, found) == ["2<|im_end|>"]


def test_a_completion_follows_the_prompt_of_the_template(tokenizer, load):
    row = {"question": "1+1?", "answer": " It is 2. "}
    fields = {"prompt_fields": ("question",), "completion_field": "answer"}
    options = {"row_format": "prompt_completion", **fields}
    (found,) = load(row, template="direct", **options).conversations
    assert learned(tokenizer, found) == [" It is 2. <|im_end|>"]
    assert tokenizer.decode(found.token_ids) == "Question: 1+1?\nAnswer:  It is 2. <|im_end|>"
    (found,) = load(row, template="chat", system_prompt="Add.", **options).conversations
    prompt = tokenizer.apply_chat_template(
        [SYSTEM, USER], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(found.token_ids) == f"{prompt} It is 2. <|im_end|>"
    assert learned(tokenizer, found) == [" It is 2. <|im_end|>"]
    row["answer"] = "2<|im_end|>"  # the end is there already
    (found,) = load(row, **options).conversations
    assert tokenizer.decode(found.token_ids) == "1+1?2<|im_end|>"
    for wrong in (None, "", [ANSWER]):
        refused(r"line 1: field 'answer' must be text", load, row | {"answer": wrong}, **options)


def test_parquet_rows_may_hold_empty_fields(tokenizer, tmp_path):
    file = tmp_path / "chats.parquet"
    turns = [USER | {"tool_calls": None, "name": "x"}, ANSWER | {"tool_calls": None, "name": None}]
    pq.write_table(pa.table({"chat": [turns], "id": [7]}), file)
    found = load_file(file, tokenizer, messages_field="chat")
    assert [learned(tokenizer, one) for one in found.conversations] == [["It is 2.<|im_end|>"]]
    refused(r"chats.parquet: field 'messages' is missing", load_file, file, tokenizer)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, r"must be a list of messages, not None"),
        ([], r"must be a list of messages, not \[\]"),
        (["hello"], r"message 1 of 'messages' must have a role and a content"),
        ([USER, {"role": "bot", "content": "2"}], r"message 2 .* has role='bot'.*must be one of"),
        ([USER, {"role": "assistant", "content": " "}], r"message 2 .*, of the assistant, must"),
        ([{"role": "user", "content": [{"text": "x"}]}, ANSWER], r"message 1 .*must have text as"),
        ([USER, SYSTEM, ANSWER], r"message 2 .* is the system's, which must be the first"),
        ([ANSWER, USER, OTHER], r"message 1 .* is the assistant's; put the system's or the user's"),
        ([USER, ANSWER, OTHER], r"message 3 .* is the assistant's, as the one before"),
        ([USER, AGAIN, ANSWER], r"message 2 .* is the user's, as the one before; .*join the two"),
        ([SYSTEM, USER], r"has no assistant message, so nothing can be learned"),
        ([USER, ANSWER | {"weight": 0}], r"message 2 .* has 'weight', which is not supported"),
        ([USER, ANSWER | {"content": "\ud800"}], r"lone surrogate at character 0"),
    ],
)
def test_a_bad_row_is_named(load, messages, message):
    text = refused(message, load, {"messages": [USER, ANSWER]}, {"messages": messages})
    assert "chats.jsonl, line 2: " in text


def test_bad_rows_can_be_skipped(load):
    lines = []
    bad = {"prompt": "1", "completion": "2"}
    found = load(bad, {"messages": TURNS}, {}, skip_bad_rows=True, report=lines.append)
    assert len(found) == 1
    assert "line 1: field 'messages' is missing; rows with a prompt and a compl" in lines[0]
    assert lines[-1] == "2 of 3 rows are bad and left out."
    refused(r"all 1 rows are bad; the first: .*line 1", load, bad, skip_bad_rows=True)


def test_rows_of_messages_read_as_completions_name_the_other_format(load):
    with pytest.raises(UserError, match=r"'completion' is missing; .* sft\.row_format='messages'"):
        load({"messages": TURNS}, row_format="prompt_completion")


def test_long_conversations(load):
    short, long = {"messages": [USER, ANSWER]}, {"messages": TURNS}
    sizes = [len(one) for one in load(short, long).conversations]
    lines = []
    options = {"max_tokens": sizes[1] - 2, "report": lines.append}
    found = load(short, long, **options)
    assert len(found) == 1
    assert "1 of 2 conversations have more than" in lines[0] and "1 left out" in lines[0]
    found = load(short, long, too_long="truncate", **options)
    assert len(found) == 2
    cut = found.conversations[1]
    assert len(cut) == sizes[1] - 2 and cut.loss_mask[-1]
    assert "1 are truncated and 0 left out" in lines[-1]
    with pytest.raises(UserError, match=rf"line 2: .* of {sizes[1]} tokens exceeds sft.max"):
        load(short, long, too_long="refuse", **options)
    # Nothing to learn is left of the second one's first tokens.
    load(short, long, too_long="truncate", max_tokens=sizes[0], report=lines.append)
    assert lines[-1].startswith("1 of 2 conversations have more than")
    with pytest.raises(UserError, match=r"none of the 2 conversations .* shortest has \d+; raise"):
        load(short, long, max_tokens=5, too_long="truncate")


def test_files_and_templates_that_cannot_be_used(tokenizer, load, tmp_path):
    refused(r"'/nowhere.jsonl' does not exist", load_file, "/nowhere.jsonl", tokenizer)
    refused(r"sft.files is empty; name a", load_file, "", tokenizer)
    refused(r"chats.jsonl: the file has no rows", load)
    tokenizer.chat_template = BRACKETS
    refused(
        r"line 1: .*refuses messages with the roles system, .*no system", load, {"messages": TURNS}
    )
    tokenizer.chat_template = FORGETFUL
    refused(r"line 1: the chat template rewrites message 3 or those bef", load, {"messages": TURNS})
    tokenizer.chat_template = MARKED.replace("'assistant'", "'user'")
    refused(r"line 1: the chat template marks 2 texts of", load, {"messages": TURNS[1:4]})
    for broken in ("{{ raise_exception('never') }}", "{% if %}"):
        tokenizer.chat_template = broken
        refused(r"cannot be used for training: the chat template ref", load, {"messages": TURNS})
    tokenizer.chat_template = None
    refused(r"needs a chat template; name a file", load, {"messages": TURNS})
    file = tmp_path / "chat.jinja"
    with pytest.raises(UserError, match=r"^sft.chat_template='.*' cannot be read"):
        data.set_chat_template(tokenizer, str(file), "sft.chat_template")
    file.write_text(CHATML)
    data.set_chat_template(tokenizer, str(file), "sft.chat_template")
    assert len(load({"messages": TURNS})) == 1


def test_a_conversation_without_the_models_end_token_is_reported(tokenizer, load):
    lines = []
    ends = (tokenizer.eos_token_id,)
    load({"messages": TURNS}, end_token_ids=ends, report=lines.append)
    assert not lines
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "###")
    (found,) = load({"messages": TURNS}, end_token_ids=ends, report=lines.append).conversations
    assert "1 of 1 conversations do not end with an end token of the model (<|im_end|>)" in lines[0]
    assert learned(tokenizer, found)[0] == "It is 2.###\n"  # no special token: its text is whole


def test_the_hash_tells_what_is_learned(tokenizer, load):
    found = load({"messages": TURNS})
    assert found.hash == load({"messages": TURNS}).hash
    tokenizer.chat_template = MARKED.replace("<|im_end|>{% endgen", "{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    other = load({"messages": TURNS})
    assert len(other.conversations[0]) == len(found.conversations[0]) - 1
    assert other.hash != found.hash
