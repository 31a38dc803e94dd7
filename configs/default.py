"""Every setting with its default. Experiment files import this and change some settings.

Suffixes give units. The sections mirror the rooms of the package. Defaults of the method are those
of VERL's launcher (arXiv 2509.23808 and its repository), unless a comment gives a reason.
"""

import ml_collections


def part_of(total, size: int):
    """`size` if it divides `total`, otherwise `total`.

    Args:
      total: a number, or a reference to a field: the result then follows its overrides.
      size: above 0.
    """
    is_rest = (total % size + size - 1) // size  # 1 if it does not divide, else 0
    return size + (total - size) * is_rest


def at_least(size, least):
    """The larger one; for numbers or references, as `part_of`."""
    return (size + least + abs(size - least)) // 2


def get_config() -> ml_collections.ConfigDict:
    """The default configuration; `semrl_jax.runs.validate` checks combinations of settings."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of all random numbers

    config.distributed = ml_collections.ConfigDict()  # docs/clusters.md
    config.distributed.coordinator = ""  # host:port of process 0; empty: from the cluster
    config.distributed.num_processes = 0  # 0: from the cluster; 1: this process alone
    config.distributed.process_id = -1  # -1: from the cluster
    config.distributed.connect_timeout_s = 300.0  # for all processes to arrive
    config.distributed.heartbeat_timeout_s = 60.0  # after this silence, a process is lost
    config.distributed.phase_timeout_s = 10800.0  # for one phase; above rollout.call_timeout_s

    config.model = ml_collections.ConfigDict()
    # Hugging Face directory or hub id; or a run or one of its checkpoints, whose weights are copied
    # to WORKDIR/start. Empty: a random model
    config.model.path = ""
    # A family of semrl_jax/models/families, or "my_package.my_module" with your own; empty: by the
    # model_type of its config.json, and qwen2 for a random model.
    config.model.family = ""
    # Dtype of activations: float32 or bfloat16
    config.model.compute_dtype = "float32"
    # Dtype of the trained parameters: float32, or bfloat16 with float32 copies in the optimiser
    # (docs/memory.md)
    config.model.param_dtype = "float32"
    # Dtype of the reference: float32, or bfloat16, which takes half the memory
    config.model.reference_dtype = "float32"
    # What the backward pass recomputes: none, dots (all but the products, which saves memory and
    # its traffic) or full.
    config.model.remat = "dots"
    # Attention of whole sequences: xla; splash, a fused kernel for TPUs; triton, one for GPUs; or
    # auto: splash on TPUs if it supports the model and the mesh, and xla elsewhere.
    config.model.attention = "auto"
    # Width of a random model; like the other sizes not read with model.path
    config.model.hidden_size = 128
    config.model.intermediate_size = 256  # width of the feed-forward layers of a random model
    config.model.num_layers = 3  # layers of a random model
    config.model.num_heads = 4  # query heads of a random model; they divide hidden_size
    config.model.num_kv_heads = 2  # key and value heads of a random model; they divide num_heads
    # Whether input and output of a random model share one matrix
    config.model.tie_embeddings = True

    config.mesh = ml_collections.ConfigDict()  # sizes multiply to the device count; one may be -1
    # Copies of parameters and optimiser; each trains on a part of the batch
    config.mesh.replica = 1
    config.mesh.fsdp = -1  # shards of parameters and optimiser, which are also shards of the batch
    config.mesh.sequence = 1  # parts into which the tokens of a row are split
    config.mesh.tensor = 1  # parts into which heads and feed-forward layers are split
    # Parts into which the experts of each layer are split; they are also shards of the batch
    config.mesh.expert = 1

    config.data = ml_collections.ConfigDict()
    # arithmetic: the built-in generator; files: those of data.files; reasoning_gym: procedural sets
    config.data.task = "arithmetic"
    config.data.num_prompts = 4096  # training prompts from a generator
    # Data sets of the package reasoning-gym, NAME or NAME:option=value:weight=2; docs/data.md
    config.data.reasoning_gym = ()
    # Prompts of one training step, each with rollout.group_size responses
    config.data.prompts_per_step = 48
    config.data.files = ()  # training prompts, .jsonl and .parquet, repeat the flag; docs/data.md
    config.data.row_format = "question_answer"  # rows of the files: question_answer or simplerl
    # Fields of a row that make the question; several are joined by a space
    config.data.question_fields = ("question",)
    config.data.answer_field = "answer"  # field of a row with the reference answer
    # The answer is the text after this mark, #### in GSM8K; empty: all
    config.data.answer_after = ""
    # Template of a prompt: auto (the tokenizer's chat template, else plain), plain, abel, ...,
    # chat, a text with {input}, or its file
    config.data.template = "auto"
    config.data.system_prompt = ""  # system prompt for the template chat
    # Before a prompt: the special tokens that the tokenizer adds by default, such as BOS. A chat
    # template writes its own. docs/data.md
    config.data.add_special_tokens = True
    # True: count and skip rows that cannot be used instead of stopping
    config.data.skip_bad_rows = False

    config.rollout = ml_collections.ConfigDict()
    config.rollout.addresses = ()  # host:port, repeat the flag; empty: the trainer's own replica
    # A file with one host:port a line in place of addresses. It is read again before each sync of
    # weights, so that replicas may join and leave. docs/clusters.md
    config.rollout.addresses_file = ""
    # Engine of the trainer's own replica: jax (embedded) or vllm (a child process)
    config.rollout.engine = "jax"
    config.rollout.token_file = ""  # token for the addresses; empty: $SEMRL_ROLLOUT_TOKEN
    config.rollout.tls_ca_file = ""  # certificate authority for the addresses; empty: no TLS
    config.rollout.group_size = 8  # responses per prompt
    # N: a replica gets the prompts in calls of N, the next one when it is free. 0: an equal part of
    # the batch each. docs/clusters.md
    config.rollout.groups_per_call = 0
    config.rollout.temperature = 1.0  # temperature of the sampling; 0 is greedy
    # Sample from the most probable tokens with this sum of probabilities; 1: all
    config.rollout.top_p = 1.0
    config.rollout.top_k = 0  # sample from this many most probable tokens; 0: all
    # Multiplies the temperature of token t by 1 for t < warmup_tokens, then by
    # max(1 + maximum - exp(t / d), minimum), d = min(decay_tokens + decay_growth * step, max_...).
    # docs/algorithms.md; JAX engine only
    config.rollout.annealing = ml_collections.ConfigDict()
    config.rollout.annealing.enabled = False  # whether the temperature is annealed along a response
    config.rollout.annealing.maximum = 1.2  # the larger, the later the temperature falls
    config.rollout.annealing.minimum = 0.1  # smallest factor of the temperature
    config.rollout.annealing.warmup_tokens = 10  # first tokens of a response with the factor 1
    # d at step 0; with a larger d the temperature falls later
    config.rollout.annealing.decay_tokens = 500.0
    config.rollout.annealing.decay_growth = 100.0  # what each training step adds to d
    config.rollout.annealing.max_decay_tokens = 800_000.0  # the largest d
    config.rollout.max_prompt_tokens = 512  # longer prompts of files are left out
    config.rollout.max_response_tokens = 1536  # a response is truncated there
    # Token ids that end a response, in addition to the end-of-sequence token. docs/data.md
    config.rollout.stop_token_ids = ()
    # Words of one token that end a response, or verl:llama, ...; repeat the flag
    config.rollout.stop_words = ()
    # Texts that end a response; they may span tokens; repeat the flag
    config.rollout.stop_strings = ()
    # What happens to running responses when new weights arrive: replicas wait for them, abort them
    # or keep them. Kept responses take their further tokens from the new weights: with any engine
    # if max_staleness is at least 2 (docs/ahead.md), else with vLLM only.
    config.rollout.in_flight = "wait"
    config.rollout.weight_dtype = ""  # dtype of weights on the wire; empty: model.compute_dtype
    # Lag k: the batch of step s is sampled with the weights of step max(0, s - k), during the
    # updates of the steps between. docs/ahead.md
    config.rollout.max_staleness = 0
    config.rollout.connect_timeout_s = 300.0  # limit for all replicas to answer
    # Limit of one batch of responses or one sync, retries included
    config.rollout.call_timeout_s = 7200.0
    config.rollout.sync_wait_s = 60.0  # limit for slower replicas, once one of them has new weights
    # Longest silence of a replica or client, compilation included
    config.rollout.stall_timeout_s = 600.0
    # JAX engine: child processes of the trainer that sample; 0: the trainer itself, in between
    config.rollout.jax_processes = 0
    # JAX engine: cores that the trainer leaves to each child process; 0: all share all
    config.rollout.jax_process_cores = 0
    # JAX engine: responses decoded side by side; on a CPU, divided among the cores
    config.rollout.jax_max_batch = 128
    config.rollout.jax_chunk_tokens = 16  # JAX engine: decoded tokens between two transfers
    # JAX engine: devices of this process that share one copy of the weights. -1: all that
    # jax_data_parallelism leaves.
    config.rollout.jax_tensor_parallelism = 1
    # JAX engine: copies of the weights that share the responses, a power of two. -1: as many as
    # jax_tensor_parallelism leaves devices for. docs/clusters.md
    config.rollout.jax_data_parallelism = 1
    # Python of vLLM's environment, third_party/vllm_patch/README.md.
    config.rollout.vllm_python = ".venv-vllm/bin/python"
    config.rollout.vllm_max_num_seqs = 256  # vLLM engine: responses decoded side by side
    # vLLM engine: most tokens of an engine step; 0: its own default
    config.rollout.vllm_max_num_batched_tokens = 0
    config.rollout.vllm_tensor_parallelism = 1  # vLLM engine: devices of a replica
    # vLLM engine: share of a GPU, or of the machine without one, for weights and cache
    config.rollout.vllm_gpu_memory_utilization = 0.9
    # vLLM engine: size of the cache; 0: the rest of that memory, on CPU 4
    config.rollout.vllm_kv_cache_gib = 0.0
    # vLLM engine: True: no compilation, starts in half the time
    config.rollout.vllm_enforce_eager = False
    # vLLM engine: rounds the weights that arrive to 8 bits: fp8_per_channel, fp8_per_tensor or
    # fp8_per_block; empty: it does not. docs/vllm.md
    config.rollout.vllm_quantization = ""

    config.hidden_states = ml_collections.ConfigDict()
    # Who computes the states that are measured: rollout, policy or none
    config.hidden_states.source = "rollout"
    config.hidden_states.dtype = "bfloat16"  # dtype of states on the wire: bfloat16 or float32
    config.hidden_states.compare_every = 0  # how often both sources are compared; 0: never

    config.metrics = ml_collections.ConfigDict()
    # Tokens between two measured prefixes of a response; ERA needs 3 strides
    config.metrics.stride = 40
    # Responses between two measured prefixes of a batch; 0: not measured
    config.metrics.dataset_stride = 20
    # Which prefixes velocity and acceleration compare: exact, release or later
    config.metrics.window = "exact"
    config.metrics.method = "gram"  # decomposition: gram, or svd, which is slower and has 5 digits
    # Metrics of a response's hidden states: built in, or of your own; docs/extending.md.
    config.metrics.names = ("effective_rank",)
    # Metrics of the mean states of each group: elliptical_novelty, log_determinant, lidar;
    # docs/metrics.md.
    config.metrics.of_groups = ()
    # How often the final states of policy and reference are compared; 0: never. A comparison takes
    # a forward pass of both models.
    config.metrics.drift_every = 0
    # Your own numbers for the log: modules, repeat the flag; docs/extending.md
    config.metrics.probes = ()
    # Whose hidden states are measured; -1: the final layer; i: the input of layer i
    config.metrics.layers = (-1,)
    # Where it is measured: trainer, or rollout, on the replica, which then sends no states
    config.metrics.placement = "trainer"
    config.metrics.num_threads = 1  # host threads that measure
    # 0: on the host, in num_threads threads. N: N responses at a time on the accelerator.
    config.metrics.device_batch = 0

    config.shaping = ml_collections.ConfigDict()
    # What the bonus is added to: advantage, reward, both or none
    config.shaping.target = "advantage"
    config.shaping.tokens = "all"  # which response tokens get the bonus: all or last
    # Weight of exploration: adaptive, by the guidance; half, 0.5; sum, no mixing.
    config.shaping.mixing = "adaptive"
    # Scale of the bonus: fixed, or performance, which falls as the mean reward rises
    config.shaping.scale = "fixed"
    config.shaping.eta = 1.0  # strength of the bonus; 0: none
    config.shaping.gain = 2.0  # how strongly the guidance changes the weight of exploration
    config.shaping.kappa = 2.0  # the bonus is at most |A| / kappa
    config.shaping.indicators = (  # metrics whose deviation from their baselines gives the bonus
        "effective_rank_acceleration",
        "effective_rank_velocity",
        "effective_rank",
    )
    # One weight per indicator, in the mixture for exploration
    config.shaping.explore_weights = (0.0, 0.0, 1.0)
    # One weight per indicator, in the mixture for exploitation
    config.shaping.exploit_weights = (0.0, 1.0, 0.0)
    # The indicator that decides between exploration and exploitation
    config.shaping.guidance = "effective_rank_acceleration"
    config.shaping.alpha = 0.3  # update rate of the baselines, in (0, 1]
    config.shaping.ema_init = "first_batch"  # first baselines: means of the first_batch, or zero
    config.shaping.ema_lag = 1  # 1: step t uses means up to step t - 1; 2: up to t - 2
    # Responses too short for an indicator are excluded or count as zeros
    config.shaping.invalid = "excluded"

    config.algorithms = ml_collections.ConfigDict()
    # docs/algorithms.md, or "my_package.my_module" with one of your own, docs/extending.md
    config.algorithms.name = "grpo"
    config.algorithms.options = ml_collections.ConfigDict()  # options without a field below
    config.algorithms.advantage = ml_collections.ConfigDict()
    config.algorithms.advantage.epsilon = 1e-6  # grpo, quantile_baseline: keeps a quotient finite
    # quantile_baseline: which quantile of a group's rewards is the baseline
    config.algorithms.advantage.quantile = 0.5
    # quantile_baseline: divide by the standard deviation
    config.algorithms.advantage.normalise = True
    # sample_reinforcement: weight of correct responses
    config.algorithms.advantage.positive_weight = 0.1
    # sample_reinforcement: weight of wrong responses
    config.algorithms.advantage.negative_weight = 1.0
    config.algorithms.advantage.correction = "backward"  # noisy_rewards: backward or forward
    # noisy_rewards: probability that a wrong response is accepted
    config.algorithms.advantage.false_positive_rate = 0.0
    # noisy_rewards: probability that a correct response is rejected
    config.algorithms.advantage.false_negative_rate = 0.0
    # sample_reinforcement, noisy_rewards: rewards above are positive
    config.algorithms.advantage.threshold = 0.0
    config.algorithms.advantage.baseline_shift = -0.1  # asymre: added to the baseline
    config.algorithms.advantage.baseline_rate = 0.1  # reinforce: update rate of the baseline
    # reinforce_plus_plus: subtract the mean of the group first
    config.algorithms.advantage.group_baseline = False
    config.algorithms.advantage.gamma = 1.0  # ppo: discount per token
    config.algorithms.advantage.gae_lambda = 1.0  # ppo: lambda of generalised advantage estimation
    # ppo, reinforce_plus_plus: KL in the reward; above 0, loss.kl_coefficient must be 0
    config.algorithms.advantage.kl_reward_coefficient = 0.0
    # ppo, reinforce_plus_plus: as loss.kl_estimator.
    config.algorithms.advantage.kl_reward_estimator = "kl"
    # ppo, reinforce_plus_plus: wanted KL of an adaptive coefficient; 0: it is fixed
    config.algorithms.advantage.kl_target = 0.0
    # Number over which an adaptive coefficient changes by a fifth
    config.algorithms.advantage.kl_horizon = 10_000
    config.algorithms.loss = ml_collections.ConfigDict()
    # Loss of a token: clip, gspo, dcpo, cispo, reinforce or opmd
    config.algorithms.loss.surrogate = "clip"
    config.algorithms.loss.clip_epsilon = 0.2  # how far a ratio may fall below 1
    # How far a ratio may rise above 1; 0: as far as below
    config.algorithms.loss.clip_epsilon_high = 0.0
    config.algorithms.loss.dual_clip = 0.0  # largest ratio at a negative advantage; 0: no limit
    config.algorithms.loss.opmd_tau = 1.0  # strength of OPMD's regulariser
    # Weight of the KL penalty; 0: no reference is loaded or computed
    config.algorithms.loss.kl_coefficient = 0.001
    config.algorithms.loss.entropy_coefficient = 0.001  # weight of the entropy bonus
    # Estimator of the KL: kl, abs, mse, low_var_kl or low_var_kl+
    config.algorithms.loss.kl_estimator = "low_var_kl"
    config.algorithms.loss.value_clip = 0.5  # ppo: largest change of a value in a step
    # Correction for the difference between rollout engine and policy; docs/verl.md
    config.algorithms.importance = ml_collections.ConfigDict()
    # Level of the importance weights: none, token, sequence, geometric or total_variation
    config.algorithms.importance.level = "none"
    # The level where level is none, but responses come from another policy: with
    # rollout.max_staleness above 0 or rollout.vllm_quantization. none: no correction either.
    config.algorithms.importance.level_ahead = "token"
    # Truncate weights to the bounds, or mask: drop what lies outside
    config.algorithms.importance.outside = "truncate"
    config.algorithms.importance.floor = 0.0  # the smallest ratio
    config.algorithms.importance.cap = 2.0  # the largest ratio, or difference of probabilities
    config.algorithms.batch_rules = ml_collections.ConfigDict()
    # Over this many tokens before the limit of a response, its reward falls by up to 1; 0: off
    config.algorithms.batch_rules.overlong_tokens = 0
    # True: a response cut off at its limit is not trained on, but counts in its group
    config.algorithms.batch_rules.mask_truncated = False
    # Dynamic sampling: a step samples rounds of prompts_per_step prompts until prompts_per_step
    # groups have unequal rewards, and trains on these. The run ends if so many rounds do not
    # suffice. 0: off.
    config.algorithms.batch_rules.max_sampling_rounds = 0
    # What must differ in a group: reward or correctness
    config.algorithms.batch_rules.keep_groups_by = "reward"
    # How the losses of the tokens become one: token_mean, response_mean or constant_length
    config.algorithms.aggregation = "token_mean"
    config.algorithms.constant_length = 0  # aggregation constant_length: limit of a response

    config.rewards = ml_collections.ConfigDict()
    # A built-in verifier, or "package.module:name" of your own; empty: math. docs/verifiers.md
    config.rewards.function = ""
    # Several functions, summed: FUNCTION, or FUNCTION:weight=0.5:name=NAME; repeat the flag. The
    # entry "model" is the score of rewards.model. Without another entry, rewards.function only
    # tells which responses are correct.
    config.rewards.functions = ()
    config.rewards.model = ml_collections.ConfigDict()
    config.rewards.model.path = ""  # Hugging Face directory or hub id of a sequence classifier
    config.rewards.model.dtype = "float32"  # float32, or bfloat16, which takes half the memory
    config.rewards.failure_score = 0.0  # score if your function raises, hangs or returns no verdict
    config.rewards.memory_limit_gib = 2.0  # limit of one worker; 0: no limit
    config.rewards.mode = "independent"  # correctness and the box count; mix: only correctness
    # Score of wrong and unboxed responses, in independent mode
    config.rewards.unboxed_penalty = -1.0
    config.rewards.timeout_s = 10.0  # limit of one call of a verifier
    config.rewards.num_workers = 2  # processes that run verifiers
    # True: permute rewards over the batch, a control that must not learn
    config.rewards.shuffle = False

    config.critic = ml_collections.ConfigDict()  # only with an algorithm that has one, such as ppo
    config.critic.path = ""  # Hugging Face directory; empty: the policy's weights and a new head
    # Steps at the beginning that train only the critic
    config.critic.warmup_steps = 0
    config.critic.learning_rate = 1e-5  # learning rate of the critic
    config.critic.learning_rate_warmup_steps = 0  # optimiser steps with a linearly rising rate
    config.critic.adam_b1 = 0.9  # adamw: decay of the mean of gradients
    config.critic.adam_b2 = 0.999  # adamw: decay of the mean of squared gradients
    config.critic.weight_decay = 0.01  # times the learning rate, per step
    config.critic.max_grad_norm = 1.0  # gradients above this norm are scaled down to it

    config.lora = ml_collections.ConfigDict()  # adapters upon a frozen base. docs/lora.md
    config.lora.rank = 0  # rank of the adapters; 0: no adapters, all parameters are trained
    config.lora.alpha = 32.0  # the product of an adapter's matrices is scaled by alpha / rank
    config.lora.rank_stabilized = False  # True: scaled by alpha / sqrt(rank)
    # Modules of every layer that get adapters: q_proj, ..., patterns such as *_proj, or all-linear;
    # repeat the flag
    config.lora.targets = ("all-linear",)
    # Dtype of the frozen base, which is also the reference: float32, or bfloat16 for half the
    # memory
    config.lora.base_dtype = "float32"
    # Directory in PEFT's format with the adapter to start from; empty: a new adapter
    config.lora.path = ""

    config.warm_start = ml_collections.ConfigDict()  # supervised training before the first update
    config.warm_start.num_steps = 0  # optimiser steps; 0: no warm start
    config.warm_start.num_demonstrations = 20_000  # demonstrations that are generated and repeated
    config.warm_start.batch_size = 64  # sequences of an optimiser step
    # Sequences of one forward and backward pass; divides batch_size. Default: 16 if that divides
    # it, else all
    config.warm_start.micro_batch_size = part_of(config.warm_start.get_ref("batch_size"), 16)
    config.warm_start.learning_rate = 2e-3  # learning rate of the warm start
    config.warm_start.forget_probability = 0.8  # probability that the teacher drops a carry

    # Supervised fine-tuning on conversations of your own, launch.sft; docs/data.md
    config.sft = ml_collections.ConfigDict()
    # Conversations, .jsonl and .parquet, repeat the flag; empty: launch.sft warm-starts
    config.sft.files = ()
    config.sft.evaluation_files = ()  # held-out conversations; each file has its own loss
    # Steps between evaluations, which also run before the first and after the last step; 0: never
    config.sft.evaluation_every_steps = 50
    config.sft.row_format = "messages"  # rows of the files: messages or prompt_completion
    config.sft.messages_field = "messages"  # field of a row with the list of messages
    # prompt_completion: fields that make the prompt; several are joined by a space
    config.sft.prompt_fields = ("prompt",)
    config.sft.completion_field = "completion"  # prompt_completion: field with the completion
    config.sft.template = "auto"  # as data.template
    config.sft.system_prompt = ""  # system prompt for the template chat
    config.sft.add_special_tokens = True  # as data.add_special_tokens
    config.sft.chat_template = ""  # Jinja file that replaces the tokenizer's chat template
    # True: count and skip rows that cannot be used instead of stopping
    config.sft.skip_bad_rows = False
    config.sft.max_tokens = 2048  # limit of a conversation, template included
    config.sft.too_long = "drop"  # conversations above max_tokens: drop, truncate or refuse
    config.sft.num_epochs = 1  # passes over the conversations
    config.sft.num_steps = 0  # optimiser steps; above 0, replaces num_epochs
    config.sft.batch_size = 64  # conversations of an optimiser step
    config.sft.batch_tokens = 0  # above 0, replaces batch_size: most tokens of an optimiser step
    config.sft.micro_batch_size = 8  # as training.micro_batch_size
    # Tokens of one forward and backward pass on each data shard; follows sft.max_tokens unless set
    config.sft.micro_batch_tokens = config.sft.get_ref("max_tokens").identity()
    config.sft.pack_sequences = True  # as training.pack_sequences
    config.sft.balance_lengths = True  # as training.balance_lengths
    config.sft.learning_rate = 1e-5  # highest rate of the schedule
    config.sft.schedule = "cosine"  # rate after the warm-up: cosine, linear or constant
    config.sft.warmup_fraction = 0.03  # share of the steps in which the rate rises linearly
    config.sft.final_fraction = 0.0  # share of the highest rate, at the end of cosine and linear
    config.sft.adam_b1 = 0.9  # adamw: decay of the mean of gradients
    config.sft.adam_b2 = 0.95  # adamw: decay of the mean of squared gradients
    config.sft.weight_decay = 0.01  # times the learning rate, per step
    config.sft.max_grad_norm = 1.0  # gradients above this norm are scaled down to it

    # Optimiser of the policy, the critic and launch.sft; docs/memory.md
    config.optimizer = ml_collections.ConfigDict()
    # adamw or adafactor, or "my_package.my_module" with one of your own, docs/extending.md
    config.optimizer.name = "adamw"
    config.optimizer.options = ml_collections.ConfigDict()  # options without a field below
    # adamw, adafactor: dtype of the mean of gradients: float32 or bfloat16
    config.optimizer.first_moment_dtype = "float32"
    config.optimizer.momentum = 0.0  # adafactor: decay of the mean of its steps; 0: none
    config.optimizer.decay_exponent = 0.8  # adafactor: of the decay of the mean of squares

    config.training = ml_collections.ConfigDict()
    config.training.num_steps = 160  # length of the run; may be raised when it is resumed
    config.training.responses_per_step = (  # derived: follows overrides of both factors
        config.data.get_ref("prompts_per_step") * config.rollout.get_ref("group_size")
    )
    # Prompts of one optimiser step; divides data.prompts_per_step. Default: 24 if that divides it,
    # else all
    config.training.prompts_per_minibatch = part_of(config.data.get_ref("prompts_per_step"), 24)
    config.training.micro_batch_size = 8  # responses of one forward and backward pass
    # Tokens of one forward and backward pass on each data shard, padding included. Above 0, it
    # replaces micro_batch_size.
    config.training.micro_batch_tokens = 0
    config.training.pack_sequences = False  # put several sequences into a row of micro_batch_tokens
    # Give shards equally many tokens; same numbers up to rounding
    config.training.balance_lengths = True
    config.training.learning_rate = 5e-7  # learning rate of the policy
    config.training.learning_rate_warmup_steps = 0  # optimiser steps with a linearly rising rate
    config.training.adam_b1 = 0.9  # adamw: decay of the mean of gradients
    config.training.adam_b2 = 0.999  # adamw: decay of the mean of squared gradients
    config.training.weight_decay = 0.01  # times the learning rate, per step
    config.training.max_grad_norm = 1.0  # gradients above this norm are scaled down to it
    config.training.max_skipped_updates = 3  # non-finite updates in a row that end the run
    config.training.grace_s = 30.0  # time after SIGTERM to save the last checkpoint
    # What is kept in the memory of the host while no update needs it: optimizer, reference; repeat
    # the flag. GPUs and TPUs; docs/memory.md
    config.training.offload = ()
    # Dtype of WORKDIR/model, a Hugging Face directory of the policy that launch.train writes at the
    # end: float32 or bfloat16. Empty: none
    config.training.export = ""

    config.evaluation = ml_collections.ConfigDict()
    config.evaluation.every_steps = 10  # also before the first and after the last update; 0: never
    config.evaluation.num_problems = 512  # at most, per held-out set or file
    # Used with data.task=files; each file is a benchmark with its own name. FILE, or
    # FILE:setting=value:... to set a field below, num_problems or name for this file; docs/data.md
    config.evaluation.files = ()
    config.evaluation.scores = ("greedy",)  # names of docs/evaluation.md, or "my_package.module"
    # Whether held-out problems of the task or files are evaluated
    config.evaluation.held_out = True
    # A name or group such as gsm8k or tiny, FILE.jsonl, or "my_package.module", each with
    # :setting=value:... for names and files; docs/data.md
    config.evaluation.benchmarks = ()
    config.evaluation.data_dir = "data/benchmarks"  # where the files of named benchmarks are
    config.evaluation.shots = 0  # examples before each question, the first ones of shots_file
    # File of the examples: .jsonl or .parquet, with question and answer (or response)
    config.evaluation.shots_file = ""
    # Responses per problem, for scores such as pass_at_k. The score greedy always samples one
    # response at temperature 0.
    config.evaluation.n = 1
    # Temperature of the sampling for scores other than greedy; 0 is greedy
    config.evaluation.temperature = 0.0
    config.evaluation.top_p = 1.0  # as rollout.top_p, for these scores
    config.evaluation.top_k = 0  # as rollout.top_k, for these scores
    config.evaluation.k = (1,)  # values of k in pass@k, maj@k and best@k; at most n
    # Responses of one call of launch.evaluate. An interrupted evaluation repeats the last call.
    config.evaluation.responses_per_call = 1024
    # Sequence classifier for best@k of launch.evaluate: Hugging Face directory or hub id.
    config.evaluation.reward_model = ""
    # Verifier of all held-out problems, named as in rewards.function. Empty: the verifier
    # "benchmark" for named benchmarks, and the verifier of the rewards for other problems.
    config.evaluation.verifier = ""
    config.evaluation.metrics = False  # True: measure hidden states of evaluated responses too
    # Without identity(), setting a field that follows another one would change that one too

    # Rows of held-out files; follows data.row_format unless set
    config.evaluation.row_format = config.data.get_ref("row_format").identity()
    # Follows data.question_fields unless set
    config.evaluation.question_fields = config.data.get_ref("question_fields").identity()
    # Follows data.answer_field unless set
    config.evaluation.answer_field = config.data.get_ref("answer_field").identity()
    # Follows data.answer_after unless set
    config.evaluation.answer_after = config.data.get_ref("answer_after").identity()
    # Follows data.template unless set
    config.evaluation.template = config.data.get_ref("template").identity()
    # Follows rollout.stop_strings unless set
    config.evaluation.stop_strings = config.rollout.get_ref("stop_strings").identity()
    # Options of evaluation.metrics. Each field follows the field of config.metrics unless set.
    config.evaluation.metric_options = ml_collections.ConfigDict()
    for field in set(config.metrics) - {"of_groups", "drift_every", "probes"}:
        config.evaluation.metric_options[field] = config.metrics.get_ref(field).identity()

    config.checkpoints = ml_collections.ConfigDict()
    config.checkpoints.every_steps = 40  # steps between two checkpoints
    config.checkpoints.keep = 2  # the newest ones stay
    # Checkpoints of multiples of this step are never removed; 0: none
    config.checkpoints.keep_every = 0
    # Steps with a checkpoint of their own, which is never removed
    config.checkpoints.extra_steps = ()

    config.logging = ml_collections.ConfigDict()
    # Steps between two whose responses are recorded, in addition to the last step and every
    # evaluation. 0: no response is recorded.
    config.logging.rollouts_every_steps = 10
    # Steps between two drawings of the report; 0: only at the end, also after a failure
    config.logging.plot_every_steps = 10

    # Project of Weights & Biases that gets the rows too; empty: none. Needs `pip install wandb`
    config.logging.wandb = ""
    # Project of Trackio that gets the rows too; empty: none. Needs `pip install trackio`
    config.logging.trackio = ""

    config.profile = ml_collections.ConfigDict()
    # Steps of which a JAX profile is written to WORKDIR/profile: 3:6 for the steps 3, 4 and 5.
    # Empty: none. docs/performance.md
    config.profile.steps = ""
    return config
