"""BM25 against a plain float64 form, the text of answers, and corpora that cannot be read."""

import json
import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.environments.tools.bm25 import search_tool
from tests.cases import refused


def corpus(tmp_path, *texts):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def order(answer):
    return [re.sub(r"^\[\d+\] ", "", line) for line in answer.split("\n")]


def bm25(query, texts):
    """The score of every text, as the papers write it."""
    split = [text.split() for text in texts]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        score = 0.0
        for word in dict.fromkeys(query.split()):
            with_word = sum(word in other for other in split)
            idf = math.log(1 + (len(split) - with_word + 0.5) / (with_word + 0.5))
            tf = words.count(word)
            score += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(words) / mean))
        scores.append(score)
    return scores


@given(st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=9), min_size=1,
                max_size=12), st.lists(st.sampled_from("abcxyz"), max_size=4))  # fmt: skip
def test_order_is_that_of_bm25(tmp_path_factory, passages, query):
    texts = [" ".join([*words, f"n{i}"]) for i, words in enumerate(passages)]
    search = search_tool(corpus(tmp_path_factory.mktemp("c"), *texts), num_results=12)
    scores = np.round(bm25(" ".join(query), texts), 9)
    found = order(search(" ".join(query)))
    if not scores.any():
        assert found == ["[nothing found]"]
        return
    numbers = [texts.index(text) for text in found]
    assert set(numbers) == set(np.flatnonzero(scores))
    assert list(scores[numbers]) == sorted(scores[numbers], reverse=True)


def test_passages_of_equal_score_keep_their_order(tmp_path):
    texts = [f"word {name}" for name in "zyxwv"]
    search = search_tool(corpus(tmp_path, *texts), num_results=3)
    assert search("WORD word") == "[1] word z\n[2] word y\n[3] word x"


def test_words_of_other_scripts(tmp_path):
    search = search_tool(
        corpus(tmp_path, "北京是首都", "東京タワー", "Ünïcode snake_case"), num_results=1
    )
    assert search("首都") == "[1] 北京是首都"
    assert search("タワ") == "[1] 東京タワー"
    assert search("ÜNÏCODE") == search("case") == "[1] Ünïcode snake_case"


@pytest.mark.parametrize("query", ["", "?!", "unknown", "\x00", "a" * 10**6])
def test_a_query_without_a_known_word_finds_nothing(tmp_path, query):
    assert search_tool(corpus(tmp_path, "some words"))(query) == "[nothing found]"


def test_an_answer_has_at_most_its_characters(tmp_path):
    search = search_tool(corpus(tmp_path, *["word " * 1000] * 5), num_results=3, max_chars=200)
    answer = search("word")
    assert len(answer) <= 200
    assert len(answer.split("...\n")) == 3
    assert answer.endswith("...")


def test_files_of_a_directory_are_read_in_their_order(tmp_path):
    (tmp_path / "b.txt").write_text("\ufefffirst word\nof b\n\n \nsecond word\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("# word")
    (tmp_path / "c.csv").write_text("word")
    (tmp_path / "d.jsonl").write_text('{"title": "T", "text": "word"}\n\n{"text": "word"}\n')
    table = pa.table({"text": ["word p"], "other": [1]})
    pyarrow.parquet.write_table(table, tmp_path / "e.parquet")
    search = search_tool(tmp_path, num_results=9, max_chars=1000)
    parts = set(re.split(r"\n?\[\d\] ", search("word"))[1:])
    assert parts == {"# word", "first word\nof b", "second word", "T\nword", "word", "word p"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "is no .jsonl, .parquet, .txt, .md file"),
        ("corpus.csv", b"a", "is no .jsonl, .parquet, .txt, .md file"),
        ("corpus.txt", b"\xff", "cannot be read as UTF-8"),
        ("corpus.txt", b"", "has no word"),
        ("corpus.txt", b"?!", "has no word"),
        ("corpus.jsonl", b'{"text": "a"}\n{"text"', "line 2: not valid JSON"),
        ("corpus.jsonl", b"[1]", "line 1: must be a JSON object"),
        ("corpus.jsonl", b'{"text": 3}', 'line 1 must have a text as "text"'),
        ("corpus.jsonl", b'{"title": 3, "text": "a"}', 'line 1 must have a text as "text"'),
    ],
)
def test_a_corpus_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(message, search_tool, tmp_path / name)


@pytest.mark.parametrize("values", [{"num_results": 0}, {"num_results": 3, "max_chars": 119}])
def test_limits_are_checked(tmp_path, values):
    refused("num_results=", search_tool, corpus(tmp_path, "a"), **values)
