"""Makes docs/algorithms.md from the docstrings: `python docs/make_algorithms.py`."""

import dataclasses
import importlib
import inspect
import pathlib
import re

from semrl_jax.algorithms import SURROGATES
from semrl_jax.algorithms.algorithm import PARTS
from semrl_jax.algorithms.given import GIVEN_SURROGATES
from semrl_jax.algorithms.objective import Objective
from semrl_jax.algorithms.values import ValueLoss
from semrl_jax.sampling.branching import PARTS as BRANCH_PARTS
from semrl_jax.support.modules import module_names

PAGE = pathlib.Path(__file__).with_name("algorithms.md")
PACKAGE = "semrl_jax.algorithms"
BRANCHING = "semrl_jax.sampling.branching"
HEAD = """# Algorithms

Made from the docstrings by `python docs/make_algorithms.py`. The end of a docstring in
`semrl_jax/algorithms` says what differs from the paper. An algorithm of your own is [one
file](extending.md#an-algorithm).

`algorithms.name` chooses the advantages, `algorithms.loss.surrogate` the loss of a token. Any pair
can be combined, and VERL's shaping acts on the advantages of each. RLOO with the loss of GSPO:

```bash
python -m launch.train --config=configs/quickstart.py --workdir=runs/rloo_gspo \\
    --config.algorithms.name=rloo --config.algorithms.loss.surrogate=gspo \\
    --config.algorithms.loss.clip_epsilon=3e-4 --config.algorithms.loss.clip_epsilon_high=4e-4 \\
    --config.algorithms.aggregation=response_mean
```

r is the reward of a response. A group is the G responses to one prompt (`rollout.group_size`); mean
and std are over the group. Settings are fields of `config.algorithms.advantage`, with their
defaults. `ppo`, `reinforce`, `sample_reinforcement`, `noisy_rewards` with `forward`, `distillation`
without `reward_weight`, `single_stream`, and `reinforce_plus_plus` without `group_baseline` need no
group: `rollout.group_size=1` works.
"""
KL_ESTIMATES = """
`--config.algorithms.loss.kl_estimator` names the KL of a token, x = logprobs - ref_logprobs: `kl` x
(k1), `abs` |x|, `mse` x^2 / 2 (k2), `low_var_kl` exp(-x) + x - 1, at most 10 (k3), `low_var_kl+`
the value of k3 with the gradient of k2. Source: Schulman, "Approximating KL divergence", 2020.
`exact` needs no sampled token: it is the sum over the vocabulary of p log (p / q), with its
gradient. The logits of both models are computed in tiles and never stored, so nothing is cut to the
top k.
"""
OF_GIVEN = """
## Given responses

With [`rollout.given_responses`](data.md#given-responses), tokens of given responses have this loss
in place of the surrogate, times `loss.given_coefficient`. p = exp(logprobs).

| `loss.given_surrogate` | Loss of a token | Source |
|---|---|---|"""
CORRECTIONS = """## Corrections against the rollout engine

`--config.algorithms.importance.level=...` multiplies the advantages by weights from the ratio of
the policy's to the engine's probability ([details](verl.md#truncated-importance-sampling)).
The settings below are fields of `algorithms.importance`:

| | `level` | `outside` | `floor` | `cap` |
|---|---|---|---|---|
| truncated importance sampling by token | `token` | `truncate` | 0 | 2 |
| truncated importance sampling by response | `sequence` | `truncate` | 0 | 2 |
| masked importance sampling by response | `sequence` | `mask` | 0.5 | 2 |
| IcePop | `token` | `mask` | 0.5 | 2 or 5 |
| mask of responses by their geometric mean | `geometric` | `mask` | 0.99 | 1.01 |
| total-variation mask of tokens | `total_variation` | `mask` | 0 | 0.2 |

## Critic

`ppo` trains a second model with a scalar head, the critic. `critic.path` is its Hugging Face
directory: a language model, or a classifier with one label; if empty, it starts from the policy's
weights. [`critic.*`](configuration.md) are the settings of its optimiser. Shaping acts on the
whitened advantages, not on the returns. `critic/explained_variance` shows how well it predicts.

## KL in the reward

`algorithms.advantage.kl_reward_coefficient` (`ppo`, `reinforce_plus_plus`, `grpo`, `dr_grpo`,
`rloo`, `opo`) subtracts the KL from the reward of each token. Algorithms that compare responses
take the sum over a response, or from a turn on. `algorithms.loss.kl_coefficient` must then be 0.
With `algorithms.advantage.kl_target` the coefficient is multiplied after each step by
1 + clip(KL / kl_target - 1, -0.2, 0.2) * responses / kl_horizon (arXiv:1909.08593), and logged
as `algorithm/kl_coefficient`.

## Without reference answers

`rewards.majority=True` (TTRL, arXiv:2504.16084) rewards the answer that most responses of a group
give. The references, if there are any, count in the log, for a [curriculum](data.md#curricula) and
with `keep_groups_by=correctness`. Answers are compared as in `maj@k`; a verifier of yours must
return them as [`extracted`](verifiers.md#the-function).

## The probability of the reference answer

`rewards.probability_after="<answer>"` (RLPR, arXiv:2506.18254) needs no rule that compares answers:
the reward, from 0 to 1, is the mean probability that the policy gives to the tokens of the
reference answer after the last mark of a response, less their probability right after the prompt
and the mark. It costs a pass over the responses. The verifier's `correct` counts in the log alone.

## Distillation

`model.reference_path` names another model as the reference: a teacher with the policy's tokenizer,
of any family and size. It is a Hugging Face directory; `python -m launch.convert` makes one of a
run. `distillation` trains without rewards, which are then only in the log:

```bash
python -m launch.train --config=configs/gsm8k.py --workdir=runs/distilled \\
    --config.model.path=STUDENT --config.model.reference_path=TEACHER \\
    --config.algorithms.name=distillation --config.algorithms.loss.kl_coefficient=0 \\
    --config.shaping.target=none
```

The default coefficient, 0.001, would add the KL to the same teacher a second time, with a small
weight. `policy/kl` in the log, the KL to the teacher, shows the success. The small entropy bonus of
the default remains; `algorithms.loss.entropy_coefficient=0` removes it.

Distillation over the whole vocabulary instead of the sampled token has a lower variance of the
gradient. It takes the exact KL in place of the advantages:

```bash
python -m launch.train --config=configs/gsm8k.py --workdir=runs/distilled_exact \\
    --config.model.path=STUDENT --config.model.reference_path=TEACHER \\
    --config.algorithms.name=distillation --config.algorithms.advantage.teacher_weight=0 \\
    --config.algorithms.loss.kl_estimator=exact --config.algorithms.loss.kl_coefficient=1 \\
    --config.shaping.target=none
```

With `data.teacher_input` the teacher reads the reference answer, and may be the policy itself
(OPSD, SDPO's kind). The text takes the place of the question in the prompt:

```bash
python -m launch.train --config=configs/gsm8k.py --workdir=runs/self_distilled \\
    --config.algorithms.name=distillation --config.algorithms.advantage.teacher=policy \\
    --config.algorithms.loss.kl_coefficient=0 --config.shaping.target=none \\
    --config.data.teacher_input="{input} Here is the reference answer: {answer}. Now answer."
```

### A teacher on replicas

A replica may hold the teacher. It sends the final states of the responses: D numbers per token, the
hidden width, instead of V logits, the size of the vocabulary. The trainer has only the teacher's
output matrix, in the memory of its host.

Both processes need the same [token](security.md#token). In one shell, `&` lets the replica run in
the background. In another shell, set the same value of `SEMRL_ROLLOUT_TOKEN` first:

```bash
export SEMRL_ROLLOUT_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
python -m launch.rollout --policy=TEACHER --port=50061 \\
    --config.rollout.max_prompt_tokens=639 --config.rollout.max_response_tokens=1 &
python -m launch.train --config=configs/gsm8k.py --workdir=runs/distilled_replica \\
    --config.model.path=STUDENT --config.model.reference_path=TEACHER \\
    --config.model.reference_addresses=127.0.0.1:50061 \\
    --config.algorithms.name=distillation --config.algorithms.loss.kl_coefficient=0 \\
    --config.shaping.target=none
```

- The replica reads prompt and response as one prompt. Its `rollout.max_prompt_tokens` must be at
  least the trainer's `rollout.max_prompt_tokens` + `rollout.max_response_tokens` - 1, because the
  last token is not read: 512 + 128 - 1 with `configs/gsm8k.py`. With `data.teacher_input`, the
  longest prompt of the teacher counts in place of the first number if it is longer. If the
  replica's limit is too low, the trainer ends at the start and names the number.
- The states of prompts are sent too.
- The replica runs until it is stopped, and may serve several runs one after the other.
- The replica computes in its own `--config.model.compute_dtype`. The states travel in the dtype
  that the trainer computes in. In float32, the log-probabilities are equal, up to rounding, to
  those of a reference in the trainer.
- Repeat `--config.model.reference_addresses` for several replicas of one teacher, all started
  alike. They share the responses, and the numbers do not depend on how many there are if they are
  JAX replicas. Token, TLS and time limits are those of `rollout`. A replica that fails is retried,
  and one that starts again goes on.
- Architecture, tokenizer and a sample of the weights are compared with `model.reference_path`. A
  replica that serves other weights, at the start or later, ends the run with one line.
- The exact KL needs the teacher in the trainer.

### A teacher for each data source

`model.references` names other teachers for the prompts of single [data sources](data.md), and
`model.reference_addresses` their replicas. The teacher of other prompts is `model.reference_path`,
or if that is empty, the weights at the start. Here the rows of `math.jsonl` have the source `math`,
and a replica at port 50062 holds the teacher of `code`:

```bash
python -m launch.train --config=configs/default.py --workdir=runs/two_teachers \\
    --config.model.path=STUDENT --config.data.task=files \\
    --config.data.files=data/math.jsonl --config.data.files=data/code.jsonl \\
    --config.model.references=math=MATH_TEACHER --config.model.references=code=CODE_TEACHER \\
    --config.model.reference_addresses=code=127.0.0.1:50062 \\
    --config.algorithms.name=distillation --config.algorithms.loss.kl_coefficient=0 \\
    --config.shaping.target=none
```

Each teacher reads the responses of its sources alone, in a pass before the update. So this goes
with every algorithm that has a reference, but not with the exact KL.

### What all teachers have in common

Every algorithm can have the exact KL as its KL, in addition to its rewards. The logits of the
teacher are divided by `rollout.temperature` too. If its vocabulary is larger, the exact KL leaves
out the tokens that the policy lacks.

## After training

`launch.convert --other=DIR --share=S` writes (1 - S) of the weights of a run and S of those of a
directory: the average of two models, or with a negative share a step past the run, away from DIR:

```bash
python -m launch.convert --source=runs/quickstart --target=beyond \\
    --other=runs/quickstart/warm_start --share=-0.3
```

## Hints

`rollout.hint_rounds=3` (GHPO, arXiv:2507.10628) samples a group without a correct response again,
after a prompt with a quarter, a half, and three quarters of a solution ([hints](data.md#hints)).

## Branches

`rollout.branching=NAME` samples some responses of a group from the prompt, and the others from a
prefix of one of these
([branches](data.md#branches)). It goes with every algorithm that takes groups.

BRANCH_RULES

## Batch rules

These are fields of `algorithms.batch_rules`:

- `overlong_tokens=N`: over the last N tokens before `rollout.max_response_tokens` the reward falls
  by up to 1 (DAPO, arXiv:2503.14476, Eq. 13).
- `mask_truncated=True`: a truncated response is not trained on, but counts in the statistics of its
  group, and under `ppo` in the whitening.
- `max_sampling_rounds=N`: dynamic sampling (DAPO). Groups of equal rewards are dropped, and the
  step samples further rounds of `data.prompts_per_step` prompts until it has that many groups. The
  reward that decides has the penalty of `overlong_tokens`, but not the bonus. Surplus prompts come
  again in the next step. If N rounds are not enough, the run ends with exit code 2; the same
  command with more rounds, or with 0, continues.
- `keep_groups_by=correctness`: keeps groups with 0 < correct responses < G, the paper's rule.

## Aggregation

`--config.algorithms.aggregation=...`: `token_mean` weighs all tokens of the mini-batch equally,
`response_mean` all responses, and `constant_length` divides the sum over tokens by the number of
responses times `algorithms.constant_length` (Dr. GRPO). How a mini-batch is divided into
micro-batches or over devices changes nothing.
"""


LEFT_OUT = """## Left out

| Methods | Why |
|---|---|
| ACE, ARM, StableReinforce | the constants or the formula were not published |
| LATR, ROSE, DeepSearch | branches of several generations, or a tree with values of its nodes |
| AMPO's choice of teachers | by log-probabilities of the answer; here the first responses enter |
| Guide | importance weights between the prompts with and without a hint |
| SEELE | the length of a hint from a model of item response theory, fitted in every round |
| CalibRL | a loss of sampled responses that compares them with the given one |
| ReST-RL | groups that begin with parts of earlier responses; search in a tree by a value model |
| judges of CAPO, FAPO, PROF | models that judge steps; here [a function](verifiers.md) does |
| SvS, MAE, SSP, SSRL | the policy writes its problems; here they are given |
| ROVER | the values of all next tokens, with a softmax of its own in the sampler |
| LaSeR | the log-probability of a token that was not sampled, with a gradient in the update |
| filter of RLPR, V0.5 | prompts without or with more responses; a value model of V0.5's own |
| teacher of SDPO | averaged weights; feedback and a correct response of the group in its prompt |
| softmax of REAL over a group | log-ratios of all responses of a group in one micro-batch |
| MSSR's shaping by entropy | an estimator gets no entropies; `single_stream` has such a baseline |
| RoRecomp | trains again on responses of earlier steps; here a step trains on its own |
| SPARK | trains the policy as a judge of its responses, on prompts that are made of them |
| OLR, TraPO | answers of earlier steps decide which is right; none are kept |
| RECAP | losses of several objectives with weights of their own; here all prompts have one loss |
| RLSP | PPO with a reward for length or of a judge: `ppo` and [`rewards.functions`](verifiers.md) |
| APRIL, arrol | responses that are begun and given up; here all are completed |
| SCOPE | a model that finds the first wrong step, and a better model that corrects it |
| NExt | a predictor of weights that is trained on the checkpoints of many runs |
| reranking by rewards of processes | a model that judges steps; `best_of_k` has reward models |
| MATH-Beyond | a data set: [a file](data.md) that `--benchmarks` takes |
"""


def row(name: str, text: str, settings: str | None = None) -> str:
    """Summary, equation and source of a docstring, as a row of a table.

    What follows the source, the differences from it, stays in the module. With `settings`, equation
    and settings have columns of their own.
    """
    before, _, after = inspect.cleandoc(text).partition("\n\nSource: ")
    before = [" ".join(part.split()) for part in before.split("\n\n")]
    source = " ".join(after.partition("\n\n")[0].split())
    equation = [part for part in before if re.match(r"(A|A_i|A_t|x_t|delta_t) = ", part)]
    rest = " ".join(part for part in before if part not in equation)
    cells = (f"`{name}`", rest, "<br>".join(equation), settings, source)
    if settings is None:
        cells = (f"`{name}`", " ".join(before), source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def settings_of(options: type) -> str:
    """The fields of `Options` that the algorithm adds to the fields of the loss, with defaults."""
    of_loss = {field.name for kind in (Objective, ValueLoss) for field in dataclasses.fields(kind)}
    fields = [field for field in dataclasses.fields(options) if field.name not in of_loss]
    return "<br>".join(f"`{field.name}={field.default}`" for field in fields)


def branch_rules() -> str:
    """The table of the rules for branches, without what departs from their sources."""
    lines = ["| `rollout.branching` | | Settings | Source |\n|---|---|---|---|"]
    for name in module_names(BRANCHING, BRANCH_PARTS):
        module = importlib.import_module(f"{BRANCHING}.{name}")
        text = re.sub(r"\n\nDepartures\..*", "", module.__doc__, flags=re.DOTALL)
        _, meaning, source = row(name, text).split(" | ")
        lines.append(f"| `{name}` | {meaning} | {settings_of(module.Options)} | {source}")
    return "\n".join(lines)


def page() -> str:
    modules = {
        name: importlib.import_module(f"{PACKAGE}.{name}") for name in module_names(PACKAGE, PARTS)
    }
    advantages = [
        row(name, module.__doc__, settings_of(module.Options)) for name, module in modules.items()
    ]
    losses = [row(name, surrogate.loss.__doc__) for name, surrogate in SURROGATES.items()]
    lines = [
        HEAD,
        "## Advantages\n\n| `name` | | Equation | Settings | Source |\n|---|---|---|---|---|",
        *advantages,
        "\n## Losses\n\nr = exp(logprobs - old_logprobs), A the advantage; sg stops the gradient.",
        "",
        "| `loss.surrogate` | Loss of a token | Source |\n|---|---|---|",
        *losses,
        KL_ESTIMATES.rstrip("\n"),
        OF_GIVEN,
        *(row(name, surrogate.loss.__doc__) for name, surrogate in GIVEN_SURROGATES.items()),
        "",
        CORRECTIONS.replace("BRANCH_RULES", branch_rules()),
        LEFT_OUT,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
