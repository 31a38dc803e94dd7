"""GRPO steps of google-tunix, with its own sampler. See benchmarks/step.py.

Qwen2 and Llama. Three things differ from the other systems with responses of ragged lengths: every
call samples with the same random numbers, the end token of a response is not trained on, and rows
are padded to the longest prompt and to the limit of a response.
"""

import functools
import importlib.metadata
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from protocol import Driver
from reward import vowels
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

driver = Driver()
work = driver.work
directory = pathlib.Path(work["model"])
architecture = json.loads((directory / "config.json").read_text())
sizes = {
    "num_layers": architecture["num_hidden_layers"],
    "vocab_size": architecture["vocab_size"],
    "embed_dim": architecture["hidden_size"],
    "hidden_dim": architecture["intermediate_size"],
    "num_heads": architecture["num_attention_heads"],
    "head_dim": architecture["hidden_size"] // architecture["num_attention_heads"],
    "num_kv_heads": architecture["num_key_value_heads"],
    "rope_theta": int((architecture.get("rope_parameters") or architecture)["rope_theta"]),
    "norm_eps": architecture["rms_norm_eps"],
}
tied = architecture["tie_word_embeddings"]
if architecture["model_type"] == "llama":
    # Its Llama does not use the model's rope_theta.
    llama3.apply_rope = functools.partial(llama3.apply_rope, rope_theta=sizes["rope_theta"])
    config, params = llama3.ModelConfig(**sizes, weight_tying=tied), llama3_params
else:
    config, params = qwen2.ModelConfig(**sizes, use_tied_embedding=tied), qwen2_params
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, -1), ("fsdp", "tp"))
tokenizer = AutoTokenizer.from_pretrained(directory)
ends = work["end_token_ids"]
if tokenizer.pad_token_id in ends:
    # It takes every padding token for padding, also the end tokens within a chat.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(max(tokenizer.added_tokens_decoder))
actor = params.create_model_from_safe_tensors(str(directory), config, mesh, dtype=jnp.float32)


class Prompts:
    """The prompts of the step, again and again."""

    def __iter__(self):
        while True:
            yield {"prompts": np.array(work["prompts"])}


def reward(prompts, completions, **_):
    return [vowels(completion) for completion in completions]


micro_batches = {}  # in prompts
if work["peer_micro_batch_size"] < len(work["prompts"]) * work["group_size"]:
    micro_batches = {
        "mini_batch_size": len(work["prompts"]),
        "train_micro_batch_size": max(work["peer_micro_batch_size"] // work["group_size"], 1),
        "rollout_micro_batch_size": len(work["prompts"]),
    }
cluster = rl.RLCluster(
    actor=actor,
    tokenizer=tokenizer,
    cluster_config=rl.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT), mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl.RLTrainingConfig(
            actor_optimizer=optax.adam(work["learning_rate"]),
            eval_every_n_steps=10**9,
            max_steps=10**6,
            **micro_batches,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=work["response_tokens"],
            max_prompt_length=work["prompt_tokens"],
            kv_cache_size=work["prompt_tokens"] + work["response_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            # Without end tokens: no such token exists, so every response has its full length.
            eos_tokens=ends or [architecture["vocab_size"] + 7],
        ),
    ),
)
# beta=0: no reference model.
learner = GRPOLearner(
    rl_cluster=cluster,
    reward_fns=reward,
    algo_config=GRPOConfig(num_generations=work["group_size"], num_iterations=1, beta=0.0),
)
generate, update_actor = cluster.generate, cluster.update_actor
row = {}


def timed_generate(*arguments, **options):
    """Begins a step. Work between the previous update and this call counts to the step before."""
    if row:
        driver.report(**row)
        row.clear()
    driver.wait()
    began = time.perf_counter()
    found = generate(*arguments, **options)
    row["rollout_s"] = time.perf_counter() - began
    # It leaves out the end token of a response.
    limit = work["response_tokens"]
    row["num_tokens"] = sum(min(len(tokens) + 1, limit) for tokens in found.tokens)
    return found


def timed_update(*arguments, **options):
    began = time.perf_counter()
    found = update_actor(*arguments, **options)
    jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param)))
    took = time.perf_counter() - began
    row["update_s"] = row.get("update_s", 0.0) + took  # called for every micro-batch
    return found


cluster.generate, cluster.update_actor = timed_generate, timed_update
driver.report(
    versions={name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")},
    num_params=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(actor, nnx.Param))),
    prompt_tokens=[len(tokenizer(text)["input_ids"]) for text in work["prompts"]],
)
learner.train(Prompts())
