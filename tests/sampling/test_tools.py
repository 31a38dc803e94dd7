"""Episodes with tools, on templates of families with a form of their own and without one."""

import json

import numpy as np
import pytest

from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.rewards.verdict import episode_verdict
from semrl_jax.sampling.environment_tasks import first_answers, opening_of, training_tasks
from semrl_jax.sampling.multi_turn import MultiTurn
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError
from tests.data.test_turns import CONTROLS, FAMILIES, tokenizer_of
from tests.environments.test_pool import USERS, section
from tests.sampling.test_multi_turn import Policy, draw_of
from tests.tiny import tiny_config

RESPONSE = "<tool_response>\n{}\n</tool_response>"
# A call as the family writes it, and the answer's message after the header of its role.
FORMS = {
    "qwen": ("<tool_call>\n{}\n</tool_call>", "arguments", "user", RESPONSE),
    "llama": ("{}", "parameters", "ipython", '"{}"'),
    "smollm": ("```json\n{}\n```", "arguments", "user", RESPONSE),
}  # fmt: skip


CALCULATOR = "calculator:digits=4"


class Family:
    """A tokenizer with a family's template, its calls, and what stands between two turns."""

    def __init__(self, name):
        template, self.end, _ = FAMILIES[name]
        self.name, self.tokenizer = name, tokenizer_of(template, self.end)
        self._call, self._arguments, self._role, self._answer = FORMS[name]

    def call(self, tool, **arguments):
        return self._call.format(json.dumps({"name": tool, self._arguments: arguments}))

    def between(self, answer):
        """What others write after a call that ended with the end token."""
        answer = self._answer.format(answer)
        if self.name == "llama":
            header = "<|start_header_id|>{}<|end_header_id|>\n\n"
            return f"{header.format(self._role)}{answer}<|eot_id|>{header.format('assistant')}"
        return f"\n<|im_start|>{self._role}\n{answer}<|im_end|>\n<|im_start|>assistant\n"

    def play(self, environments, scripts):
        """The opening, and the rollout of each script of messages."""
        config = tiny_config()
        config.data.update(num_prompts=1, prompts_per_step=1)
        config.evaluation.num_problems = 1
        config.rollout.update(max_prompt_tokens=2000, max_response_tokens=2000)
        config.environment.max_turns = 8
        (pool,) = map(environments.__getitem__, environments)
        (example,) = training_tasks(config, self.tokenizer, pool, print).examples
        first_answers([example], self.tokenizer, environments)
        end_id = self.tokenizer.convert_tokens_to_ids(self.end)
        episodes = MultiTurn.of(config, self.tokenizer, (end_id,), environments)
        opening = opening_of(example.columns)
        scripts = scripts(opening.task) if callable(scripts) else scripts
        policy = Policy(self.tokenizer, *[[text + self.end for text in one] for one in scripts])
        draw = draw_of([example] * len(scripts), len(scripts))
        found = {each.sample_id: each for each in episodes.play(draw, policy, Clock())}
        return example, [found[str(i)] for i in range(len(scripts))]

    def parts(self, rollout):
        """The text of each span, whose tokens are the policy's and others' in turn."""
        starts = np.flatnonzero(np.diff(rollout.response_mask)) + 1
        return [self.tokenizer.decode(ids) for ids in np.split(rollout.response_ids, starts)]


def opened(name):
    return EnvironmentPools(section(name), [name])


@pytest.fixture(scope="module", params=FORMS)
def family(request):
    return Family(request.param)


def test_a_calculator_is_called_and_its_result_rewarded(family):
    def scripts(task):
        right = family.call("calculate", expression=task["expression"])
        wrong = family.call("calculate", expression="1 / 2")
        return [[right, task["answer"]], [wrong, "None."]]

    with opened(CALCULATOR) as environments:
        example, (solved, failed) = family.play(environments, scripts)
        (schema,) = environments[CALCULATOR].schemas
        assert environments.counters["num_tool_calls"] == 2
        assert environments.counters["num_failed_tool_calls"] == 1
    opening = opening_of(example.columns)
    tools = None if family.name == "smollm" else [schema]
    assert example.prompt_ids.tolist() == family.tokenizer.apply_chat_template(
        opening.messages, tools, add_generation_prompt=True, return_dict=False
    )
    assert (
        example.prompt.count('"calculate"') == 1
        and schema["function"]["description"] in example.prompt
    )
    call, between, answer = family.parts(solved)
    assert between == family.between(opening.task["answer"])
    assert call == family.call("calculate", expression=opening.task["expression"]) + family.end
    assert answer == opening.task["answer"] + family.end
    assert solved.turn_rewards.tolist() == [0.0, 1.0] and not solved.environment_error
    error = "error: ValueError: an expression has whole numbers, + - * and parentheses"
    assert family.parts(failed)[1] == family.between(error)
    assert failed.turn_rewards.tolist() == [0.0, 0.0]
    assert episode_verdict([0.0, 0.0], "", failure_score=-1.0).correct is False


def test_control_tokens_in_the_answer_of_a_tool_stay_text(family):
    hostile = "".join(CONTROLS)
    scripts = [[family.call("obey", what=f"say {text}"), "end"] for text in (hostile, "plain")]
    with opened(f"{USERS}:Tooled") as environments:
        _, rollouts = family.play(environments, scripts)
    controls = family.tokenizer.convert_tokens_to_ids([*CONTROLS])
    counts = [
        np.isin(found.response_ids[~found.response_mask], controls).sum() for found in rollouts
    ]
    assert counts[0] == counts[1] > 0
    assert hostile in family.parts(rollouts[0])[1]


def test_a_template_that_refuses_answers_of_tools_is_found_before_the_run():
    family = Family("qwen")
    template = family.tokenizer.chat_template
    family.tokenizer.chat_template = template.replace(
        "message.role == 'tool' %}", "message.role == 'tool' %}{{- raise_exception('no tools') }}"
    )
    with (
        opened("calculator") as environments,
        pytest.raises(UserError, match=r"refuses messages .*\(system, user, tool: no tools\)"),
    ):
        family.play(environments, [["1"]])


def test_a_malformed_call_is_answered(family):
    broken = family.call("obey", what="say a").replace('"say a"', "say a")
    with opened(f"{USERS}:Tooled") as environments:
        _, (rollout,) = family.play(
            environments, [[broken, family.call("obey", what="say b"), "end"]]
        )
    _, first, _, second, _ = family.parts(rollout)
    assert "error: the call cannot be read: invalid JSON" in first and "b" in second
    assert rollout.turn_rewards.tolist() == [0.0, 0.0, 1.0]
