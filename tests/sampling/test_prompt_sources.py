"""The problems of an evaluation, with settings for each file."""

import json
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from semrl_jax.data import character_tokenizer
from semrl_jax.evaluation.evaluator import Evaluator
from semrl_jax.evaluation.scores import greedy
from semrl_jax.rewards import Verdict
from semrl_jax.runs import validate
from semrl_jax.sampling.prompt_sources import (
    check_files,
    evaluation_files,
    held_out_problems,
    prompts_of_files,
)
from semrl_jax.sampling.requests import EVALUATION, stream_seed
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError
from semrl_jax.types import Rollout
from tests.cases import refused
from tests.sampling.parts import sampler_of
from tests.tiny import tiny_config

# The published formats of GSM8K and MATH500.
GSM8K = {"question": "2*9", "answer": "2*9=18\n#### 18"}
MATH500 = {"problem": "1-3", "solution": "so \\boxed{-2}", "answer": "-2"}
SIMPLERL = {"prompt": [{"content": "(3)"}], "reward_model": {"ground_truth": "3"}}


@pytest.fixture
def config(tmp_path):
    for name, row in (("gsm8k", GSM8K), ("math500", MATH500), ("simplerl", SIMPLERL)):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    config = tiny_config()
    config.model.path = "a model"
    config.data.task = "files"
    config.data.files = ("training.jsonl",)
    config.data.answer_after = "####"
    config.data.template = "Q: {input}"
    config.rollout.max_prompt_tokens = 64
    return config


def read(config, directory, *entries):
    config.evaluation.files = tuple(f"{directory}/{entry}" for entry in entries)
    validate(config)
    return held_out_problems(config, character_tokenizer(), [].append)


def test_a_missing_file_is_named_with_its_field(config, tmp_path):
    here, there = str(tmp_path / "gsm8k.jsonl"), str(tmp_path / "none.jsonl")
    config.data.files, config.evaluation.files = (here,), (f"{here}:answer_after=",)
    check_files(config)
    for section, other in (("evaluation", f"{there}:name=x"), ("data", there)):
        config[section].files = (here, other)
        refused(f"^{section}.files: prompt file '{there}' does not", check_files, config)


def test_each_file_has_its_own_settings(config, tmp_path):
    problems = read(
        config,
        tmp_path,
        "gsm8k.jsonl",
        "math500.jsonl:question_fields=problem:answer_after=:num_problems=1:template=A:\\ {input}",
        "math500.jsonl:name=twice:question_fields=problem:question_fields=answer:answer_after=",
        "simplerl.jsonl:row_format=simplerl",
    )
    found = {p.data_source: (p.prompt, p.answer) for p in problems}
    assert found == {
        "gsm8k": ("Q: 2*9", "18"),
        "math500": ("A:\\ 1-3", "-2"),
        "twice": ("Q: 1-3 -2", "-2"),
        "simplerl": ("(3)", "3"),  # its rows contain the template, and no answer mark
    }
    assert [p.data_source for p in problems].count("math500") == 1
    # Only chat templates use a system prompt.
    config.data.system_prompt = "Be brief."
    assert len(read(config, tmp_path, "gsm8k.jsonl")) == 3


MISTAKES = {
    "gsm8k.jsonl:templat=abel": "'templat' is not a setting of a file; choose from row_format, ",
    "gsm8k.jsonl:template=abel:template=plain": "template is set twice",
    "gsm8k.jsonl:template=abell": "template='abell' is unknown; choose from",
    "gsm8k.jsonl:row_format=gsm8k": "row_format='gsm8k' must be one of",
    "gsm8k.jsonl:num_problems=0": "num_problems='0' must be a whole number, in",
    "gsm8k.jsonl:num_problems=1e3": "num_problems='1e3' must be a whole number",
    "gsm8k.jsonl:name= ": "name=' ' must not be empty",
    "gsm8k.jsonl:question_fields=": r"question_fields=\('',\) .* must each name a field",
    "simplerl.jsonl:row_format=simplerl:template=abel": "template='abel' must be 'auto' or",
}


@pytest.mark.parametrize("entry", MISTAKES)
def test_a_mistake_in_a_setting_names_the_file_and_the_field(entry, config, tmp_path):
    refused(f"evaluation.files='.*/{entry}': {MISTAKES[entry]}", read, config, tmp_path, entry)


def test_settings_are_checked_before_anything_is_started(config):
    config.evaluation.files = ("nowhere.jsonl:answer=####",)
    refused("'answer' is not a setting of a file", validate, config)


def test_two_files_with_one_name_are_refused_with_a_way_out(config, tmp_path):
    with pytest.raises(UserError, match=r"data source 'gsm8k'.*/gsm8k.jsonl:name=NAME"):
        read(config, tmp_path, "gsm8k.jsonl", "gsm8k.jsonl:template=abel")


def test_an_entry_without_settings_is_a_path_with_any_characters():
    for path in ("data/a.jsonl", "C:/a, b=1.jsonl", "a:b.parquet"):
        assert evaluation_files([path]) == [(path, path, {})]


def test_too_long_problems_are_not_sampled_but_count_as_wrong(config, tmp_path):
    rows = [{"question": "1" * n, "answer": f"#### {n}"} for n in (1, 90, 2)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = {**rows[1], "data_source": "long"}  # a benchmark without responses
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(rows[0])}\n{json.dumps(long)}\n")
    config.evaluation.metrics = False
    requested = []

    def sample(requests, references, *_args, **_options):
        requested.extend((request.group_id, request.seed) for request in requests)
        assert references.keys() == {request.group_id for request in requests}
        response = np.ones(7, np.int32), np.zeros(7, np.float32)
        verdict = Verdict(1.0, True, True, "1", "")
        items = [
            ScoredRollout(
                Rollout(r.sample_id, r.group_id, 0, r.prompt_ids, *response, None, "eos", ()),
                "", "", verdict,
            )
            for r in requests
        ]  # fmt: skip
        return Scored(items)

    config.evaluation.every_steps = 3
    problems = read(config, tmp_path, "set.jsonl", "two.jsonl")
    sampler = sampler_of()
    sampler.sample = sample
    evaluator = Evaluator(config, problems, [greedy], sampler)
    scalars = evaluator.evaluate(3, Clock()).scalars
    # Indices and seeds are those of an evaluation without a limit.
    places = {0: ("set", 0), 2: ("set", 2), 3: ("two", 0)}
    assert requested == [
        (index, stream_seed(config.seed, EVALUATION, zlib.crc32(name.encode()), place, 0))
        for index, (name, place) in places.items()
    ]
    assert scalars["eval/set/greedy_accuracy"] == 2 / 3
    assert (scalars["eval/set/num_problems"], scalars["eval/set/mean_length"]) == (3, 7)
    assert scalars["eval/two/greedy_accuracy"] == 1
    assert {key: value for key, value in scalars.items() if key.startswith("eval/long/")} == {
        "eval/long/greedy_accuracy": 0,
        "eval/long/greedy_accuracy_stderr": 0,
        "eval/long/num_problems": 1,
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_field_of_given_responses_that_no_row_has_is_refused(config, tmp_path, suffix):
    file, row = tmp_path / f"q{suffix}", GSM8K | {"solution": "18"}
    if suffix == ".jsonl":
        file.write_text(json.dumps(row) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    config.data.update(task="files", files=(str(file),), given_field="solutoin")
    config.rollout.given_responses = 1
    message = "data.given_field='solutoin': no row has a given response; name the field"
    refused(message, prompts_of_files, config, character_tokenizer(), print)
