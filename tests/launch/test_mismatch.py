"""launch.mismatch: the page, the cause in one sentence, and mistakes in one line."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import faults
from semrl_jax import models
from semrl_jax.jobs.mismatch import compared_weights
from semrl_jax.support.console import Reporter
from semrl_jax.types import TensorSum
from tests.fixtures import save_model
from tests.launch.conftest import run, succeed
from tests.launch.test_bad_input import assert_each_is_one_line
from tests.rollout.engines.vllm_replica import PYTHON

pytestmark = pytest.mark.slow
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A random model, one with another tensor, and what the first one sampled."""
    home = tmp_path_factory.mktemp("mismatch")
    for name in ("model", "other"):
        save_model(home / name, num_layers=2)
    (file,) = (home / "other").glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {TENSOR: 2 * tensors[TENSOR]}, file, {"format": "pt"})
    (home / "q.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+{n}="}) + "\n" for n in range(6))
    )
    succeed(
        "launch.generate", f"--policy={home / 'model'}", f"--prompts={home / 'q.jsonl'}",
        f"--output={home / 'sampled'}", "--max_prompt_tokens=16", "--max_response_tokens=24",
        "--logprobs", "--hidden_states=0,1,-1", "--states=decode,prefill", "--states_dtype=float32",
    )  # fmt: skip
    save_model(home / "small", num_layers=2, hidden_size=8)
    shutil.copytree(home / "sampled", home / "torn")
    (shard,) = (home / "torn").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:200])
    shutil.copytree(home / "sampled", home / "foreign")
    file = home / "foreign" / "responses.parquet"
    table = pq.read_table(file)
    place = table.column_names.index("response_ids")
    ids = [[9999] * len(row) for row in table["response_ids"].to_pylist()]
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(ids, field.type)), file)
    return home


def test_recorded_numbers_of_the_same_weights_are_healthy(home):
    page = home / "same.html"
    given = f"--policy={home / 'model'}", f"--samples={home / 'sampled'}"
    done = succeed("launch.mismatch", *given, f"--output={page}")
    assert "Rounding in float32 explains" in done.stdout
    (engine,) = json.loads(page.with_suffix(".json").read_text())["engines"]
    assert engine["findings"] == [] and max(engine["ratios"].values()) < 5
    assert list(engine["ratios"]) == ["0", "1", "2", "3"] and engine["logprob_mismatch"] < 1e-5
    assert b"Rounding in float32" in page.read_bytes()


def test_another_tensor_is_named_with_its_layer(home):
    page = home / "other.html"
    given = f"--policy={home / 'other'}", f"--samples={home / 'sampled'}"
    done = run("launch.mismatch", *given, f"--output={page}")
    assert done.returncode == 1, done.stderr
    assert "of layer 1 is multiplied by 0.5" in done.stdout and "Way out" in done.stdout
    (engine,) = json.loads(page.with_suffix(".json").read_text())["engines"]
    assert [found["layers"] for found in engine["findings"]] == [[1]]


def test_an_engine_samples_from_random_prompts(home):
    page = home / "engine.html"
    policy = f"--policy={home / 'model'}"
    done = succeed(
        "launch.mismatch", policy, f"--output={page}", "--num_responses=3", "--max_tokens=8"
    )
    assert "jax: Rounding in float32" in done.stdout
    assert "0 of 27 tensors have another checksum" in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checksums_name_tensors_and_the_version_that_they_are_of(dtype):
    """After the engine's cast; what the engine holds in another form is not compared."""
    config, params = faults.model("qwen2", 0)
    earlier = faults.moved(params, 1, 0.01)
    held = faults.changed(params, {"down/kernel": lambda kernel: 1.1 * kernel}, 1)
    held = faults.changed(
        held, {"query/bias": lambda _: np.asarray(earlier["layers"]["query"]["bias"])[3]}, 3
    )
    arrays = models.iterate_hf_tensors(held, config, dtype)
    sums = [
        TensorSum(spec.name, dtype, *map(np.asarray, models.array_sums(jnp.asarray(array))))
        for spec, array in arrays
    ]
    weights = compared_weights(
        "jax", sums[1:], params, {"step 0": earlier}, config, Reporter(quiet=True)
    )
    assert weights.differing == {"1/down/kernel": "", "3/query/bias": "step 0"}
    assert weights.unknown == {"embed/embedding"}


def test_mistakes_are_one_line(home):
    output, model = f"--output={home / 'no.html'}", f"--policy={home / 'model'}"
    assert_each_is_one_line(
        "launch.mismatch",
        ((output,), "--policy is needed"),
        ((output, model, f"--samples={home}/none"), "does not exist"),
        ((output, model, "--engine=nowhere"), "--engine=nowhere"),
        ((output, model, f"--samples={home}/torn"), "cannot be read"),
        ((output, f"--policy={home}/small", f"--samples={home}/sampled"), "shape"),
        ((output, model, f"--samples={home}/foreign"), "another tokenizer"),
        ((output, model, "--earlier=1"), "--earlier"),
        imports=["semrl_jax.jobs.mismatch"],
    )
    assert not (home / "no.html").exists()


@pytest.mark.soak
def test_vllm_gives_the_states_of_all_layers(tmp_path):
    model = tmp_path / "model"
    save_model(
        model, num_layers=3, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1,
        head_dim=32,
    )  # fmt: skip
    page = tmp_path / "vllm.html"
    done = succeed(
        "launch.mismatch", f"--policy={model}", "--engine=vllm", "--num_responses=4",
        "--max_tokens=16", f"--config.rollout.vllm_python={PYTHON}", f"--output={page}",
        timeout=300,
    )  # fmt: skip
    assert "vllm: Rounding in float32" in done.stdout
    (engine,) = json.loads(page.with_suffix(".json").read_text())["engines"]
    assert list(engine["ratios"]) == ["0", "1", "2", "3", "4"]
