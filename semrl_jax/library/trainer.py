"""A training run as an object: a loop over it makes the steps."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_collections
import pyarrow as pa

from semrl_jax.jobs.evaluate import evaluate
from semrl_jax.library.language_model import LanguageModel
from semrl_jax.library.settings import chosen_config, configure
from semrl_jax.rewards.function import dump_functions
from semrl_jax.runs.lifecycle import EXIT_NOT_SAVED, EXIT_PREEMPTED, train_steps
from semrl_jax.runs.policies import find_policies
from semrl_jax.runs.workdir import GIVEN
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.config import check_sections
from semrl_jax.settings.evaluation import SAMPLING, complete
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import read_rows
from semrl_jax.support.safe_files import read_json_object, replacing

NO_ANSWER = "-"  # of a row without one
Reward = Callable[..., Any] | str
Rows = Iterable[Mapping[str, Any] | str]


class Step(NamedTuple):
    """What a step of a run leaves.

    Attributes:
      number: from 0; `scalars` belong to the weights before its update. One more than the last
        step has an evaluation alone.
      scalars: its row of metrics.jsonl, see docs/log_keys.md.
      responses: those that it trained on, with verdicts and metrics.
    """

    number: int
    scalars: Mapping[str, float]
    responses: Scored


class Trainer:
    """Trains a policy with verifiable rewards; a loop over it makes the steps.

    The run has a directory like those of `launch.train`, with log, responses, checkpoints and
    report. A second loop, also after an interrupt or in another process, goes on after the last
    checkpoint. Ending a loop early saves one.

    Args:
      workdir: directory of the run, made if missing.
      model: Hugging Face directory, hub id or .gguf file; or fields of the section `model`. None:
        the config's.
      prompts: rows with `question` (or `prompt`) and `answer`, or questions alone; any iterable,
        such as a list or a `datasets.Dataset`, or a pandas DataFrame. Or paths of .jsonl and
        .parquet files. None: the config's.
      problems: the same, held out for evaluations.
      reward: a function of (response, reference) or of (response, reference, row), which returns a
        score, a mapping or a Verdict (docs/verifiers.md); the name of a built-in verifier; or
        several by name, each as itself or as a pair with its weight. Functions, also lambdas, run
        in processes of their own. None: the config's.
      config: to begin with: a name in `configs`, a file with `get_config`, or a ConfigDict, which
        is changed.
      sections: settings, such as `training={"num_steps": 20}` or
        `training=semrl_jax.settings.training.Training(num_steps=20)`; docs/configuration.md.

    Raises:
      UserError: for a wrong setting; the first step finds further mistakes.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        prompts: Rows | None = None,
        problems: Rows | None = None,
        reward: Reward | Mapping[str, Reward | tuple[Reward, float]] | None = None,
        config: str | os.PathLike[str] | ml_collections.ConfigDict = "default",
        **sections: Any,
    ):
        self.workdir = pathlib.Path(workdir)
        self.config = chosen_config(config)
        self._files: dict[str, bytes] = {}  # inputs that are not in files yet
        if isinstance(model, str | os.PathLike):
            model = {"path": str(model)}
        if model is not None:
            sections["model"] = model
        if prompts is not None:
            files = self._rows_files("prompts", prompts)
            configure(self.config, {"data": {"task": "files", "files": files}})
        if problems is not None:
            files = self._rows_files("problems", problems)
            configure(self.config, {"evaluation": {"files": files}})
        if reward is not None:
            self._set_reward(reward)
        configure(self.config, sections)
        self._policy: LanguageModel | None = None
        self._steps: Generator[Any, None, int] | None = None

    def __iter__(self) -> Iterator[Step]:
        """Makes the steps that are left.

        Raises:
          UserError: for a wrong setting, input, model or directory, before the first step.
          KeyboardInterrupt: after an interrupt, once a checkpoint is saved.
          OSError: if the last checkpoint could not be written.
        """
        self.close()  # a loop that an error ended may still be held by the error
        self._write_files()
        compilation.keep_programs()
        former = _handlers()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_policy)  # the end may have saved a newer checkpoint
            steps = contextlib.closing(train_steps(self.config, str(self.workdir)))
            self._steps = stack.enter_context(steps)
            while True:
                try:
                    result, row = next(self._steps)
                except StopIteration as end:
                    code = end.value
                    break
                self._close_policy()  # there may be a newer checkpoint
                step = Step(result.step, row, result.scored)
                del result  # its weights are those that the next step changes
                with _handled_by(former):
                    yield step
        if code == EXIT_PREEMPTED:
            raise KeyboardInterrupt
        if code == EXIT_NOT_SAVED:
            raise OSError(f"the last checkpoint of {self.workdir} could not be written")

    def train(self, *callbacks: Callable[[Step], None]) -> Trainer:
        """Makes all steps that are left, and calls each function with each of them."""
        for step in self:
            for callback in callbacks:
                callback(step)
        return self

    @property
    def log(self) -> pa.Table:
        """All rows of metrics.jsonl: one per step, with a column for each scalar."""
        rows = read_rows(self.workdir / "metrics.jsonl")
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    @property
    def policy(self) -> LanguageModel:
        """The policy of the newest checkpoint."""
        if self._policy is None:
            self._policy = LanguageModel(self.workdir)
        return self._policy

    def evaluate(
        self, output: str | os.PathLike[str], benchmarks: Iterable[str] = (), **evaluation: Any
    ) -> dict[str, Any]:
        """Evaluates the policy of the newest checkpoint, as `launch.evaluate` does.

        Args:
          output: directory of the results, made if missing; a part that is there is not repeated.
          benchmarks: names, files or environments, docs/data.md; none: the held-out problems.
          evaluation: further settings of `config.evaluation`, such as n.

        Returns:
          The figures by benchmark, as in results.json.

        Raises:
          UserError: for a wrong setting or benchmark, or without a checkpoint.
        """
        self.close()
        config, benchmarks = self.config.copy_and_resolve_references(), tuple(benchmarks)
        evaluation |= {"benchmarks": benchmarks}
        given = {f"evaluation.{name}" for name in evaluation}
        configure(config, {field: value for field, value in SAMPLING.items() if field not in given})
        configure(config, {"evaluation": evaluation})
        complete(config, given, of_run=not benchmarks)
        check_sections(config)
        compilation.keep_programs()
        if evaluate(config, find_policies(str(self.workdir), None), pathlib.Path(output)):
            raise KeyboardInterrupt
        return read_json_object(pathlib.Path(output) / "results.json")

    def close(self) -> None:
        """Ends a loop that is not at its end, after a checkpoint, and the threads of `policy`."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._close_policy()

    def _close_policy(self) -> None:
        if self._policy is not None:
            self._policy.close()
        self._policy = None

    def _rows_files(self, name: str, rows: Rows) -> tuple[str, ...]:
        """The files of rows, which are written when the run begins."""
        if isinstance(rows, str | os.PathLike):
            return (str(rows),)
        if isinstance(rows, Mapping):  # such as a DatasetDict, which iterates over names of splits
            raise UserError(
                f"{name} is a mapping with {', '.join(map(str, rows))}; give rows, or one split."
            )
        if hasattr(rows, "iterrows"):  # a DataFrame, which iterates over names of columns
            rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
        rows = list(rows)
        if rows and all(str(row).endswith((".jsonl", ".parquet")) for row in rows):
            return tuple(map(str, rows))
        found = [_as_row(name, number, row) for number, row in enumerate(rows)]
        if not found:
            raise UserError(f"{name} has no row.")
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name} must have rows that JSON can hold: {error}.") from None
        self._files[f"{name}.jsonl"] = text.encode()
        return (str(self.workdir / GIVEN / f"{name}.jsonl"),)

    def _set_reward(self, reward: Reward | Mapping[str, Reward | tuple[Reward, float]]) -> None:
        if isinstance(reward, str):
            configure(self.config, {"rewards": {"function": reward, "functions": ()}})
            return
        several = reward if isinstance(reward, Mapping) else {"reward": reward}
        weighted = {
            name: one if isinstance(one, tuple) else (one, 1.0) for name, one in several.items()
        }
        functions = {name: one for name, (one, _) in weighted.items() if callable(one)}
        if functions:
            try:
                self._files["rewards.pkl"] = dump_functions(functions)
            except Exception as error:  # objects decide what they raise
                raise UserError(
                    f"reward cannot be sent to its own process{_unsent(functions)} "
                    f"({type(error).__name__}: {error}); make what it needs at its first call."
                ) from None
        file = self.workdir / GIVEN / "rewards.pkl"
        entries = {
            name: f"{file}:{name}" if name in functions else one
            for name, (one, _) in weighted.items()
        }
        if isinstance(reward, Mapping):
            lines = tuple(
                f"{entry}:weight={weighted[name][1]}:name={name}" for name, entry in entries.items()
            )
            configure(self.config, {"rewards": {"function": "", "functions": lines}})
        else:
            configure(self.config, {"rewards": {"function": entries["reward"], "functions": ()}})

    def _write_files(self) -> None:
        """Writes what the run reads; UserError if it began with other rows."""
        directory = self.workdir / GIVEN
        for name, contents in self._files.items():
            file = directory / name
            if file.exists() and name.endswith(".jsonl") and file.read_bytes() != contents:
                raise UserError(
                    f"workdir={self.workdir} holds a run with other {file.stem}; name a new one."
                )
            directory.mkdir(parents=True, exist_ok=True)
            with replacing(file) as out:
                out.write(contents)


def _unsent(functions: Mapping[str, Callable[..., Any]]) -> str:
    """Which variables of the functions cannot be sent; "" if that is not known."""
    found = []
    for function in filter(inspect.isfunction, functions.values()):
        variables = inspect.getclosurevars(function)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            try:
                dump_functions(value)
            except Exception:  # objects decide what they raise
                found.append(name)
    return f", because of {', '.join(found)}" if found else ""


def _as_row(name: str, number: int, row: Mapping[str, Any] | str) -> dict[str, Any]:
    """A row with a question and an answer."""
    if isinstance(row, str):
        row = {"question": row}
    if not isinstance(row, Mapping):
        raise UserError(f"{name}: row {number} must be a mapping or a question, not {row!r:.80}.")
    row = dict(row)
    if "question" not in row and "prompt" in row:
        row["question"] = row["prompt"]
    if row.get("answer") is None:  # as in a table that lacks some
        row["answer"] = NO_ANSWER
    return row


def _handlers() -> dict[int, Any]:
    """The handlers of the signals that a run handles."""
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


@contextlib.contextmanager
def _handled_by(handlers: Mapping[int, Any]) -> Iterator[None]:
    """These handlers in the block; only the main thread has handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    others = _handlers()
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, handler in others.items():
            signal.signal(number, handler)
