"""Every use of a prompt has the special tokens that the tokenizer adds by default, once."""

import json

import numpy as np
import pytest
import tokenizers
import transformers

from semrl_jax import data
from semrl_jax.data.encoding import encode_spans
from semrl_jax.support.errors import UserError

TEXTS = ["The capital of France is", "1+1=2"]
BOS = {"LlamaTokenizer": "<s>", "GemmaTokenizer": "<bos>", "Qwen2Tokenizer": "<|im_start|>"}
CHAT = (
    "{% if BOS %}{{ bos_token }}{% endif %}{% for message in messages %}{{ message['content'] }}="
    "{% endfor %}"
)
FAMILIES = [
    ("llama", "LlamaTokenizer", True), ("llama", "LlamaTokenizer", False),
    ("mistral", "LlamaTokenizer", True), ("gemma3_text", "GemmaTokenizer", True),
    ("qwen2", "Qwen2Tokenizer", False), ("qwen3", "Qwen2Tokenizer", False),
    ("qwen3_moe", "Qwen2Tokenizer", False), ("qwen2", "Qwen2Tokenizer", True),
]  # fmt: skip


def make_tokenizer(directory, model_type="llama", name="LlamaTokenizer", adds_bos=True, end=""):
    """Trains the tokenizer of a family and loads it from a directory; `end` follows every text."""
    made = getattr(transformers, name)().train_new_from_iterator(
        TEXTS * 5, 300, show_progress=False, new_special_tokens=[BOS[name]]
    )
    made.bos_token = bos = BOS[name]
    if adds_bos:
        special = [(token, made.convert_tokens_to_ids(token)) for token in (bos, end) if token]
        made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A {end}".strip(), special_tokens=special
        )
    made.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return data.load_tokenizer(directory)


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(("model_type", "name", "adds_bos"), FAMILIES)
def test_prompts_begin_as_the_tokenizer_of_the_family_begins_texts(
    tmp_path, model_type, name, adds_bos
):
    tokenizer = make_tokenizer(tmp_path, model_type, name, adds_bos)
    expected = tokenizer(TEXTS)["input_ids"]
    bos = tokenizer.bos_token_id
    assert [ids.count(bos) for ids in expected] == [adds_bos] * 2
    prefix = data.special_prefix(tokenizer)
    assert prefix == [bos] * adds_bos
    assert data.encode(tokenizer, TEXTS, prefix) == expected
    # A template that writes the token itself does not get it twice.
    written = [f"{tokenizer.bos_token}{text}" for text in TEXTS]
    with_one = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert data.encode(tokenizer, written, prefix) == with_one
    assert [ids.count(bos) for ids in with_one] == [1, 1]
    plain = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    off = data.special_prefix(tokenizer, add_special_tokens=False)
    assert data.encode(tokenizer, TEXTS, off) == plain
    assert data.encode(tokenizer, [], prefix) == []
    assert data.encode(tokenizer, [""], prefix) == [[]]  # a prompt without text is a mistake


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_chat_template_writes_its_special_tokens_itself(tmp_path, writes_bos):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = CHAT.replace("BOS", str(writes_bos).lower())
    file = write(tmp_path / "set.jsonl", [{"question": "1+1", "answer": "2"}])
    dataset = data.load_prompts(file, tokenizer, template="chat")
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, return_dict=False
    )
    assert dataset.examples[0].prompt_ids.tolist() == expected
    assert expected.count(tokenizer.bos_token_id) == writes_bos


def test_an_end_token_of_the_default_does_not_follow_a_prompt(tmp_path):
    tokenizer = make_tokenizer(tmp_path, end="</s>")
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    prefix = data.special_prefix(tokenizer)
    assert prefix == [tokenizer.bos_token_id]
    (ids,) = data.encode(tokenizer, ["1"], prefix)
    assert ids == tokenizer("1")["input_ids"][:-1]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_completion_follows_the_tokens_of_its_prompt(tmp_path, adds_bos):
    """Fine-tuning learns a completion after the very tokens that sampling starts from."""
    tokenizer = make_tokenizer(tmp_path, adds_bos=adds_bos)
    rows = [{"prompt": "The capital of", "completion": " France"}]
    file = write(tmp_path / "set.jsonl", rows)

    def load(**options):
        reader = data.conversation_reader(tokenizer, row_format="prompt_completion", **options)
        return data.load_conversations([file], tokenizer, reader).conversations

    (found,) = load()
    whole = tokenizer("The capital of France")["input_ids"]
    assert found.token_ids.tolist() == [*whole, tokenizer.eos_token_id]
    learned = found.token_ids[found.loss_mask]
    assert tokenizer.bos_token_id not in learned and learned[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(learned[:-1]).strip() == "France"
    (off,) = load(add_special_tokens=False)
    np.testing.assert_array_equal(off.token_ids, found.token_ids[adds_bos:])
    # A special token in the text of a span is learned; one that is added before it is not.
    text = f"{tokenizer.bos_token}1"
    ids, mask = encode_spans(tokenizer, text, [(0, len(text))], data.special_prefix(tokenizer))
    assert ids.tolist().count(tokenizer.bos_token_id) == 1 and mask.all()


@pytest.mark.parametrize(
    ("adds_bos", "added", "template", "expected"),
    [
        (True, True, "plain", "template 'plain', <s> before it (tokenizer's default)"),
        (
            True,
            False,
            "plain",
            "template 'plain', no <s> before it (data.add_special_tokens=False)",
        ),
        (
            False,
            True,
            "a {input}\n",
            r"template 'a {input}\n', no special token before it (tokenizer's",
        ),
        (True, True, "chat", "template 'chat', the tokenizer's chat template, which writes its sp"),
    ],
)
def test_the_line_about_a_template(tmp_path, adds_bos, added, template, expected):
    tokenizer = make_tokenizer(tmp_path, adds_bos=adds_bos)
    line = data.template_line("training prompts", template, tokenizer, added)
    assert line.startswith("training prompts: template ") and expected in line
    assert "\n" not in line and "not the tokenizer's chat template" not in line
    tokenizer.chat_template = CHAT
    line = data.template_line("training prompts", template, tokenizer, added)
    unused = "(not the tokenizer's chat template, which data.template=chat chooses)"
    assert (unused in line) == (template != "chat")


def test_a_token_beyond_the_vocabulary(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    size = len(tokenizer)
    data.check_vocabulary(tokenizer, size, "model.path=x")
    ids = tokenizer.get_vocab().values()
    last = tokenizer.convert_ids_to_tokens(max(ids))
    with pytest.raises(UserError) as caught:
        data.check_vocabulary(tokenizer, size - 1, "model.path=x")
    assert str(caught.value).startswith(
        f"model.path=x: the tokenizer has 1 tokens beyond the model's vocab_size={size - 1}, such "
        f"as {last!r} with id {size - 1}; they do not belong together"
    )
    # The text models of Gemma 3 have a tokenizer with a token for images.
    tokenizer.add_tokens([tokenizers.AddedToken("<image>", special=True)], special_tokens=True)
    assert len(tokenizer) == size + 1
    data.check_vocabulary(tokenizer, size, "model.path=x")
    rows = [np.array(ids, np.int32) for ids in tokenizer(["1+1", "1<image>"])["input_ids"]]
    with pytest.raises(UserError, match=f"^row 1 has the token '<image>' with id {size}, beyond"):
        data.check_ids(tokenizer, size, [(f"row {i}", ids) for i, ids in enumerate(rows)])
    tokenizer.pad_token = "<image>"
    with pytest.raises(UserError, match=f"such as '<image>' with id {size};"):
        data.check_vocabulary(tokenizer, size, "model.path=x")
