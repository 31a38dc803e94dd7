"""Procedural data sets of the package reasoning-gym, for the prompts and for the verifier.

A problem is made from the name and options of its data set, a seed and an index. The verifier makes
it again, because the scorers need what JSON does not keep. Neither JAX nor a tokenizer is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.data.prompt_rows import Problem
from semrl_jax.support.errors import UserError

FIELD = "data.reasoning_gym"
COLUMN = "reasoning_gym"  # of a prompt's row
TEXTS = ("name", "contains")  # settings of an entry that are no numbers, also if they look so
FIXED = ("seed", "size")  # options of every data set; they follow the run
# Seeds below belong to training. The package adds the index of a problem to its seed.
HELD_OUT_SEED = 2**31
SPARE = 1000  # problems of a data set in addition to those wanted: held-out ones are skipped
MADE_PER_KEPT = 8  # at most, if only questions that contain a text are kept
COMMAND = "python -m launch.problems"  # lists the data sets, and shows one


class Source(NamedTuple):
    """An entry of `data.reasoning_gym`: `NAME`, or `NAME:option=value:weight=WEIGHT:name=LABEL`."""

    dataset: str  # its name in the package, such as "chain_sum"
    options: dict[str, Any]  # fields of its configuration, such as {"max_terms": 2}
    weight: float  # share of the training prompts, relative to the other entries
    name: str  # in the log and in results
    contains: str = ""  # other questions are left out: some data sets vary their wording at random


def sources(entries: Sequence[str]) -> list[Source]:
    """Reads the entries; UserError for one of another form, or two with the same name."""
    found: list[Source] = []
    for entry in entries:
        dataset, *settings = entry.split(":")
        options = {}
        for setting in settings:
            name, is_set, value = setting.partition("=")
            if not is_set or name in options or name in FIXED:
                raise UserError(
                    f"{FIELD}={entry!r}: {setting!r:.100} must be OPTION=VALUE, once for each "
                    "option and not for seed or size, which follow the run."
                )
            options[name] = value if name in TEXTS else option_value(value)
        weight, name = options.pop("weight", 1), options.pop("name", dataset)
        contains = options.pop("contains", "")
        if type(weight) not in (int, float) or not 0 < weight < 1e9:
            raise UserError(f"{FIELD}={entry!r}: weight={weight!r:.50} must be a number above 0.")
        if name in (source.name for source in found):
            raise UserError(
                f"{FIELD}={entry!r}: another entry is called {name!r:.100}; add :name=LABEL."
            )
        found.append(Source(dataset, options, float(weight), name, contains))
    return found


def training_problems(
    entries: Sequence[Source], seed: int, count: int, num_held_out: int
) -> list[Problem]:
    """Problems for training, without the held-out ones; the entries take turns by their weights."""
    held_out = {problem.question for problem in held_out_problems(entries, num_held_out)}
    found: list[Problem] = []
    first = (seed + 1) * 1_000_003 % (HELD_OUT_SEED // 2)
    streams = [_problems(source, first, count) for source in entries]
    given = [0] * len(entries)
    while len(found) < count:
        # The entry that is furthest behind its share.
        turn = min(range(len(entries)), key=lambda i: (given[i] + 1) / entries[i].weight)
        given[turn] += 1
        problem = next((p for p in streams[turn] if p.question not in held_out), None)
        if problem is None:
            raise UserError(
                f"{FIELD}: {entries[turn].name!r} has too few problems{containing(entries[turn])} "
                f"that are not among its {num_held_out} held-out ones; set options that make more."
            )
        found.append(problem)
    return found


def held_out_problems(entries: Sequence[Source], count: int) -> list[Problem]:
    """`count` different problems of each entry, for any seed of the run; UserError if too few."""
    found: list[Problem] = []
    for source in entries if count else ():
        different: dict[str, Problem] = {}
        for problem in _problems(source, HELD_OUT_SEED, count):
            different.setdefault(problem.question, problem)
            if len(different) == count:
                break
        else:
            raise UserError(
                f"{FIELD}: {source.name!r} has only {len(different)} different problems"
                f"{containing(source)}; lower evaluation.num_problems={count}."
            )
        found += different.values()
    return found


class DataSet(NamedTuple):
    """A data set of the package."""

    name: str  # of an entry
    group: str  # such as "arithmetic"
    description: str  # the package's own, one line; "" if there is none


def data_sets() -> list[DataSet]:
    """All of them, by group and name; UserError if the package is missing."""
    found = []
    for name, (dataset, config) in _package().DATASETS.items():
        texts = (inspect.cleandoc(each.__doc__ or "") for each in (dataset, config))
        # A dataclass without a description has its signature there.
        lines = (text.partition("\n")[0].removeprefix("Configuration for ") for text in texts)
        description = next((x for x in lines if x and not x.startswith(config.__name__)), "")
        found.append(DataSet(name, dataset.__module__.split(".")[1], description))
    return sorted(found, key=lambda each: (each.group, each.name))


def options(source: Source) -> dict[str, tuple[str, str]]:
    """Value and default of each option of an entry; UserError if there is no such data set."""
    defaults = {f.name: _default(f) for f in _option_fields(source.dataset, source.options)}
    return {
        name: (_text(source.options[name]) if name in source.options else default, default)
        for name, default in defaults.items()
    }


def examples(source: Source, count: int) -> list[Problem]:
    """The first held-out problems of an entry; UserError if it cannot be made or has fewer."""
    found = list(itertools.islice(_problems(source, HELD_OUT_SEED, count), count))
    if len(found) < count:
        raise UserError(
            f"{FIELD}: {source.name!r} has only {len(found)} problems{containing(source)}; ask for "
            "fewer, or change its options."
        )
    return found


def containing(source: Source) -> str:
    """What the problems of an entry are limited to, for a message."""
    return f" that contain {source.contains!r:.100}" if source.contains else ""


def remade(row: Any) -> tuple[Any, dict[str, Any]]:
    """The data set of a problem's row and its entry, for the scorer; UserError if it has none."""
    made = row.get(COLUMN) if isinstance(row, dict) else None
    try:
        name, options, seed, size, index = (
            made[key] for key in ("dataset", "options", "seed", "size", "index")
        )
        dataset = _dataset(name, json.dumps(options, sort_keys=True), seed, size)
        return dataset, dataset[index]
    except (TypeError, KeyError, IndexError):
        raise UserError(
            f"the verifier reasoning_gym needs the column {COLUMN!r}, missing or damaged here."
        ) from None


def _problems(source: Source, seed: int, count: int) -> Iterator[Problem]:
    size = (2 * count + SPARE) * (MADE_PER_KEPT if source.contains else 1)
    options = json.dumps(source.options, sort_keys=True)
    dataset = _dataset(source.dataset, options, seed, size)
    for index in range(size):
        try:
            entry = dataset[index]
        except Exception as error:  # a generator of the package may fail in any way
            raise _refusal(source.dataset, f"problem {index} cannot be made", error) from None
        if source.contains not in entry["question"]:
            continue
        place = {"dataset": source.dataset, "options": source.options, "seed": seed, "size": size}
        row = json.dumps({COLUMN: {**place, "index": index}})
        answer = "" if entry["answer"] is None else str(entry["answer"])
        yield Problem(str(entry["question"]), answer, source.name, row)


@functools.lru_cache(maxsize=64)
def _dataset(name: str, options: str, seed: int, size: int) -> Any:
    settings = json.loads(options)
    _option_fields(name, settings)
    try:
        return _package().create_dataset(name, seed=seed, size=size, **settings)
    except Exception as error:  # its own checks are assertions, and its code may fail in any way
        raise _refusal(name, "cannot be made with these options", error) from None


def _package() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise UserError(
            f"{FIELD} needs reasoning-gym ({error}): pip install 'semrl_jax[reasoning_gym]'."
        ) from None
    return factory


def _option_fields(name: str, settings: Mapping[str, Any]) -> list[dataclasses.Field]:
    """The options of a data set; raises UserError if it, or one of the settings, does not exist."""
    known = _package().DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"{FIELD}: there is no data set {name!r:.100}; {hint}{COMMAND} lists all.")
    fields = [f for f in dataclasses.fields(known[name][1]) if f.name not in FIXED]
    names = [field.name for field in fields]
    if unknown := settings.keys() - names:
        raise UserError(
            f"{FIELD}: {name} has no option {min(unknown)!r:.100}; it has {', '.join(names)}. "
            f"{COMMAND} {name} shows them."
        )
    return fields


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _text(field.default_factory())
    return "" if field.default is dataclasses.MISSING else _text(field.default)


def _refusal(name: str, problem: str, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{FIELD}: {name}: {problem} ({reason:.200}); change its options.")


def option_value(text: str) -> Any:
    """A number, bool, null or list as JSON; any other text as it is."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _text(value: Any) -> str:
    """A value as `option_value` reads it, if it can be written so."""
    if isinstance(value, list | tuple):
        try:
            return json.dumps(value)
        except TypeError:
            return repr(value)
    return (
        str(value) if value is None or isinstance(value, bool | int | float | str) else repr(value)
    )
