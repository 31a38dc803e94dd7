"""Untrusted JSON is read with limits; files are not written through links."""

import json
import os

import pytest

from semrl_jax.support import safe_files
from semrl_jax.support.errors import UserError
from tests.cases import refused

HOSTILE = {
    "never closed": (b"[" * 100_000, "is not JSON: nested more than 100 deep"),
    "closed": (b'{"a":' * 101 + b"1" + b"}" * 101, "is not JSON: nested more than 100 deep"),
    "in lists": (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 100 deep"),
    "torn": (b'{"a": 1', "is not JSON"),
    "empty": (b"", "is not JSON"),
    "no text": (b'{"a": "\xff"}', "is not JSON: 'utf-8' codec"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not JSON"),
    "digits": (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON: Exceeds the limit"),
    "a list": (b"[]", "must hold a JSON object, not list"),
    "null": (b"null", "must hold a JSON object, not NoneType"),
    "a number": (b"1", "must hold a JSON object, not int"),
    "large": (b" " * (safe_files.MAX_JSON_BYTES + 1), "is larger than 16 MiB"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_json_is_the_users_error(tmp_path, case):
    content, message = HOSTILE[case]
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        safe_files.read_json_object(file)
    text = str(caught.value)
    assert text.startswith(f"{file} ") and message in text and len(text) < 300


def test_other_than_regular_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros", "."):
        refused("is no regular file", safe_files.read_json_object, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        safe_files.read_json_object(tmp_path / "absent")


def test_an_object_as_deep_as_allowed_is_read(tmp_path):
    value = 1
    for _ in range(safe_files.MAX_JSON_DEPTH):
        value = {"a": value, "b": None}
    (tmp_path / "link.json").symlink_to(tmp_path / "deep.json")  # as the hub's snapshots have them
    (tmp_path / "deep.json").write_text(json.dumps(value))
    assert safe_files.read_json_object(tmp_path / "link.json") == value


@pytest.mark.parametrize("at", ["file.json", "file.writing"])
def test_replacing_writes_through_no_link(tmp_path, at):
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    (tmp_path / at).symlink_to(target)
    safe_files.write_json(tmp_path / "file.json", {"a": 1}, durable=True)
    assert target.read_text() == "years of work"
    assert not (tmp_path / "file.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "thesis.tex"]
    assert safe_files.read_json_object(tmp_path / "file.json") == {"a": 1}


def test_a_failed_write_leaves_the_file_unchanged(tmp_path):
    file = tmp_path / "file.json"
    safe_files.write_json(file, {"a": 1})
    with pytest.raises(OSError, match="No space"), safe_files.replacing(file) as out:
        out.write(b"half")
        raise OSError(28, "No space left on device")
    assert safe_files.read_json_object(file) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    (tmp_path / "file.writing").mkdir()
    refused(r"file\.writing is a directory", safe_files.write_json, file, {})


def test_appending_through_a_link_is_refused(tmp_path):
    (tmp_path / "log.txt").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(UserError, match=r"log\.txt is a symbolic link"):
        open(tmp_path / "log.txt", "a", opener=safe_files.through_no_link).close()
    assert not (tmp_path / "thesis.tex").exists()


def test_appending_to_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log.txt")
    with pytest.raises(UserError, match=r"log\.txt is a pipe"):
        open(tmp_path / "log.txt", "a", opener=safe_files.through_no_link).close()
