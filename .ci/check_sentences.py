"""Lists sentences in docstrings, comments and pages that need a second reading.

    python .ci/check_sentences.py

A docstring or a comment must begin with a noun or a verb. Words that hide the noun are listed too.
The exit code is 1 if there is such a sentence.
"""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
# History, generated code, and this file.
LEFT_OUT = ("changelog.md", "_pb2.py", "check_sentences.py")
BEGINS = re.compile(r"(Of|That|Those|As|By)\b")
CONTAINS = re.compile(r"\b(that of the|those of the|whatever|beside)\b", re.IGNORECASE)


def texts(path: pathlib.Path):
    """(line, text, whether it is a docstring or a comment) of everything that people read."""
    source = path.read_text()
    if path.suffix == ".md":
        code = False
        for number, line in enumerate(source.splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if not code:
                yield number, line, False
        return
    for node in ast.walk(ast.parse(source)):
        has_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, has_docstring) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text, True
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            yield token.start[0], text, token.start[0] != before + 1
            before = token.start[0] if not token.line[: token.start[1]].strip() else 0


def offenders():
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        if name.endswith(LEFT_OUT):
            continue
        for line, text, begins in texts(ROOT / name):
            for offset, part in enumerate(text.split("\n")):
                found = CONTAINS.search(part) or (begins and not offset and BEGINS.match(part))
                if found:
                    yield f"{name}:{line + offset}: {found[0]!r} in {part.strip()}"


if __name__ == "__main__":
    found = list(offenders())
    print(*found, sep="\n")
    sys.exit(bool(found))
