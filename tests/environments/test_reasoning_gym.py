"""Problems of reasoning-gym, with further tries."""

import pytest

from semrl_jax import data
from semrl_jax.data import procedural
from semrl_jax.environments import Turn
from semrl_jax.environments.kinds.reasoning_gym import RETRY, Environment
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.sampling.environment_tasks import held_out_tasks, training_tasks
from semrl_jax.settings.environment import named
from semrl_jax.support.errors import UserError
from tests.environments.test_pool import played, section
from tests.tiny import tiny_config

# One of two digits and two signs make 200 questions; training finds equal ones elsewhere.
SMALL = "chain_sum:min_terms=2:max_terms=2:min_digits=1:max_digits=1:weight=3"
MIXTURE = f'reasoning_gym:sets=["{SMALL}","gcd:max_value=9"]:attempts=2'


@pytest.fixture(scope="module")
def mixture():
    """Its process takes seconds to import the package."""
    with EnvironmentPool(section(MIXTURE)) as environments:
        yield environments


def begun(**options):
    environment = Environment("chain_sum", **options)
    (task,) = environment.tasks(seed=5, count=1)
    question = environment.reset(task, seed=0)
    return environment, task["answer"], question


def test_one_answer_is_scored_by_the_data_set():
    environment, answer, question = begun(suffix=" Number only.", max_terms=2)
    (problem,) = procedural.training_problems(
        [procedural.Source("chain_sum", {"max_terms": 2}, 1.0, "chain_sum")], 5, 1, 0
    )
    assert question == f"{problem.question} Number only." and answer == problem.answer
    assert environment.step(f"It is {answer}") == Turn((), 1.0, True)
    partly = len(answer) / len(f"{answer} or so")
    for message, reward in (("no", 0.0), (f"<answer>{answer} or so</answer>", partly)):
        environment, _, _ = begun(max_terms=2)
        assert environment.step(message) == Turn((), reward, True)


def test_the_last_of_several_answers_counts():
    environment, answer, _ = begun(attempts=3)
    assert environment.step(f"<answer>{answer} or so</answer>") == Turn(RETRY, 0.0, False)
    assert environment.step(answer) == Turn((), 1.0, True)
    environment, answer, _ = begun(attempts=2)
    assert environment.step("no") == Turn(RETRY, 0.0, False)
    assert environment.step("no") == Turn((), 0.0, True)


def test_a_mixture_has_options_and_weights(mixture):
    found = mixture.openings(seed=1, count=8)
    retry, last = played(mixture, found[0], "no", found[0].task["answer"])
    columns = [each.task[procedural.COLUMN] for each in found]
    assert [each["dataset"] for each in columns].count("chain_sum") == 6
    assert {"max_value": 9} in [each["options"] for each in columns]
    assert retry.turn.messages == [{"role": "user", "content": RETRY}] and not retry.error
    assert (last.turn.reward, last.turn.done, last.error) == (1.0, True, "")
    here, *_ = made(*named(MIXTURE)[:2])  # another process makes the same tasks
    assert here.tasks(seed=1, count=8) == [each.task for each in found]


def test_training_leaves_held_out_questions_out(mixture):
    config = tiny_config()
    config.data.update(num_prompts=300, prompts_per_step=2)
    config.evaluation.num_problems = 30
    config.rollout.max_prompt_tokens = 500
    tokenizer = data.train_tokenizer(["State the final answer to 1 + 2 - 3 = . user"], 270)
    training = training_tasks(config, tokenizer, mixture, print).examples
    held_out = held_out_tasks(mixture, 30, tokenizer, print)
    questions = {example.question for example in held_out}
    assert len(held_out) == 30 and len(training) > 100
    assert not questions & {example.question for example in training}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("sets=chain_sun", "sets: there is no data set 'chain_sun'; did you mean chain_sum"),
        ("sets=chain_sum:max_term=2", "sets: chain_sum has no option 'max_term'; it has min_terms"),
        ('sets=["chain_sum","gcd"]:max_terms=2', "sets: gcd has no option 'max_terms'"),
        ("sets=chain_sum:seed=2", "sets: chain_sum has no option 'seed'"),
        ("sets=chain_sum:min_terms=9", "cannot be made with these options .*max_terms must be"),
        ('sets=["gcd","gcd"]', "another entry is called 'gcd'; add :name=LABEL"),
        ("sets=gcd:attempts=0", "attempts=0 must be a whole number above 0"),
        ("attempts=2", "missing 1 required positional argument: 'sets'"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        made(*named(f"reasoning_gym:{options}")[:2])
    assert str(error.value).startswith("environment.name: reasoning_gym")
    assert "\n" not in str(error.value) and procedural.FIELD not in str(error.value)
