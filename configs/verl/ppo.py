"""What turns a published GRPO run into the PPO run of the same model: values of the launcher."""


def with_critic(config):
    """The configuration with PPO: one response per prompt, and a critic instead of groups."""
    config.algorithms.name = "ppo"
    config.rollout.group_size = 1
    config.algorithms.advantage.gamma = 1.0
    config.algorithms.advantage.gae_lambda = 1.0
    config.algorithms.loss.value_clip = 0.5
    # The critics of the published runs are not known. The launcher's default is a model with
    # another tokenizer; an example of the release pairs Mistral with a critic of Qwen's tokenizer.
    config.critic.path = ""  # the policy's weights
    config.critic.warmup_steps = 0
    config.critic.learning_rate = 1e-5
    config.critic.learning_rate_warmup_steps = 0
    config.critic.max_grad_norm = 1.0
    return config
