"""Shared code of the commands: flags, and user mistakes as one line with exit code 2."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import itertools
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict

import configs
from configs.default import get_config
from semrl_jax.runs.config_checks import validate
from semrl_jax.settings.algorithms import add_users_options
from semrl_jax.settings.config import unknown_field
from semrl_jax.settings.moved import new_places
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import DISK_ERRNOS, UserError

EXIT_USER_ERROR = 2
# A path that the user named fails with these: too long, in a closed directory, or below a file.
PATH_ERRNOS = (errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR)
# Nobody reads: a pipe's reader has ended, or the terminal was closed.
GONE_ERRNOS = (errno.EPIPE, errno.EIO)
EXAMPLES = {"config": "configs/quickstart.py", "workdir": "runs/quickstart"}
# gRPC reads this when it is imported. Otherwise it would print every attempt to connect.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def run(
    main: Callable[..., int] | Mapping[str, Callable[[], int]], usage: str, *, names: bool = False
) -> None:
    """Parses the flags, runs `main` and exits with its code.

    Args:
      main: the command, which returns an exit code; or several, by the word that selects one.
      usage: printed above the flags by --help.
      names: whether `main` takes the other arguments, as a list of texts.
    """
    program = f"python -m {sys.modules['__main__'].__spec__.name}"
    open_output()
    message = None
    try:
        # Flags may follow the command word or names. Otherwise, other arguments are refused.
        flags.FLAGS.set_gnu_getopt(names or isinstance(main, Mapping))
        rest = _parse(usage)
        if isinstance(main, Mapping):
            if not rest or rest[0] not in main:
                given = f"not {rest[0]!r}" if rest else "but there is none"
                raise UserError(
                    f"the first argument must be one of {', '.join(main)}, {given}; see --help."
                )
            main = main[rest.pop(0)]
        if rest and not names:
            hint = f"see {program} --help."
            if "config" in flags.FLAGS and rest[0].endswith(".py"):
                hint = f"did you mean --config={rest[0]}?"
            raise UserError(f"{rest[0]!r} is not a flag; {hint}")
        code = main(rest) if names else main()
    except UserError as error:
        # Always one line, even if the message quotes text with line breaks.
        message, code = " ".join(str(error).split()), EXIT_USER_ERROR
    except OSError as error:
        if error.errno in PATH_ERRNOS and error.filename:
            path = f"{error.filename!r:.300}"
            message, code = f"{path}: {error.strerror}; name another path.", EXIT_USER_ERROR
        elif error.errno in DISK_ERRNOS:
            name = "" if error.filename is None else f"{error.filename}: "
            message = f"{name}{error.strerror}; free some space, the same command goes on"
            code = 1
        else:
            raise
    except RuntimeError as error:
        if "Unable to initialize backend" not in str(error):  # of JAX
            raise
        platforms = os.environ.get("JAX_PLATFORMS", "")
        message, code = f"JAX_PLATFORMS={platforms!r}: {error}", EXIT_USER_ERROR
    except KeyboardInterrupt:
        code = 130
    if message is not None:
        print(f"{program}: {message}", file=sys.stderr)
    logging.shutdown()
    sys.exit(code)


class _Output(io.TextIOWrapper):
    """Standard output or error. Once nobody can read it any more, it discards what is written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        if error.errno not in GONE_ERRNOS:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # libraries and child processes write there, too
        os.close(nowhere)


def open_output() -> None:
    """Lets work go on that nobody reads, and prints every text.

    A stream that is closed (`>&-`), or whose reader has ended (`| head -1`), discards all lines.
    Characters that its encoding lacks are escaped.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)  # or the next file would be standard input or output
    os.close(opened)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):  # not one of a test, in memory
            stream.flush()
            steady = _Output(
                stream.buffer,
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, steady)


@contextlib.contextmanager
def new_directory(flag: str, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Checks before any work that a directory can be made at `path`; UserError if not.

    The block may write to `<path>.writing` and `<path>.replaced`, which are removed if it fails.
    """
    path = pathlib.Path(os.path.abspath(path))
    neighbours = [path.with_name(path.name + end) for end in (".writing", ".replaced")]
    try:
        empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if os.path.lexists(path) and not empty:
            raise UserError(f"--{flag}={path} is there already; name a new directory.")
        for neighbour in neighbours:
            if os.path.lexists(neighbour):
                raise UserError(
                    f"--{flag}={path}: {neighbour} is there already; remove it, or name another."
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        neighbours[0].mkdir()  # test that a directory can be made here
        neighbours[0].rmdir()
    except OSError as error:
        raise UserError(f"--{flag}={path} cannot be made: {error.strerror}.") from None
    try:
        yield path
    except BaseException:
        for neighbour in neighbours:
            shutil.rmtree(neighbour, ignore_errors=True)
        raise


def output_file(flag: str, path: str, *, make_directory: bool = False) -> pathlib.Path:
    """The file that a flag names, checked before any work.

    Args:
      make_directory: make the directory of the file if it is missing.

    Raises:
      UserError: if it cannot be written. A device or a pipe is refused too: files are replaced as a
        whole, so with root's rights --output=/dev/null would put a file in place of /dev/null.
    """
    file = pathlib.Path(path)
    try:
        directory = file.absolute().parent
        if make_directory:
            directory.mkdir(parents=True, exist_ok=True)
        if not directory.is_dir() or (file.exists() and not file.is_file()):
            raise UserError(f"--{flag}={file} must be a file in a directory that exists.")
        check_writable(directory)
    except OSError as error:
        raise UserError(f"--{flag}={file} cannot be written: {error.strerror}.") from None
    return file


def check_writable(directory: pathlib.Path) -> None:
    """Raises OSError if no file can be made in a directory; rights alone do not tell."""
    with tempfile.TemporaryFile(dir=directory):
        pass


def required(flag: flags.FlagHolder[Any]) -> Any:
    """The flag's value; UserError if it was not given."""
    if flag.value is None:
        example = EXAMPLES.get(flag.name)
        such_as = f", such as --{flag.name}={example}" if example else ""
        raise UserError(f"--{flag.name} is needed{such_as}; see --help.")
    return flag.value


def checked_config(
    flag: flags.FlagHolder[ConfigDict],
    check: Callable[[ConfigDict], None] = validate,
    short_flags: Mapping[str, str] = {},
) -> ConfigDict:
    """The config with its overrides, after the check. It is locked: no field can be added.

    With --explain, it prints all fields and ends the command.

    Args:
      check: raises UserError; it may set fields.
      short_flags: the flag that was given, by the field that `check` sets from it.
    """
    given = flags.FLAGS[flag.name]
    try:
        config = flag.value if given.present else required(flag)
        hasattr(config, "lock")
    except OSError as error:  # ml_collections reports a failed load only at the first use
        raise UserError(f"--{flag.name}: {_first_reason(error)}") from None
    # ml_collections would accept a flag that replaces a section by a dict.
    if any(isinstance(v, ConfigDict) for v in given.override_values.values()):
        _check_fields()
    _check_complete(given.config_filename, config)
    config.lock()
    if "explain" in flags.FLAGS and flags.FLAGS.explain:
        from launch.explain import explained

        name, _, argument = given.config_filename.partition(":")
        file = flatten(given.parser.parse(given.config_filename))
        overridden = given.override_values
        print(explained(config, check, file, argument or name, overridden, short_flags))
        sys.exit(0)
    check(config)
    return config


def _check_complete(file: str, config: Any) -> None:
    """Raises UserError if `get_config` of a config file returns no config, or not all fields."""
    is_config = isinstance(config, ConfigDict)
    missing = sorted(flatten(get_config()).keys() - flatten(config).keys()) if is_config else []
    if missing or not is_config:
        lacks = f"has no field {missing[0]!r}" if missing else f"is {config!r:.60}, no ConfigDict"
        raise UserError(
            f"--config={file}: what get_config() returns {lacks}; begin it with "
            "`config = default.get_config()`, as configs/quickstart.py does."
        )


def _find_shipped() -> None:
    """Names a shipped config by its place if --config=configs/NAME.py is not in this directory."""
    for number, argument in enumerate(sys.argv):
        given = re.fullmatch(r"(--?config=)?(configs/[^:]+)(:.*)?", argument, re.DOTALL)
        if given and (given[1] or sys.argv[number - 1] in ("-config", "--config")):
            shipped = pathlib.Path(configs.__file__).parents[1] / given[2]
            if not os.path.exists(given[2]) and shipped.is_file():
                sys.argv[number] = f"{given[1] or ''}{shipped}{given[3] or ''}"


def given_values(name: str) -> list[str]:
    """The values of a flag among the arguments, as --name=value or --name value."""
    found = []
    for argument, following in itertools.pairwise([*sys.argv, ""]):
        if match := re.fullmatch(rf"--?{re.escape(name)}(?:=(.*))?", argument, re.DOTALL):
            found.append(following if match[1] is None else match[1])
    return found


def config_arguments() -> list[str]:
    """The flags of the config on the command line, to pass them on."""
    found = []
    for argument, following in itertools.pairwise([*sys.argv[1:], ""]):
        if re.match(r"--?(no)?config(\.[\w.]+)?(=|$)", argument):
            found.append(argument)
            # The value of a flag without "=" follows; one that is True or False may have none.
            if "=" not in argument and not re.match(r"$|--?[A-Za-z]", following):
                found.append(following)
    return found


def _take_users_options() -> None:
    """Lets flags set the options that a user's algorithm declares."""
    if not any(re.match(r"--?(no)?config\.algorithms\.options\.", one) for one in sys.argv):
        return  # the module of the algorithm loads JAX, and not every command needs it
    name = next(reversed(given_values("config.algorithms.name")), None)
    parser = flags.FLAGS["config"].parser
    parse = parser.parse

    def parse_with_options(file: str) -> Any:
        config = parse(file)
        if isinstance(config, ConfigDict) and "algorithms" in config:
            add_users_options(config, name or config.algorithms.name)
        return config

    parser.parse = parse_with_options


def _parse(usage: str) -> list[str]:
    options = {"allow_hide_cpp": True, "short_name": "h", "flag_values": flags.FLAGS}
    flags.DEFINE_bool("help", False, "print this help", **options)
    if "config" in flags.FLAGS:
        flags.DEFINE_bool(
            "explain",
            False,
            "print every setting with its value, unit, origin and meaning, and end",
            module_name=sys.argv[0],  # so that --help lists it among the command's flags
            flag_values=flags.FLAGS,
        )
    _check_values()
    if "config" in flags.FLAGS:
        _find_shipped()
        _take_users_options()
    try:
        rest = flags.FLAGS(sys.argv)[1:]
    except OSError as error:
        raise UserError(f"--config: {_first_reason(error)}") from None
    except Exception as error:  # a config file may raise anything
        _check_fields()
        raise UserError(_wrong_flag(error)) from None
    if flags.FLAGS.help:
        print(f"{usage}\n{flags.FLAGS.module_help(sys.modules['__main__'])}")
        sys.exit(0)
    return rest


def _check_values() -> None:
    """Raises UserError for a flag without a value: absl would use the next flag as its value."""
    for argument, following in itertools.pairwise([*sys.argv[1:], ""]):
        name = argument.lstrip("-")
        if re.match(r"--?[\w.]+=~(/|$)", argument):
            raise UserError(
                f"{argument}: the shell leaves ~ as it is after =, so this would be a directory "
                "named ~ here; write $HOME, or a blank in place of =."
            )
        takes_one = name in flags.FLAGS and not flags.FLAGS[name].boolean
        if argument.startswith("-") and takes_one and not following and argument == sys.argv[-1]:
            raise UserError(f"--{name} has no value; give --{name}=VALUE.")
        if argument.startswith("-") and takes_one and re.match(r"--\w", following):
            raise UserError(
                f"--{name} has no value: {following!r} after it is a flag; give --{name}=VALUE."
            )


def _check_fields() -> None:
    """Raises UserError for a config file that fails, or a flag that sets no field of it."""
    if "config" not in flags.FLAGS:
        return
    for path in given_values("config"):
        try:
            config = flags.FLAGS["config"].parser.parse(path)
        except Exception as error:  # of the user's own code
            if places := _places_in(error):
                raise UserError(
                    f"--config={path} sets a field of an earlier version: {places}."
                ) from None
            (*_, reason) = str(error).strip().splitlines() or [""]
            # ml_collections puts the traceback and the name of the type into the text.
            reason = reason.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
            reason = reason.removeprefix(f"{type(error).__name__}: ")
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise UserError(f"--config={path}: {kind}{reason}") from None
        for other in sys.argv[1:]:
            field = re.match(r"--?(?:no)?config\.([\w.]+)", other)
            if field and field[1] not in flatten(config):
                raise UserError(f"--config.{unknown_field(config, field[1])}")


def _places_in(error: Exception) -> str:
    """What became of the fields of an earlier version that a failing line of a config file uses."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    names = {name for line in lines for name in re.findall(r"\bconfig\.([\w.]+)", line)}
    return "; ".join(filter(None, map(new_places, sorted(names))))


# What a flag of each type expects.
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple": "a value or a tuple, such as \"('a', 'b')\"; or repeat the flag for each value",
}


def _wrong_flag(error: Exception) -> str:
    """Why absl refuses a flag, in one sentence."""
    if isinstance(error, flags.UnrecognizedFlagError):
        name, dot, field = error.flagname.partition(".")
        known = [flag for flag in flags.FLAGS if not dot or flag == "config"]
        near = [f"{flag}{dot}{field}" for flag in difflib.get_close_matches(name, known, n=1)]
        hint = f"did you mean --{near[0]}?" if near else "see --help."
        return f"--{error.flagname} is unknown; {hint}"
    found = re.match(r"flag --([\w.]+)=", str(error))
    if not found or found[1] not in flags.FLAGS:
        return str(error)
    parser = flags.FLAGS[found[1]].parser
    if parser.flag_type() not in KINDS:
        return str(error)
    value = str(error)[found.end() :].removesuffix(f": {error.__context__}")
    least, most = (getattr(parser, f"{end}_bound", None) for end in ("lower", "upper"))
    bound = "" if least is None else f" of at least {least}"
    bound += "" if most is None else f" and at most {most}"
    return f"--{found[1]}={value} must be {KINDS[parser.flag_type()]}{bound}."


def _first_reason(error: Exception) -> str:
    """The first reason in ml_collections' list of failed attempts."""
    reasons = re.findall(r"^\s+(\[Errno.*|.*Error.*)$", str(error), re.MULTILINE)
    reason = reasons[0] if reasons else str(error).rpartition("failure to load: ")[2]
    reason = re.sub(r"^\[Errno \d+\] ", "", reason)
    missing = re.fullmatch(r"No such file or directory: '(.+)'", reason)
    if not missing:
        return reason
    there = [str(file) for file in pathlib.Path(missing[1]).parent.glob("*.py")]
    near = difflib.get_close_matches(missing[1], there, n=1)
    return f"{reason}; " + (
        f"did you mean {near[0]}?" if near else f"name one such as {EXAMPLES['config']}."
    )
