"""Requests and results in a file: done once, kept, and found again."""

import contextlib

import pytest

from semrl_jax.support.errors import UserError
from semrl_jax.tinker.futures import Ended, Futures, Request
from tests.cases import refused
from tests.tinker.conftest import encoded


def request(number, kind="optim_step", body=b"body"):
    return Request(f"m:{number}", kind, body, "m", number)


def passes(number, **more):
    data = [([5, 6], [6, 7], {"weights": [1, 1]})]
    return request(number, "forward_backward", encoded("m", number, data, **more))


def test_requests_survive_and_are_done_once(tmp_path):
    path = tmp_path / "futures.sqlite3"
    with contextlib.closing(Futures(path)) as futures:
        assert futures.add(request(1)) and futures.add(request(2)) and futures.add(request(3))
        assert not futures.add(request(1))
        futures.end(request(1), Ended("optim_step", b"{}"))
        futures.end(request(2), Ended("optim_step", error="wrong", is_users=True))
        futures.put("model", "m", {"rank": 4})
        futures.put("model", "m", {"rank": 5})
    with contextlib.closing(Futures(path)) as futures:
        assert futures.pending() == [request(3)]
        assert futures.find("m:1") == Ended("optim_step", b"{}")
        assert futures.find("m:2") == Ended("optim_step", error="wrong", is_users=True)
        assert futures.find("m:3") is None
        assert futures.get("model", "m") == {"rank": 4}
        for find in (lambda: futures.find("m:9"), lambda: futures.get("model", "x")):
            with pytest.raises(KeyError):
                find()


def test_bodies_are_kept_until_a_snapshot_has_them(tmp_path):
    with contextlib.closing(Futures(tmp_path / "futures.sqlite3")) as futures:
        for each in (request(0, "create_model"), passes(1), request(2)):
            futures.add(each)
            futures.end(each, Ended(each.kind, b""))
        assert [each.seq for each in futures.since("m", 0)] == [1, 2]
        assert [each.seq for each in futures.since("m", 1)] == [2]
        futures.forget("m", 1)
        assert [each.seq for each in futures.since("m", 0)] == [2]


def test_bodies_of_passes_that_change_no_model_are_not_kept(tmp_path):
    """A model that is only read has no snapshot that would make them needless."""
    with contextlib.closing(Futures(tmp_path / "futures.sqlite3")) as futures:
        forward, failed = passes(1, forward_only=True), passes(2)
        for each, end in ((forward, Ended("", b"")), (failed, Ended("", error="wrong"))):
            futures.add(each)
            futures.end(each, end)
        assert futures.since("m", 0) == []


def test_a_second_server_is_refused(tmp_path):
    path = tmp_path / "futures.sqlite3"
    with contextlib.closing(Futures(path)), pytest.raises(UserError, match="locked"):
        Futures(path)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "futures.sqlite3"
    path.write_text("no database" * 100)
    refused("cannot be used: file is not a database", Futures, path)
