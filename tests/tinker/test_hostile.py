"""Thousands of wrong requests to a server that trains: none breaks it or changes the training."""

import concurrent.futures
import json
import pathlib
import random
import threading

import pytest

from tests.rollout.http.test_server import mutated
from tests.tinker.conftest import NAME, encoded
from tests.tinker.test_server import DATA, base_sampler, sample_body, train

pytestmark = pytest.mark.soak

COUNT = 2000


def requests(session, model, sampler, path, index):
    """A right request of each kind, of a number of its own."""
    of_model = {"model_id": model, "seq_id": 10 * index}
    lora = {"rank": 4, "seed": 1}
    of_session = {"session_id": session, "model_seq_id": 10 + index, "base_model": NAME}
    return (
        ("optim_step", of_model | {"adam_params": {"learning_rate": 0.01, "grad_clip_norm": 1}}),
        ("asample", sample_body(sampler, index, [5, 6, 7])),
        ("create_model", of_session | {"lora_config": lora, "user_metadata": {"a": "b"}}),
        ("save_weights", of_model | {"path": f"p{index}"}),
        ("save_weights_for_sampler", of_model | {"sampling_session_seq_id": 10 + index}),
        ("load_weights", of_model | {"path": path, "optimizer": True}),
        ("create_sampling_session",
         {"session_id": session, "sampling_session_seq_id": 10 + index, "model_path": path}),
        ("create_session", {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0"}),
        ("session_heartbeat", {"session_id": session}),
        ("weights_info", {"tinker_path": path}),
        ("get_info", {"model_id": model}),
        ("retrieve_future", {"request_id": f"{model}:1"}),
    )  # fmt: skip


def mutated_bytes(draw, body):
    """A body with changed, missing or repeated bytes."""
    data = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        place, kind = draw.randrange(len(data)), draw.randrange(4)
        if kind == 0:
            del data[place : place + draw.randint(1, 20)]
        elif kind == 1:
            data[place:place] = data[place : place + draw.randint(1, 60)]
        else:
            data[place] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        if not data:
            break
    return bytes(data)


def attack(server):
    """Sends the requests; returns the statuses, and the accepted requests."""
    draw, session = random.Random(0), server.session()
    model = server.model(session)
    save = {"model_id": model, "seq_id": 1, "path": "saved"}
    path = server.result("save_weights", save)["path"]
    sampler = base_sampler(server, session)
    statuses, accepted = [], []
    for index in range(1, COUNT + 1):
        if index % 2:
            passes = encoded(model, 10 * index, DATA)
            route, body = "forward_backward", mutated_bytes(draw, passes)
        else:
            route, body = draw.choice(requests(session, model, sampler, path, index))
            body = mutated(draw, body)
        status, answer = server.ask(route, body)
        statuses.append(status)
        if status == 200 and isinstance(answer, dict) and "request_id" in answer:
            accepted.append(answer["request_id"])
    return statuses, accepted


def resident_mib(server):
    pages = pathlib.Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) / 256


def test_wrong_requests_beside_a_training_run(own_server):
    logged = []
    threading.Thread(target=lambda: logged.extend(own_server.process.stderr), daemon=True).start()
    session = own_server.session()
    expected = train(own_server, own_server.model(session), 20)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        attacking = threads.submit(attack, own_server)
        number, sizes = 0, []
        while not attacking.done():
            number += 1
            losses = train(own_server, own_server.model(session, number), 20)
            assert losses == pytest.approx(expected, rel=1e-4)
            sizes.append(resident_mib(own_server))
    statuses, accepted = attacking.result()
    print({status: statuses.count(status) for status in set(statuses)}, len(accepted), sizes)
    assert set(statuses) <= {200, 400, 404, 408, 410, 415}
    assert COUNT / 5 < statuses.count(400) < COUNT
    assert sizes[-1] - sizes[len(sizes) // 4] < 300
    for request_id in accepted:
        body = json.dumps({"request_id": request_id}).encode()
        status, answer = own_server.ask("retrieve_future", body)
        while status == 408:
            status, answer = own_server.ask("retrieve_future", body)
        assert status == 200
        assert isinstance(answer, bytes) or answer.get("category", "user") == "user", answer
    assert train(own_server, own_server.model(session, number + 1), 20) == pytest.approx(
        expected, rel=1e-4
    )
    assert not any("Traceback" in line for line in logged), "".join(logged)
