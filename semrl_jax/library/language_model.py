"""A policy with its weights and its tokenizer: to sample from, and to look into."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from configs import recorded
from configs.default import get_config
from semrl_jax import data, models
from semrl_jax.cluster.peers import Peers
from semrl_jax.data.turns import ChatTurns
from semrl_jax.jobs.chat import encoded_question, own_template
from semrl_jax.models.of_config import build_policy, end_token_ids
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.runs.export import save_model
from semrl_jax.runs.policies import find_policies
from semrl_jax.sampling.requests import GENERATION, stream_seed
from semrl_jax.support import compilation
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import run_of
from semrl_jax.types import HiddenStateParams, Rollout, SampleRequest, SamplingParams, WeightVersion

Prompt = str | Sequence[Mapping[str, str]]
Tokens = str | Sequence[int] | Int[np.ndarray, " T"]


class Response(NamedTuple):
    """A sampled response.

    Attributes:
      text: without the token that ends it.
      token_ids: [T], with it.
      logprobs: [T] float32 nats, at the temperature of the sampling.
      hidden_states: [T, D], the state that each token was drawn from; None if not asked for.
      finish_reason: "eos", or "length" if it was cut.
    """

    text: str
    token_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    hidden_states: Float[np.ndarray, "T D"] | None
    finish_reason: str


class LanguageModel(contextlib.AbstractContextManager):
    """A policy with weights and a tokenizer, in this process.

    Args:
      path: a run, one of its checkpoints, a Hugging Face directory, a hub id, a .gguf file or an
        adapter in PEFT's format. A run stands for its newest checkpoint.
      max_prompt_tokens: longer prompts are refused.

    Raises:
      UserError: if there is no such policy, or it is not supported.

    Attributes:
      policy: the Flax decoder without its weights; its methods take `params` first.
      params: the weights, a nested dict of arrays; others may be assigned.
      tokenizer: of transformers.
    """

    def __init__(self, path: str | pathlib.Path, max_prompt_tokens: int = 2048):
        (source,) = find_policies(str(path), None, field="model")
        config = get_config()
        config.model.path, config.model.family = str(source.model), source.family
        run = run_of(pathlib.Path(path))
        self._config = recorded.get_config(run / "config.json") if run else config  # of prompts
        compilation.keep_programs()
        mesh = models.make_mesh(config.mesh.to_dict())
        self.policy, self.tokenizer = build_policy(config)
        self.params = source.params(self.policy, mesh)
        self._base = source.model
        self._ends = end_token_ids(config, self.tokenizer)
        self._max_prompt_tokens = max_prompt_tokens
        self._client: RolloutClient | None = None
        self._version: WeightVersion | None = None
        self._sent: models.Params | None = None

    def close(self) -> None:
        """Ends the threads of `generate`; a further call starts them again."""
        if self._client is not None:
            self._client.close()
        self._client = self._sent = None

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes a Hugging Face directory, for transformers, vLLM and `model.path`."""
        save_model(
            pathlib.Path(directory), self.params, self.policy.config, self.tokenizer, self._base,
            Peers(),
        )  # fmt: skip

    def encode(self, prompt: Prompt) -> Int[np.ndarray, " P"]:
        """The tokens of a prompt, as in training.

        Args:
          prompt: a question, which gets the template of the run; without a run, the tokenizer's
            chat template if there is one. Or messages, `[{"role": "user", "content": ...}, ...]`.

        Raises:
          UserError: if the chat template refuses it, or it has no token or too many.
        """
        if isinstance(prompt, str):
            template = own_template(self._config, self.tokenizer)
            ids = encoded_question(prompt, self._config, self.tokenizer, template)
        else:
            (begun,) = ChatTurns(self.tokenizer, self._ends).begun([prompt])
            if begun.error:
                raise UserError(f"the chat template refuses the messages: {begun.error}.")
            ids = begun.token_ids
        if not 0 < len(ids) <= self._max_prompt_tokens:
            raise UserError(
                f"a prompt of {len(ids)} tokens; max_prompt_tokens={self._max_prompt_tokens}."
            )
        return np.array(ids, np.int32)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        states: bool = False,
        **distribution: float,
    ) -> list[list[Response]]:
        """Samples `n` responses to each prompt. Equal arguments give equal responses.

        Args:
          prompts: one or several, see `encode`.
          n: responses to each.
          max_tokens: of a response.
          temperature: 0 is greedy.
          top_p, top_k: keep the most probable tokens; 1 and 0 keep all.
          seed: of all random numbers.
          states: whether the responses have their hidden states, of the final layer.
          distribution: min_p, presence_penalty, frequency_penalty, repetition_penalty, min_tokens;
            see `types.SamplingParams`.
        """
        is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping))
        encoded = [self.encode(prompt) for prompt in ([prompts] if is_one else prompts)]
        requests = [
            SampleRequest(f"{group}/{i}", group, i, ids, stream_seed(seed, GENERATION, group, i))
            for group, ids in enumerate(encoded)
            for i in range(n)
        ]
        if not requests:
            return [[] for _ in encoded]
        client, version = self._opened()
        sampling = SamplingParams(max_tokens, temperature, top_p, top_k, self._ends, **distribution)
        kept = HiddenStateParams((-1,) if states else (), "float32")
        rollouts = client.generate(requests, sampling, kept, version=version)
        found = {rollout.sample_id: self._response(rollout) for rollout in rollouts}
        return [[found[f"{group}/{i}"] for i in range(n)] for group in range(len(encoded))]

    def logprobs(self, prompt: Prompt, response: Tokens) -> Float[np.ndarray, " T"]:
        """Log-probability of each token of a response, in nats.

        Args:
          prompt: see `encode`.
          response: a text, whose tokens get no end token; or token ids.
        """
        before, ids, states = self._joined(prompt, response)
        # Token t + 1 is drawn from state t; what stands last is not drawn from any.
        following = np.roll(ids, -1, axis=1)
        found = _logprobs(self.policy, self.params, states, following)
        return np.asarray(found[0, before])

    def hidden_states(self, prompt: Prompt, response: Tokens) -> Float[np.ndarray, "T D"]:
        """States after the final norm from which the tokens of a response are drawn.

        Args:
          prompt, response: see `logprobs`.
        """
        before, _, states = self._joined(prompt, response)
        return np.asarray(states[0, before])

    def _joined(
        self, prompt: Prompt, response: Tokens
    ) -> tuple[slice, Int[np.ndarray, "1 S"], Float[Array, "1 S D"]]:
        """Where the response is drawn from; the tokens of both, padded; all states."""
        first = self.encode(prompt)
        if isinstance(response, str):
            (response,) = data.encode(self.tokenizer, [response], [])
        ids = np.concatenate([first, np.asarray(response, np.int32)])
        data.check_ids(self.tokenizer, self.policy.config.vocab_size, [("the response", ids)])
        size = max(64, 1 << (len(ids) - 1).bit_length())  # so that few programs are compiled
        padded = np.pad(ids, (0, size - len(ids)))[None]
        positions = np.arange(size, dtype=np.int32)[None]
        segments = (positions < len(ids)).astype(np.int32)
        states = _states(self.policy, self.params, padded, positions, segments)
        return slice(len(first) - 1, len(ids) - 1), padded, states

    def _opened(self) -> tuple[RolloutClient, WeightVersion]:
        """A client of an engine in this process, which has the weights."""
        architecture = self.policy.config
        if self._client is None:
            engine = JaxEngine(self.policy, max_prompt_tokens=self._max_prompt_tokens)
            self._client = RolloutClient(
                local=LocalReplica(engine),
                run_id=secrets.token_hex(8),
                attempt_id="library",
                progress=Reporter().line,
            )
        if self._sent is not self.params:
            specs = models.tensor_specs(architecture, "float32")

            def read() -> Iterator[np.ndarray | jax.Array]:
                tensors = models.iterate_hf_tensors(
                    self.params, architecture, "float32", on_host=False
                )
                return (array for _, array in tensors)

            step = 0 if self._version is None else self._version.step + 1
            self._version = self._client.sync_weights(specs, read, step=step)
            self._sent = self.params
        return self._client, self._version

    def _response(self, rollout: Rollout) -> Response:
        ids = rollout.response_ids
        is_ended = len(ids) and int(ids[-1]) in self._ends
        states = rollout.hidden_states
        return Response(
            text=data.full_text(self.tokenizer, ids[:-1] if is_ended else ids),
            token_ids=ids,
            logprobs=rollout.rollout_logprobs,
            hidden_states=None if states is None else states[:, 0],
            finish_reason=rollout.finish_reason,
        )


@functools.partial(jax.jit, static_argnums=0)
def _states(
    policy: models.Policy, params: models.Params, *arrays: Int[Array, "1 S"]
) -> Float[Array, "1 S D"]:
    return policy.final_states(params, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(
    policy: models.Policy,
    params: models.Params,
    states: Float[Array, "1 S D"],
    token_ids: Int[Array, "1 S"],
) -> Float[Array, "1 S"]:
    return policy.token_logprobs(params, states, token_ids)[0]
