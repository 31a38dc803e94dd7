"""Adapters: the forward pass against merged weights, targets, layouts, PEFT's format."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from semrl_jax import models
from semrl_jax.models import peft
from semrl_jax.models.hf_weights import layer_kernels
from semrl_jax.models.lora import A, B, Dropout
from semrl_jax.models.sharding import PARTITION_SPECS, partition_spec
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.fixtures import random_params
from tests.models.conftest import make_pair

CONFIG = models.DecoderConfig(
    vocab_size=23, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8,
)  # fmt: skip
POLICY = models.Policy(CONFIG)
LORA = models.Lora(peft.find_modules(CONFIG, ["all-linear"]), rank=4, alpha=6.0)
IDS = np.arange(12, dtype=np.int32).reshape(2, 6)
INPUTS = tuple(map(jnp.asarray, (IDS, np.tile(IDS[:1], (2, 1)), np.ones_like(IDS))))


def trained(lora=LORA, seed=1):
    """An adapter whose second matrices are not zero."""
    random = np.random.default_rng(seed)
    shapes = lora.shapes(POLICY.shapes())
    return jax.tree.map(lambda x: 0.3 * random.standard_normal(x.shape, np.float32), shapes)


@pytest.fixture(scope="module")
def params():
    return POLICY.init(jax.random.key(0))


def merged_by_hand(params, adapter, scale):
    """W + scale A B of each layer, in float64, as plain parameters."""
    layers = dict(params["layers"])
    for name, pair in adapter["layers"].items():
        product = np.einsum("lir,lro->lio", np.float64(pair[A]), np.float64(pair[B]))
        kernel = np.asarray(params["layers"][name]["kernel"]) + scale * product
        layers[name] = layers[name] | {"kernel": jnp.float32(kernel)}
    return params | {"layers": layers}


def test_a_family_with_fused_kernels_has_no_adapters():
    fused = dataclasses.replace(CONFIG, model_type="phi3")
    with pytest.raises(UserError, match=r"'phi3' has fused kernels .*qkv_proj.* set lora\.rank=0"):
        peft.find_modules(fused, ["all-linear"])


@pytest.mark.slow
def test_an_adapter_is_the_merged_model(params):
    """Forward and in the gradient, which the chain rule takes through W + scale A B."""
    adapter, base = trained(), LORA.base(params)
    by_hand = merged_by_hand(params, adapter, 6.0 / 4)
    expected = jax.jit(POLICY.final_states)(by_hand, *INPUTS)
    actual = jax.jit(POLICY.final_states)(models.adapted(adapter, base), *INPUTS)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert np.abs(actual - POLICY.final_states(params, *INPUTS)).max() > 0.1
    weight = np.random.default_rng(0).normal(size=expected.shape).astype(np.float32)

    def loss(params):
        return jnp.sum(POLICY.final_states(params, *INPUTS) * weight)

    of_kernels = jax.jit(jax.grad(loss))(by_hand)["layers"]
    gradient = jax.jit(jax.grad(lambda own: loss(models.adapted(own, base))))(adapter)["layers"]
    for name, pair in adapter["layers"].items():
        kernel = np.asarray(of_kernels[name]["kernel"])
        for leaf, by_chain in (
            (A, np.einsum("lio,lro->lir", kernel, pair[B])),
            (B, np.einsum("lir,lio->lro", pair[A], kernel)),
        ):
            np.testing.assert_allclose(gradient[name][leaf], 1.5 * by_chain, rtol=1e-3, atol=1e-3)


def test_weights_are_sent_and_saved_merged(params):
    adapter = trained()
    whole = models.adapted(adapter, LORA.base(params))
    by_hand = merged_by_hand(params, adapter, 1.5)
    tensors = models.iterate_hf_tensors(by_hand, CONFIG, "float32")
    expected = {spec.name: array for spec, array in tensors}
    for spec, array in models.iterate_hf_tensors(whole, CONFIG, "float32"):
        np.testing.assert_allclose(array, expected[spec.name], atol=1e-6, err_msg=spec.name)


def test_a_new_adapter_changes_nothing(params):
    adapter = LORA.init(params, seed=3)
    for pair, name in ((adapter["layers"][name], name) for name in LORA.modules):
        num_in = params["layers"][name]["kernel"].shape[1]
        largest = np.abs(pair[A]).max() * np.sqrt(num_in)
        assert 0.9 < largest <= 1 and not pair[B].any()
        np.testing.assert_allclose(pair[A].std() * np.sqrt(3 * num_in), 1, atol=0.15)  # uniform
    actual = POLICY.final_states(models.adapted(adapter, LORA.base(params)), *INPUTS)
    np.testing.assert_array_equal(actual, POLICY.final_states(params, *INPUTS))
    other = LORA.init(params, seed=4)["layers"]["up"][A]
    assert not np.array_equal(other, adapter["layers"]["up"][A])


def test_the_scale_of_a_rank_stabilized_adapter():
    assert LORA.scale == 1.5
    assert dataclasses.replace(LORA, rank_stabilized=True).scale == 3.0


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["q_proj"], ("query",)),
        (["v_proj", "q_proj"], ("query", "value")),
        (["mlp.*"], ("gate", "up", "down")),
        (["?_proj", "self_attn.o_proj"], ("query", "key", "value", "output")),
        (["all-linear"], ("query", "key", "value", "output", "gate", "up", "down")),
    ],
)
def test_targets(targets, modules):
    assert peft.find_modules(CONFIG, targets) == modules


def test_mistakes_of_settings():
    names = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    for target in ("lm_head", "query", "*.bias"):
        expected = f"has {target!r}, which matches no linear module of a layer; choose from {names}"
        refused(re.escape(expected), peft.find_modules, CONFIG, [target])
    with pytest.raises(UserError, match=r"lora.rank=17 must be at most 16 for self_attn.k_proj"):
        peft.check_rank(CONFIG, dataclasses.replace(LORA, rank=17))


def test_adapters_are_split_as_their_kernels():
    assert partition_spec("layers/query/lora_a") == PartitionSpec(None, "fsdp", None)
    assert partition_spec("layers/query/lora_b") == PartitionSpec(None, None, "tensor")
    assert partition_spec("layers/down/lora_a") == PartitionSpec(None, ("tensor", "fsdp"), None)
    assert partition_spec("layers/down/lora_b") == PartitionSpec(None, None, None)
    assert all(partition_spec(name) == spec for name, spec in PARTITION_SPECS.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory, params):
    """A base, and an adapter of it in PEFT's format."""
    root = tmp_path_factory.mktemp("peft")
    models.save_directory(root / "base", params, CONFIG, None)
    peft.save_adapter(root / "adapter", trained(), LORA, CONFIG, root / "base", "owner/base")
    return root


def test_an_adapter_comes_back_to_the_bit(saved):
    files = peft.find_adapter(saved / "adapter")
    adapter, lora = peft.load_adapter(files, CONFIG, saved / "base", "any/name")
    assert lora == LORA
    jax.tree.map(np.testing.assert_array_equal, adapter, trained())
    assert peft.num_parameters(CONFIG, LORA) == sum(x.size for x in jax.tree.leaves(adapter))


def test_equal_adapters_are_equal_files_that_others_may_read(saved, tmp_path):
    """A service of another user reads an export, so modes must follow the umask."""
    ours = {file.name: file for file in (saved / "adapter").iterdir()}
    for number in range(8):  # an order by chance would be found
        again = tmp_path / f"{number}"
        peft.save_adapter(again, trained(), LORA, CONFIG, saved / "base", "owner/base")
        for file in again.iterdir():
            assert file.read_bytes() == ours[file.name].read_bytes()
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    for file in [*ours.values(), *(saved / "base").iterdir()]:
        assert file.stat().st_mode == mode, file


def change_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


PREFIX = "base_model.model.model.layers.1."
UP = f"{PREFIX}mlp.up_proj.lora_B.weight"
UP_A = np.ones((4, 32), np.float32)
# Fields of the configuration; tensors, None removes one; what is said. With other tensors, the file
# does not have our sample of the weights of the base.
MISTAKES = {
    "bias": ({"bias": "all"}, {}, "bias='all' is not supported"),
    "rank": ({"r": 0}, {}, "r=0 must be a whole number above 0"),
    "a huge rank": ({"r": 10**400}, {}, "above 0, and at most 16777216"),
    "endless alpha": ({"lora_alpha": float("inf")}, {}, "lora_alpha=inf a number"),
    "huge alpha": ({"lora_alpha": 1e300}, {}, "lora_alpha=1e.300 a number"),
    "stabilized by text": ({"use_rslora": "false"}, {}, "use_rslora='false' must be true or false"),
    "not finite": (
        {"base_model_name_or_path": "hub/mine"},
        {UP: np.full((48, 4), np.nan, np.float32)},
        r"layers\.1\.mlp\.up_proj\.lora_B\.weight has a value that is not finite",
    ),
    "another name": ({}, {"more": UP_A}, "is an adapter of 'owner/base', not of models/mine"),
    "another shape": (
        {"base_model_name_or_path": "hub/mine"},
        {UP: np.ones((64, 4), np.float32)},
        r"up_proj\.lora_B\.weight has shape \(64, 4\); rank 4 .* needs \(48, 4\)",
    ),
    "another dtype": (
        {"base_model_name_or_path": "hub/mine"},
        {UP: np.ones((48, 4))},
        "up_proj.lora_B.weight is of dtype F64",
    ),
    "a layer less": (
        {"base_model_name_or_path": ""},
        {f"{PREFIX}mlp.up_proj.lora_A.weight": None},
        r"layers\.1\.mlp\.up_proj\.lora_A\.weight is missing; rank 4 .* needs \(4, 32\)",
    ),
    "pissa": (
        {"init_lora_weights": "pissa_niter_4"},
        {},
        "init_lora_weights='pissa_niter_4' is not supported, only .*'eva'.*; the other ones change",
    ),
    "a later version of peft": (
        {"use_new_method": {"a": 1}},
        {},
        "use_new_method={'a': 1} is not supported; train an adapter without it",
    ),
    "the output matrix": (
        {"base_model_name_or_path": "mine"},
        {"base_model.model.lm_head.lora_A.weight": UP_A},
        "lm_head.lora_A.weight adapts lm_head, but only the linear modules of a layer can have",
    ),
    "the embedding": (
        {"base_model_name_or_path": "mine"},
        {"base_model.model.model.embed_tokens.lora_embedding_A": UP_A},
        "adapts model.embed_tokens, but only the linear modules of a layer can have an adapter",
    ),
    "a layer more": (
        {"base_model_name_or_path": "mine"},
        {UP.replace("layers.1", "layers.2"): UP_A},
        "layers.2.* adapts no linear module of models/mine; name its own base",
    ),
}


@pytest.fixture
def copied(saved, tmp_path):
    """The adapter, to be changed."""
    return shutil.copytree(saved / "adapter", tmp_path / "adapter")


@pytest.mark.parametrize("name", MISTAKES)
def test_an_adapter_that_cannot_be_read(name, saved, copied):
    fields, tensors, message = MISTAKES[name]
    change_config(copied, **fields)
    if tensors:
        file = copied / "adapter_model.safetensors"
        changed = load_file(file) | tensors
        save_file({name: array for name, array in changed.items() if array is not None}, file)
    with pytest.raises(UserError, match=message):
        peft.load_adapter(peft.find_adapter(copied), CONFIG, saved / "base", "models/mine")


def test_weights_of_an_adapter_that_cannot_be_read(saved, copied):
    file = copied / "adapter_model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        peft.load_adapter(peft.find_adapter(copied), CONFIG, saved / "base", "models/mine")
    file.unlink()
    with pytest.raises(UserError, match="is missing"):
        peft.load_adapter(peft.find_adapter(copied), CONFIG, saved / "base", "models/mine")


def test_every_field_of_peft_is_supported_or_refused(copied):
    """With a value that PEFT does not have by default; a field that PEFT adds must come here."""
    import peft as library

    supported = {
        "bias": None, "init_lora_weights": "orthogonal", "use_rslora": True, "r": 5,
        "lora_alpha": 3.0, "base_model_name_or_path": "other", **dict.fromkeys(
            (
                "task_type", "auto_mapping", "peft_version", "revision", "inference_mode",
                "target_modules", "exclude_modules", "lora_dropout", "layers_pattern",
                "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
                "qalora_group_size", "runtime_config", "ensure_weight_tying",
            ),
            "other",
        ),
    }  # fmt: skip
    unsupported = {
        "peft_type": "IA3", "fan_in_fan_out": True, "modules_to_save": ["lm_head"],
        "layers_to_transform": 0, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
        "megatron_config": {"a": 1}, "trainable_token_indices": [0], "use_dora": True,
        "velora_config": {"a": 1}, "alora_invocation_tokens": [1], "use_qalora": True,
        "monteclora_config": {"a": 1}, "layer_replication": [[0, 1]], "lora_bias": True,
        "target_parameters": ["a"], "use_bdlora": {"a": 1}, "arrow_config": {"a": 1},
        "kasa_config": {"a": 1},
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(library.LoraConfig)}
    assert fields <= supported.keys() | unsupported.keys()
    # What PEFT writes by default is accepted, also with the other supported values.
    defaults = json.loads(json.dumps(library.LoraConfig().to_dict(), default=list))
    change_config(copied, **defaults)
    peft.find_adapter(copied)
    change_config(copied, **supported)
    found = peft.find_adapter(copied)
    assert (found.rank, found.alpha, found.rank_stabilized) == (5, 3.0, True)
    for name, value in unsupported.items():
        change_config(copied, **defaults | {"peft_type": "LORA", name: value})
        refused(f"{name}=.*(is not supported|must be 'LORA')", peft.find_adapter, copied)


def test_an_adapter_of_other_weights(saved, tmp_path):
    models.save_directory(tmp_path / "base", random_params(POLICY, 7), CONFIG, None)
    files = peft.find_adapter(saved / "adapter")
    with pytest.raises(UserError, match="is an adapter of other weights than those of owner/base"):
        peft.load_adapter(files, CONFIG, tmp_path / "base", "owner/base")
    refused(r"is no adapter: adapter_config\.json is missing", peft.find_adapter, tmp_path)


@pytest.mark.parametrize("name", [None, "", ["base"]])
def test_an_adapter_without_a_base(name, copied):
    """The working directory is not taken for it."""
    change_config(copied, base_model_name_or_path=name)
    refused("base_model_name_or_path is missing or empty; set it", peft.find_adapter(copied).base)


TOKENS = np.arange(2, 22, dtype=np.int32).reshape(2, 10)


def logits(pair, adapter, lora, dropout=None):
    params = models.adapted(adapter, lora.base(pair.params))
    columns = jnp.tile(jnp.arange(10, dtype=jnp.int32), (2, 1))
    inputs = jnp.asarray(TOKENS), columns, jnp.ones_like(columns), dropout
    states = pair.policy.final_states(params, *inputs)
    return np.asarray(pair.policy.logits(params, states.reshape(20, -1))).reshape(2, 10, -1)


def multiplied_by(mask):
    """A torch module that multiplies by a mask."""
    import torch

    class Module(torch.nn.Module):
        def forward(self, x):
            return x * mask

    return Module()


def logits_of_torch(model):
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "stabilized"), [(["all-linear"], False), (["q_proj", "down_proj"], True)]
)
def test_peft_agrees_in_both_directions(targets, stabilized, tmp_path):
    """Logits agree within 1e-4; both sides compute in float32."""
    import peft as library
    import torch

    pair = make_pair(tmp_path / "base", "qwen2")
    config = pair.policy.config
    lora = models.Lora(peft.find_modules(config, targets), 8, 12.0, stabilized)
    random = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda leaf: 0.1 * random.standard_normal(leaf.shape, np.float32),
        lora.shapes(pair.policy.shapes()),
    )
    plain = logits_of_torch(pair.torch_model)
    base = str(pair.directory)
    peft.save_adapter(tmp_path / "ours", adapter, lora, config, pair.directory, base)
    loaded = library.PeftModel.from_pretrained(pair.torch_model, tmp_path / "ours")
    np.testing.assert_allclose(logits(pair, adapter, lora), logits_of_torch(loaded), atol=1e-4)
    assert np.abs(logits_of_torch(loaded) - plain).max() > 1

    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    loaded.save_pretrained(tmp_path / "theirs")
    files = peft.find_adapter(tmp_path / "theirs")
    assert files.base_name == base
    found, their_lora = peft.load_adapter(files, config, pair.directory, base)
    assert their_lora == lora
    np.testing.assert_allclose(logits(pair, found, lora), logits_of_torch(loaded), atol=1e-4)


@pytest.mark.slow
def test_dropout_is_that_of_peft_with_the_same_masks(tmp_path):
    """Also in the gradient, with and without rematerialisation."""
    import peft as library
    import torch

    pair = make_pair(tmp_path / "base", "qwen2")
    config, policy = pair.policy.config, pair.policy
    lora = models.Lora(peft.find_modules(config, ["all-linear"]), 8, 12.0, dropout=0.25)
    random = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda leaf: 0.1 * random.standard_normal(leaf.shape, np.float32),
        lora.shapes(policy.shapes()),
    )
    peft.save_adapter(tmp_path / "ours", adapter, lora, config, pair.directory, "base")
    assert json.loads((tmp_path / "ours" / peft.CONFIG_FILE).read_text())["lora_dropout"] == 0.25
    loaded = library.PeftModel.from_pretrained(pair.torch_model, tmp_path / "ours").train()
    dropout = Dropout(lora.dropout, jnp.full((2, 10), 5), jnp.arange(20).reshape(2, 10))
    ours = {kernel.name: (module, kernel) for module, kernel in layer_kernels(config).items()}
    masks = {}
    for name, layer in loaded.named_modules():
        if hasattr(layer, "lora_dropout"):
            number, place = re.search(r"layers\.(\d+)\.(\w+\.\w+)$", name).groups()
            module, kernel = ours[place]
            ones = jnp.ones((2, 10, kernel.shape[1]))
            mask = np.array(dropout._replace(layer=int(number))(ones, module))
            masks[name] = mask[..., :32]
            assert layer.lora_dropout["default"].p == 0.25
            layer.lora_dropout["default"] = multiplied_by(torch.tensor(mask))
    assert len(masks) == 7 * config.num_layers
    assert len({mask.tobytes() for mask in masks.values()}) == len(masks)
    kept = np.mean([mask > 0 for mask in masks.values()])
    np.testing.assert_allclose(kept, 0.75, atol=0.02)
    with torch.no_grad():
        expected = loaded(torch.tensor(TOKENS)).logits.numpy()
    found = logits(pair, adapter, lora, dropout)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - logits(pair, adapter, lora)).max() > 0.1

    def gradient(remat):
        own = dataclasses.replace(pair, policy=dataclasses.replace(policy, remat=remat))
        columns = jnp.tile(jnp.arange(10, dtype=jnp.int32), (2, 1))
        inputs = jnp.asarray(TOKENS), columns, jnp.ones_like(columns), dropout

        def loss(adapter):
            params = models.adapted(adapter, lora.base(own.params))
            return jnp.sum(own.policy.final_states(params, *inputs) ** 2)

        return jax.jit(jax.grad(loss))(adapter)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        gradient("none"), gradient("full"),
    )  # fmt: skip


@pytest.mark.slow
def test_a_supported_initialisation_leaves_the_base_as_it_is(tmp_path):
    """PEFT loads its own untrained adapter onto the base, and its logits are ours."""
    import peft as library
    import transformers

    pair = make_pair(tmp_path / "base", "llama")
    targets, read = ["q_proj", "up_proj"], transformers.AutoModelForCausalLM.from_pretrained
    for init in (True, False, "gaussian", "orthogonal", "mica", "eva"):
        config = library.LoraConfig(
            r=4, target_modules=targets, init_lora_weights=init, task_type="CAUSAL_LM"
        )
        folder = tmp_path / str(init)
        library.get_peft_model(read(pair.directory), config).save_pretrained(folder)
        loaded = library.PeftModel.from_pretrained(read(pair.directory), folder)
        files = peft.find_adapter(folder)
        found, lora = peft.load_adapter(files, pair.policy.config, pair.directory, "base")
        ours, theirs = logits(pair, found, lora), logits_of_torch(loaded)
        np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=str(init))
