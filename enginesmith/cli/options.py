"""Arguments and options that commands share, and their standard streams."""

import inspect
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from enginesmith.cli.tables import echo
from enginesmith.core.errors import HttpAddress, InputError, parse_address
from enginesmith.core.parsing import LONGEST
from enginesmith.core.text import visible_json, write_line
from enginesmith.core.types import PRECISIONS
from enginesmith.registry.store.layout import DEFAULT_REGISTRY, REGISTRY_VARIABLE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# Arguments, options and output that commands share; each is declared once, so that it means the same everywhere.


Command = TypeVar("Command", bound=Callable[..., object])

LOG_FORMATS = ("text", "json")
# Where the command's root context keeps it.
LOG_FORMAT = "log_format"
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


class Duration(click.ParamType[timedelta]):
    """'7d', '12h', '30m', '0s'."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """The duration. Raises click's usage error for another text."""
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"([0-9]{1,6})([dhms])", str(value))
        if found is None:
            self.fail(f"{value!r} is no duration; give a number and d, h, m or s, as in 7d", param, ctx)
        lasts = timedelta(**{_UNITS[found[2]]: int(found[1])})
        if lasts > LONGEST:
            self.fail(f"{value!r} is longer than {LONGEST.days}d", param, ctx)
        return lasts


class ListenAddress(click.ParamType[HttpAddress]):
    """'127.0.0.1:8080', '[::]:8080'; ':8080' with the default host, if there is one."""

    name = "address"

    def __init__(self, default_host: str = "") -> None:
        self._default_host = default_host

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> HttpAddress:
        """The address. Raises click's usage error for another text."""
        if isinstance(value, HttpAddress):
            return value
        try:
            return parse_address(str(value), self._default_host)
        except InputError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType[int]):
    """'100GiB', '512MiB', '1000': a number of bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes. Raises click's usage error for another text."""
        found = re.fullmatch(r"([0-9]{1,12})(B|KiB|MiB|GiB|TiB)?", str(value))
        if found is None or not int(found[1]):
            self.fail(f"{value!r} is no size; give a number and KiB, MiB, GiB or TiB, as in 100GiB", param, ctx)
        return int(found[1]) << 10 * ("B", "KiB", "MiB", "GiB", "TiB").index(found[2] or "B")


class ShortTime(click.ParamType[float]):
    """'50ms', '200us', '1.5s': seconds. least: the smallest that is taken."""

    name = "time"

    def __init__(self, least: float = 0.0, above: bool = False) -> None:
        self._least, self._above = least, above

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds. Raises click's usage error for another text."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|µs|ms|s)", str(value))
        if found is None:
            self.fail(f"{value!r} is no time; give a number and us, ms or s, as in 50ms", param, ctx)
        seconds = float(found[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
        if seconds < self._least or (self._above and seconds <= self._least):
            self.fail(f"{value!r}: must be above {self._least:g} s", param, ctx)
        return seconds


class Percent(click.ParamType[float]):
    """'20%': 0.2. From 0 % to below 100 %."""

    name = "percent"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share. Raises click's usage error for another text."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?)%", str(value))
        if found is None:
            self.fail(f"{value!r} is no share from 0% to below 100%; give such as 20%", param, ctx)
        return float(found[1]) / 100.0


def _argument(name: str, metavar: str, meaning: str, **settings: Any) -> Callable[[Command], Command]:
    """An argument whose meaning is added to the command's help text, since click's arguments have no help."""

    def add(command: Command) -> Command:
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{metavar.strip('[].')}: {meaning}"
        return click.argument(name, metavar=metavar, **settings)(command)

    return add


_REF = "NAME@VERSION, NAME:CHANNEL, or NAME: its channel stable, else candidate, else its newest version."

# `REF`, passed as `reference: str`.
reference_argument = _argument("reference", "REF", _REF)
# `REF...`, passed as `references: tuple[str, ...]`.
references_argument = _argument("references", "REF...", _REF, nargs=-1, required=True)
# `[REF]...`, where there may be none, passed as `references: tuple[str, ...]`.
optional_references_argument = _argument("references", "[REF]...", _REF, nargs=-1, required=False)
# `REF` where it may be left out, passed as `reference: str | None`.
optional_reference_argument = _argument("reference", "[REF]", _REF, required=False)
# `NAME:CHANNEL`, passed as `where: str`.
channel_argument = _argument("where", "NAME:CHANNEL", "a model and its channel, such as digits:stable.")
# `SPEC`, passed as `spec: str`.
_SPEC = "a file, registered:MODEL[@DIGEST], or a file in a bucket (s3://bucket/specs/model.yaml)."
spec_argument = _argument("spec", "SPEC", _SPEC)
# `[SPEC]` where it may be left out, passed as `spec: str | None`.
optional_spec_argument = _argument("spec", "[SPEC]", _SPEC, required=False)


def combine(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """One decorator for several options, which help lists in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def number_option(
    name: str, kind: click.ParamType[Any], default: float | None, meaning: str, shown: bool | str = True
) -> Callable[[Command], Command]:
    """An option for a number. kind: its range.  shown: whether help says the default, or what it says in its place."""
    return click.option(name, type=kind, default=default, show_default=shown, help=meaning, callback=check_finite)


def check_finite(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """The value of an option for a number. Raises click's usage error for NaN and infinity, which no range refuses."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def path_option(name: str, meaning: str, shown: bool | str = False, **kind: bool) -> Callable[[Command], Command]:
    """An option for a path. shown: what help says is taken without it.  kind: settings of `click.Path`."""
    return click.option(name, type=click.Path(path_type=Path, **kind), show_default=shown, help=meaning)


def require_svg(path: Path) -> None:
    """Raise InputError for a file of a picture that is no SVG."""
    if path.suffix.lower() != ".svg":
        raise InputError(f"{path}: pictures are written as .svg; name the file so")


def registry_option_with(default: str | None, shown: bool | str) -> Callable[[Command], Command]:
    """`--registry`, from ENGINESMITH_REGISTRY, else `default`; passed as `registry`. shown: the default in the help."""
    return click.option(
        "--registry",
        metavar="URI",
        envvar=REGISTRY_VARIABLE,
        default=default,
        show_default=shown,
        show_envvar=True,
        help="Registry: a path, file://, s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix or "
        "http://cache. Of several with commas, pull reads the first that answers; all else is done at the last.",
    )


# Passed as `registry: str`.
registry_option = registry_option_with(DEFAULT_REGISTRY, True)
# For commands that take a spec, which may name its registry; passed as `registry: str | None`.
spec_registry_option = registry_option_with(None, f"the spec's publication.registry, else {DEFAULT_REGISTRY}")

TARGET = "Target: cpu, a kind of CPU (avx512-vnni), a GPU product (l4), compute capability (sm_89) or generation (ada)"


def _several(option: str, name: str, metavar: str, meaning: str, shown: str | None) -> Callable[[Command], Command]:
    """An option that takes several names, with commas or repeated; passed as one text with commas, or None.

    shown: what is taken without it, for help; None: it is required.
    """
    return click.option(
        option,
        name,
        metavar=metavar,
        multiple=True,
        required=shown is None,
        show_default=shown or False,
        callback=lambda _context, _option, given: ",".join(given) or None,
        help=f"{meaning}; repeat it, or separate several with commas.",
    )


def targets_option(shown: str | None) -> Callable[[Command], Command]:
    """`--target` for several targets or groups of them; passed as `targets: str | None`. shown: as for `_several`."""
    return _several("--target", "targets", "TARGETS", f"{TARGET}, gpu or all", shown)


def precisions_option(shown: str) -> Callable[[Command], Command]:
    """`--precision` for several; passed as `precisions: str | None`."""
    return _several("--precision", "precisions", "PRECISIONS", f"Precision: {', '.join(PRECISIONS)}", shown)


def backends_option(shown: str) -> Callable[[Command], Command]:
    """`--backend` for several; passed as `backends: str | None`."""
    return _several("--backend", "backends", "BACKENDS", "Compiler, as `enginesmith backends list` lists it", shown)


# `--target`, `--precision` and `--backend`, which narrow a spec; passed as `targets`, `precisions`, `backends`.
selection_options = combine(
    *(option("all of the spec") for option in (targets_option, precisions_option, backends_option))
)

# Passed as `why: str`.
why_option = click.option("--why", metavar="TEXT", default="", help="Reason, which is recorded and shown later.")
# Passed as `accept_loss: bool`.
accept_loss_option = click.option(
    "--accept-loss",
    is_flag=True,
    help="Let nodes lose targets or precisions that the channel serves; which ones is recorded.",
)
# Passed as `jobs: int | None`.
jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 1024), show_default="one per CPU", help="Processes that run at the same time."
)

# Passed as `target: str`.
target_option = click.option(
    "--target", metavar="TARGET", default="auto", show_default=True, help=f"{TARGET}; auto is this machine."
)


def precision_option(shown: str) -> Callable[[Command], Command]:
    """`--precision` of engines; passed as `precision: str | None`. shown: what is taken without it, for help."""
    return click.option(
        "--precision", type=click.Choice(PRECISIONS), show_default=shown, help="Only engines of this precision."
    )


# Which of a version's engines; passed as `target: str`, `precision: str | None`.
engine_options = combine(target_option, precision_option("the one that fits best"))

# `--log-format`, the format of stderr, which `log_format` reads.
log_format_option = click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default="text",
    show_default=True,
    envvar="ENGINESMITH_LOG_FORMAT",
    show_envvar=True,
    expose_value=False,
    callback=lambda ctx, _, value: ctx.ensure_object(dict).update({LOG_FORMAT: value}),
    help="Format of stderr; json: one object per line.",
)
# `--quiet`, passed as `quiet: bool`, and `--log-format`, which `shown_progress` and `say` read.
progress_options = combine(log_format_option, click.option("--quiet", is_flag=True, help="Show no progress on stderr."))


def log_format() -> str:
    """The format of stderr that the running command was asked for: 'text' or 'json'."""
    context = click.get_current_context(silent=True)
    chosen = context.find_object(dict) if context else None
    return str((chosen or {}).get(LOG_FORMAT, "text"))


def progress_speaker(quiet: bool) -> Callable[[str], object]:
    """`say` for lines of progress, of a command that has no display; nothing where it is quiet."""
    return str if quiet else say


# Passed as `as_json: bool`.
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
# Passed as `trust: Path | None`.
trust_option = click.option(
    "--trust",
    type=click.Path(path_type=Path),
    envvar="ENGINESMITH_TRUST_POLICY",
    show_envvar=True,
    help="Trust policy (YAML): which signatures a version needs.",
)


def emit_json(value: object) -> None:
    """Print a JSON value on stdout. Raises ValueError for NaN, which JSON does not have."""
    echo(visible_json(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)))


def say(text: str) -> None:
    """Write a remark on stderr, in the command's log format; stdout holds the result alone."""
    if log_format() == "json":
        write_line("remark", message=text)
    else:
        echo(text, err=True)


# Runtimes with an option of their own; any other is stated with --runtime.
_NAMED_RUNTIMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


def runtime_options(where: str) -> Callable[[Command], Command]:
    """Options for the versions of runtimes; read them with `stated_runtimes`. where: the machines that have them."""

    def add(command: Command) -> Command:
        for name, title in reversed(_NAMED_RUNTIMES.items()):
            command = click.option(f"--{name}", metavar="VERSION", help=f"{title} {where}.")(command)
        text = f"Another runtime {where}, by its package; repeat it."
        return click.option("--runtime", "runtime", multiple=True, metavar="NAME=VERSION", help=text)(command)

    return add


def stated_runtimes(given: dict[str, Any]) -> dict[str, str]:
    """The versions that `runtime_options` were given, by the name of the runtime's package; taken out of `given`."""
    stated: dict[str, str] = {}
    for text in given.pop("runtime", ()):
        name, equals, version = text.partition("=")
        if not (name and equals and version):
            raise click.BadParameter(
                f"{text!r} is not NAME=VERSION, such as onnxruntime=1.31.1", param_hint="--runtime"
            )
        stated[name.lower().replace("_", "-")] = version
    named = {name: given.pop(name.replace("-", "_"), None) for name in _NAMED_RUNTIMES}
    return stated | {name: version for name, version in named.items() if version is not None}


# The standard streams of the command line: closed, full, or with a reader that has gone.
#
# A command has done its work whether or not its output can be written: output that is lost gives one message and an
# exit code instead of a traceback.


UNWRITABLE = 3
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class _Checked(io.FileIO):
    """The file of an output stream. error: the last error of writing to it."""

    error: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        """Write as `FileIO` does, and keep the error."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def prepare_streams() -> None:
    """Open the null device for each standard stream that is closed, and have stdout and stderr keep their errors.

    Without the first, the next file that is opened would get the stream's number, and prints would go into that file.
    Streams that were replaced in Python are left as they are.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _nullify(number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _check(sys.stdout)
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _check(sys.stderr)


def code_of_lost(error: OSError) -> int:
    """The exit code for an error of writing to stdout or stderr. Raises any other error again."""
    if isinstance(error, BrokenPipeError):
        return 0
    if all(_error_of(stream) is None for stream in (sys.stdout, sys.stderr)):
        raise error
    return UNWRITABLE


def write_stderr(text: str) -> None:
    """Write a line to stderr, if that can be written."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Flush and exit; with `UNWRITABLE` instead of 0 where the output is lost.

    A reader that closed our stdout early (`| head`) is no error.
    """
    with suppress(OSError):
        sys.stdout.flush()
    error = _error_of(sys.stdout)
    if error is not None and not isinstance(error, BrokenPipeError):
        write_stderr(f"error: stdout cannot be written: {error.strerror}; send the output elsewhere and run again")
        code = code or UNWRITABLE
    for stream in (sys.stdout, sys.stderr):
        if _error_of(stream) is not None:  # the interpreter flushes once more, and would end with a traceback
            _nullify(stream.fileno())
    sys.exit(code)


def _check(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    file = _Checked(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _error_of(stream: object) -> OSError | None:
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    return file.error if isinstance(file, _Checked) else None


def _nullify(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)
