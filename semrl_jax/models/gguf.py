"""GGUF files, as llama.cpp reads them: converted once to a Hugging Face directory.

A GGUF file has configuration, tokenizer, chat template and weights, most of them quantised. The
weights become float32 without further rounding. Each name and key of the file must be known, so
that nothing of the model is left out silently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.hf_config import config_from_hf
from semrl_jax.models.hf_weights import HfTensor, hf_tensors
from semrl_jax.support.errors import UserError, prefixed

VERSION = 3  # of the conversion; part of the names of converted directories
FAMILIES = {  # architecture of the file: `model_type` of Hugging Face
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}  # fmt: skip
# Below the architecture's name: fields of config.json.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Modules of a layer by our names: theirs. Kernels are stored [out, in], as in Hugging Face.
LAYER_NAMES = {
    "attention_norm": "attn_norm", "query": "attn_q", "key": "attn_k", "value": "attn_v",
    "query_norm": "attn_q_norm", "key_norm": "attn_k_norm", "output": "attn_output",
    "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "mlp_post_norm": "post_ffw_norm",
    "router": "ffn_gate_inp", "expert_gate": "ffn_gate_exps", "expert_up": "ffn_up_exps",
    "expert_down": "ffn_down_exps",
}  # fmt: skip
OTHER_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later: divisors of the frequencies
# What reading a file that is torn or lies about its sizes raises.
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, AttributeError)


CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eot", "eom")  # of a turn and of a message, where llama.cpp stops too
# The same, which llama.cpp finds also where a file does not name them.
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
# How texts are split before byte-level merges, by `tokenizer.ggml.pre`. None: as GPT-2.
_DIGITS = "digits"
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(_LLAMA3, _WORDS + "{1,3}" + _REST),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS + _REST),
    "tekken": _TEKKEN,
    "smollm": _DIGITS,
    **dict.fromkeys(("default", "gpt-2"), None),
}
# Kinds with a first token, unless the file says otherwise, in which a word of the vocabulary needs
# no merges.
_WHOLE_WORDS = (*_LLAMA3, "tekken")


def find_file(path: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that a path is, or that a directory holds; UserError for several."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or (path / "config.json").exists():
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise UserError(f"{path} holds {len(files)} GGUF files ({names}); give the path of one.")
    return files[0]


class Gguf:
    """An open GGUF file; UserError of every method names the file and what is wrong."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        try:
            reader = _reader()(file)
            self.fields = reader.fields
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except _DAMAGE as error:
            raise self._error(f"cannot be read as GGUF: {error!s:.200}") from None
        self.architecture = self.text("general.architecture")
        if self.architecture not in FAMILIES:
            kind, known = f"{self.architecture!r:.50}", ", ".join(FAMILIES)
            raise self._error(f"architecture {kind} is not supported; it must be one of {known}")

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.file}: {problem}.")

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.fields[name].contents() if name in self.fields else default
        except (*_DAMAGE, UnicodeDecodeError) as error:
            raise self._error(f"field {name} cannot be read: {error!s:.200}") from None

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self._error(f"field {name} must be a text, not {value!r:.50}")
        return value

    def hf_config(self) -> dict[str, Any]:
        """The fields of a Hugging Face `config.json`, as far as the file has them."""
        found: dict[str, Any] = {"model_type": FAMILIES[self.architecture]}
        ignored = {"vocab_size", "rope.dimension_count", "attention.value_length"}
        for name in self.fields:
            below = name.removeprefix(f"{self.architecture}.")
            if below == name or below in ignored:
                continue
            value = self.get(name)
            if below in FIELDS:
                # Floats are stored in 32 bits: 1e-5 is what 9.9999997e-06 was written as.
                is_float = type(value) is float
                found[FIELDS[below]] = float(str(np.float32(value))) if is_float else value
            elif below not in ("rope.scaling.type", "rope.scaling.factor"):
                raise self._error(f"{name}={value!r:.50} is not supported")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self._error("tensor token_embd.weight is missing")
        found["vocab_size"] = int(embedding.shape[-1])
        found["tie_word_embeddings"] = "output.weight" not in self.tensors
        width, heads = found.get("hidden_size"), found.get("num_attention_heads")
        if type(width) is not int or type(heads) is not int or not heads:
            raise self._error("embedding_length and attention.head_count must be whole numbers")
        found.setdefault("head_dim", width // heads)
        for name in ("rope.dimension_count", "attention.value_length"):
            size = self.get(f"{self.architecture}.{name}", found["head_dim"])
            if size != found["head_dim"]:
                raise self._error(f"{name}={size!r:.50} must be head_dim={found['head_dim']!r:.50}")
        if self.architecture == "gemma3":  # llama.cpp derives both; 27B is the exception
            is_27b = found.get("num_hidden_layers") == 62
            found["query_pre_attn_scalar"] = width // heads if is_27b else found["head_dim"]
        if self.architecture == "qwen3moe":
            found["norm_topk_prob"] = True  # in llama.cpp
        found["rope_scaling"] = self._rope_scaling(found)
        for ours, theirs in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
            found[f"{ours}_token_id"] = self.get(f"tokenizer.ggml.{theirs}_token_id")
        ends = [self.get(f"tokenizer.ggml.{name}_token_id", -1) for name in _ENDS]
        tokens = self.get("tokenizer.ggml.tokens")
        if _is_list(tokens, str):
            ends += [index for index, token in enumerate(tokens) if token in _END_TEXTS]
        if further := [e for e in ends if type(e) is int and 0 <= e < found["vocab_size"]]:
            own = [] if found["eos_token_id"] is None else [found["eos_token_id"]]
            found["eos_token_id"] = list(dict.fromkeys(own + further))
        return found

    def _rope_scaling(self, hf: Mapping[str, Any]) -> dict[str, Any] | None:
        """Linear scaling, or that of Llama 3.1, of which the file has the divisors alone."""
        factor = self.get(f"{self.architecture}.rope.scaling.factor", 1.0)
        absent = "none" if factor in (0.0, 1.0) else "linear"  # which llama.cpp takes
        kind = self.get(f"{self.architecture}.rope.scaling.type", absent)
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "none":
            raise self._error(f"rope.scaling.type={kind!r:.50} is not supported, only linear")
        if ROPE_FACTORS not in self.tensors:
            return None
        factors = self.array(ROPE_FACTORS).reshape(-1)
        scaling = {
            "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        expected = _llama3_factors(hf["head_dim"], hf.get("rope_theta", 10_000.0), scaling)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise self._error(f"{ROPE_FACTORS} is no scaling of Llama 3.1, so it is not supported")
        return scaling

    def array(self, name: str) -> np.ndarray:
        """A tensor as float32, in the layout of PyTorch."""
        import gguf

        tensor = self.tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise self._error(f"{name}: quantisation {kind} is not supported") from None
        except _DAMAGE as error:
            raise self._error(f"{name} cannot be read: {error!s:.200}") from None
        return values.astype(np.float32, copy=False).reshape(_shape(tensor))

    def check_tensors(self, config: DecoderConfig) -> None:
        """Raises UserError, naming missing, unknown and misshapen tensors."""
        expected: dict[str, tuple[int, ...]] = {}
        for tensor in hf_tensors(config):
            experts = () if tensor.expert is None else (config.experts.num_experts,)
            expected[_name(tensor)] = (*experts, *tensor.shape)
        problems = [f"{name} is missing" for name in expected.keys() - self.tensors.keys()]
        for name, tensor in self.tensors.items():
            shape = _shape(tensor)
            if name == ROPE_FACTORS and self.architecture == "llama":
                continue
            if name not in expected:
                problems.append(f"{name:.100} is not part of the model")
            elif shape != expected[name]:
                problems.append(f"{name} has shape {shape}, not {expected[name]}")
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise self._error("; ".join(sorted(problems)[:5]) + more)

    def arrays(self, config: DecoderConfig) -> Iterator[np.ndarray]:
        """The tensors of `hf_tensors` as float32, in the layout of Hugging Face."""
        array = functools.lru_cache(maxsize=1)(self.array)  # experts share one
        for tensor in hf_tensors(config):
            values = array(_name(tensor))
            if tensor.expert is not None:
                values = values[tensor.expert]
            module = tensor.path[-2]
            if self.architecture == "llama" and module in ("query", "key"):
                # llama.cpp rotates pairs of neighbours, Hugging Face pairs of halves.
                pairs = values.reshape(-1, config.head_dim // 2, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            if self.architecture == "gemma3" and module.endswith("norm"):
                values = values - 1  # Hugging Face multiplies by 1 + weight
            yield values

    def tokenizer(self) -> Any:
        """The tokenizer, byte-level or sentencepiece BPE, as a transformers one."""
        import transformers
        from tokenizers import AddedToken, processors

        tokens, kinds = self.get("tokenizer.ggml.tokens"), self.get("tokenizer.ggml.token_type")
        model = self.get("tokenizer.ggml.model")
        if not _is_list(tokens, str) or not (kinds is None or _is_list(kinds, int)):
            raise self._error("tokenizer.ggml.tokens must be texts, and token_type whole numbers")
        builders = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if model not in builders:
            raise self._error(
                f"tokenizer.ggml.model={model!r:.50} is not supported, only {', '.join(builders)}"
            )
        try:
            backend = builders[model](tokens)
            for token, kind in zip(tokens, kinds or ()):
                # A token that the vocabulary spells otherwise, such as spaces, is none to be added.
                if kind in (CONTROL, USER_DEFINED) and backend.token_to_id(token) is not None:
                    added = AddedToken(token, normalized=False, special=kind == CONTROL)
                    (backend.add_special_tokens if kind == CONTROL else backend.add_tokens)([added])
            special = {}
            for name, key in _SPECIAL.items():
                token_id = self.get(f"tokenizer.ggml.{key}_token_id")
                if token_id is not None and 0 <= token_id < len(tokens):
                    special[name] = tokens[token_id]
            bos = special.get("bos_token")
            has_first = model == "llama" or self.get("tokenizer.ggml.pre") in _WHOLE_WORDS
            if bos and self.get("tokenizer.ggml.add_bos_token", has_first):
                backend.post_processor = processors.TemplateProcessing(
                    f"{bos} $A", f"{bos} $A {bos} $B", [(bos, tokens.index(bos))]
                )
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        except UserError:
            raise
        except Exception as error:  # the Rust part raises Exception itself
            raise self._error(f"no tokenizer can be built: {error!s:.200}") from None
        if self.get("tokenizer.chat_template") is not None:
            tokenizer.chat_template = self.text("tokenizer.chat_template")
        return tokenizer

    def _byte_level(self, tokens: list[str]) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        kind = self.get("tokenizer.ggml.pre", "default")
        if kind not in _SPLITS:
            raise self._error(f"tokenizer.ggml.pre={kind!r:.50} is not supported")
        merges = self.get("tokenizer.ggml.merges")
        if not _is_list(merges, str):
            raise self._error("tokenizer.ggml.merges must be a list of texts")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind in _WHOLE_WORDS))
        split = _SPLITS[kind]
        byte_level = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=split in (None, _DIGITS)
        )
        first = {None: [], _DIGITS: [pre_tokenizers.Digits(individual_digits=True)]}.get(split)
        if first is None:
            first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self, tokens: list[str]) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        scores = self.get("tokenizer.ggml.scores")
        if not _is_list(scores, float) or len(scores) != len(tokens):
            raise self._error("tokenizer.ggml.scores must be as many numbers as there are tokens")
        if self.architecture == "gemma3":
            # Runs of spaces are written as spaces, and merges are in the order of the tokens.
            tokens = ["▁" * len(text) if text and not text.strip(" ") else text for text in tokens]
            scores = [-index for index in range(len(tokens))]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        unknown = self.get("tokenizer.ggml.unknown_token_id")
        bpe = models.BPE(
            vocabulary,
            merges_of(vocabulary, scores),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(bpe)
        has_prefix = self.get("tokenizer.ggml.add_space_prefix", True)
        prefix = [normalizers.Prepend("▁")] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend


def merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece vocabulary: all splits of a token into two, by its score."""
    found = []
    for token, index in vocabulary.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
        splits.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-scores[index], pair) for pair in splits]
    found.sort(key=lambda entry: entry[0])  # stable
    return [pair for _, pair in found]


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor of the file, in the layout of PyTorch."""
    return tuple(int(n) for n in tensor.shape[::-1])


def _name(tensor: HfTensor) -> str:
    module, kind = tensor.path[-2:]
    end = "bias" if kind == "bias" else "weight"
    if tensor.layer is None:
        return f"{OTHER_NAMES[module]}.{end}"
    return f"blk.{tensor.layer}.{LAYER_NAMES[module]}.{end}"


def _llama3_factors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """The divisors of the frequencies, float64 [head_dim / 2], as llama.cpp stores them."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


@functools.cache
def _reader() -> type:
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *args, **options)
            if len(found) != count:  # a file that lies about its sizes would be read without end
                raise ValueError(f"it ends before byte {offset + count}")
            return found

    return Reader


def hf_directory(file: pathlib.Path) -> pathlib.Path:
    """The Hugging Face directory of a GGUF file, made at the first call, in the user's cache."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    target = cache / "semrl_jax" / f"{file.stem}-{_fingerprint(file)}"
    if not target.is_dir():
        print(f"converting {file} once to {target}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as staging:
            made = pathlib.Path(staging) / "model"
            convert(file, made)
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(target)
    return target


def convert(
    file: pathlib.Path, target: pathlib.Path, dtype: str = "float32", **options: Any
) -> None:
    """Writes a GGUF file as a Hugging Face directory, see `directory.save_directory`."""
    from semrl_jax.models.directory import save_directory  # which finds directories by this module

    source = Gguf(file)
    hf = source.hf_config()
    with prefixed(f"{file}"):
        config = config_from_hf(hf)
    source.check_tensors(config)
    tokenizer = source.tokenizer()
    arrays = (array.astype(dtype, copy=False) for array in source.arrays(config))
    save_directory(target, arrays, config, tokenizer, dtype=dtype, base=hf, **options)


def _fingerprint(file: pathlib.Path) -> str:
    """A hash of the file's size, 64 of its blocks, and the version of the conversion."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{VERSION} {size}".encode())
    with open(file, "rb", buffering=0) as content:
        for block in range(64):
            content.seek(max(0, size - 4096) * block // 63)
            digest.update(content.read(4096))
    return digest.hexdigest()[:16]
