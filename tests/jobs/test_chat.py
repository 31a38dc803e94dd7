"""A chat asks with the right prompts, and prints each response with its figures."""

import io
import sys

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.data.arithmetic import held_out_problems, prompt_text
from semrl_jax.jobs import chat
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.runs.policies import find_policies
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.fixtures import make_scored, save_model


def test_figures_of_a_response():
    ranks = {
        MetricKey("effective_rank", "acceleration"): Measurement(0.0, False),
        MetricKey("effective_rank", "velocity"): Measurement(0.25, True),
        MetricKey("effective_rank"): Measurement(12.345, True),
    }
    item = Scored.of([make_scored(metrics=ranks)])  # two tokens of log-probability -1 and -2
    assert chat.figures(item, 0.5) == (
        "2 tokens, 4 tokens/s, ended by eos, mean log-probability -1.500 nats, ER 12.3, ERV 0.25, "
        "ERA too short"
    )
    context = Scored([make_scored(response_mask=np.array([False, True]))])
    assert "1 tokens, 4000 tokens/s" in chat.figures(context, 1 / 4000)
    assert chat.figures(context, 0.5).startswith("1 tokens, 2 tokens/s, ended by eos, mean log-")
    assert "-2.000 nats" in chat.figures(context, 0.5)


def test_responses_cannot_control_the_terminal():
    assert chat.printable("a\x1b[31mb\x07\n\tü\u202e") == "a�[31mb�\n\tü�"


def test_questions_that_are_not_utf8_are_refused():
    """In the locale C, Python reads such a byte as an unpaired surrogate, with no error."""
    questions = iter(["1+2", b"\xff".decode(errors="surrogateescape")])
    found = chat.lines_of(lambda: next(questions))
    assert next(found) == "1+2"
    refused("standard input is not UTF-8 text", next, found)


def test_a_question_in_another_encoding_names_the_one_that_python_reads():
    found = chat.lines_of(lambda: "groß".encode().decode("ascii"))
    refused("not text in ascii, which", next, found)


def test_the_template_is_that_of_the_task_or_of_the_tokenizer(config):
    tokenizer = data.character_tokenizer()
    template = chat.own_template(config, tokenizer)
    problem = held_out_problems()[0]
    question = f"{problem.left}{problem.operator}{problem.right}"
    assert template.replace("{input}", question) == prompt_text(problem)
    config.data.task = "files"
    assert chat.own_template(config, tokenizer) == "plain"
    tokenizer.chat_template = "{{ messages }}"
    assert chat.own_template(config, tokenizer) == "chat"
    config.data.template = "abel"
    assert chat.own_template(config, tokenizer) == "abel"


@pytest.mark.slow
def test_a_chat_with_a_random_model(config, tmp_path, capsys, monkeypatch):
    tokenizer = data.character_tokenizer()
    save_model(tmp_path)
    (source,) = find_policies(str(tmp_path), None)
    config.evaluation.metrics, config.evaluation.metric_options.stride = True, 2
    config.evaluation.temperature = 1.0
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 40, 12
    asked, responses = [], []
    prompt_ids, ask = chat.Conversation._prompt_ids, chat.Conversation.ask

    def remember(self, question):
        found = prompt_ids(self, question)
        asked.append(tokenizer.decode(found))
        return found

    def remember_response(self, question):
        scored, seconds = ask(self, question)
        responses.append(scored[0].response)
        return scored, seconds

    monkeypatch.setattr(chat.Conversation, "_prompt_ids", remember)
    monkeypatch.setattr(chat.Conversation, "ask", remember_response)

    lines = ["1+1", "", "2+2", "/new", "3+3", "9" * 60, "/quit", "4+4"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    code = chat.chat(config, source, chat.Options("plain", multi_turn=True))
    out = capsys.readouterr().out
    assert asked == ["1+1", f"1+1\n{responses[0]}\n\n2+2", "3+3"]
    assert code == chat.EXIT_UNANSWERED and "more than rollout.max_prompt_tokens=40" in out
    assert out.count(" tokens/s, ended by ") == out.count(", ERA ") == 3 and "\x1b" not in out
    assert "> 1+1\n" in out and "> 4+4" not in out
    assert all(chat.printable(response) in out for response in responses)

    with pytest.raises(UserError, match="is unknown; choose from"):
        chat.chat(config, source, chat.Options("no template"))
