"""launch.mismatch: the page, the cause in one sentence, and mistakes in one line."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from tests.fixtures import save_model
from tests.launch.conftest import run, succeed
from tests.launch.test_bad_input import assert_one_line
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


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "--policy is needed"),
        (("--policy={home}/model", "--samples={home}/none"), "does not exist"),
        (("--policy={home}/model", "--engine=nowhere"), "--engine=nowhere"),
        (("--policy={home}/model", "--samples={home}/torn"), "cannot be read"),
        (("--policy={home}/small", "--samples={home}/sampled"), "shape"),
        (("--policy={home}/model", "--samples={home}/foreign"), "another tokenizer"),
        (("--policy={home}/model", "--earlier=1"), "--earlier"),
    ],
)
def test_mistakes_are_one_line(home, flags, reason):
    given = [flag.replace("{home}", str(home)) for flag in flags]
    done = run("launch.mismatch", *given, f"--output={home / 'no.html'}")
    assert_one_line(done, reason)
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
