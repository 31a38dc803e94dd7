"""The references of a run that are models of their own: checked, loaded, or connected to."""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Callable, Mapping

import jax
import ml_collections
from jax.sharding import Mesh

from semrl_jax import data, models
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.models.of_config import ReferenceFiles, output_matrix, starting_params
from semrl_jax.runs.inputs import Inputs
from semrl_jax.sampling.reference_replicas import open_reference
from semrl_jax.settings.model import ReferenceModel
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.training.offload import host_copies, is_away
from semrl_jax.training.references import Loaded, References, Remote


def check_sources(
    references: Mapping[str, ReferenceFiles],
    prompts: data.PromptDataset,
    report: Callable[[str], None],
) -> None:
    """Reports which references several sources have; UserError for a source without a prompt."""
    own = references.keys() - {""}
    counts = collections.Counter(prompts.sources)
    for source in sorted(own - counts.keys()):
        raise UserError(
            f"{references[source].named.field}={references[source].named.path!r}: no prompt is of "
            f"this data source; the sources are {', '.join(counts):.300}."
        )
    if not own:
        return
    if "" in references and not counts.keys() - own:
        path = references[""].named.path
        raise UserError(
            f"model.reference_path={path!r} is not read: each data source has a reference in "
            "model.references; remove it."
        )
    main = references[""].named.path if "" in references else "the weights at the start"
    parts = [
        f"{source} ({count} prompts): {references[source].named.path if source in own else main}"
        for source, count in counts.items()
    ]
    report(f"references: {', '.join(parts)}")


def reference_params(
    config: ml_collections.ConfigDict, directory: pathlib.Path, model: models.Policy, mesh: Mesh
) -> models.Params:
    """The weights of a reference, where `training.offload` wants them."""
    params = starting_params(directory, model, mesh, config.model.reference_dtype)
    return host_copies(params) if is_away(config, "reference") else params


def open_references(
    stack: contextlib.ExitStack,
    config: ml_collections.ConfigDict,
    inputs: Inputs,
    mesh: Mesh,
    stop: StopRequest,
    reporter: Reporter,
) -> References:
    """Loads the references that are models of their own, or connects to their replicas."""
    longest = inputs.longest_prompt(config)

    def opened(files: ReferenceFiles) -> Loaded | Remote:
        if not files.named.addresses:
            return Loaded(files.model, reference_params(config, files.directory, files.model, mesh))
        replicas = stack.enter_context(open_reference(config, files, longest, stop, reporter))
        matrix = output_matrix(files).astype(jax.numpy.dtype(config.model.reference_dtype))
        return Remote(files.model, matrix, replicas.final_states)

    main = inputs.reference
    others: list[Loaded | Remote] = []
    number_of: dict[ReferenceModel, int] = {}  # sources with one model share it
    of_source = {}
    for source, files in inputs.references.items():
        key = files.named._replace(field="")
        if source and key not in number_of:
            others.append(opened(files))
            number_of[key] = len(others)
        if source:
            of_source[source] = number_of[key]
    numbers = {
        data.prompt_key(example.prompt_ids): of_source.get(example.data_source, 0)
        for example in reversed(inputs.prompts.examples)  # of equal prompts, the first counts
    }
    # A main reference that is here is the learner's own.
    first = opened(main) if main is not None and main.named.addresses else None
    return References((first, *others), numbers if others else {})
