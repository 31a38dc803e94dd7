"""The text of every template, and chat templates against the tokenisation of transformers."""

import pathlib

import pytest
import tokenizers
import transformers

from semrl_jax.data import load_prompts
from semrl_jax.data.templates import TEMPLATES, prompt_renderer
from semrl_jax.errors import UserError

QUESTION = "What is {1}+{input}?"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "What is {1}+{input}?"),
        ("abel", "Question:\nWhat is {1}+{input}?\nAnswer:\nLet's think step by step.\n"),
        (
            "qwen-boxed",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            "What is {1}+{input}?\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen25-math-cot",
            "<|im_start|>system\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.<|im_end|>\n<|im_start|>user\nWhat is {1}+{input}?<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "mathstral",
            "What is {1}+{input}?\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.",
        ),
        ("direct", "Question: What is {1}+{input}?\nAnswer: "),
        ("cot", "Question: What is {1}+{input}?\nAnswer: "),
        (
            "deepseek-math",
            "User: What is {1}+{input}?\nPlease reason step by step, and put your final answer "
            "within \\boxed{}.\n\nAssistant:",
        ),
        ("mistral", "[INST] What is {1}+{input}?[/INST]"),
        ("numina", "### Problem: What is {1}+{input}?\n### Solution:"),
        ("Problem: {input}\\boxed{}", "Problem: What is {1}+{input}?\\boxed{}"),
    ],
)
def test_question_is_inserted_as_it_is(tokenizer, name, text):
    assert prompt_renderer(name, tokenizer)([QUESTION, "1"])[0] == text


def test_every_template_is_spelled_out_above():
    [parameters] = test_question_is_inserted_as_it_is.pytestmark
    assert set(TEMPLATES) == {name for name, _ in parameters.args[1]} & set(TEMPLATES)


def test_page_names_every_template():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert all(f"`{name}`" in page for name in (*TEMPLATES, "chat"))


def test_a_file_is_a_template(tokenizer, chat_tokenizer, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Frage: {input}\n\\boxed{}\n\n", encoding="utf-8")
    text = f"Frage: {QUESTION}\n\\boxed{{}}\n"  # without the last line break
    assert prompt_renderer(str(file), tokenizer)([QUESTION]) == [text]
    chat_tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    assert prompt_renderer(f"chat:{file}", chat_tokenizer)([QUESTION]) == [f"{text}!"]
    for content, message in ((b"Frage:", "must contain {input}"), (b"\xff", "cannot be read: ")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"mine.txt'.* {message}"):
            prompt_renderer(str(file), tokenizer)


def test_unknown_name_is_the_users_error(tokenizer):
    with pytest.raises(UserError, match=r"data\.template='abell' is unknown; choose from \['abel'"):
        prompt_renderer("abell", tokenizer)


LLAMA = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]"
    "['content']|trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}"
    "{%- endif %}{{- '<|start|>system<|end|>\n\nToday Date: ' + date }}{{- system + '<|eot|>' }}"
    "{%- for message in messages %}{{- '<|start|>' + message['role'] + '<|end|>\n\n' + "
    "message['content'] | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"
)
LLAMA_31 = "{%- set date = '26 Jul 2024' %}" + LLAMA
LLAMA_32 = "{%- set date = strftime_now('%d %b %Y') %}" + LLAMA
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|start|>system\n' + messages[0]['content'] + "
    "'<|eot|>\n' }}{%- else %}{{- '<|start|>system\nYou are helpful.<|eot|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|start|>user\n' + "
    "message.content + '<|eot|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant!') }}{% endif %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A tokenizer of bytes and four special tokens, which adds <s> before any text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "<|start|>", "<|end|>", "<|eot|>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({s: i for i, s in enumerate([*special, *alphabet])}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|eot|>", pad_token="<|end|>"
    )


@pytest.fixture
def question_file(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "  1+{input}=? ä", "answer": 2}\n' * 2)
    return path


@pytest.mark.parametrize(
    ("chat_template", "system_prompt"),
    [(LLAMA_31, ""), (LLAMA_31, "Be brief."), (QWEN, ""), (QWEN, "Be brief."), (MISTRAL, "")],
)
@pytest.mark.parametrize("text", ["", ":Solve {input} \\boxed{}"])
def test_chat_has_the_token_ids_of_transformers(
    chat_tokenizer, question_file, chat_template, system_prompt, text
):
    chat_tokenizer.chat_template = chat_template
    dataset = load_prompts(
        question_file, chat_tokenizer, template=f"chat{text}", system_prompt=system_prompt
    )
    content = "Solve   1+{input}=? ä \\boxed{}" if text else "  1+{input}=? ä"
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": content})
    expected = chat_tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    for example in dataset.examples:
        assert example.prompt_ids.tolist() == expected
        assert chat_tokenizer.decode(example.prompt_ids) == example.prompt
        assert example.prompt.count("<s>") == (chat_template != QWEN)  # never twice
        assert (system_prompt in example.prompt) and content.strip() in example.prompt
    assert len(dataset) == 2


def test_prompts_do_not_change_with_the_date(chat_tokenizer):
    rendered = {}
    for name, template in [("fixed", LLAMA_31), ("today", LLAMA_32)]:
        chat_tokenizer.chat_template = template
        rendered[name] = prompt_renderer("chat", chat_tokenizer)(["1"])
    assert rendered["today"] == rendered["fixed"]
    chat_tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d, %A %B') }}"
    assert prompt_renderer("chat", chat_tokenizer)(["1"]) == ["2024-07-26, Friday July"]


def test_chat_mistakes_are_the_users(chat_tokenizer, tokenizer, question_file):
    chat_tokenizer.chat_template = MISTRAL
    with pytest.raises(UserError, match=r"refuses a system and a user message \(Conversation rol"):
        prompt_renderer("chat", chat_tokenizer, system_prompt="Be brief.")
    with pytest.raises(UserError, match="the tokenizer has no chat template; choose from"):
        prompt_renderer("chat", tokenizer)
    with pytest.raises(UserError, match=r"'chat:Solve': what follows 'chat:' is unknown; choose"):
        prompt_renderer("chat:Solve", chat_tokenizer)
    with pytest.raises(
        UserError, match=r"data.template='abel' takes no data.system_prompt='Be brief.'"
    ):
        prompt_renderer("abel", chat_tokenizer, system_prompt="Be brief.")
    with pytest.raises(
        UserError, match=r"data.template='chat' needs data.add_special_tokens=False"
    ):
        load_prompts(question_file, chat_tokenizer, template="chat", add_special_tokens=True)
    for broken in ["{{ 1 + }}", "{{ messages[0]['content'] + 1 }}", "{{ nothing.there }}"]:
        chat_tokenizer.chat_template = broken
        with pytest.raises(UserError, match="refuses one user message") as caught:
            prompt_renderer("chat", chat_tokenizer)
        assert "\n" not in str(caught.value)
