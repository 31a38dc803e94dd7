"""A tiny random model in a directory, a server of it, and requests as the SDK makes them."""

import contextlib
import json
import os
import pathlib
import signal
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.tinker.proto import tinker_pb2 as pb
from tests.launch.conftest import read_until, start

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = pathlib.Path(os.environ.get("SEMRL_TINKER_PYTHON", ROOT / ".venv-tinker/bin/python"))
KEY = "tml-a-key-for-the-tests"
NAME = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    words = "User: What is 4 + 5? Assistant: 9 the quick brown fox 0123456789 Guess: too high low"
    tokenizer = data.train_tokenizer([words] * 3, 300)
    config = models.DecoderConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=32, tie_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    params = jax.tree.map(lambda leaf: leaf * 1.5, models.Policy(config).init(jax.random.key(3)))
    directory = tmp_path_factory.mktemp("tinker") / NAME
    models.save_directory(directory, params, config, tokenizer)
    return directory


class Server:
    """A server in a process of its own, which can be killed and started again."""

    def __init__(self, model, workdir, *options):
        self.workdir, self.process = workdir, None
        self._arguments = [
            "launch.tinker", f"--model={model}", f"--workdir={workdir}", f"--name={NAME}",
            "--max_tokens=2048", *options,
        ]  # fmt: skip
        self._port = 0

    def start(self):
        self.process = start(*self._arguments, f"--port={self._port}", env={"TINKER_API_KEY": KEY})
        self.url = read_until(self.process, "http://").split()[-1]
        self._port = int(self.url.rpartition(":")[2])
        return self

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process.stdout.close(), self.process.stderr.close()
        return code

    def ask(self, route, body=None, *, key=KEY, headers=(), timeout_s=120, method=None):
        """The status and the body of the answer, read as JSON or protobuf bytes."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/api/v1/{route}"
        request = urllib.request.Request(url, content, dict(headers), method=method)
        if key:
            request.add_header("X-API-Key", key)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                kind, found, status = answer.headers["content-type"], answer.read(), answer.status
        except urllib.error.HTTPError as error:
            kind, found, status = error.headers["content-type"], error.read(), error.code
        return status, json.loads(found) if kind == "application/json" else found

    def result(self, route, body, **options):
        """The result of a request that is answered later."""
        status, accepted = self.ask(route, body, **options)
        assert status == 200, accepted
        while True:
            status, found = self.ask("retrieve_future", {"request_id": accepted["request_id"]})
            if status != 408:
                assert status == 200, found
                return found

    def session(self):
        return self.ask("create_session", {"tags": []})[1]["session_id"]

    def model(self, session, number=0, rank=4, seed=1, **more):
        lora = {"rank": rank, "seed": seed}
        body = {"session_id": session, "model_seq_id": number, "base_model": NAME, **more}
        return self.result("create_model", body | {"lora_config": lora})["model_id"]

    def forward_backward(self, model, seq, data, loss="cross_entropy", forward_only=False):
        """Log-probabilities of each datum, and the metrics."""
        body = encoded(model, seq, data, loss, forward_only)
        found = pb.ForwardBackwardOutput.FromString(self.result("forward_backward", body))
        (record,) = found.loss_fn_outputs
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, np.int64) // 4
        values = np.frombuffer(field.data, np.float32)
        return np.split(values, offsets[1:-1]), dict(found.metrics)

    def step(self, model, seq, **adam):
        return self.result("optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam})


def encoded(model, seq, data, loss="cross_entropy", forward_only=False):
    """A ForwardBackwardRequest; a datum is its token ids, its targets, and its other inputs."""
    request = pb.ForwardBackwardRequest(
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    for token_ids, targets, inputs in data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.int32(token_ids).tobytes()
        datum.loss_fn_inputs["target_tokens"].dense = np.int64(targets).tobytes()
        datum.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
        for name, values in inputs.items():
            datum.loss_fn_inputs[name].dense = np.float32(values).tobytes()
            datum.loss_fn_inputs[name].dtype = pb.DTYPE_FLOAT32
    return request.SerializeToString()


@pytest.fixture(scope="session")
def served(model_directory, tmp_path_factory):
    server = Server(model_directory, tmp_path_factory.mktemp("tinker_workdir")).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def own_server(model_directory, tmp_path):
    """A server that the test may kill."""
    server = Server(model_directory, tmp_path / "workdir").start()
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.stop()
