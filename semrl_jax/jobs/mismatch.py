"""Compares engines with the trainer's own pass, and names the cause of a difference."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import secrets
import tempfile
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from safetensors import SafetensorError, safe_open

from semrl_jax import models
from semrl_jax.analysis.mismatch import (
    Diagnosis,
    Observation,
    Observed,
    Weights,
    as_given,
    diagnose,
    observe_rollouts,
    segments_of,
)
from semrl_jax.evaluation.generated_files import RESPONSES, STATES_INDEX
from semrl_jax.jobs.generate import RECORD
from semrl_jax.models.of_config import build_policy
from semrl_jax.pages.mismatch import EngineMap, ResponseMap, write_page
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.policies import PolicySource, find_policies
from semrl_jax.sampling.replicas import open_client
from semrl_jax.sampling.requests import GENERATION, stream_seed
from semrl_jax.settings.rollout import weight_dtype
from semrl_jax.support import response_files
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import record_of, recorded
from semrl_jax.support.safe_files import read_json_object, write_json
from semrl_jax.types import (
    DISTRIBUTION,
    GIVEN,
    HiddenStateParams,
    SampleRequest,
    SamplingParams,
    TensorSum,
    distribution_of,
)

RANDOM_TOKENS = 16  # of a prompt, if there are no others
COLUMNS = (
    "rollout_logprobs",
    "rollout_raw_logprobs",
    "response_mask",
    "conversations",
    "step",
    "response",
    "finish_reason",
)


class Options(NamedTuple):
    """What is compared."""

    engines: Sequence[str]  # "jax", "vllm" or an address; empty: what the samples recorded
    samples: pathlib.Path | None
    count: int  # responses
    max_tokens: int  # of a sampled response
    dtype: str  # that the engine is meant to compute in; "": of the config
    steps: Sequence[int]  # earlier checkpoints to try; empty: the one before, and the first model


def compare(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    run: pathlib.Path | None,
    output: pathlib.Path,
    options: Options,
    *,
    quiet: bool = False,
) -> int:
    """Compares, prints a sentence per engine, and writes the page and a record.

    Returns 0, or 1 if a difference is not explained by rounding; UserError for a wrong input.
    """
    reporter = Reporter(quiet=quiet)
    config = source.of_model(config)
    policy, tokenizer = build_policy(config)
    mesh = models.make_mesh(config.mesh.to_dict())
    chosen, temperature = None, 1.0
    if options.samples is not None:
        chosen = read_samples(options.samples, policy.config, tokenizer, options.count)
    if options.samples is None and run is not None:
        chosen = newest_samples(run, policy.config, tokenizer, options.count)
    params = source.params(policy, mesh)
    earlier = earlier_versions(config, source, run, policy, mesh, options.steps)
    # What engines get; that these weights are rounded is meant.
    given = jax.tree.map(lambda x: x.astype(weight_dtype(config)).astype("float32"), params)
    names = options.engines
    if not names and options.samples is None:
        names = config.rollout.addresses or (config.rollout.engine,)
    found: list[tuple[str, Observation, Weights | None]] = []
    dtype = options.dtype or weight_dtype(config) or policy.compute_dtype
    if not names:
        if source.checkpoint is not None and chosen.steps - {source.step}:
            raise UserError(
                f"--samples has responses of step {min(chosen.steps)}, and the policy is of step "
                f"{source.step}; name the checkpoint of that step, or an --engine to sample anew."
            )
        if not chosen.is_raw:
            sampling = sampling_of(chosen.file, config)
            temperature = sampling.temperature or 1.0  # greedy: of the model's own distribution
            if sampling.is_modified:
                raise UserError(
                    "--samples has log-probabilities of another distribution than the model's; "
                    "name an --engine to sample anew."
                )
        observation = Observation.of(chosen.responses)
        found.append((f"recorded in {chosen.file.name}", observation, None))
    for name in names:
        prompts = prompts_of(chosen, policy.config, options.count, config.seed)
        observation, sums = sampled(
            name, config, policy, tokenizer, params, source, run, prompts, options, reporter
        )
        weights = compared_weights(name, sums, given, earlier, policy.config, reporter)
        found.append((name, observation, weights))
    maps, records, all_healthy = [], [], True
    for name, observation, weights in found:
        parts = segments_of(policy.config, observation)
        with reporter.bar(f"compare {name}", len(parts), "parts") as bar:
            diagnosis = diagnose(
                policy.config, given, observation, dtype=dtype, earlier=earlier,
                weights=weights, temperature=temperature,
                quantized=bool(config.rollout.vllm_quantization),
                advance=bar.advance, status=bar.status,
            )  # fmt: skip
        all_healthy &= diagnosis.is_healthy
        reporter.notice(f"{name}: {diagnosis.sentence}")
        maps.append(engine_map(name, observation, diagnosis, policy.config.num_layers, tokenizer))
        records.append(record(name, diagnosis))
    note = f"Policy {source.name}; earlier versions: {', '.join(earlier) or 'none'}."
    write_page(output, f"Mismatch of {source.name}", note, maps)
    write_json(output.with_suffix(".json"), {"policy": source.name, "engines": records})
    reporter.notice(f"done: see {output}")
    return 0 if all_healthy else 1


class Chosen(NamedTuple):
    """Responses of a file."""

    file: pathlib.Path
    responses: list[Observed]
    steps: frozenset[int]  # of the weights that sampled them, as far as the file says
    is_raw: bool  # whether log-probabilities are of the model's own distribution


def newest_samples(
    run: pathlib.Path, architecture: models.DecoderConfig, tokenizer: Any, count: int
) -> Chosen | None:
    """The newest recorded training step of a run; None if it has none."""
    files = [*recorded(run, "step").values()]
    return read_samples(files[-1], architecture, tokenizer, count) if files else None


def read_samples(
    path: pathlib.Path, architecture: models.DecoderConfig, tokenizer: Any, count: int
) -> Chosen:
    """Responses of `launch.generate`, of a run or of an evaluation; UserError if they do not fit.

    A directory of `launch.generate` may have states.
    """
    file = path / RESPONSES if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--samples={path} is no file of responses, and has no {RESPONSES}.")
    table = response_files.read(file, (*response_files.KEYS, *response_files.IDS), COLUMNS).slice(
        0, count
    )
    # No engine gave anything for given responses.
    rows = [row for row in table.to_pylist() if row.get("finish_reason") != GIVEN]
    if not rows:
        raise UserError(f"--samples: {file} has no response.")
    for row in rows:
        if not row["prompt_ids"]:
            raise UserError(f"--samples: {file} has a response without a prompt.")
        largest = max((*row["prompt_ids"], *row["response_ids"]))
        if largest >= architecture.vocab_size:
            raise UserError(
                f"--samples: {file} has token {largest}, and the policy {architecture.vocab_size} "
                "tokens: it is of another tokenizer."
            )
    _check_text(file, rows, tokenizer)
    states = _States(path, architecture) if (path / STATES_INDEX).is_file() else None
    raw = all(row.get("rollout_raw_logprobs") is not None for row in rows)
    name = "rollout_raw_logprobs" if raw else "rollout_logprobs"
    responses = []
    for row in rows:
        ids = np.array(row["response_ids"], np.int32)
        logprobs = row.get(name)
        values = np.full(len(ids), np.nan) if logprobs is None else np.array(logprobs, np.float32)
        if logprobs is not None and not np.isfinite(values).all():
            raise UserError(f"--samples: {file} has {name} that are not finite.")
        for each in (name, "response_mask", "conversations"):
            if row.get(each) is not None and len(row[each]) != len(ids):
                raise UserError(
                    f"--samples: {file} has {len(row[each])} {each} for {len(ids)} tokens."
                )
        if (mask := row.get("response_mask")) is not None:
            values = np.where(mask, values, np.nan)
        if (conversations := row.get("conversations")) is not None:
            # Later conversations do not see the first one, whose tokens the pass has before them.
            values = np.where(np.cumsum(conversations) == 0, values, np.nan)
        prompt = np.array(row["prompt_ids"], np.int32)
        key = row["group_id"], row["sample_index"]
        found = states.of(*key, len(prompt), len(ids)) if states else {}
        responses.append(Observed(prompt, ids, values.astype(np.float32), found))
    steps = frozenset(row["step"] for row in rows if row.get("step") is not None)
    return Chosen(file, responses, steps, raw)


def sampling_of(file: pathlib.Path, config: ml_collections.ConfigDict) -> SamplingParams:
    """How the responses of a file were sampled: as launch.generate recorded, else as in the run."""
    try:
        settings = read_json_object(file.parent / RECORD)["settings"]
        options = {name: settings[f"evaluation.{name}"] for name in DISTRIBUTION}
    except (FileNotFoundError, KeyError, TypeError):
        options = distribution_of(config.rollout)
    return SamplingParams(1, **options)


def _check_text(file: pathlib.Path, rows: Sequence[dict[str, Any]], tokenizer: Any) -> None:
    """Raises UserError if no response is the text of its token ids."""
    texts = [
        (tokenizer.decode(row["response_ids"], skip_special_tokens=True).strip(), row["response"])
        for row in rows
        if row.get("response")
    ]
    texts = [(own, given) for own, given in texts if own and given.strip()]
    if texts and not any(own in given or given.strip() in own for own, given in texts):
        raise UserError(
            f"--samples: the responses in {file} are not the text of their token ids with this "
            "policy's tokenizer; name the policy that they are of."
        )


class _States:
    """The hidden states of a directory of `launch.generate`."""

    def __init__(self, directory: pathlib.Path, architecture: models.DecoderConfig):
        self.directory, self.architecture = directory, architecture
        try:
            index = json.loads((directory / STATES_INDEX).read_text())
            self.layers = [int(layer) for layer in index["metadata"]["layers"]]
            self.shards = dict(index["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{directory / STATES_INDEX} cannot be read: {type(error).__name__}."
            ) from None

    def of(self, group: int, sample: int, num_prompt: int, num_tokens: int) -> dict[int, Any]:
        """States by layer, as in `Observed`; UserError if they do not fit the response."""
        width, count = self.architecture.hidden_size, self.architecture.num_layers
        parts = {}
        for name, rows in (
            (f"{group}/{sample}/decode", num_tokens),
            (f"{group}/prefill", num_prompt),
        ):
            if name not in self.shards:
                continue
            parts[name] = found = self._read(name)
            if found.shape != (rows, len(self.layers), width):
                raise UserError(
                    f"{self.directory / self.shards[name]}: {name} has the shape {found.shape}, "
                    f"and the response needs {(rows, len(self.layers), width)}."
                )
        states = {}
        for plane, layer in enumerate(self.layers):
            if not -1 <= layer <= count:
                raise UserError(
                    f"{self.directory / STATES_INDEX} has layer {layer}, and the policy {count}."
                )
            rows = np.full((num_prompt + num_tokens - 1, width), np.nan, np.float32)
            for name, found in parts.items():
                first = num_prompt - 1 if name.endswith("decode") else 0
                rows[first : first + len(found)] = as_given(found[:, plane])
            states[count if layer == -1 else layer] = rows
        return states

    def _read(self, name: str) -> np.ndarray:
        file = self.directory / self.shards[name]
        try:
            with safe_open(str(file), framework="numpy") as tensors:
                return tensors.get_tensor(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {type(error).__name__}: {error}.") from None


def earlier_versions(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    run: pathlib.Path | None,
    policy: models.Policy,
    mesh: Any,
    steps: Sequence[int],
) -> dict[str, models.Params]:
    """Weights that a stale engine may have, by name; "base" is the model without its adapter."""
    if source.adapter is not None:
        return {"base": PolicySource(source.name, source.model).params(policy, mesh)}
    if run is None or source.checkpoint is None:
        if steps:
            raise UserError("--earlier names steps of a run, and the policy is none; leave it out.")
        return {}
    if not steps:
        saved = [step for step in checkpoint_steps(run / "checkpoints") if step < source.step]
        steps = dict.fromkeys([*saved[-1:], 0])
    found = {}
    for step in steps:
        (one,) = find_policies(str(run), [step], "--earlier")
        is_base = one.checkpoint is None and bool(config.lora.rank)
        found["base" if is_base else f"step {step}"] = one.params(policy, mesh)
    return found


def prompts_of(
    chosen: Chosen | None, architecture: models.DecoderConfig, count: int, seed: int
) -> list[np.ndarray]:
    """The prompts of the chosen responses, or random tokens."""
    if chosen is not None:
        return [each.prompt_ids for each in chosen.responses]
    random = np.random.default_rng(seed)
    return list(random.integers(0, architecture.vocab_size, (count, RANDOM_TOKENS), np.int32))


def sampled(
    name: str,
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any,
    params: models.Params,
    source: PolicySource,
    run: pathlib.Path | None,
    prompts: Sequence[np.ndarray],
    options: Options,
    reporter: Reporter,
) -> tuple[Observation, list[TensorSum]]:
    """Samples from an engine, with the states and the sums of weights that it gives.

    A replica that serves weights of the run is asked as it is; others get the policy's.
    """
    config = config.copy_and_resolve_references()
    rollout = config.rollout
    rollout.addresses = () if name in ("jax", "vllm") else (name,)
    rollout.addresses_file = ""
    rollout.jax_processes = 0
    rollout.engine = name if name in ("jax", "vllm") else rollout.engine
    if not rollout.addresses:
        rollout.max_prompt_tokens = max(map(len, prompts))
        rollout.max_response_tokens = options.max_tokens
        rollout.vllm_inner_states, rollout.vllm_max_num_seqs = True, len(prompts)
    config.hidden_states.source, config.evaluation.metrics = "none", False
    config.data.prompts_per_step = rollout.group_size = 1
    run_id = secrets.token_hex(8) if run is None else record_of(run).get("run_id", "mismatch")
    requests = [
        SampleRequest(str(i), i, 0, ids, stream_seed(config.seed, GENERATION, i))
        for i, ids in enumerate(prompts)
    ]
    architecture, dtype = policy.config, weight_dtype(config)
    count = architecture.num_layers
    with _client(config, policy, tokenizer, run_id, reporter) as client:
        (description,) = client.descriptions
        version = description.version
        if version is None:
            version = client.sync_weights(
                models.tensor_specs(architecture, dtype),
                lambda: (
                    array for _, array in models.iterate_hf_tensors(params, architecture, dtype)
                ),
                step=source.step,
            )
        else:
            reporter.line(f"{name} serves the weights of step {version.step}, which it keeps")
        layers = tuple(range(count + 1))
        if missing := set(layers[:-1]) - set(description.layers):
            layers = (-1,)
            reporter.line(
                f"{name} gives no states of {len(missing)} inner layers "
                f"({description.layers_reason}): final states and log-probabilities are compared"
            )
        kinds = tuple(kind for kind in ("decode", "prefill") if kind in description.state_kinds)
        states = HiddenStateParams(layers, "float32", kinds)
        rollouts = list(
            client.generate(requests, SamplingParams(options.max_tokens), states, version=version)
        )
        try:
            sums = client.tensor_sums()
        except UserError as error:
            reporter.line(f"{error}; weights are compared by what they compute alone")
            sums = []
    rollouts.sort(key=lambda each: each.group_id)
    return observe_rollouts(rollouts, count), sums


def compared_weights(
    name: str,
    sums: Sequence[TensorSum],
    given: models.Params,
    earlier: Mapping[str, models.Params],
    architecture: models.DecoderConfig,
    reporter: Reporter,
) -> Weights | None:
    """Compares an engine's tensors with the trainer's, cast to the dtypes in which it holds them.

    An engine that has an adapter unmerged has two tensors of each of its modules, next to the base.
    None if it gave no sums.
    """
    if not sums:
        return None
    theirs, paths = {each.name: each for each in sums}, {}
    adapter = models.adapter_of(given, architecture)
    if adapter is not None and not any(".lora_A." in name for name in theirs):
        adapter = None
    tensors = [*models.hf_tensors(architecture)]
    tensors += models.adapter_tensors(architecture, adapter) if adapter else []
    for tensor in tensors:
        place = tensor.path if tensor.layer is None else (str(tensor.layer), *tensor.path[1:])
        paths[tensor.name] = "/".join(place)

    def equal(params: models.Params, names: Container[str]) -> Iterator[tuple[str, bool]]:
        options = {"on_host": False}
        if adapter is None:
            arrays = models.iterate_hf_tensors(params, architecture, "float32", **options)
        else:
            base = models.iterate_base_tensors(params, architecture, "float32", **options)
            own = models.iterate_adapter_tensors(params, architecture, **options)
            arrays = itertools.chain(base, own if models.adapter_of(params, architecture) else ())
        for spec, array in arrays:
            if spec.name in names:
                held = theirs[spec.name]
                checksum, _ = models.array_sums(array.astype(held.dtype))
                yield spec.name, int(checksum) == held.checksum

    differing = {each: "" for each, is_equal in equal(given, theirs) if not is_equal}
    for label, params in earlier.items() if differing else ():
        differing |= {each: label for each, is_equal in equal(params, set(differing)) if is_equal}
    left_out = len(paths) - len(theirs)
    reporter.line(
        f"{name}: {len(differing)} of {len(theirs)} tensors have another checksum than the "
        "trainer's"
        + (f"; {left_out} are held in another form, and not compared" if left_out else "")
    )
    return Weights(
        {paths[each]: label for each, label in differing.items()},
        frozenset(paths[each] for each in paths.keys() - theirs.keys()),
    )


@contextlib.contextmanager
def _client(config, policy, tokenizer, run_id: str, reporter: Reporter) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="semrl-mismatch-") as directory:
        with open_client(
            config, policy, tokenizer, threading.Lock(), reporter, run_id=run_id,
            attempt_id=secrets.token_hex(8), directory=pathlib.Path(directory),
            num_problems=1,
        ) as client:  # fmt: skip
            yield client


def engine_map(
    name: str, observation: Observation, diagnosis: Diagnosis, count: int, tokenizer: Any
) -> EngineMap:
    """What the page shows of an engine, for a model of `count` layers."""
    segments = diagnosis.segments
    responses = []
    for row, length in enumerate(observation.num_tokens):
        length = int(length)
        tokens = tokenizer.convert_ids_to_tokens(observation.ids[row, :length].tolist())
        noise = [diagnosis.noise[segment.last] for segment in segments]
        responses.append(
            ResponseMap(
                [str(token) for token in tokens],
                int(observation.num_prompt[row]),
                np.array([each[row, :length] for each in diagnosis.states.values()]),
                np.array(
                    [
                        diagnosis.local[segment.last][row, :length] / size
                        for segment, size in zip(segments, noise)
                    ]
                ),
                diagnosis.logprobs[row, :length],
            )
        )
    names = [f"input of layer {layer}" if layer < count else "final" for layer in diagnosis.states]
    parts = [segment.name(count) for segment in segments]
    return EngineMap(
        name,
        diagnosis.sentence,
        diagnosis.is_healthy,
        names,
        parts,
        diagnosis.ratios,
        diagnosis.limit,
        responses,
    )


def record(name: str, diagnosis: Diagnosis) -> dict[str, Any]:
    """What the record has of an engine."""
    known = diagnosis.logprobs[np.isfinite(diagnosis.logprobs)]
    return {
        "engine": name,
        "sentence": diagnosis.sentence,
        "dtype": diagnosis.dtype,
        "logprob_mismatch": float(np.abs(known).mean()) if known.size else None,
        "ratios": {
            str(segment.last): ratio if np.isfinite(ratio) else None
            for segment, ratio in zip(diagnosis.segments, diagnosis.ratios)
        },
        "findings": [
            {
                "kind": each.kind, "what": each.what, "layers": list(each.layers),
                "value": each.value, "explained": each.explained, "sentence": each.sentence,
            }
            for each in diagnosis.findings
        ],
    }  # fmt: skip
