"""The benchmarks by name, their groups, and where their files are looked for."""

from __future__ import annotations

import difflib
import pathlib

from semrl_jax.evaluation.benchmark_spec import Benchmark
from semrl_jax.evaluation.benchmarks import BENCHMARKS
from semrl_jax.support.errors import UserError

_OLYMPIADS = (
    "olymmath_en_easy", "olymmath_en_hard", "olymmath_zh_easy", "olymmath_zh_hard", "beyond_aime",
)  # fmt: skip
_CONTESTS = ("math24o", "aime24", "aime25", "amc23", "amc24")
_GAOKAO = (
    "gaokao2023en", "gaokao2024_I", "gaokao2024_II", "gaokao2024_mix", "gaokao_math_cloze",
    "gaokao_math_qa",
)  # fmt: skip
_SMALL = ("math500", "aqua", "cn_middle_school", *_GAOKAO, "minerva_math", "sat_math")
_LARGE = (
    "asdiv", "carp_en", "cmath", "college_math", "gsm8k", "math", "mawps", "mmlu_stem",
    "olympiadbench", "svamp", "tabmwp",
)  # fmt: skip
# Groups of the reference implementation, which draws 1, 16, 32 and 256 responses per problem, in
# the order below.
GROUPS = {
    "full": (*_CONTESTS, *_OLYMPIADS, *_SMALL, *_LARGE),
    "small": _SMALL,
    "little": _OLYMPIADS,
    "tiny": _CONTESTS,
}


def names() -> tuple[str, ...]:
    """All benchmarks, sorted."""
    return tuple(sorted(BENCHMARKS))


def find(name: str) -> Benchmark:
    """The benchmark of this name, which must be one of `names()`."""
    return BENCHMARKS[name]


def members(field: str, name: str) -> tuple[str, ...]:
    """The benchmarks that a name stands for: itself, or those of a group; else UserError."""
    if name in GROUPS:
        return GROUPS[name]
    known = names()
    if name in known:
        return (name,)
    near = difflib.get_close_matches(name.lower(), {n.lower(): n for n in (*known, *GROUPS)}, 1)
    found = next((n for n in (*known, *GROUPS) if near and n.lower() == near[0]), "")
    hint = f"did you mean {found!r}? " if found else ""
    raise UserError(
        f"{field}={name!r:.100} is unknown; {hint}choose one of {', '.join(known)}, or a group: "
        f"{', '.join(GROUPS)}; or FILE.jsonl, or a module, 'my_package.my_module'."
    )


def file_of(name: str, data_dir: str) -> pathlib.Path | None:
    """NAME.jsonl, NAME.parquet, or test.jsonl in a directory NAME or the release's; or None."""
    directory = pathlib.Path(data_dir)
    files = [f"{name}.jsonl", f"{name}.parquet", f"{name}/test.jsonl"]
    files.append(f"{find(name).folder or name}/test.jsonl")
    return next((directory / file for file in files if (directory / file).is_file()), None)


def check_files_of(field: str, wanted: tuple[str, ...], data_dir: str) -> None:
    """Raises UserError if a benchmark has no file, with the command that fetches it."""
    missing = [name for name in wanted if file_of(name, data_dir) is None]
    if not missing:
        return
    directory = pathlib.Path(data_dir)
    output = directory / f"{missing[0]}.jsonl" if len(missing) == 1 else directory
    split = " --split=test" if "gsm8k" in missing else ""
    what = ", ".join(f"{name}.jsonl" for name in missing)
    raise UserError(
        f"{field}: {directory} has no {what}; fetch with: python -m launch.prepare_data "
        f"--dataset={','.join(missing)}{split} --output={output} (evaluation.data_dir names the "
        "directory)."
    )
