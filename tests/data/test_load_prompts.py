"""Valid and invalid prompt files: loaded rows, rows left out, error messages."""

import copy
import datetime
import decimal
import hashlib
import inspect
import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from semrl_jax import data
from semrl_jax.data import PromptDataset, PromptExample, columns_hash, dataset_hash, prompt_rows
from semrl_jax.data.loading import _CHUNK_ROWS
from semrl_jax.data.row_files import MAX_LINE_BYTES, RowError, read_rows
from semrl_jax.support.errors import UserError
from tests.cases import refused

ROWS = [
    {"q": "1+1=?", "meta": {"truth": "2"}, "messages": [{"content": "1+1"}], "a.b": 5, "c": "(0)"},
    {"q": "{input}", "meta": {"truth": "3"}, "messages": [{"content": "2"}], "a.b": 27.0, "c": "1"},
]
GOOD = b'{"question": "1", "answer": "1"}\n'


def load_prompts(paths, tokenizer, **options):
    of_reader = inspect.signature(data.row_reader).parameters.keys() & options.keys()
    reader = data.row_reader(**{name: options.pop(name) for name in of_reader})
    return data.load_prompts(paths, tokenizer, reader, **options)


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def problem(question="1", answer="1", **fields):
    return {"question": question, "answer": answer, **fields}


def prompts_of(dataset):
    return [example.prompt for example in dataset.examples]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_loads_files_by_field_paths(tokenizer, tmp_path, suffix):
    path = write(tmp_path / f"set{suffix}", ROWS)
    dataset = load_prompts(
        path, tokenizer, question_fields="q", answer_field="meta.truth", template="Q:{input}\nA:"
    )
    assert prompts_of(dataset) == ["Q:1+1=?\nA:", "Q:{input}\nA:"]
    assert [e.answer for e in dataset.examples] == ["2", "3"]
    assert [(e.data_source, e.index) for e in dataset.examples] == [("set", 0), ("set", 1)]
    dataset = load_prompts(
        path,
        tokenizer,
        question_fields=("messages.0.content", "c"),
        answer_field="a.b",
        max_prompt_tokens=7,
    )
    assert prompts_of(dataset) == ["1+1 (0)", "2 1"]
    assert [e.answer for e in dataset.examples] == ["5", "27"]
    np.testing.assert_array_equal(dataset.examples[1].prompt_ids, [4, 23, 3])
    assert dataset.examples[1].prompt_ids.dtype == np.int32


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_given_responses_are_a_text_or_a_list_and_end_with_the_end_token(
    tokenizer, tmp_path, suffix
):
    texts = [["12", "3"], ["4"], [], [""]] if suffix == ".parquet" else [["12", "3"], "4", None, ""]
    path = write(tmp_path / f"set{suffix}", [problem(given=text) for text in texts])
    options = {"given_field": "given", "max_response_tokens": 3}
    dataset = load_prompts(path, tokenizer, **options)
    end = tokenizer.eos_token_id
    one, two, three, four = tokenizer(["1234"], add_special_tokens=False)["input_ids"][0]
    found = [[ids.tolist() for ids in example.given] for example in dataset.examples]
    assert found == [[[one, two, end], [three, end]], [[four, end]], [], []]
    assert dataset_hash(dataset) != dataset_hash(load_prompts(path, tokenizer))
    message = r"line|row 1: a given response has 3 tokens, more than rollout.max_response_tokens=2;"
    refused(message, load_prompts, path, tokenizer, **options | {"max_response_tokens": 2})
    path = write(tmp_path / f"other{suffix}", [problem(given=["4"]), problem()])
    if suffix == ".parquet":
        write(tmp_path / "without.parquet", [problem()])
        path = [path, tmp_path / "without.parquet"]
    found = [len(example.given) for example in load_prompts(path, tokenizer, **options).examples]
    assert found == [1, 0, 0][: len(found)]  # rows may lack the field
    path = write(tmp_path / "numbers.jsonl", [problem(given=7), problem(given="7")])
    refused("1: field 'given' must be text or a list of", load_prompts, path, tokenizer, **options)
    assert len(load_prompts(path, tokenizer, skip_bad_rows=True, **options)) == 1


FLOATS = [0.1, 3.0, 1e-5, 2.5]
ANSWERS = {
    "float16": (pyarrow.array(np.array(FLOATS, np.float16)), ["0.1", "3", "0.00001", "2.5"]),
    "float32": (pyarrow.array(FLOATS, pyarrow.float32()), ["0.1", "3", "0.00001", "2.5"]),
    "float64": (pyarrow.array(FLOATS, pyarrow.float64()), ["0.1", "3", "0.00001", "2.5"]),
    "large floats": (
        pyarrow.array([16777216.0, 1e10, -0.0, 1e22], pyarrow.float32()),
        ["16777216", "10000000000", "0", "1" + 22 * "0"],
    ),
    "decimal": (
        pyarrow.array(map(decimal.Decimal, ("0.10", "27.00", "-0.05", "1200")))
        .cast(pyarrow.decimal128(38, 20)),
        ["0.1", "27", "-0.05", "1200"],
    ),
    "many digits": (
        pyarrow.array([decimal.Decimal("1" * 40 + ".50")] * 4, pyarrow.decimal256(60, 2)),
        ["1" * 40 + ".5"] * 4,
    ),
    "int8": (pyarrow.array([1, -2, 3, 0], pyarrow.int8()), ["1", "-2", "3", "0"]),
    "uint64": (pyarrow.array([2**64 - 1] * 4, pyarrow.uint64()), [str(2**64 - 1)] * 4),
    "string": (pyarrow.array([" 0.10 ", "27.0", "1e-5", "x"]), ["0.10", "27.0", "1e-5", "x"]),
    "large string": (pyarrow.array(["1"] * 4, pyarrow.large_string()), ["1"] * 4),
    "dictionary": (pyarrow.array(list("abab")).dictionary_encode(), [*"abab"]),
}  # fmt: skip
REFUSED = {
    "bool": pyarrow.array([True]), "binary": pyarrow.array([b"1"]),
    "list": pyarrow.array([["1"]]), "null": pyarrow.array([None], pyarrow.string()),
    "date": pyarrow.array([datetime.date(2026, 1, 1)]),
    "nan": pyarrow.array([float("nan")], pyarrow.float32()),
    "infinite": pyarrow.array([float("inf")], pyarrow.float32()),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_of_every_type_of_parquet(tokenizer, tmp_path, kind):
    """In a column, in a struct, and in a list, where the field is a path."""
    column, expected = ANSWERS[kind]
    struct = pyarrow.StructArray.from_arrays([column], ["truth"])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array(range(5), pyarrow.int32()), column)
    questions = pyarrow.array(["1"] * 4)
    table = pyarrow.table([questions, column, struct, lists], ["question", "answer", "a", "b"])
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    for field in ("answer", "a.truth", "b.0"):
        dataset = load_prompts(tmp_path / "set.parquet", tokenizer, answer_field=field)
        assert [example.answer for example in dataset.examples] == expected, field


@pytest.mark.parametrize("kind", REFUSED)
def test_values_that_are_no_answer(tokenizer, tmp_path, kind):
    table = pyarrow.table([["1"], REFUSED[kind]], ["question", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    with pytest.raises(UserError, match="field 'answer' must be text or a finite number, not"):
        load_prompts(tmp_path / "set.parquet", tokenizer)


def test_parts_of_a_question_are_joined_by_one_space(tokenizer, tmp_path):
    rows = [{"question": " 1 \n", "options": ["A)1 ", " B)2"], "answer": "A"}]
    path = write(tmp_path / "set.jsonl", rows)
    joined = load_prompts(path, tokenizer, question_fields=("question", "options"))
    assert prompts_of(joined) == ["1 A)1 B)2"]
    assert prompts_of(load_prompts(path, tokenizer)) == [" 1 \n"]  # a single text stays as it is


def test_files_are_read_in_the_order_given(tokenizer, tmp_path):
    a = write(tmp_path / "a.jsonl", [problem("1"), problem("12345"), problem("2")])
    b = write(
        tmp_path / "b.parquet", [problem("3", data_source="x"), problem("4", data_source=None)]
    )
    dataset = load_prompts((b, a), tokenizer, max_prompt_tokens=3)
    assert prompts_of(dataset) == ["3", "4", "1", "2"]
    assert [e.index for e in dataset.examples] == [0, 1, 2, 4]  # the long one keeps its number
    assert [e.data_source for e in dataset.examples] == ["x", "b", "a", "a"]
    for num_rows, expected in [(1, ["3"]), (3, ["3", "4", "1"]), (9, ["3", "4", "1", "2"])]:
        dataset = load_prompts((b, a), tokenizer, max_prompt_tokens=3, num_rows=num_rows)
        assert prompts_of(dataset) == expected


def test_chunks_do_not_change_the_result(tokenizer, tmp_path):
    size = 2 * _CHUNK_ROWS + 1
    path = write(tmp_path / "set.jsonl", [problem(str(i), i) for i in range(size)])
    dataset = load_prompts(path, tokenizer)
    assert [(e.prompt, e.answer, e.index) for e in dataset.examples] == [
        (str(i), str(i), i) for i in range(size)
    ]


def test_long_reading_reports_progress(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("semrl_jax.data.loading._PROGRESS_S", -1.0)
    path = write(tmp_path / "set.jsonl", [problem()] * (_CHUNK_ROWS + 1))
    lines = []
    load_prompts(path, tokenizer, report=lines.append)
    assert lines == [f"{n} rows of prompt data read" for n in (_CHUNK_ROWS, _CHUNK_ROWS + 1)]


def simplerl(content="Q:1", truth="7", index=0, **fields):
    messages = [{"content": content, "role": "user"}]
    return {
        "data_source": "simplelr_qwen",
        "prompt": messages,
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
        **fields,
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_simplerl_rows(tokenizer, tmp_path, suffix):
    rows = [simplerl("Q:{1}\nA:", index=5), simplerl("2", "1,234", index=5)]
    path = write(tmp_path / f"train{suffix}", rows)
    dataset = load_prompts([path], tokenizer, row_format="simplerl")
    assert prompts_of(dataset) == ["Q:{1}\nA:", "2"]
    assert [(e.answer, e.data_source, e.index) for e in dataset.examples] == [
        ("7", "simplelr_qwen", 0),
        ("1,234", "simplelr_qwen", 1),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (simplerl(prompt=[]), r"field 'prompt\.0\.content' is missing; the row has \['ability'"),
        (simplerl(prompt="text"), r"field 'prompt\.0\.content' is missing"),
        (simplerl(content=" "), r"field 'prompt\.0\.content' must be text, not ' '"),
        (simplerl(truth=""), r"field 'reward_model\.ground_truth' must be text or a finite"),
        (simplerl(data_source=3), r"field 'data_source' must be text, not 3"),
        (simplerl(data_source=""), r"field 'data_source' must be text, not ''"),
        *(
            (
                simplerl(prompt=[{"role": role, "content": "1"} for role in roles.split(", ")]),
                rf"field 'prompt' has messages of {roles}, but .*question_fields='prompt\."
                rf"{number - 1}\.content' and answer_field='reward_model\.ground_truth'",
            )
            for number, roles in ((2, "system, user"), (3, "user, assistant, user"), (1, "system"))
        ),
        (simplerl(prompt=["1"]), r"field 'prompt\.0\.content' is missing"),
    ],
)
def test_bad_simplerl_rows(tokenizer, tmp_path, row, message):
    path = write(tmp_path / "train.jsonl", [simplerl(), row])
    with pytest.raises(UserError, match=rf"train\.jsonl, line 2: {message}"):
        load_prompts(path, tokenizer, row_format="simplerl")


def test_a_path_to_a_message_leads_to_the_users(tokenizer, tmp_path):
    messages = [{"role": "system", "content": "0"}, {"role": "user", "content": "1"}]
    rows = [{"prompt": messages[1:], "answer": "1"}, {"prompt": messages, "answer": "1"}]
    path = write(tmp_path / "set.jsonl", rows)
    expected = r"line 2: field 'prompt\.0\.content' is the text of a message of the system, so"
    refused(expected, load_prompts, path, tokenizer, question_fields="prompt.0.content")
    write(path, rows[1:])
    both = load_prompts(path, tokenizer, question_fields=("prompt.0.content", "prompt.1.content"))
    assert prompts_of(both) == ["0 1"]


def test_simplerl_rows_have_their_own_template_and_fields(tokenizer, tmp_path):
    path = write(tmp_path / "train.jsonl", [simplerl()])
    with pytest.raises(
        UserError, match=r"template='abel' must be 'auto' or 'plain' with .*='simplerl'"
    ):
        load_prompts(path, tokenizer, row_format="simplerl", template="abel")
    with pytest.raises(UserError, match=r"and answer_field='x' are not read with"):
        load_prompts(path, tokenizer, row_format="simplerl", answer_field="x")
    with pytest.raises(UserError, match=r"data\.row_format='verl' must be one of 'que"):
        load_prompts(path, tokenizer, row_format="verl")
    for fields in ({"question_fields": ()}, {"answer_field": ""}, {"question_fields": ("a", "")}):
        refused("must each name a field", load_prompts, path, tokenizer, **fields)


def test_answer_after_the_last_mark(tokenizer, tmp_path):
    rows = [problem("1", "work #### 3\n#### 1,234 \n"), problem("2", "####-5")]
    path = write(tmp_path / "set.jsonl", rows)
    dataset = load_prompts(path, tokenizer, answer_after="####")
    assert [e.answer for e in dataset.examples] == ["1,234", "-5"]
    for answer in ("no mark", "mark ####", "#### \n", 5):
        write(path, [*rows, problem("3", answer)])
        place = r"set\.jsonl, line 3: field 'answer' has no answer af"
        with pytest.raises(UserError, match=f"{place}.*empty takes the whole field"):
            load_prompts(path, tokenizer, answer_after="####")


@pytest.mark.parametrize(
    ("value", "answer"), [(27.0, "27"), (10**400, "1" + "0" * 400), (" a ", "a")]
)
def test_answers_are_texts(tokenizer, tmp_path, value, answer):
    path = write(tmp_path / "set.jsonl", [problem("1", value)])
    assert load_prompts(path, tokenizer).examples[0].answer == answer


BAD_LINES = [
    (b"{", r"not valid JSON \(Expecting property name.* at column 2\)"),
    (b'{"question": "\xff"}', r"not UTF-8 text \(invalid start byte at byte 15\)"),
    (b"\0\0\0\0", r"not valid JSON"),
    (b'{"question": "\0"}', r"not valid JSON \(Invalid control character"),
    (b"[" * 100_000, r"not valid JSON"),
    (b'{"a": ' * 900 + b"1" + b"}" * 900, r"not valid JSON \(nested more than 100 deep\)"),
    (b'{"question": "1", "answer": ' + b"1" * 5000 + b"}", r"not valid JSON"),
    (b"[1]", r"must be a JSON object, not list"),
    (b'{"answer": "1"}', r"field 'question' is missing; the row has \['answer'\]"),
    (b'{"question": "1"}', r"field 'answer' is missing"),
    (b'{"question": 1, "answer": "1"}', r"field 'question' must be text, not 1"),
    (b'{"question": " ", "answer": "1"}', r"field 'question' must be text"),
    (b'{"question": [], "answer": "1"}', r"field 'question' must be text"),
    (b'{"question": ["1", 2], "answer": "1"}', r"field 'question' must be text"),
    (b'{"question": "\\ud800", "answer": "1"}', r"field 'question' holds a lone surrogate"),
    (b'{"question": "1", "answer": "1\\udfff"}', r"field 'answer' holds a lone surrogate at chara"),
    ('{"question": "ß", "answer": "1"}'.encode(), r"the tokenizer has no token for any of its"),
    (b'{"question": "1", "answer": ""}', r"field 'answer' must be text or a finite"),
    (b'{"question": "1", "answer": null}', r"field 'answer' .* not None"),
    (b'{"question": "1", "answer": true}', r"field 'answer' .* not True"),
    (b'{"question": "1", "answer": NaN}', r"field 'answer' .* not nan"),
    (b'{"question": "1", "answer": 1e999}', r"field 'answer' .* not inf"),
    (b'{"question": "1", "answer": ["1"]}', r"field 'answer' .* not \['1'\]"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_row_names_file_line_and_field(tokenizer, tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    assert len(refused(rf"bad\.jsonl, line 3: {message}", load_prompts, path, tokenizer)) < 500


def test_bad_rows_are_skipped_and_counted(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"".join(line + b"\n" for line, _ in BAD_LINES) + GOOD)
    lines = []
    dataset = load_prompts(path, tokenizer, skip_bad_rows=True, report=lines.append)
    assert [e.index for e in dataset.examples] == [0, len(BAD_LINES) + 1]
    assert len(lines) == 6
    assert lines[0].startswith(f"bad row skipped: {path}, line 2: not valid JSON")
    assert lines[-1] == f"{len(BAD_LINES)} of {len(BAD_LINES) + 2} rows are bad and left out."
    path.write_bytes(b"[1]\n{\n")
    with pytest.raises(UserError, match=r"all 2 rows are bad; the first: .*bad\.jsonl, line 1: mu"):
        load_prompts(path, tokenizer, skip_bad_rows=True)


def test_a_very_long_line_is_skipped_in_little_memory(tokenizer, tmp_path):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b'{"question": "')
        for _ in range(50):
            file.write(b"1" * 2**20)
        file.write(b'", "answer": 1}\n' + GOOD)
    text = refused(r"long\.jsonl, line 2: is longer than 16 MiB", load_prompts, path, tokenizer)
    assert len(text) < 300
    dataset = load_prompts(path, tokenizer, skip_bad_rows=True)
    assert [e.index for e in dataset.examples] == [0, 2]
    # The longest line that is read, its end included.
    row = b'{"question": "1", "answer": 1, "pad": "%s"}'
    path.write_bytes(row % (b"x" * (MAX_LINE_BYTES - 1 - len(row % b""))) + b"\n" + GOOD)
    assert len(load_prompts(path, tokenizer)) == 2


def test_byte_order_marks_and_line_ends(tokenizer, tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b" \r\n" + GOOD.strip())
    assert len(load_prompts(path, tokenizer)) == 2
    path.write_bytes(GOOD.decode().encode("utf-16"))
    refused(r"windows\.jsonl, line 1: not UTF-8 text", load_prompts, path, tokenizer)


def test_bad_files_are_the_users_error(tokenizer, tmp_path):
    refused(r"absent\.jsonl' does not exist", load_prompts, tmp_path / "absent.jsonl", tokenizer)
    refused(r"'a.x00b\.jsonl' does not exist", load_prompts, "a\0b.jsonl", tokenizer)
    refused(r"xxx' cannot be opened \(File name too long\)", load_prompts, "x" * 5000, tokenizer)
    refused("'/dev/zero' is no regular file", load_prompts, "/dev/zero", tokenizer)
    refused("is a directory; name the files in it", load_prompts, tmp_path, tokenizer)
    for name in ("set.csv", "set", "set.jsonl.gz"):
        (tmp_path / name).write_bytes(GOOD)
        with pytest.raises(UserError, match=rf"{name}' must end in \.jsonl or \.parquet"):
            load_prompts(tmp_path / name, tokenizer)
    refused(r"data\.files is empty", load_prompts, [], tokenizer)
    good = write(tmp_path / "good.jsonl", [problem()])
    for content in (b"", b"\n \n"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=r"empty\.jsonl: the file has no rows"):
            load_prompts([good, tmp_path / "empty.jsonl"], tokenizer, skip_bad_rows=True)
    os.symlink(good, tmp_path / "link.jsonl")
    for again in (good, tmp_path / "." / "good.jsonl", tmp_path / "link.jsonl"):
        refused(r"data\.files has '.*' twice", load_prompts, [good, again], tokenizer)


def test_bad_parquet_is_the_users_error(tokenizer, tmp_path):
    path = write(tmp_path / "rows.parquet", [problem(str(i)) for i in range(5000)])
    content = path.read_bytes()
    assert len(load_prompts(path, tokenizer)) == 5000
    middle = len(content) // 4
    for broken in (
        b"PAR1 and no more",
        content[:-20],
        content[: len(content) // 2],
        content[:middle] + b"\xff" * 400 + content[middle + 400 :],
        b"",
    ):
        path.write_bytes(broken)
        refused(r"rows\.parquet cannot be read as Parquet", load_prompts, path, tokenizer)
    write(path, [problem(), {"question": "1"}])
    refused(r"rows\.parquet, row 2: field 'answer' .* not None", load_prompts, path, tokenizer)
    with pytest.raises(UserError, match=r"field 'x\.y' is missing; the file has the columns \['qu"):
        load_prompts(path, tokenizer, question_fields="x.y", skip_bad_rows=True)
    write(path, [])
    refused("is missing", load_prompts, path, tokenizer)
    texts = pyarrow.array([b"1", b"\xff", b"2"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": texts, "answer": ["1"] * 3}), path)
    refused(r"rows\.parquet, row 2: holds text that is not UTF-8", load_prompts, path, tokenizer)
    assert prompts_of(load_prompts(path, tokenizer, skip_bad_rows=True)) == ["1", "2"]


def test_only_needed_columns_of_parquet_are_read(tmp_path):
    path = write(tmp_path / "rows.parquet", [{**row, "unused": "x" * 99} for row in ROWS])
    rows = [row for _, row in read_rows(path, ("messages.0.content", "a.b"), ("none.such",))]
    assert all(row.keys() == {"messages", "a.b"} for row in rows)
    rows = [row for _, row in read_rows(path, ("meta.truth",), ("c",))]
    assert rows == [{"meta": row["meta"], "c": row["c"]} for row in ROWS]
    where, row = next(read_rows(path))
    assert where == f"{path}, row 1" and row.keys() == {*ROWS[0], "unused"}


def test_long_prompts_are_dropped_or_kept(tokenizer, tmp_path):
    path = write(tmp_path / "set.jsonl", [problem("1" * n) for n in (3, 4, 2, 9)])
    lines = []
    dataset = load_prompts(path, tokenizer, max_prompt_tokens=3, report=lines.append)
    assert [e.index for e in dataset.examples] == [0, 2]
    assert lines == ["2 of 4 prompts have more than max_prompt_tokens=3 tokens and are left out."]
    # The tokens of the template count.
    kept = {"template": "Q:{input}", "keep_long": True, "report": lines.append}
    lines.clear()
    assert len(load_prompts(path, tokenizer, max_prompt_tokens=11, **kept)) == 4 and not lines
    dataset = load_prompts(path, tokenizer, max_prompt_tokens=10, **kept)
    assert [len(e.prompt_ids) for e in dataset.examples] == [5, 6, 4, 11]
    assert lines == [
        f"benchmark set: {path}, line 4: the prompt has 11 tokens, more than max_prompt_tokens=10; "
        "it is not sampled and counts as wrong."
    ]
    for keep_long in (False, True):  # with this limit, no prompt is left
        with pytest.raises(
            UserError, match=r"none of the 4 prompts has at most .*=1 .* shortest has 2"
        ):
            load_prompts(path, tokenizer, max_prompt_tokens=1, keep_long=keep_long)
    write(path, [problem(), *(problem("1" * n) for n in range(2, 9))])
    lines.clear()
    load_prompts(path, tokenizer, max_prompt_tokens=1, keep_long=True, report=lines.append)
    assert len(lines) == 6 and lines[-1].startswith("7 of 8 prompts have more than")


def example(ids=(1, 2), answer="3", source="s"):
    return PromptExample("p", np.array(ids, np.int32), answer, source, 0)


def test_different_datasets_have_different_hashes():
    def of(*examples):
        return dataset_hash(PromptDataset(examples))

    base = of(example(), example(ids=(7,)))
    assert base == of(example(), example(ids=(7,)))
    others = [
        of(example()),
        of(example(ids=(7,)), example()),
        of(example(ids=(1, 3)), example(ids=(7,))),
        of(example(answer="4"), example(ids=(7,))),
        of(example(source="t"), example(ids=(7,))),
        of(example(answer="3s", source=""), example(ids=(7,))),
        of(example(answer="", source="3s"), example(ids=(7,))),
        of(example(ids=(1,)), example(ids=(2, 7))),
    ]
    assert len({base, *others}) == len(others) + 1
    # Recorded: with another hash, every resumed run would refuse its data.
    lengths = [bytes([n, 0, 0, 0, 0, 0, 0, 0]) for n in (8, 1, 1)]
    parts = b"\1\0\0\0\2\0\0\0", b"3", b"s"
    content = b"".join(length + part for length, part in zip(lengths, parts))
    assert of(example()) == hashlib.sha256(content).hexdigest()


def test_parquet_values_outside_the_range_of_python_are_bad_rows(tmp_path):
    when = pyarrow.array([10**15, 0], pyarrow.timestamp("s"))
    table = pyarrow.table({"question": ["a", "b"], "answer": ["1", "2"], "when": when})
    path = tmp_path / "times.parquet"
    pyarrow.parquet.write_table(table, path)
    (_, bad), (_, good) = read_rows(path)
    assert isinstance(bad, RowError) and "cannot be read" in str(bad)
    assert good["question"] == "b"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_kept_for_a_verifier_that_takes_them(tokenizer, tmp_path, suffix):
    rows = [problem(tests=[{"in": "1", "n": i}], limit=0.5, text="é\u2028") for i in range(3)]
    path = write(tmp_path / f"set{suffix}", rows)
    kept = load_prompts(path, tokenizer, keep_columns=True)
    assert [json.loads(example.columns) for example in kept.examples] == rows
    plain = load_prompts(path, tokenizer)
    assert {example.columns for example in plain.examples} == {""}
    assert dataset_hash(kept) == dataset_hash(plain)  # a run resumes with either verifier
    assert columns_hash(plain) == ""
    others = [rows, rows[::-1], [{**rows[0], "limit": 0.25}, *rows[1:]]]
    hashes = [
        columns_hash(load_prompts(write(path, other), tokenizer, keep_columns=True))
        for other in others
    ]
    assert hashes[0] == columns_hash(kept) and len({"", *hashes}) == 4


def test_a_column_that_is_not_json_is_refused_with_its_row(tokenizer, tmp_path, monkeypatch):
    day = datetime.date(2024, 7, 26)
    bad = [
        (write(tmp_path / "a.parquet", [problem(day=None), problem(day=day)]), "row 2", "'day'"),
        (write(tmp_path / "b.parquet", [problem(raw=b"1")]), "row 1", "'raw'"),
        (write(tmp_path / "c.jsonl", [problem(), problem(x={"y": [float("nan")]})]), "line 2",
         "'x'"),
    ]  # fmt: skip
    for path, row, field in bad:
        pattern = rf"{path.name}, {row}: field {field} is .* but a row that is kept"
        refused(pattern, load_prompts, path, tokenizer, keep_columns=True)
        load_prompts(path, tokenizer)  # nothing reads the column
    assert len(load_prompts(bad[0][0], tokenizer, keep_columns=True, skip_bad_rows=True)) == 1
    monkeypatch.setattr(prompt_rows, "MAX_COLUMNS_CHARS", 40)
    with pytest.raises(UserError, match=r"line 1: has 64 characters as JSON.* may have 40"):
        path = write(tmp_path / "d.jsonl", [problem(more="x" * 20)])
        load_prompts(path, tokenizer, keep_columns=True)


def test_a_parquet_file_without_a_needed_column_is_refused_also_for_whole_rows(tokenizer, tmp_path):
    path = write(tmp_path / "set.parquet", [{"question": "1", "truth": "1"}])
    with pytest.raises(UserError, match="field 'answer' is missing; the file has the columns"):
        load_prompts(path, tokenizer, keep_columns=True, skip_bad_rows=True)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_may_lack_the_answer_if_none_is_needed(tokenizer, tmp_path, suffix):
    rows = [{"question": "1+1", "answer": "2"}, {"question": "2+1", "answer": None}]
    path = write(tmp_path / f"set{suffix}", rows)
    loaded = load_prompts(path, tokenizer, needs_answer=False, keep_columns=True)
    assert [(e.question, e.answer) for e in loaded.examples] == [("1+1", "2"), ("2+1", "")]
    refused("field 'answer' must be text or a finite number", load_prompts, path, tokenizer)
    path = write(tmp_path / f"other{suffix}", [{"question": "1+1"}])
    for keep in (False, True):
        loaded = load_prompts(path, tokenizer, needs_answer=False, keep_columns=keep)
        assert [example.answer for example in loaded.examples] == [""]
    refused("field 'answer' is missing", load_prompts, path, tokenizer)


def test_auto_is_the_chat_template_if_there_is_one(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "2"}])
    (plain,) = load_prompts(path, tokenizer).examples
    assert (plain.prompt, plain.template) == ("1+1?", "plain")
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (chat,) = load_prompts(path, chatty, system_prompt="Be brief.").examples
    assert (chat.prompt, chat.template) == ("<system>Be brief.<user>1+1?", "chat")
    (own,) = load_prompts(path, chatty, template="plain").examples
    assert (own.prompt, own.template) == ("1+1?", "plain")
    with pytest.raises(UserError, match=r"takes no data.system_prompt='Be brief.'"):
        load_prompts(path, tokenizer, system_prompt="Be brief.")
