"""One optimiser step of a policy or of a critic, with the arguments that tests vary."""

from semrl_jax.training.critic_update import CriticLoss
from semrl_jax.training.policy_update import PolicyLoss
from semrl_jax.training.train_state import Trained
from semrl_jax.training.trainee import Frozen, MiniBatch, Trainee


def update_policy(
    params, opt_state, batch, old_logprobs, ref_logprobs, advantages, reference=None, base=None, *,
    policy, optimizer, plan, importance=(), number=None, **options,
):  # fmt: skip
    """New parameters and optimiser state, scalars, and log-probabilities before the step."""
    loss = PolicyLoss(policy, importance=importance, **options)
    trainee = Trainee("policy", optimizer, loss, Frozen(base, reference))
    rows = MiniBatch(batch, old_logprobs, ref_logprobs, advantages=advantages, dropout=number)
    trained, scalars, logprobs = trainee.update(Trained(params, opt_state), rows, plan)
    return *trained, scalars, logprobs


def update_critic(critic, batch, values, returns, *, model, optimizer, plan, algorithm):
    """The critic after the step, and scalars."""
    trainee = Trainee("critic", optimizer, CriticLoss(model, algorithm))
    return trainee.update(critic, MiniBatch(batch, values=values, returns=returns), plan)[:2]
