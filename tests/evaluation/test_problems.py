"""Entries of `evaluation.benchmarks`: names, groups, files and modules, and their problems."""

import json
import re
import sys
import types

import ml_collections
import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.data import character_tokenizer, read_shots
from semrl_jax.evaluation import catalogue, problems
from semrl_jax.evaluation.entries import benchmark_entries, benchmark_settings, check_benchmarks
from semrl_jax.runs import validate
from semrl_jax.support.errors import UserError
from tests.tiny import tiny_config

GSM8K = {"question": "2*9", "answer": "2*9=18\n#### 18"}
AMC23 = {"problem": "1-3", "answer": -2.0, "id": 0}


@pytest.fixture
def config(tmp_path):
    config = tiny_config()
    config.evaluation.data_dir = str(tmp_path)
    config.evaluation.num_problems = 2
    config.rollout.max_prompt_tokens = 64
    for name, row in (("gsm8k", GSM8K), ("amc23", AMC23), ("mine", GSM8K | {"data_source": "x"})):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    return config


def load(config, *entries, lines=None, **options):
    config.evaluation.benchmarks = entries
    validate(config)
    check_benchmarks(config)
    report = [] if lines is None else lines
    found = problems.load_problems(config, character_tokenizer(), report.append, **options)
    return [problem for problem in found if problem.data_source != "arithmetic"]


def test_names_and_files_with_their_settings(config, tmp_path):
    found = load(
        config,
        "gsm8k:num_problems=1:template=Q: {input}\n:n=4:temperature=0.6",
        "amc23:name=contest:top_p=0.9:top_k=20",
        f"{tmp_path}/mine.jsonl:answer_after=####:num_problems=3:n=2:verifier=a.b:c",
    )
    assert [(p.data_source, p.prompt, p.question, p.answer) for p in found] == [
        ("gsm8k", "Q: 2*9\n", "2*9", "18"),
        *[("contest", "1-3", "1-3", "-2")] * 2,
        *[("mine", "2*9", "2*9", "18")] * 3,
    ]
    assert [p.index for p in found] == [0, 0, 1, 0, 1, 2]
    assert json.loads(found[0].columns) == {"kind": "number"} and not found[-1].columns
    assert benchmark_settings(config) == {
        "gsm8k": {"verifier": "benchmark", "n": 4, "temperature": 0.6},
        "contest": {"verifier": "benchmark", "top_p": 0.9, "top_k": 20},
        "mine": {"n": 2, "verifier": "a.b:c"},
    }
    found = load(config, "amc23", f"{tmp_path}/mine.jsonl:answer_after=####", keep_columns=True)
    assert json.loads(found[0].columns) == {"kind": "number"} | AMC23
    assert json.loads(found[-1].columns)["data_source"] == "x"


def test_the_number_of_problems_is_compared_with_the_published_one(config):
    lines = []
    load(config, "gsm8k", "amc23:num_problems=9", lines=lines)
    assert lines[0] == "benchmark gsm8k: its first 2 problems; published are 1319."
    assert re.fullmatch(
        r"benchmark amc23: .*amc23.jsonl has 3 problems; published are 40\.", lines[1]
    )


def test_a_random_subset_is_the_same_each_time_and_part_of_a_larger_one(config, tmp_path):
    rows = [GSM8K | {"question": f"{number}+1"} for number in range(40)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def chosen(count, seed, lines=None):
        config.evaluation.subset_seed = seed
        found = load(config, f"gsm8k:num_problems={count}", lines=lines)
        return [int(problem.question.partition("+")[0]) for problem in found]

    assert chosen(5, -1) == [0, 1, 2, 3, 4]
    lines = []
    few = chosen(5, 0, lines)
    assert few == chosen(5, 0) == sorted(few) and len(set(few)) == 5 and max(few) > 4
    assert few != chosen(5, 1) and set(few) < set(chosen(9, 0))
    assert chosen(99, 0) == list(range(40))
    assert lines == ["benchmark gsm8k: 5 random problems; published are 1319."]


def test_a_prompt_over_the_limit_is_kept_and_named_once(config, tmp_path):
    rows = [GSM8K, GSM8K | {"question": "1+" * 40 + "1"}]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = []
    found = load(config, "gsm8k", lines=lines)
    assert [len(p.prompt_ids) > 64 for p in found] == [False, True]
    named = [line for line in lines if "tokens" in line]
    assert len(named) == 1
    assert "benchmark gsm8k: " in named[0] and "line 2: the prompt has 81 tokens" in named[0]


@pytest.mark.parametrize("place", ["aime24.jsonl", "aime24.parquet", "aime24/test.jsonl"])
def test_where_a_file_is_looked_for(place, tmp_path):
    assert catalogue.file_of("aime24", str(tmp_path)) is None
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("")
    assert catalogue.file_of("aime24", str(tmp_path)) == tmp_path / place


def test_folders_have_the_names_of_the_reference_implementation(tmp_path):
    (tmp_path / "OlymMATH-EN-EASY").mkdir()
    (tmp_path / "OlymMATH-EN-EASY" / "test.jsonl").write_text("")
    assert catalogue.file_of("olymmath_en_easy", str(tmp_path)).parent.name == "OlymMATH-EN-EASY"


def test_a_set_of_a_group_and_of_another_entry_counts_once():
    entries = benchmark_entries({"benchmarks": ("tiny:n=8", "little", "aime24:n=32")})
    assert [entry.name for entry in entries] == [
        *catalogue.GROUPS["tiny"], *catalogue.GROUPS["little"]
    ]  # fmt: skip
    found = {entry.name: dict(entry.settings) for entry in entries}
    assert (found["aime25"], found["aime24"], found["beyond_aime"]) == ({"n": 8}, {"n": 32}, {})
    assert len(benchmark_entries({"benchmarks": ("full", "small:n=16")})) == 32


def test_an_environment_has_options_and_settings():
    text = "environment:my.module:Game:low=1:n=4:high=a:b:name=game:num_problems=3"
    (entry,) = benchmark_entries({"benchmarks": (text,)})
    assert (entry.kind, entry.target) == ("environment", "my.module:Game:low=1:high=a:b")
    assert (entry.name, entry.settings) == ("game", {"n": 4, "name": "game", "num_problems": 3})
    (entry,) = benchmark_entries({"benchmarks": ("environment:calculator:digits=2",)})
    assert (entry.name, entry.target) == ("calculator", "calculator:digits=2")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("gsm8",), "='gsm8' is unknown; did you mean 'gsm8k'? choose one of aime24, aime25"),
        (("AIME24",), "did you mean 'aime24'?"),
        (("gsm8k", "gsm8k:n=2"), "and 'gsm8k:n=2' are 'gsm8k'; add :name=NAME"),
        (("gsm8k:name=a", "amc23:name=a"), "are 'a'; add"),
        (("gsm8k:name= ",), "name=' ' must not be empty"),
        (("tiny:name=a",), "a group has no name of its own"),
        (("gsm8k:answer_field=x",), "'answer_field' is not a setting of a set; choose from num_"),
        (("x.jsonl:m=1",), "'m' is not a setting of a file; choose from row_format"),
        (("my_package.module:n=2",), "'n' is not a setting of a module"),
        (("gsm8k:n=2:n=3",), "n is set twice"),
        (("environment:",), "names no environment; write environment:NAME"),
        (("environment:calculators",), "environment.name='calculators' must be 'package.module:"),
        (("environment:calculator:digits=1:digits=2",), "digits is set twice"),
        (("environment:calculator:digits=2:n=0",), "n='0' must be a whole number"),
        (("environment:calculator:digits=1", "environment:calculator"), "are 'calculator'; add"),
        *[
            ((f"gsm8k:{wrong}",), f"{wrong.partition('=')[0]}=")
            for wrong in (
                "n=0", "n=1.5", "n=x", "temperature=-1", "temperature=nan", "temperature=1e999",
                "top_p=0", "top_p=1.1", "top_k=-1", "shots=-1", "num_problems=0",
            )
        ],
        (("gsm8k:verifier=maths",), "verifier='maths' must be 'package.module:name'"),
        (("gsm8k:shots=1",), "evaluation.shots_file is empty; name a file"),
        (("x.jsonl",), "prompt file 'x.jsonl' does not exist"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_the_users_error(config, entries, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load(config, *entries)
    assert str(caught.value).startswith("evaluation.benchmarks") and "\n" not in str(caught.value)


def test_a_missing_file_is_named_with_the_command_that_fetches_it(config, tmp_path):
    with pytest.raises(UserError) as caught:
        load(config, "aime24")
    command = f"python -m launch.prepare_data --dataset=aime24 --output={tmp_path}/aime24.jsonl"
    assert f"{tmp_path} has no aime24.jsonl; fetch with: {command} (" in str(caught.value)
    with pytest.raises(
        UserError, match="--dataset=math24o,aime24,aime25,amc24 --output="
    ) as caught:
        load(config, "tiny")
    (tmp_path / "gsm8k.jsonl").unlink()
    with pytest.raises(UserError, match=r"--dataset=gsm8k --split=test --output=.*/gsm8k\.jsonl"):
        load(config, "gsm8k")


def test_a_bad_row_is_named_with_file_line_and_field(config, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text(f'{json.dumps(GSM8K)}\n{{"question": "x"}}\n')
    with pytest.raises(UserError, match=r"gsm8k.jsonl, line 2: field 'answer' is missing"):
        load(config, "gsm8k")


def test_two_sources_with_one_name_are_refused(config):
    with pytest.raises(UserError, match="data_source 'arithmetic' of another"):
        load(config, "gsm8k:name=arithmetic")


def test_examples_come_from_the_file_in_its_order(config, tmp_path):
    shots = [
        {"question": "1+1", "answer": "two", "response": "1+1=2"},
        {"question": "2+2", "answer": "four"},
    ]
    file = tmp_path / "shots.jsonl"
    file.write_text("\n".join(map(json.dumps, shots)))
    config.evaluation.shots, config.evaluation.shots_file = 2, str(file)
    config.evaluation.template = "Q: {input}\nA:"
    found = load(config, "gsm8k", "amc23:shots=0")
    assert found[0].prompt == "Q: 1+1\nA: 1+1=2\n\nQ: 2+2\nA: four\n\nQ: 2*9\nA:"
    assert found[0].question == "2*9" and found[-1].prompt == "Q: 1-3\nA:"
    with pytest.raises(UserError, match="has 2 rows, fewer than 3 shots"):
        load(config, "gsm8k:shots=3")
    config.evaluation.shots_file = ""
    with pytest.raises(UserError, match=r"evaluation\.shots=2 needs examples"):
        load(config, "gsm8k")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ('{"question": "x"}', "line 1: field 'answer' must be text, not None"),
        ('{"question": "x", "response": 2}', "line 1: field 'response' must be text, not 2"),
        ('{"question": " ", "answer": "2"}', "line 1: field 'question' must be text"),
        ('{"question": "\\ud800", "answer": "2"}', "field 'question' holds a lone surrogate"),
    ],
)
def test_a_bad_example_is_the_users_error(line, message, tmp_path):
    file = tmp_path / "shots.jsonl"
    file.write_text(line)
    with pytest.raises(UserError, match=f"evaluation.shots_file: .*{message}"):
        read_shots(file, 1)


def problem(**wrong):
    found = data.PromptExample("Q", np.asarray([1, 2], np.int32), "2", "b", 0)
    for name, value in wrong.items():
        object.__setattr__(found, name, value)
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "at least one problem"),
        (None, "NoneType"),
        (["1+1"], "must return data.PromptExample"),
        ([problem(answer=2)], "must be texts"),
        ([problem(prompt_ids=[1, 2])], "int32"),
        ([problem(columns="[1]")], "columns of a problem must be the text of a JSON object"),
    ],
)
def test_wrong_problems_are_refused(found, message, monkeypatch):
    module = types.ModuleType("users.benchmark")
    module.problems = lambda config, tokenizer: found
    monkeypatch.setitem(sys.modules, "users.benchmark", module)
    monkeypatch.setattr(problems, "held_out_problems", lambda *args, **options: [])
    config = ml_collections.ConfigDict({"evaluation": {"benchmarks": ("users.benchmark",)}})
    with pytest.raises(UserError, match=f"problems of users.benchmark failed .*{message}"):
        problems.load_problems(config, None, print)
