"""The server of a live report: its token, its interface, and what it sends after a change."""

import json
import os
import socket
import threading
import urllib.error
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax.pages.report import serving
from semrl_jax.runs.records import write_rollouts
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.errors import UserError
from tests.pages.report.making import add_row, make_run, scored, text_of
from tests.pages.report.test_evaluations import make_results


def get(address):
    """Status, headers and body."""
    try:
        with urllib.request.urlopen(address, timeout=20) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


@pytest.fixture
def served(config, tmp_path):
    """A run without rows, and the address of its page."""
    run = make_run(tmp_path / "run", config, num_steps=0)
    server = serving._Server((serving.HOST, 0), serving._Handler)
    server.content = serving.Content([run])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield run, f"http://127.0.0.1:{server.server_port}/{server.token}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_changes_are_sent_once(served):
    run, address = served
    status, headers, body = get(address)
    assert status == 200 and headers["Referrer-Policy"] == "no-referrer"
    assert b"connect-src 'self'" in body and b'"live":true' in body

    def changes(figures="", samples=""):
        status, _, body = get(f"{address}data?figures={figures}&samples={samples}")
        assert status == 200
        return json.loads(body)

    first = changes()
    assert first["figures"]["runs"][0]["steps"] == [] and first["samples"]["rows"] == []
    known = {name: part["version"] for name, part in first.items()}
    assert changes(**known) == {}
    add_row(run, 0, {"reward/mean": 0.25})
    second = changes(**known)
    assert second.keys() == {"figures"}
    assert second["figures"]["runs"][0]["series"] == {"reward/mean": [0.25]}
    known["figures"] = second["figures"]["version"]
    write_rollouts(
        run / "rollouts", 0, Scored.of([scored(i, correct=True) for i in range(4)]), text_of
    )
    third = changes(**known)
    assert third.keys() == {"samples"} and len(third["samples"]["rows"]) == 4
    assert changes(figures=known["figures"], samples=third["samples"]["version"]) == {}


def test_new_results_of_an_evaluation_are_followed(tmp_path):
    make_results(tmp_path / "first", "a-step0", 0)
    content = serving.Content([tmp_path])
    first = content.changes(figures="", samples="")
    known = {name: part["version"] for name, part in first.items()}
    make_results(tmp_path / "second", "a-step20", 1)
    (shown,) = content.changes(**known)["figures"]["runs"]
    assert shown["steps"] == [0, 20]


def test_the_page_that_a_plot_links_to_is_sent(served):
    run, address = served
    add_row(run, 0, {"rollout/logprob_mismatch/mean": 0.25})
    assert b'{"mismatch.html: ' not in get(address)[2]
    (run / "mismatch.html").write_text("<p>layers")
    assert b'{"mismatch.html: ' in get(address)[2]
    assert get(f"{address}mismatch.html")[::2] == (200, b"<p>layers")
    assert get(f"{address}config.json")[0] == 404


def test_responses_that_cannot_be_read_do_not_stop_the_server(served):
    run, address = served
    rollouts = run / "rollouts"
    responses = Scored.of([scored(i, correct=True) for i in range(4)])
    write_rollouts(rollouts, 0, responses, text_of)
    table = pq.read_table(rollouts / "step_000000.parquet")
    place = table.column_names.index("prompt")
    pq.write_table(
        table.set_column(place, "prompt", pa.array([b"\xff"] * 4)), rollouts / "step_000001.parquet"
    )
    os.mkfifo(rollouts / "step_000002.parquet")
    os.mkfifo(rollouts / "eval_000002.parquet")
    for _ in range(2):
        status, _, body = get(f"{address}data?figures=&samples=")
        found = json.loads(body)["samples"]
        assert status == 200 and len(found["rows"]) == 4
        names = "step_000002.parquet, eval_000002.parquet, step_000001.parquet"
        assert f"Unreadable: {names}." in found["note"]


def test_only_the_address_with_the_token_is_answered(served):
    run, address = served
    root = address.rsplit("/", 2)[0]
    wrong = root + "/" + "x" * len(address.rsplit("/", 2)[1])
    for other in (
        root,
        root + "/",
        wrong + "/",
        wrong + "/data",
        root + "/%C3%A9/data",
        address[:-1],
    ):
        assert get(other)[0] == 404, other
        assert run.name.encode() not in get(other)[2]
    assert get(address + "../config.json")[0] == 404 and get(address + "config.json")[0] == 404
    # A run that is removed is no traceback.
    (run / "config.json").unlink()
    add_row(run, 0, {})
    status, _, body = get(address + "data?figures=&samples=")
    assert status == 503 and "is no run" in json.loads(body)["error"]


@pytest.mark.parametrize("path", [b"*", b"x", b"http://[x/"])
def test_a_malformed_address_is_not_found(served, capfd, path):
    _, address = served
    port = int(address.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
        assert b" 404 " in connection.makefile("rb").readline()
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_named(served, config, tmp_path):
    _, address = served
    port = int(address.split(":")[2].split("/")[0])
    run = make_run(tmp_path / "other", config, num_steps=0)
    with pytest.raises(UserError, match=f"--port={port} cannot be used: Address already in use"):
        serving.serve([run], port, print)
