"""Numbers of the release agree wherever they stand, and it installs what it imports."""

import ast
import importlib.metadata
import pathlib
import re
import sys
import tomllib

import semrl_jax

ROOT = pathlib.Path(__file__).parents[1]
SETUP = (ROOT / "setup.py").read_text()
SUPPORT = (ROOT / "docs" / "support.md").read_text()
PLUGIN = tomllib.loads((ROOT / "third_party/vllm_patch/pyproject.toml").read_text())["project"]


def test_the_newest_release_has_the_version_of_the_package():
    (version,) = re.findall(r'^    version="(.*)",$', SETUP, re.MULTILINE)
    assert {version} == {semrl_jax.__version__, PLUGIN["version"]}
    changes = (ROOT / "docs" / "changelog.md").read_text()
    releases = re.findall(r"^## (\S+)$", changes, re.MULTILINE)
    assert version in releases[:2]  # the next one may be above


def test_the_page_has_the_bounds_of_the_packages():
    for package in ("jax", "transformers"):
        (least, beyond) = re.search(rf'"{package}>=([\d.]+),<([\d.]+)"', SETUP).groups()
        newest = re.sub(r"\d+$", lambda last: str(int(last[0]) - 1), beyond)
        row = re.search(rf"^\| {package} \| (.*?) \|", SUPPORT, re.MULTILINE | re.IGNORECASE)[1]
        assert row == f"{least} to {newest}"
    (vllm,) = PLUGIN["optional-dependencies"]["cuda"]
    assert f"| vLLM | {vllm.removeprefix('vllm==').removesuffix('.*')}, in an env" in SUPPORT
    python = re.search(r'python_requires=">=([\d.]+)"', SETUP)[1]
    assert f"| Python | {python} and newer |" in SUPPORT


def imported(file):
    """Packages outside the standard library that a module imports when it is imported."""
    for node in ast.parse(file.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        yield from {name.split(".")[0] for name in names} - sys.stdlib_module_names


def test_modules_import_what_the_package_installs():
    """The API reference imports all modules but one, in an environment without other extras."""
    required = re.search(r"install_requires=\[(.*?)\n    \]", SETUP, re.DOTALL)[1]
    installed = {name.replace("_", "-") for name in re.findall(r'"([\w-]+)>?=', required)}
    installed |= {"scipy", "semrl-jax"}  # JAX needs the former
    found = importlib.metadata.packages_distributions()
    files = {*(ROOT / "semrl_jax").rglob("*.py")}
    files -= {ROOT / "semrl_jax/environments/kinds/verifiers.py"}
    packages = {package for file in files for package in imported(file)}
    assert len(packages) > 15
    for package in packages:
        names = {name.replace("_", "-") for name in found.get(package, [package])}
        assert names & installed, package
