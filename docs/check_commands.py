"""Checks the pages: every command names what exists, and every link leads somewhere.

    python docs/check_commands.py [PAGE ...]

Each `python -m launch.NAME` of a bash block is parsed by the command itself, with its flags and the
fields of its config. Nothing is run; tests/launch/test_page_commands.py runs some. Of other
commands, the module or the file must exist. A flag `...` stands for the flags that a page has shown
before.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import io
import os
import pathlib
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/*.md", "third_party/*/README.md")
# Programs that are not ours. The check does not know other programs, and reports them.
FOREIGN = (
    "cd", "curl", "docker", "export", "gcloud", "git", "grep", "kubectl", "mkdir", "openssl", "pip",
    "printf", "ruff", "sbatch", "source", "srun", "tail",
)  # fmt: skip
SHELL_VALUE = re.compile(r"\$\([^()]*(\([^()]*\))*[^()]*\)|\$\w+")  # $NAME, $(command)
PYTHON = re.compile(r"(\S*/)?python3?")
# A module that a page tells its reader to save; flags may name what is in it.
SAVED = re.compile(r"`(my_package/\w+\.py)`.*?```python\n(.*?)```", re.DOTALL)


class Command(NamedTuple):
    """A command of a page: where it is, and its words without variables before it."""

    place: str
    words: tuple[str, ...]


def pages() -> list[pathlib.Path]:
    """All pages."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def commands_of(page: pathlib.Path) -> Iterator[Command]:
    """The commands in the bash blocks of a page."""
    text = page.read_text()
    for block in re.finditer(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        number = text[: block.start()].count("\n") + 1
        for whole in block[1].replace("\\\n", "\0").splitlines():
            first, number = number + 1, number + 1 + whole.count("\0")
            line = SHELL_VALUE.sub("1", whole.replace("\0", " "))
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: list[str] = []
            for word in [*lexer, "&&"]:
                if set(word) <= set("&;|"):
                    while words and re.match(r"\w+=", words[0]):
                        del words[0]
                    if words:
                        yield Command(f"{page.name}:{first}", tuple(words))
                    words = []
                else:
                    words.append(word)


def problem_of(command: Command) -> str:
    """What is wrong with a command; "" if nothing is."""
    program, *rest = command.words
    if PYTHON.fullmatch(program):
        if rest[0] == "-c":
            return ""
        if rest[0] != "-m":
            return "" if (ROOT / rest[0]).is_file() else f"{rest[0]} is no file"
        module = rest[1]
        if module.startswith("launch."):
            return _refusal(lambda: parse(module, rest[2:]))
        found = module in ("pytest", "venv") or importlib.util.find_spec(module)
        return "" if found else f"there is no module {module}"
    if pathlib.Path(program).name in FOREIGN:
        return ""
    return "" if (ROOT / program).is_file() else f"{program} is no program that is known here"


def parse(module: str, arguments: list[str]) -> None:
    """Lets a command of `launch` parse its flags and load its config, in this process.

    Raises:
      SystemExit: with the code 2 and a line on stderr, as the command does for a wrong flag.
    """
    from launch import cli

    if not (ROOT / f"{module.replace('.', '/')}.py").is_file():
        print(f"there is no command {module}", file=sys.stderr)
        raise SystemExit(2)
    if "..." in arguments:  # what the page has shown before
        arguments = [word for word in arguments if word != "..."]
        arguments = ["--config=configs/default.py", "--workdir=run", *arguments]
    if "--" in arguments:  # launch.local: what follows is for launch.train
        end = arguments.index("--")
        arguments, passed = arguments[:end], arguments[end + 1 :]
        if reason := _refusal(lambda: parse("launch.train", passed)):
            print(reason, file=sys.stderr)
            raise SystemExit(2)
    arguments = ["--config=configs/default.py" if a == "--config=..." else a for a in arguments]
    sys.argv = [module, *arguments]
    run = cli.run

    def load(*arguments: Any) -> int:
        if "config" in flags.FLAGS and flags.FLAGS["config"].value is not None:
            flags.FLAGS["config"].value.lock()  # raises if the file cannot be loaded
        return 0

    def only_parse(
        main: Callable[..., int] | Mapping[str, Any], *rest: Any, **options: Any
    ) -> None:
        run(dict.fromkeys(main, load) if isinstance(main, Mapping) else load, *rest, **options)

    cli.run = only_parse
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _refusal(call: Callable[[], None]) -> str:
    """What a call prints before it exits with another code than 0, in a child process.

    Flags are global, so two commands cannot be parsed in one process.
    """
    sys.stdout.flush()
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        code, printed = 1, io.StringIO()
        try:
            os.close(readable)
            with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
                call()
        except SystemExit as error:
            code = error.code or 0
        except BaseException as error:
            printed.write(f"{type(error).__name__}: {error}")
        finally:
            os.write(writable, printed.getvalue()[:4000].encode())
            os._exit(code)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read().strip()
    _, status = os.waitpid(child, 0)
    return text or f"exit code {status >> 8}" if status else ""


def anchors(page: pathlib.Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    counts: collections.Counter[str] = collections.Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


def broken_links(page: pathlib.Path) -> Iterator[str]:
    """The links of a page to files or headings that do not exist."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.name}: {link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.name}: {link}: there is no such heading"


def problems(chosen: list[pathlib.Path]) -> list[str]:
    """All that is wrong with these pages, one line each."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    importlib.import_module("launch.cli")  # once, before processes are forked
    importlib.import_module("configs.default")
    found = []
    with tempfile.TemporaryDirectory() as saved:
        sys.path.append(saved)
        for page in chosen:
            for name, code in SAVED.findall(page.read_text()):
                pathlib.Path(saved, name).parent.mkdir(exist_ok=True)
                pathlib.Path(saved, name).write_text(code)
            for command in commands_of(page):
                if problem := problem_of(command):
                    found.append(f"{command.place}: {problem}")
            found.extend(broken_links(page))
    return found


def main() -> int:
    chosen = [pathlib.Path(page).resolve() for page in sys.argv[1:]] or pages()
    found = problems(chosen)
    for line in found:
        print(line, file=sys.stderr)
    count = sum(len(list(commands_of(page))) for page in chosen)
    print(f"{len(chosen)} pages, {count} commands, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
