"""Replicas that hold a reference: they send final states, from which the trainer computes the rest.

A state has D numbers, the logits of a token V: with D / V of their bytes, the trainer computes any
function of them. A sequence is sent as a prompt, and its response, of one token, is not read.

Source: the idea is of verl-project/verl#6705.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import ml_collections
import numpy as np
from jaxtyping import Float, Int

from semrl_jax import data, models
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.models.directory import read_tensors
from semrl_jax.models.hf_weights import EMBEDDING
from semrl_jax.models.of_config import ReferenceFiles
from semrl_jax.rollout.building import read_token
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.types import (
    HiddenStateParams,
    ReplicaDescription,
    SampleRequest,
    SamplingParams,
    WeightVersion,
)

FIELD = "model.reference_addresses"
# A call is a unit of retries. It has as many for any number of replicas, so that results do not
# depend on that number.
SEQUENCES_PER_CALL = 16


@dataclasses.dataclass(frozen=True)
class ReferenceReplicas:
    """The replicas of one reference."""

    client: RolloutClient
    version: WeightVersion  # of the weights that they serve
    dtype: str  # of the states on the wire
    stop: StopRequest

    def final_states(
        self, sequences: Sequence[Int[np.ndarray, " _"]]
    ) -> Iterator[tuple[int, Float[np.ndarray, "_ D"]]]:
        """The states after the final norm of all tokens of each sequence, which is numbered.

        They come in any order. Raises as `RolloutClient.generate`, and Preempted after a signal.
        """
        # Sequences of about the same length, because a call is padded.
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        requests = [
            SampleRequest(str(index), place // SEQUENCES_PER_CALL, place, sequences[index], seed=0)
            for place, index in enumerate(order)
        ]

        def again() -> WeightVersion:
            return self.client.await_weights(self.version)

        with self.stop.interruptible():
            again()
            found = self.client.generate(
                requests,
                SamplingParams(max_tokens=1, temperature=0.0),
                HiddenStateParams((-1,), self.dtype, ("prefill",)),
                version=self.version,
                groups_per_call=1,
                resync=again,
            )
            with contextlib.closing(found):
                for rollout in found:
                    yield int(rollout.sample_id), rollout.prompt_states[:, 0]


@contextlib.contextmanager
def open_reference(
    config: ml_collections.ConfigDict,
    files: ReferenceFiles,
    longest_prompt: int,
    stop: StopRequest,
    reporter: Reporter,
) -> Iterator[ReferenceReplicas]:
    """The replicas of a reference, connected, with the weights of its directory.

    UserError: one cannot be reached, or serves another model or too short sequences.
    """
    rollout, architecture = config.rollout, files.model.config

    def check(replica: ReplicaDescription) -> None:
        needed = longest_prompt + rollout.max_response_tokens - 1
        if replica.max_prompts < SEQUENCES_PER_CALL:
            raise UserError(
                f"replica {replica.replica_id} takes {replica.max_prompts} sequences per call, and "
                f"a reference needs {SEQUENCES_PER_CALL}."
            )
        if replica.max_prompt_tokens < needed:
            raise UserError(
                f"replica {replica.replica_id} reads max_prompt_tokens={replica.max_prompt_tokens}"
                f", but a prompt and response may have {needed} before the last token; start it "
                f"with --config.rollout.max_prompt_tokens={needed}."
            )
        if -1 not in replica.layers or "prefill" not in replica.state_kinds:
            raise UserError(f"replica {replica.replica_id} sends no final states of prompts.")

    with contextlib.ExitStack() as stack:
        try:
            client = stack.enter_context(
                RolloutClient(
                    files.named.addresses,
                    read_token(rollout.token_file),
                    run_id="",  # it sends no weights
                    attempt_id="",
                    connect_timeout_s=rollout.connect_timeout_s,
                    sync_timeout_s=rollout.connect_timeout_s,
                    generate_timeout_s=rollout.call_timeout_s,
                    stall_timeout_s=rollout.stall_timeout_s,
                    tls_ca=rollout.tls_ca_file,
                    share_memory=False,
                    field=FIELD,
                    check=check,
                    progress=reporter.line,
                )
            )
            client.connect(
                model_hash=architecture.hash,
                tokenizer_hash=data.tokenizer_hash(data.load_tokenizer(files.directory)),
                vocab_size=architecture.vocab_size,
            )
            version = client.await_weights()
            if not check_weights(client, files):
                reporter.line(f"the weights of {files.named.path!r} on replicas are not compared")
        except (UserError, RuntimeError) as error:
            raise UserError(f"{FIELD}, for {files.named.path!r}: {error}") from error
        yield ReferenceReplicas(client, version, config.model.compute_dtype, stop)


def check_weights(client: RolloutClient, files: ReferenceFiles) -> int:
    """UserError if a replica has other weights than the directory, by a sample of the tensors.

    Returns how many were compared: those that it holds in another form, such as 8 bits, are not.

    These are the output matrix, the final norm and the last layer: all but small models of one
    architecture differ there.
    """
    config = files.model.config
    names = {
        tensor.name
        for tensor in models.hf_tensors(config)
        if tensor.expert is None and tensor.layer in (None, config.num_layers - 1)
        if tensor.name != EMBEDDING or config.tie_embeddings
    }
    sums = {each.name: each for each in client.tensor_sums() if each.name in names}
    ours = read_tensors(files.directory, config, {}, sorted(sums))
    for name, array in sorted(ours.items()):
        checksum, _ = models.array_sums(jnp.asarray(array, sums[name].dtype))
        if int(checksum) != sums[name].checksum:
            raise UserError(
                f"replica {client.descriptions[0].replica_id} serves other weights, such as in "
                f"{name}; start it with --policy={files.named.path}."
            )
    return len(ours)
