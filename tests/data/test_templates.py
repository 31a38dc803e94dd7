"""The text of every template, and chat templates against the tokenisation of transformers."""

import hashlib
import pathlib

import pytest
import tokenizers
import transformers

from semrl_jax.data import chat_templates, load_prompts
from semrl_jax.data.templates import (
    _PYTHON_GUIDELINES,
    FORMATS,
    STOP_STRINGS,
    TEMPLATES,
    prompt_renderer,
)
from semrl_jax.support import chat_worker
from semrl_jax.support.errors import UserError
from tests.cases import refused, slow_after

QUESTION = "What is {1}+{input}?"
SHOTS = [("1+{input}", "one {input}"), ("2+2", "four")]


# First 16 digits of the SHA-256 of each prompt, as in the evaluation of Qwen2.5-Math and VERL.
RECORDED = {
    "plain": "689287a6a078d89d", "abel": "e7ff9ea349e1bf0b", "qwen-boxed": "c3e04b2adef9089c",
    "qwen25-math-cot": "768912ebb4764036", "mathstral": "fce891bc7cd1947b",
    "direct": "a5a2fc380560f6b5", "cot": "a5a2fc380560f6b5", "deepseek-math": "174ca02a12cf7c92",
    "deepseek-r1": "e420dd0d86737332", "mistral": "44ab4f825e76895e", "numina": "3f92e519767e9b51",
    "pal": "e934c7b0252cdef3", "tool-integrated": "ba4c4df46ca4c128", "tora": "843857447223aecf",
    "self-instruct": "26a38c8cb428a32f", "wizard_zs": "689714739b73376e",
    "platypus_fs": "a5878fde9a011a73", "kpmath": "4fcbc6d86a8ba99f", "jiuzhang": "b909c4fad7d59a5b",
    "jiuzhang_tora": "f17d39d95ba58979", "jiuzhang_nl": "d1699446ecc12bc3",
    "mmiqc": "4954cecf638a04f7", "shepherd": "fab60fbbf9e9ca39",
    "internlm-math-fs": "9c642f76d025c5de", "internlm-math-chat": "bef30699b3da221a",
    "o1_cot": "4a6d3d8e881aa623",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_has_its_recorded_text(tokenizer, name):
    (text, _) = prompt_renderer(name, tokenizer)([QUESTION, "1"])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == RECORDED[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "What is {1}+{input}?"),
        ("abel", "Question:\nWhat is {1}+{input}?\nAnswer:\nLet's think step by step.\n"),
        ("Problem: {input}\\boxed{}", "Problem: What is {1}+{input}?\\boxed{}"),
    ],
)
def test_question_is_inserted_as_it_is(tokenizer, name, text):
    assert prompt_renderer(name, tokenizer)([QUESTION, "1"])[0] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "1+{input}\none {input}\n\n2+2\nfour\n\nQ"),
        ("cot", "Question: 1+{input}\nAnswer: one {input}\n\n\n"
                "Question: 2+2\nAnswer: four\n\n\nQuestion: Q\nAnswer: "),
        ("numina", "### Problem: 1+{input}\n### Solution: one {input}\n\n"
                   "### Problem: 2+2\n### Solution: four\n\n### Problem: Q\n### Solution:"),
        ("qwen25-math-cot",
         "<|im_start|>system\nPlease reason step by step, and put your final answer within "
         "\\boxed{}.<|im_end|>\n<|im_start|>user\n1+{input}\none {input}\n\n2+2\nfour\n\nQ"
         "<|im_end|>\n<|im_start|>assistant\n"),
        ("tora", f"{_PYTHON_GUIDELINES}<|user|>\n1+{{input}}\n<|assistant|>\none {{input}}\n"
                 "<|user|>\n2+2\n<|assistant|>\nfour\n<|user|>\nQ\n<|assistant|>\n"),
        ("Q: {input}\nA:", "Q: 1+{input}\nA: one {input}\n\nQ: 2+2\nA: four\n\nQ: Q\nA:"),
        ("Q: {input}\n", "Q: 1+{input}\none {input}\n\nQ: 2+2\nfour\n\nQ: Q\n"),
    ],
)  # fmt: skip
def test_examples_are_in_the_template_and_inserted_as_they_are(tokenizer, name, text):
    assert prompt_renderer(name, tokenizer, shots=SHOTS)(["Q"]) == [text]


def test_separators_of_examples():
    separators = {
        "\n": {"self-instruct", "tora", "internlm-math-fs"},
        "\n---\n": {"pal", "tool-integrated"},
        "\n\n\n": {
            "cot", "deepseek-math", "wizard_zs", "platypus_fs", "jiuzhang", "jiuzhang_tora",
            "jiuzhang_nl", "mmiqc", "shepherd",
        },
    }  # fmt: skip
    for name, form in FORMATS.items():
        found = [separator for separator, names in separators.items() if name in names]
        assert form.separator == (*found, "\n\n")[0], name


def test_examples_are_turns_of_a_chat(chat_tokenizer):
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    options = {"system_prompt": "S", "shots": SHOTS}
    turns = "system:S;user:1+{input};assistant:one {input};user:2+2;assistant:four;user:Q;"
    assert prompt_renderer("chat", chat_tokenizer, **options)(["Q"]) == [turns]
    turns = "user:[1+{input}];assistant:one {input};user:[2+2];assistant:four;user:[Q];"
    assert prompt_renderer("chat:[{input}]", chat_tokenizer, shots=SHOTS)(["Q"]) == [turns]


def test_stop_strings_end_a_further_question_but_no_ordinary_answer():
    assert {*TEMPLATES} - STOP_STRINGS.keys() == {"plain", "shepherd"}  # without marks of their own
    answer = (
        "The user asks an assistant: Problem 2. Question: 1+1? Answer: 2. Instruction, Response.\n"
        "Problem solved\nAnswer: \\boxed{2} <answer>2</answer>\n---\nThe end."
    )
    for name, stops in STOP_STRINGS.items():
        assert {"</s>", "<|im_end|>", "<|endoftext|>"} < {*stops, "any"}
        assert not any(stop in answer for stop in stops), name
    # Templates with words around the question end where the next question would begin.
    without = {"plain", "shepherd", "deepseek-r1", "qwen25-math-cot", "chat", "mathstral"}
    for name in STOP_STRINGS.keys() - without:
        following = f"2\n\n{TEMPLATES[name]}"
        assert any(stop in following for stop in STOP_STRINGS[name][3:]), name


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
        refused(f"mine.txt'.* {message}", prompt_renderer, str(file), tokenizer)


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


LONG_TIME, MUCH_MEMORY = "it takes more than 2 s of CPU time", "it takes more than 1 GiB of memory"
LONG_TEXT = "it makes a text of more than 4000000 characters"
EITHER = f"{MUCH_MEMORY}|{LONG_TIME}"  # a busy machine takes 2 s to fill the memory
HOSTILE = {
    "long": ("{{ 'a' * 5000000 }}", LONG_TEXT),
    "recursive": ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion depth"),
    "nested": (f"{{{{ {'(' * 5000}1{')' * 5000} }}}}", "recursion depth"),
    "centred": ("{{ 'a'|center(10**9) }}", EITHER),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
              LONG_TIME),
    "power": ("{{ 10 ** (10 ** 9) }}", LONG_TIME),
    "repeated": ("{% set x = 'a' * 10**9 %}{{ x }}", EITHER),
    "printed": ("{{ '%1000000000d' % 1 }}", EITHER),
    "formatted": ("{{ '{:>1000000000}'.format(1) }}", f"{EITHER}|{LONG_TEXT}"),
    "doubled": ("{% set n = namespace(x='a') %}{% for i in range(60) %}"
                "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}", EITHER),
}  # fmt: skip


@pytest.fixture(scope="module")
def impatient():
    """Templates are rendered by a process of their own, which waits for two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_worker, "TIME_S", 2.0)
        patch.setattr(chat_templates, "_WORKER", worker := chat_templates._Worker())
        yield
        worker._process.kill()
        worker._end()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("case", slow_after(3, HOSTILE))
def test_a_chat_template_has_limits_of_time_and_size(chat_tokenizer, case):
    chat_tokenizer.chat_template, limit = HOSTILE[case]
    message = rf"^data\.template='chat': the tokenizer's chat template refuses .*({limit})"
    refused(message, prompt_renderer, "chat", chat_tokenizer)
    chat_tokenizer.chat_template = QWEN  # the next template is rendered
    assert prompt_renderer("chat", chat_tokenizer)(["1+1"])[0].count("1+1") == 1


def test_prompts_do_not_change_with_the_date(chat_tokenizer):
    rendered = {}
    for name, template in [("fixed", LLAMA_31), ("today", LLAMA_32)]:
        chat_tokenizer.chat_template = template
        rendered[name] = prompt_renderer("chat", chat_tokenizer)(["1"])
    assert rendered["today"] == rendered["fixed"]
    chat_tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d, %A %B') }}"
    assert prompt_renderer("chat", chat_tokenizer)(["1"]) == ["2024-07-26, Friday July"]


def test_chat_mistakes_are_the_users(chat_tokenizer, tokenizer):
    chat_tokenizer.chat_template = MISTRAL
    with pytest.raises(UserError, match=r"refuses a system and a user message \(Conversation rol"):
        prompt_renderer("chat", chat_tokenizer, system_prompt="Be brief.")
    refused("the tokenizer has no chat template; choose from", prompt_renderer, "chat", tokenizer)
    with pytest.raises(UserError, match=r"'chat:Solve': what follows 'chat:' is unknown; choose"):
        prompt_renderer("chat:Solve", chat_tokenizer)
    with pytest.raises(
        UserError, match=r"data.template='abel' takes no data.system_prompt='Be brief.'"
    ):
        prompt_renderer("abel", chat_tokenizer, system_prompt="Be brief.")
    for broken in ["{{ 1 + }}", "{{ messages[0]['content'] + 1 }}", "{{ nothing.there }}"]:
        chat_tokenizer.chat_template = broken
        refused("refuses one user message", prompt_renderer, "chat", chat_tokenizer)
