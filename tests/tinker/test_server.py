"""The server over HTTP, by hand: training, sampling, weights, wrong requests, a killed server."""

import concurrent.futures
import json
import signal
import time

import numpy as np
import pytest

from launch.convert import convert
from semrl_jax.tinker.proto import tinker_pb2 as pb
from tests.cases import slow_after
from tests.launch.conftest import run, succeed
from tests.tinker.conftest import KEY, NAME, encoded

DATA = [
    ([5, 6, 7, 8], [6, 7, 8, 9], {"weights": [0, 1, 1, 1]}),
    ([9, 10], [10, 11], {"weights": [1, 1]}),
]


def sample_body(session, number, prompt, **sampling):
    return {
        "sampling_session_id": session, "seq_id": number, "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {"max_tokens": 6, "seed": 3} | sampling, "prompt_logprobs": True,
    }  # fmt: skip


def sampled(server, sampler, number=0, prompt=(5, 6, 7), **sampling):
    found = server.result("asample", sample_body(sampler, number, list(prompt), **sampling))
    assert isinstance(found, bytes), found
    return pb.SampleResponse.FromString(found)


def base_sampler(server, session, number=0):
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": NAME}
    return server.ask("create_sampling_session", body)[1]["sampling_session_id"]


def floats(data):
    return np.frombuffer(data, np.float32)


def train(server, model, steps, first=1, rate=0.02):
    losses = []
    for step in range(steps):
        seq = first + 2 * step
        _, metrics = server.forward_backward(model, seq, DATA)
        losses.append(metrics["loss:sum"])
        server.step(model, seq + 1, learning_rate=rate)
    return losses


def test_a_model_learns_and_samples_what_it_learned(served):
    session = served.session()
    model = served.model(session)
    info = served.ask("get_info", {"model_id": model})[1]
    assert (info["lora_rank"], info["model_name"]) == (4, NAME)
    losses = train(served, model, 12)
    assert losses[-1] < 0.5 * losses[0]
    logprobs, metrics = served.forward_backward(model, 25, DATA, forward_only=True)
    expected = -sum(np.dot(x, datum[2]["weights"]) for x, datum in zip(logprobs, DATA))
    np.testing.assert_allclose(metrics["loss:sum"], expected, rtol=1e-5)
    body = {"model_id": model, "seq_id": 26, "sampling_session_seq_id": 1}
    sampler = served.result("save_weights_for_sampler", body)["sampling_session_id"]
    found = sampled(served, sampler, prompt=[5, 6, 7, 8, 9])
    # Token t of the prompt has the log-probability that the trainer gives it.
    np.testing.assert_allclose(floats(found.prompt_logprobs)[1:], logprobs[0], rtol=2e-3, atol=2e-3)
    assert np.isnan(floats(found.prompt_logprobs)[0])
    tokens = [np.frombuffer(each.tokens, np.int32) for each in found.sequences]
    assert len(tokens) == 2 and all(len(each) <= 6 for each in tokens)
    assert all(len(floats(e.logprobs)) == len(t) for e, t in zip(found.sequences, tokens))
    again = sampled(served, sampler, 1, prompt=[5, 6, 7, 8, 9])
    assert [each.tokens for each in again.sequences] == [each.tokens for each in found.sequences]
    base = sampled(served, base_sampler(served, session, 9), prompt=[5, 6, 7, 8, 9])
    assert floats(base.prompt_logprobs)[1:].sum() < floats(found.prompt_logprobs)[1:].sum() - 1


def test_weights_are_saved_and_loaded(served):
    session = served.session()
    model = served.model(session)
    train(served, model, 3)
    save = {"model_id": model, "seq_id": 7, "path": "step-3"}
    path = served.result("save_weights", save)["path"]
    assert path == f"tinker://{model}/weights/step-3"
    assert served.result("save_weights", save)["path"] == path  # sent twice: done once
    refused = served.result("save_weights", save | {"seq_id": 8})
    assert refused["category"] == "user" and "exists already" in refused["error"]
    assert served.ask("weights_info", {"tinker_path": path})[1]["lora_rank"] == 4
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    other = served.result("load_weights", load)["model_id"]
    assert other == f"{session}:train:1"
    expected = train(served, model, 2, first=9)
    assert train(served, other, 2) == pytest.approx(expected, rel=1e-5)
    outside = {"model_id": "../../x", "path": path, "optimizer": False}
    assert served.ask("load_weights", outside)[0] == 404
    assert served.ask("load_weights", outside | {"session_id": session})[0] == 400


def test_runs_checkpoints_and_sessions_are_listed(served):
    session = served.session()
    model = served.model(session, user_metadata={"renderer_name": "role_colon"})
    paths = [
        served.result(route, {"model_id": model, "seq_id": seq, "path": "a"})["path"]
        for seq, route in enumerate(("save_weights", "save_weights_for_sampler"), 1)
    ]
    run = served.ask(f"training_runs/{model}")[1]
    assert (run["lora_rank"], run["base_model"]) == (4, NAME)
    assert run["user_metadata"] == {"renderer_name": "role_colon"}
    last = run["last_checkpoint"], run["last_sampler_checkpoint"]
    assert [checkpoint["tinker_path"] for checkpoint in last] == paths
    (newest, other) = served.ask(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
    assert [newest["checkpoint_id"], other["checkpoint_id"]] == ["sampler_weights/a", "weights/a"]
    assert newest["size_bytes"] < other["size_bytes"]  # without the optimiser
    all_of_it = served.ask("checkpoints?limit=1&offset=1")[1]
    assert all_of_it["checkpoints"] == [other] and all_of_it["cursor"]["total_count"] >= 2
    assert served.ask("training_runs?limit=1")[1]["training_runs"] == [run]
    assert served.ask("sessions?limit=1")[1] == {"sessions": [session]}
    assert served.ask(f"sessions/{session}")[1]["training_run_ids"] == [model]
    place = f"training_runs/{model}/checkpoints/weights/a"
    assert served.ask(place, method="DELETE")[0] == 204
    assert served.ask(place, method="DELETE")[0] == 404
    assert served.ask(f"training_runs/{model}/checkpoints")[1]["checkpoints"] == [newest]
    assert served.ask("weights_info", {"tinker_path": paths[0]})[0] == 400


@pytest.mark.slow
def test_saved_weights_are_evaluated_and_converted(served, tmp_path):
    model = served.model(served.session())
    served.result("save_weights", {"model_id": model, "seq_id": 1, "path": "step-3"})
    directory = served.workdir / model / "weights" / "step-3"
    convert(directory, tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "4 + 5?", "answer": "9"}) + "\n")
    succeed(
        "launch.evaluate", f"--policy={directory}", f"--benchmarks={problems}", "--n=1", "--k=1",
        f"--output={tmp_path / 'evaluated'}", "--verifier=gsm8k_strict", "--template={input}",
        "--max_response_tokens=8", "--max_prompt_tokens=64", "--quiet", timeout=300,
    )  # fmt: skip


def test_stops(served):
    sampler = base_sampler(served, served.session())
    plain = np.frombuffer(sampled(served, sampler, 0, stop=[]).sequences[0].tokens, np.int32)
    stop = int(plain[2])
    first = plain.tolist().index(stop)
    found = sampled(served, sampler, 1, stop=[stop]).sequences[0]
    assert np.frombuffer(found.tokens, np.int32).tolist() == plain[: first + 1].tolist()
    assert found.stop_reason == pb.STOP_REASON_STOP


def test_two_models_and_their_samples_do_not_mix(served):
    session = served.session()
    models = [served.model(session, number, seed=5) for number in range(2)]
    alone = train(served, models[0], 3)
    bodies = [encoded(models[1], 1, DATA), encoded(models[0], 7, DATA)]
    for body in bodies:  # both wait, and may be one program
        assert served.ask("forward_backward", body)[0] == 200
    served.step(models[0], 8)
    served.step(models[1], 2, learning_rate=0.02)
    assert train(served, models[1], 2, first=3) == pytest.approx(alone[1:], rel=1e-4)


WRONG = [
    ("create_model", {"session_id": "x"}, 400, "model_seq_id is missing"),
    ("optim_step", {"model_id": "m", "adam_params": {"beta1": 2}}, 400, "adam_params.beta1=2"),
    ("optim_step", {"model_id": "m", "adam_params": {}}, 404, "model 'm' does not exist here."),
    ("optim_step", b"{", 400, "Invalid JSON"),
    ("forward_backward", b"\xff\xff", 400, "the body is no ForwardBackwardRequest"),
    ("forward_backward", encoded("m", 1, DATA), 404, "model 'm' does not exist here."),
    ("forward_backward", encoded("m", 1, DATA, "grpo"), 400, "loss_fn='grpo' is not one of"),
    ("forward_backward", encoded("m", 1, []), 400, "data is empty"),
    ("forward_backward", encoded("m", 1, DATA, "ppo"), 400, "ppo takes target_tokens, logprobs"),
    ("forward_backward", encoded("m", 1, [([1], [1, 2], {})]), 400, "one value for each"),
    ("load_weights", {"path": "tinker://a/weights/../../b", "optimizer": False, "model_id": "m"},
     400, "does not exist on this server"),
    ("save_weights", {"model_id": "m", "path": "../x"}, 400, "path='../x'"),
    ("retrieve_future", {"request_id": "m:1"}, 410, "not known"),
    ("asample", sample_body("s", 0, [1]) | {"topk_prompt_logprobs": 3}, 400, "not supported"),
    ("asample", sample_body("s", 0, [1], stop=[2**40]), 400, "sampling_params.stop"),
    ("asample", sample_body("s", 0, [1]), 404, "sampler 's' does not exist here."),
    ("nothing", {}, 404, "Not Found"),
    ("training_runs/none", None, 404, "model 'none' does not exist here."),
    ("checkpoints?limit=-1", None, 400, "limit"),
    ("weights_info", {"tinker_path": f"tinker://{'é' * 200}/weights/a"}, 400, "does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "status", "text"), WRONG)
def test_wrong_requests_get_one_line(served, route, body, status, text):
    found, answer = served.ask(route, body)
    content = answer["detail"] if isinstance(answer, dict) else answer.decode()
    assert found == status and text in content and "\n" not in content


def test_wrong_tokens_and_names(served):
    session = served.session()
    sampler = base_sampler(served, session)
    assert (
        "the token 99999; the model has"
        in served.ask("asample", sample_body(sampler, 0, [99999]))[1]["detail"]
    )
    assert (
        "both together at most 2048"
        in served.ask("asample", sample_body(sampler, 0, [1], max_tokens=2048))[1]["detail"]
    )
    body = {
        "session_id": session,
        "model_seq_id": 7,
        "base_model": "other",
        "lora_config": {"rank": 4},
    }
    assert served.ask("create_model", body)[1]["detail"] == (
        f"base_model='other' is not served here; ask for {NAME!r}."
    )
    model = served.model(session)
    status, answer = served.ask("forward_backward", encoded(model, 1, [([1], [-1], {})]))
    assert (status, "outside of [0," in answer["detail"]) == (400, True)
    unnumbered = {"model_id": model, "adam_params": {}}
    for route, body in (("optim_step", unnumbered), ("forward_backward", encoded(model, -1, DATA))):
        status, answer = served.ask(route, body)
        assert (status, "must be at least 1; number" in answer["detail"]) == (400, True)


@pytest.mark.parametrize("key", ("", "tml-another-key-of-the-tests", KEY + "x"))
def test_without_the_key_nothing_is_answered(served, key):
    for route in ("create_session", "asample", "retrieve_future", "get_server_capabilities"):
        assert served.ask(route, {}, key=key) == (401, {"detail": "the token is missing or wrong."})
    assert served.ask("healthz", key="") == (200, {"status": "ok"})


@pytest.mark.slow
def test_a_killed_server_goes_on(own_server):
    session = own_server.session()
    undisturbed = train(own_server, own_server.model(session), 4)
    model = own_server.model(session, 1)
    losses = train(own_server, model, 2)
    _, metrics = own_server.forward_backward(model, 5, DATA)  # its gradient is in memory only
    losses.append(metrics["loss:sum"])
    step = {"model_id": model, "seq_id": 6, "adam_params": {"learning_rate": 0.02}}
    assert own_server.ask("optim_step", step)[0] == 200
    own_server.stop(signal.SIGKILL)
    own_server.start()
    assert own_server.ask("session_heartbeat", {"session_id": session})[0] == 200
    # The client sends the last request again: it is done once.
    own_server.step(model, 6, learning_rate=0.02)
    losses += train(own_server, model, 1, first=7)
    assert losses == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.slow
def test_a_server_that_ends_answers_those_that_wait(own_server):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        session = own_server.session()
        body = sample_body(base_sampler(own_server, session), 0, [5], max_tokens=900, stop=[])
        _, accepted = own_server.ask("asample", body)
        waits = threads.submit(
            own_server.ask, "retrieve_future", {"request_id": accepted["request_id"]}
        )
        time.sleep(0.5)
        assert own_server.stop() == 0
        assert waits.result()[0] == 408
    own_server.start()  # does the request, which is not sent again
    _, found = own_server.ask("retrieve_future", {"request_id": accepted["request_id"]})
    while isinstance(found, dict):
        assert found["type"] == "try_again"
        _, found = own_server.ask("retrieve_future", {"request_id": accepted["request_id"]})
    assert len(pb.SampleResponse.FromString(found).sequences) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    slow_after(
        2,
        [
            (("--workdir=w",), "--model is needed"),
            (("--model=m",), "--workdir is needed"),
            (("--model=m", "--workdir=w", "--token_file=none"), "token_file='none' cannot be read"),
            (("--model=m", "--workdir=w"), "the key must be 'tml-' and at least 16"),
        ],
    ),
)
def test_wrong_settings_are_one_line(options, text, tmp_path):
    done = run("launch.tinker", *options, env={"TINKER_API_KEY": "short"})
    assert done.returncode == 2 and text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_workdir_that_is_a_file_is_one_line():
    options = "--model=m", f"--workdir={__file__}"
    done = run("launch.tinker", *options, env={"TINKER_API_KEY": KEY})
    assert done.returncode == 2 and "cannot be made: File exists; name another" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
