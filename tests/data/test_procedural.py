"""data.task='reasoning_gym': its problems, their rows, and their scorers in the worker."""

import json

import pytest

from semrl_jax.data import procedural
from semrl_jax.rewards import VerifierPool, VerifierSettings
from semrl_jax.rewards.verifiers import reasoning_gym
from semrl_jax.sampling.prompt_sources import held_out_problems, training_prompts
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.tiny import tiny_config

SUMS = "chain_sum:min_terms=2:max_terms=2:min_digits=2:max_digits=2"


def test_entries_are_data_sets_with_options():
    plain, mixed = procedural.sources(["gcd", f"{SUMS}:allow_negation=True:weight=2.5:name=sums"])
    assert plain == procedural.Source("gcd", {}, 1.0, "gcd")
    assert mixed.options == {
        "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "allow_negation": True
    }  # fmt: skip
    assert (mixed.dataset, mixed.weight, mixed.name) == ("chain_sum", 2.5, "sums")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["gcd:weight"], "'weight' must be OPTION=VALUE"),
        (["gcd:a=1:a=2"], "'a=2' must be OPTION=VALUE, once"),
        (["gcd:seed=3"], "not for seed or size, which follow the run"),
        (["gcd:weight=0"], "weight=0 must be a number above 0"),
        (["gcd:weight=many"], "weight='many' must be a number above 0"),
        (["gcd", "gcd:weight=2"], "another entry is called 'gcd'; add :name=LABEL"),
        (["chain_sun"], "there is no data set 'chain_sun'; did you mean chain_sum"),
        (["zzz"], "there is no data set 'zzz'; python -m launch.problems lists all"),
        (["chain_sum:min_term=2"], "chain_sum has no option 'min_term'; it has min_terms,"),
        (["gcd:a=2"], r"has no option 'a'; .*max_value\. python -m launch.problems gcd shows them"),
        (["chain_sum:min_terms=9"], "cannot be made with these options .*max_terms must be >="),
    ],
)
def test_a_mistake_is_one_line(entries, message):
    text = refused(message, lambda: procedural.held_out_problems(procedural.sources(entries), 2))
    assert "data.reasoning_gym" in text


def test_held_out_problems_are_never_trained_on():
    entries = procedural.sources(["gcd:weight=3", SUMS])
    held_out = procedural.held_out_problems(entries, 300)
    assert len({p.question for p in held_out}) == 600
    training = procedural.training_problems(entries, 0, 4000, 300)
    assert not {p.question for p in training} & {p.question for p in held_out}
    assert sum(p.data_source == "gcd" for p in training) == 3000  # by the weights
    assert training == procedural.training_problems(entries, 0, 4000, 300)
    assert training != procedural.training_problems(entries, 1, 4000, 300)
    assert held_out == procedural.held_out_problems(entries, 300)


def test_only_questions_that_contain_a_text():
    natural = "basic_arithmetic:min_terms=2:max_terms=2:format_style=natural:contains="
    entries = procedural.sources([natural + "What is"])
    held_out = procedural.held_out_problems(entries, 50)
    training = procedural.training_problems(entries, 0, 500, 50)
    assert len(training) == 500 and all("What is" in p.question for p in held_out + training)
    with pytest.raises(
        UserError, match="'basic_arithmetic' has only 0 different problems that con"
    ):
        procedural.held_out_problems(procedural.sources([natural + "Why"]), 2)


def test_a_name_and_a_text_that_look_like_numbers_stay_as_they_are():
    (source,) = procedural.sources(["gcd:name=1e3:contains=2.50"])
    assert (source.name, source.contains) == ("1e3", "2.50")


def test_a_data_set_with_too_few_problems_says_so():
    small = procedural.sources(["chain_sum:max_terms=2:max_digits=1:min_terms=2:name=small"])
    with pytest.raises(UserError, match=r"'small' has only .* different problems; lower"):
        procedural.held_out_problems(small, 4000)


def verdict(problem, response):
    row = json.loads(problem.columns)
    return reasoning_gym.verify(response, problem.answer, VerifierSettings(), row)


def test_the_scorer_of_the_data_set_decides():
    (problem,) = procedural.held_out_problems(procedural.sources([SUMS]), 1)
    for response in (
        problem.answer, f"It is {problem.answer}.", rf"\boxed{{{problem.answer}}}",
        f"<answer>1</answer> no, <answer>\n{problem.answer}\n</answer>", f"{problem.answer}</s>7",
    ):  # fmt: skip
        assert verdict(problem, response).score == 1.0, response
    wrong = str(int(problem.answer) + 1)
    for response in (wrong, f"<answer>{wrong}</answer> {problem.answer}", "", "no idea"):
        found = verdict(problem, response)
        assert found.score < 1.0 and not found.correct, response
    assert verdict(problem, f"It is {problem.answer}.").extracted == problem.answer


@pytest.mark.parametrize(
    "entry",
    [
        "binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24",
        "intermediate_integration", "polynomial_multiplication", "simple_integration",
    ],
)  # fmt: skip
def test_no_scorer_executes_an_answer(entry, tmp_path):
    """The package's scorers of these data sets call `eval`, or sympy's parser, which calls it."""
    (problem,) = procedural.held_out_problems(procedural.sources([entry]), 1)
    made = tmp_path / "made"
    code = f"open({str(made)!r}, 'w')"
    for response in (
        code,
        f"<answer>{code}</answer>",
        f"exec({'+'.join(f'chr({ord(c)})' for c in code)})",
    ):
        assert verdict(problem, response).score < 0.1
    assert not made.exists()
    if "integration" not in entry:  # where some answers of the package are integrals
        assert verdict(problem, problem.answer).score == 1.0


def test_a_problem_that_is_made_otherwise_here_is_scored_by_its_reference():
    """Another PYTHONHASHSEED does so, because this data set draws from a set of terms."""
    (problem,) = procedural.held_out_problems(procedural.sources(["polynomial_multiplication"]), 1)
    shown = problem._replace(answer="6*x**3 - 2*x")
    assert verdict(shown, "6*x**3 - 2*x").score == 1.0
    assert verdict(shown, problem.answer).score == 0.0


def test_the_work_is_not_left_to_a_scorer():
    (problem,) = procedural.held_out_problems(procedural.sources(["simple_integration"]), 1)
    _, made = reasoning_gym.remade(json.loads(problem.columns))
    asked = "Integral({integrand}, {variable})".format(**made["metadata"])
    assert verdict(problem, asked).score == 0.0


def test_a_response_that_only_mentions_the_answer_gets_nothing():
    entry = "basic_arithmetic:min_terms=2:max_terms=2:min_digits=2:max_digits=2"
    (problem,) = procedural.held_out_problems(procedural.sources([entry]), 1)
    found = verdict(problem, f"It may be {problem.answer} or not; the answer is 7777.")
    assert (found.score, found.extracted) == (0.0, "7777")
    assert verdict(problem, f"no number, only_{problem.answer}_text").score == 0.0
    assert verdict(problem, problem.answer).score == 1.0


def test_answers_of_several_lines_are_scored_as_a_whole():
    (problem,) = procedural.held_out_problems(procedural.sources(["spiral_matrix:max_n=3"]), 1)
    assert verdict(problem, problem.answer).score == 1.0
    (problem,) = procedural.held_out_problems(procedural.sources(["mini_sudoku"]), 1)
    assert problem.answer.count("\n") == 3
    assert verdict(problem, problem.answer).score == 1.0
    assert verdict(problem, f"<answer>\n{problem.answer}\n</answer>").score == 1.0


def test_a_row_without_its_problem_is_named():
    for row in (None, {}, {"reasoning_gym": {"dataset": "gcd"}}):
        with pytest.raises(UserError, match="needs the column 'reasoning_gym'"):
            reasoning_gym.verify("1", "1", VerifierSettings(), row)


def test_prompts_carry_the_row_to_the_worker(tokenizer):
    config = tiny_config()
    config.data.update(task="reasoning_gym", reasoning_gym=(SUMS,), num_prompts=20)
    config.evaluation.update(num_problems=8, held_out=True)
    config.rollout.max_prompt_tokens = 512
    lines = []
    prompts = training_prompts(config, tokenizer, lines.append)
    problems = held_out_problems(config, tokenizer, lines.append)
    assert (len(prompts), len(problems)) == (20, 8)
    assert "State the final answer" in prompts.examples[0].prompt
    assert problems[0].data_source == "chain_sum" and problems[0].template == "plain"
    with VerifierPool(num_workers=1, timeout_s=20.0, function="reasoning_gym") as pool:
        for example in problems[:3]:
            found = pool.submit(example.answer, example.answer, example.columns).result(timeout=60)
            assert (found.score, found.error) == (1.0, "")
        assert not pool.submit("-1", "", problems[0].columns).result(timeout=60).correct


def test_every_data_set_is_listed_with_options_that_can_be_given_again():
    found = procedural.data_sets()
    assert len(found) > 100 and found == sorted(found, key=lambda each: (each.group, each.name))
    by_name = {each.name: each for each in found}
    assert by_name["gcd"].group == "arithmetic" and "GCD" in by_name["gcd"].description
    assert by_name["puzzle24"].description == ""  # the package has none, only a signature
    for name in by_name:
        (source,) = procedural.sources([name])
        options = procedural.options(source)
        assert options.keys() & {"seed", "size"} == set()
        assert all(value == default for value, default in options.values())
    (source,) = procedural.sources(["gcd:max_value=50"])
    assert procedural.options(source)["max_value"] == ("50", "1000")
    assert procedural.options(source)["min_value"] == ("1", "1")
    # What is shown as an option's value is that value as an entry.
    for name in ("countdown", "chain_sum", "gcd", "rotate_matrix", "calendar_arithmetic"):
        (plain,) = procedural.sources([name])
        shown = (f":{key}={value}" for key, (value, _) in procedural.options(plain).items())
        (whole,) = procedural.sources([name + "".join(shown)])
        assert procedural.options(whole) == procedural.options(plain)
        (one,), (again,) = procedural.examples(plain, 1), procedural.examples(whole, 1)
        assert (one.question, one.answer) == (again.question, again.answer)


def test_shown_problems_are_held_out_ones():
    (source,) = procedural.sources([SUMS])
    assert procedural.examples(source, 0) == []
    first = procedural.examples(source, 2)
    held_out = {problem.question for problem in procedural.held_out_problems([source], 5)}
    assert len(first) == 2 and {problem.question for problem in first} <= held_out
    (source,) = procedural.sources([f"{SUMS}:contains=nothing"])
    with pytest.raises(UserError, match="has only 0 problems that contain 'nothing'; ask for few"):
        procedural.examples(source, 1)
