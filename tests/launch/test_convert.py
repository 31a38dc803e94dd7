"""launch.convert: both directions, bit for bit; mistakes give one line."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.convert import convert
from semrl_jax import data, models
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.shaping import init_shaping_state
from semrl_jax.support.errors import UserError
from semrl_jax.training.train_state import DataPosition, TrainState
from tests.cases import refused
from tests.fixtures import random_params
from tests.launch.conftest import run

CONFIG = models.DecoderConfig(
    vocab_size=34, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8,
)  # fmt: skip
POLICY = models.Policy(CONFIG)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run directory with checkpoints of steps 1 and 2, and their parameters."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    models.save_directory(
        directory / "warm_start", random_params(POLICY), CONFIG, data.character_tokenizer()
    )
    record = {"run_id": "a", "config": {"model": {"path": ""}}}
    (directory / "config.json").write_text(json.dumps(record))
    params = {step: random_params(POLICY, step) for step in (1, 2)}
    checkpoints = Checkpoints(directory / "checkpoints", keep=2)
    for step in params:
        checkpoints.save(
            TrainState(
                params=params[step],
                optimizer={"moments": random_params(POLICY, 3)},  # not restored in these tests
                shaping=init_shaping_state(),
                step=jnp.int32(step),
                skipped_in_row=jnp.int32(0),
                position=DataPosition(0, step),
            )
        )
    checkpoints.close()
    return directory, params


@pytest.fixture
def directory(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


def weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_params(directory, params):
    loaded = models.load_params(directory, models.load_config(directory))
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_run_becomes_a_model_directory(directory, made, tmp_path, capsys):
    convert(directory, tmp_path / "newest")
    assert_same_params(tmp_path / "newest", made[1][2])
    assert len(data.load_tokenizer(tmp_path / "newest")) == CONFIG.vocab_size
    assert models.load_config(tmp_path / "newest") == CONFIG
    convert(directory, tmp_path / "first", step=1)
    assert_same_params(tmp_path / "first", made[1][1])
    assert "done" in capsys.readouterr().out


def test_a_model_may_be_mixed_with_another(directory, made, tmp_path):
    start, share = directory / "warm_start", -0.5
    convert(directory, tmp_path / "mixed", other=str(start), share=share)
    one, other = (made[1][2], random_params(POLICY))
    wanted = jax.tree.map(lambda a, b: (1 - share) * a + share * b, one, other)
    models.save_directory(tmp_path / "wanted", wanted, CONFIG, data.character_tokenizer())
    found, expected = weights(tmp_path / "mixed"), weights(tmp_path / "wanted")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6)
    convert(directory, tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "again", other=str(start), share=share)
    for name, values in weights(tmp_path / "again").items():
        np.testing.assert_array_equal(values, found[name])


def test_an_adapter_is_mixed_with_another_model_as_its_merged_model_is(tmp_path):
    lora = models.Lora(models.peft.find_modules(CONFIG, ["mlp.*"]), rank=2, alpha=4.0)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for place, seed in ((base, 0), (tmp_path / "other", 1)):
        models.save_directory(
            place, random_params(POLICY, seed), CONFIG, data.character_tokenizer()
        )
    shapes = lora.shapes(POLICY.shapes())
    random = np.random.default_rng(0)
    pairs = jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), shapes)
    models.peft.save_adapter(adapter, pairs, lora, CONFIG, base, str(base))
    convert(adapter, tmp_path / "merged")
    for source in ("adapter", "merged"):
        convert(tmp_path / source, tmp_path / f"{source}_mixed", other=str(tmp_path / "other"))
    found, expected = (weights(tmp_path / f"{one}_mixed") for one in ("adapter", "merged"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def test_another_architecture_is_not_mixed_in(directory, tmp_path):
    wide = dataclasses.replace(CONFIG, intermediate_size=24)
    params = random_params(models.Policy(wide))
    models.save_directory(tmp_path / "wide", params, wide, data.character_tokenizer())
    for other, message in (("wide", "another architecture"), ("none", "is no Hugging Face dir")):
        path = str(tmp_path / other)
        refused(f"--other={path} .*{message[3:]}", convert, directory, tmp_path / "x", other=path)
    assert not (tmp_path / "x").exists()


def test_a_run_may_be_named_relative_to_where_the_command_is_started(
    directory, made, tmp_path, monkeypatch
):
    monkeypatch.chdir(directory.parent)
    convert(pathlib.Path(directory.name), tmp_path / "newest")
    assert_same_params(tmp_path / "newest", made[1][2])


def test_the_tokenizer_is_written_as_transformers_writes_it_without_how_it_was_loaded(
    directory, tmp_path
):
    import transformers

    file = directory / "warm_start" / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": "{{ 'é' }}", "extra": "ü"}
    file.write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(directory / "warm_start")
    written = {pathlib.Path(file).name for file in theirs.save_pretrained(tmp_path / "theirs")}
    convert(directory, tmp_path / "ours")
    for name in written - {"tokenizer_config.json"}:
        content = (tmp_path / "ours" / name).read_bytes()
        assert content == (tmp_path / "theirs" / name).read_bytes(), name
    text = (tmp_path / "theirs" / "tokenizer_config.json").read_text()
    kept = [
        line for line in text.splitlines() if "is_local" not in line and "files_only" not in line
    ]
    assert (tmp_path / "ours" / "tokenizer_config.json").read_text().splitlines() == kept


def test_weights_go_to_several_files_and_to_bfloat16(directory, made, tmp_path):
    convert(directory, tmp_path / "hf", dtype="bfloat16", max_shard_gb=2e-6)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    expected = jax.tree.map(
        lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), made[1][2]
    )
    assert_same_params(tmp_path / "hf", expected)


def test_parameters_alone_go_there_and_back(directory, tmp_path):
    convert(directory, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").glob("*.safetensors*"))
    convert(tmp_path / "checkpoint", tmp_path / "again")
    there, back = weights(tmp_path / "hf"), weights(tmp_path / "again")
    assert there.keys() == back.keys()
    for name in there:
        assert there[name].tobytes() == back[name].tobytes(), name
    files = {file.name for file in (tmp_path / "hf").iterdir()}
    assert {file.name for file in (tmp_path / "again").iterdir()} == files
    for name in files - {"model.safetensors"}:
        content = (tmp_path / "again" / name).read_bytes()
        assert content == (tmp_path / "hf" / name).read_bytes(), name


def test_invalid_checkpoint_is_named_and_the_previous_one_converted(
    directory, made, tmp_path, capsys
):
    file = directory / "checkpoints" / "2" / "state" / "_METADATA"
    file.write_bytes(file.read_bytes()[:-1])
    convert(directory, tmp_path / "hf")
    assert_same_params(tmp_path / "hf", made[1][1])
    assert f"{file} has been altered" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no valid checkpoint.*_METADATA has been altered"):
        convert(directory, tmp_path / "asked", step=2)


def spoil_manifests(directory):
    for manifest in directory.glob("checkpoints/*/manifest.0.json"):
        manifest.unlink()


def forget_checkpoints(directory):
    shutil.rmtree(directory / "checkpoints")


def other_architecture(directory):
    file = directory / "warm_start" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 32}))


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (None, {"step": 7}, r"--step=7 is not among the checkpoints of .*: \[1, 2\]"),
        (None, {"dtype": "int8"}, r"dtype='int8' must be one of"),
        (None, {"max_shard_gb": 0.0}, r"--max_shard_gb=0 must be a finite number above 0"),
        (None, {"max_shard_gb": float("nan")}, r"--max_shard_gb=nan must be a finite"),
        (None, {"max_shard_gb": float("inf")}, r"--max_shard_gb=inf must be a finite"),
        (None, {"share": 0.3}, r"--share=0.3 needs --other"),
        (None, {"share": float("nan")}, r"--share=nan must be a finite number"),
        (spoil_manifests, {}, r"no valid checkpoint to convert .*not completed"),
        (forget_checkpoints, {}, r"is a run without a checkpoint"),
        (other_architecture, {}, r"params/layers/down/kernel is float32\[2, 16, 16\] there"),
        (lambda d: (d / "config.json").unlink(), {}, r"is neither a run nor a Hugging Face"),
        (lambda d: (d / "config.json").write_text("[]"), {}, r"is neither a run nor"),
        (lambda d: shutil.rmtree(d), {}, r"--source=.* is not a directory"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(
    directory, tmp_path, change, flags, message
):
    if change:
        change(directory)
    refused(message, convert, directory, tmp_path / "target", **flags)
    assert not (tmp_path / "target").exists()


def test_a_target_is_never_overwritten(directory, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    refused("is there already", convert, directory, tmp_path / "target")
    assert [file.name for file in (tmp_path / "target").iterdir()] == ["mine"]


def test_existing_staging_directory_is_never_removed(directory, tmp_path):
    for end in (".writing", ".replaced"):
        neighbour = tmp_path / f"target{end}"
        neighbour.mkdir()
        (neighbour / "mine").write_text("x")
        refused(rf"target{end} is there already", convert, directory, tmp_path / "target")
        assert (neighbour / "mine").read_text() == "x"
        shutil.rmtree(neighbour)


def test_a_target_that_cannot_be_made_is_named_before_the_work(directory, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("/nowhere")
    for target in (tmp_path / "file" / "below", "/proc/nowhere/target"):
        refused(r"--target=.* cannot be made", convert, directory, pathlib.Path(target))
    for source in (directory, directory / "warm_start"):
        refused("is there already", convert, source, tmp_path / "dangling")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "run"]


def test_a_checkpoint_flag_for_a_model_directory_is_a_mistake(directory, tmp_path):
    with pytest.raises(UserError, match="leave out --step"):
        convert(directory / "warm_start", tmp_path / "target", dtype="bfloat16")


def test_the_command_tells_mistakes_in_one_line(tmp_path):
    result = run("launch.convert", f"--source={tmp_path / 'nothing'}", "--target=x")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "is not a directory" in result.stderr


def test_no_checkpoint_is_made_where_it_could_not_be_read(made, tmp_path):
    target = tmp_path / "of[1]"
    refused(r"--target=.* because of the character \[", convert, made[0] / "warm_start", target)
    assert list(tmp_path.iterdir()) == []
