"""The tool `search`: finds passages of a local corpus by BM25."""

from __future__ import annotations

import collections
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from semrl_jax.data import read_rows
from semrl_jax.support.errors import UserError

MAX_CORPUS_BYTES = 256 * 2**20
K1, B = 1.5, 0.75
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_PARAGRAPH = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


class _Postings(NamedTuple):
    """The passages that have a word, in rising order, and what the word adds to their scores."""

    passages: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]


def search_tool(
    corpus: str | os.PathLike[str], *, num_results: int = 3, max_chars: int = 2000
) -> Callable[[str], str]:
    """Makes the tool `search(query)`: tools = [search_tool("corpus.jsonl")].

    A passage is a row of a .jsonl or .parquet file, with "text" and optionally "title", or a
    paragraph of a .txt or .md file. The score of a passage is BM25 (Robertson and Zaragoza 2009)
    with k1 = 1.5, b = 0.75 and idf = log(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.
    Words are runs of letters and digits in lower case. A Chinese or Japanese character is a word.
    Passages of equal score stand in the order of the corpus. The index is in memory: 10 MB of text
    take 90 MB and a few seconds.

    Args:
      corpus: a file, or a directory of such files, which are read in the order of their paths.
      num_results: passages in an answer, at most. A passage without a word of the query is none.
      max_chars: of an answer. Every passage gets an equal part, and ends there with "...".

    Raises UserError if the corpus cannot be read, is larger than 256 MiB or has no word, or a value
    is out of range.
    """
    if num_results < 1 or max_chars < 40 * num_results:
        raise UserError(
            f"search_tool has num_results={num_results} and max_chars={max_chars}; they must be at "
            "least 1, and 40 for each result."
        )
    passages = list(_passages(pathlib.Path(corpus)))
    postings = _postings(passages)
    if not postings:
        raise UserError(f"search_tool: the corpus {str(corpus)!r} has no word; name another one.")

    def search(query: str) -> str:
        """Searches for passages that have the words of a query.

        Args:
          query: the words.
        """
        scores = _scores(postings, len(passages), query)
        best = np.argsort(-scores, kind="stable")[:num_results]
        found = [passages[i] for i in best if scores[i] > 0]
        # A passage costs "[1] ", and a line break before the next.
        limit = max_chars // num_results - len(f"[{num_results}] \n")
        shown = (text if len(text) <= limit else f"{text[: limit - 3]}..." for text in found)
        return "\n".join(f"[{i}] {text}" for i, text in enumerate(shown, 1)) or "[nothing found]"

    return search


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _postings(passages: list[str]) -> dict[str, _Postings]:
    rows: dict[str, list[int]] = collections.defaultdict(list)
    counts: dict[str, list[int]] = collections.defaultdict(list)
    lengths = np.zeros(len(passages))
    for number, passage in enumerate(passages):
        words = _words(passage)
        lengths[number] = len(words)
        for word, count in collections.Counter(words).items():
            rows[word].append(number)
            counts[word].append(count)
    norms = K1 * (1 - B + B * lengths / max(1.0, lengths.sum() / max(1, len(passages))))
    postings = {}
    for word in rows:
        found, count = np.asarray(rows[word], np.int32), np.asarray(counts[word], np.float64)
        idf = np.log1p((len(passages) - len(found) + 0.5) / (len(found) + 0.5))
        postings[word] = _Postings(found, idf * count * (K1 + 1) / (count + norms[found]))
    return postings


def _scores(
    postings: dict[str, _Postings], num_passages: int, query: str
) -> Float[np.ndarray, " P"]:
    scores = np.zeros(num_passages)
    for word in dict.fromkeys(_words(query)):  # a word counts once; the order fixes the rounding
        if word in postings:
            scores[postings[word].passages] += postings[word].weights
    return scores


def _passages(corpus: pathlib.Path) -> Iterator[str]:
    suffixes = (".jsonl", ".parquet", ".txt", ".md")
    files = sorted(corpus.rglob("*")) if corpus.is_dir() else [corpus]
    files = [file for file in files if file.suffix in suffixes and file.is_file()]
    if not files:
        raise UserError(
            f"search_tool: {str(corpus)!r} is no {', '.join(suffixes)} file and has none in it; "
            "name a file or a directory that exists."
        )
    if (size := sum(file.stat().st_size for file in files)) > MAX_CORPUS_BYTES:
        raise UserError(
            f"search_tool: {str(corpus)!r} has {size} bytes; at most {MAX_CORPUS_BYTES} are read."
        )
    for file in files:
        if file.suffix in (".jsonl", ".parquet"):
            yield from _row_texts(file)
            continue
        try:
            content = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"search_tool: {str(file)!r} cannot be read as UTF-8 ({e}).") from e
        yield from filter(None, map(str.strip, _PARAGRAPH.split(content)))


def _row_texts(file: pathlib.Path) -> Iterator[str]:
    for where, row in read_rows(file, ("text",), ("title",)):
        if isinstance(row, UserError):
            raise UserError(f"search_tool: {where}: {row}")
        texts = [row.get("title") or "", row.get("text")]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f'search_tool: {where} must have a text as "text", and as "title" if it has one.'
            )
        yield "\n".join(filter(None, texts))
