"""Global options, options from dataclasses, and arguments that commands share."""

import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import click

from enginesmith.cli.tables import echo
from enginesmith.core.errors import HttpAddress, InputError, parse_address
from enginesmith.core.parsing import LONGEST
from enginesmith.core.text import visible_json, write_line
from enginesmith.core.types import PRECISIONS
from enginesmith.registry.store.layout import DEFAULT_REGISTRY, REGISTRY_VARIABLE

Callback = TypeVar("Callback", bound=Callable[..., object])
P = ParamSpec("P")

LOG_FORMATS = ("text", "json")
# The key of the global options in the root context.
LOG_FORMAT = "log_format"
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}

# Types of options. click calls a function with the text, or with a default of the result's type.
COUNT = click.IntRange(1)
POSITIVE = click.FloatRange(0, min_open=True)
FILE = click.Path(path_type=Path, dir_okay=False)
PRESENT_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def duration(value: object) -> timedelta:
    """Parse a duration: '7d', '12h', '30m', '0s'. Raises click's usage error for another text."""
    if isinstance(value, timedelta):
        return value
    match = re.fullmatch(r"([0-9]{1,6})([dhms])", str(value))
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; give a number and d, h, m or s, as in 7d")
    length = timedelta(**{_UNITS[match[2]]: int(match[1])})
    if length > LONGEST:
        raise click.BadParameter(f"{value!r} is longer than {LONGEST.days}d")
    return length


def address(value: object) -> HttpAddress:
    """Parse '127.0.0.1:8080', '[::]:8080'; ':8080' means 127.0.0.1. Raises click's usage error for another text."""
    try:
        return value if isinstance(value, HttpAddress) else parse_address(str(value), "127.0.0.1")
    except InputError as error:
        raise click.BadParameter(str(error)) from error


def percent(value: object) -> float:
    """Parse '20%' to 0.2, from 0 % to below 100 %. Raises click's usage error for another text."""
    if isinstance(value, float):
        return value
    match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?)%", str(value))
    if match is None:
        raise click.BadParameter(f"{value!r} is not a share from 0% to below 100%; give a number and %, as in 20%")
    return float(match[1]) / 100.0


class ShortTime(click.ParamType[float]):
    """A time in seconds, as text: '50ms', '200us', '1.5s'. above: whether 0 is refused."""

    name = "time"

    def __init__(self, above: bool = False) -> None:
        self._above = above

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text to seconds. Raises click's usage error for another text."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|µs|ms|s)", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time; give a number and us, ms or s, as in 50ms", param, ctx)
        seconds = float(match[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
        if self._above and not seconds:
            self.fail(f"{value!r}: must be above 0 s", param, ctx)
        return seconds


def _argument(name: str, metavar: str, meaning: str, **settings: Any) -> Callable[[Callback], Callback]:
    """An argument whose meaning is added to the command's help text, since click's arguments have no help."""

    def add(command: Callback) -> Callback:
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{metavar.strip('[].')}: {meaning}"
        return click.argument(name, metavar=metavar, **settings)(command)

    return add


_REF = "NAME@VERSION, NAME:CHANNEL, or NAME: channel stable if it exists, else candidate, else the newest version."

# `REF`, passed as `reference: str`.
reference_argument = _argument("reference", "REF", _REF)
# `REF...`, passed as `references: tuple[str, ...]`.
references_argument = _argument("references", "REF...", _REF, nargs=-1, required=True)
# `[REF]...`, possibly none, passed as `references: tuple[str, ...]`.
optional_references_argument = _argument("references", "[REF]...", _REF, nargs=-1, required=False)
# An optional `REF`, passed as `reference: str | None`.
optional_reference_argument = _argument("reference", "[REF]", _REF, required=False)
# `NAME:CHANNEL`, passed as `where: str`.
channel_argument = _argument("where", "NAME:CHANNEL", "a model and its channel, such as digits:stable.")
# `SPEC`, passed as `spec: str`.
_SPEC = (
    "a file, a file in a bucket (s3://bucket/specs/model.yaml), or a spec in the registry (registered:MODEL[@DIGEST])."
)
spec_argument = _argument("spec", "SPEC", _SPEC)
# An optional `[SPEC]`, passed as `spec: str | None`.
optional_spec_argument = _argument("spec", "[SPEC]", _SPEC, required=False)


def number_option(
    name: str, kind: click.ParamType[Any], default: float | None, meaning: str, default_text: bool | str = True
) -> Callable[[Callback], Callback]:
    """An option for a number. kind: its range.  default_text: the default in help, or whether help shows it."""
    return click.option(
        name, type=kind, default=default, show_default=default_text, help=meaning, callback=check_finite
    )


def listen_option(default: str) -> Callable[[Callback], Callback]:
    """The option --listen: the address of a server, HOST:PORT."""
    help_text = "Address to listen on; port 0: any free port; host 0.0.0.0: all interfaces, as a pod needs."
    return click.option(
        "--listen", type=address, metavar="HOST:PORT", default=default, show_default=True, help=help_text
    )


def check_finite(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """The value of an option for a number. Raises click's usage error for NaN and infinity, which no range refuses."""
    if isinstance(value, float) and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def path_option(
    name: str, meaning: str, default_text: bool | str = False, default: Path | None = None, **kind: bool
) -> Callable[[Callback], Callback]:
    """An option for a path. default_text: the default in help.  kind: settings of `click.Path`."""
    path_type = click.Path(path_type=Path, **kind)
    return click.option(name, type=path_type, default=default, show_default=default_text, help=meaning)


# An output folder; a file at this path is refused at the start.
FOLDER = click.Path(path_type=Path, file_okay=False)


class _Picture(click.Path):
    """A file for a picture. A suffix other than .svg is a usage error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if path.suffix.lower() != ".svg":
            self.fail(f"{path}: pictures are written as .svg; name the file so", param, ctx)
        return path


SVG = _Picture(path_type=Path, dir_okay=False)


# Every command takes the global options, before or after its name. The `ctx.obj` of the root context has their values,
# and under this key the names of those that were typed.
_TYPED = "typed"


def _keep_global(ctx: click.Context, option: click.Parameter, value: object) -> None:
    """Store a global option's value, but no default over an earlier value."""
    settings = ctx.ensure_object(dict)
    is_typed = ctx.get_parameter_source(str(option.name)) is click.core.ParameterSource.COMMANDLINE
    if is_typed or option.name not in settings:
        settings[option.name] = value
    if is_typed:
        settings.setdefault(_TYPED, set()).add(option.name)


class GlobalOption(click.Option):
    """An option of the root that every command takes too. The help of commands does not repeat it."""

    def __init__(self, *flags: str, **settings: Any) -> None:
        super().__init__(flags, expose_value=False, callback=_keep_global, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option's line in the help of the root; None in the help of other commands."""
        return None if ctx.parent else super().get_help_record(ctx)


GLOBAL_OPTIONS = (
    GlobalOption(
        "--registry",
        metavar="URI",
        envvar=REGISTRY_VARIABLE,
        show_default=f"publication.registry of SPEC, if the command takes a SPEC; else {DEFAULT_REGISTRY}",
        show_envvar=True,
        help="Registry: a path, file://, s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix or "
        "http://cache. If you give several, separated by commas, `pull` reads the first that answers, and other "
        "commands use the last.",
    ),
    GlobalOption(
        "--trust",
        metavar="FILE",
        type=click.Path(path_type=Path),
        envvar="ENGINESMITH_TRUST_POLICY",
        show_envvar=True,
        show_default="no signature is needed",
        help="Trust policy (YAML): the signatures that a version needs.",
    ),
    GlobalOption("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."),
    GlobalOption("--quiet", is_flag=True, help="Show no progress on stderr."),
    GlobalOption(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="text",
        show_default=True,
        envvar="ENGINESMITH_LOG_FORMAT",
        show_envvar=True,
        help="Format of the messages on stderr; json: one object per line.",
    ),
)
# Options that a command refuses if it has no use for them, and the remedy.
_REFUSED = {
    "as_json": "prints no JSON: leave out --json",
    "trust": "takes no --trust: leave it out, or set ENGINESMITH_TRUST_POLICY, which holds wherever engines are read",
}


class TakesGlobals(click.Command):
    """A command that takes the global options.

    Its function gets those that it has parameters for: `registry: str` (by default the default registry),
    `stated_registry: str | None`, `trust: Path | None`, `as_json: bool` and `quiet: bool`.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options, and the global ones."""
        return [*super().get_params(ctx), *GLOBAL_OPTIONS]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; add global values that the command's function takes. Raises click's usage error."""
        other_args = super().parse_args(ctx, args)
        parameters = inspect.signature(inspect.unwrap(self.callback)).parameters if self.callback else {}
        settings = ctx.ensure_object(dict)
        for name in settings.get(_TYPED, set()) & {*_REFUSED} - {*parameters}:
            if getattr(self, "invoke_without_command", True):
                raise click.UsageError(f"`{ctx.command_path}` {_REFUSED[name]}", ctx)
        if (registry := settings["registry"]) == "":
            raise click.UsageError("--registry is empty; give a path or a URI, or leave the option out", ctx)
        values = {**settings, "registry": registry or DEFAULT_REGISTRY, "stated_registry": registry}
        ctx.params.update({name: values[name] for name in _PASSED if name in parameters})
        for text in ctx.params.values():
            if isinstance(text, str):
                text.encode()  # UnicodeEncodeError, for which `main` prints a message, before anything is written
        return other_args

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write which help explains the global options."""
        super().format_epilog(ctx, formatter)
        if ctx.parent:
            formatter.write(f"\nGlobal options: {ctx.find_root().info_name} --help\n")


_PASSED = ("registry", "stated_registry", "trust", "as_json", "quiet")


class Command(TakesGlobals):
    """A command of Enginesmith."""


class Group(TakesGlobals, click.Group):
    """A group of commands of Enginesmith."""

    command_class = Command


def command(name: str | None = None) -> Callable[[Callable[..., object]], Command]:
    """A decorator that makes a command from a function."""
    return click.command(name, cls=Command)


class Option:
    """Annotation of a field with click's settings other than name, type and default.

    meaning: help text.  name: if it is not the field's.  shown: the default in help.  settings: of `click.option`,
    instead of those from the field's type.
    """

    def __init__(self, meaning: str, *, name: str | None = None, shown: str | None = None, **settings: Any) -> None:
        self.meaning, self.name, self.shown, self.settings = meaning, name, shown, settings

    def decorator(self, field: Field[Any], kind: object) -> Callable[[Any], Any]:
        """click's decorator. kind: the field's type without its annotations."""
        settings = {"help": self.meaning, **_settings_of(kind), **self.settings}
        if field.default is MISSING and field.default_factory is MISSING:
            settings["required"] = True
        elif not any(field.default is sentinel for sentinel in (MISSING, None, False, ())):
            settings.update(default=field.default, show_default=field.default != "")
        if self.shown:
            settings["show_default"] = self.shown
        return click.option(self.name or f"--{field.name.replace('_', '-')}", field.name, **settings)


def _settings_of(kind: object) -> dict[str, Any]:
    """The settings of `click.option` for a field's type: bool, str, int, float, Path, Literal, a tuple of one
    of these, or one of these or None."""
    if get_origin(kind) is tuple:
        return {**_settings_of(get_args(kind)[0]), "multiple": True}
    if get_origin(kind) is Literal:
        return {"type": click.Choice([*get_args(kind)])}
    if NoneType in (type_arguments := get_args(kind)):
        return _settings_of(type_arguments[0])
    if kind is bool:
        return {"is_flag": True}
    if kind is float:
        return {"type": float, "callback": check_finite}
    return {"type": click.Path(path_type=Path) if kind is Path else kind}


def takes(kind: type[Any], parameter: str = "options") -> Callable[[Callback], Callback]:
    """A decorator that adds an option for each field of a frozen dataclass, and passes them as one value `parameter`.

    A field is `name: Annotated[TYPE, Option(...)] = DEFAULT`, or its type is such a dataclass.
    """

    def add(command: Callback) -> Callback:
        @functools.wraps(command)
        def call(*arguments: object, **settings: Any) -> object:
            return command(*arguments, **{parameter: _collect(kind, settings)}, **settings)

        for option in reversed([*_options_of(kind)]):
            option(call)
        return call  # type: ignore[return-value]

    return add


def _options_of(kind: type[Any]) -> Sequence[Callable[[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    decorators: list[Callable[[Any], Any]] = []
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            decorators += _options_of(hint)  # type: ignore[arg-type]
        else:
            value_type, *annotations = get_args(hint)
            decorators += [
                annotation.decorator(field, value_type) for annotation in annotations if isinstance(annotation, Option)
            ]
    return decorators


def _collect(kind: type[Any], settings: dict[str, Any]) -> Any:
    """Remove the options' values from `settings`, and return them as the dataclass."""
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):
        field_type: type[Any] = hints[field.name]
        values[field.name] = _collect(field_type, settings) if is_dataclass(field_type) else settings.pop(field.name)
    return kind(**values)


TARGET = "Target: cpu, a kind of CPU (avx512-vnni), a GPU product (l4), compute capability (sm_89) or generation (ada)"


def several(name: str, meaning: str, default_text: str | None) -> Option:
    """An option for several names, separated by commas or repeated, as one text with commas.

    default_text: the default, for help; None: the option is required.
    """
    return Option(
        f"{meaning}; repeat it, or separate several with commas.",
        name=f"--{name}",
        shown=default_text,
        metavar=f"{name.upper()}S",
        multiple=True,
        callback=lambda _context, _option, names: ",".join(names) if names else None,
    )


def targets_option(default_text: str | None) -> Option:
    """The option `--target` for several targets or groups of targets. default_text: as for `several`."""
    return several("target", f"{TARGET}; gpu: every GPU; all: every target", default_text)


_PRECISIONS = f"Precision: {', '.join(PRECISIONS)}"
_BACKENDS = "Compiler, by its name in `enginesmith backends list`"
_ALL = "all in the spec"
Precisions = Annotated[str | None, several("precision", _PRECISIONS, _ALL)]
# For commands whose default is all installed backends.
InstalledBackends = Annotated[str | None, several("backend", _BACKENDS, "all installed")]
Target = Annotated[str, Option(f"{TARGET}; auto: this machine.", metavar="TARGET")]
Jobs = Annotated[
    int | None, Option("Maximum number of parallel processes.", type=click.IntRange(1, 1024), shown="one per CPU")
]


@dataclass(frozen=True)
class Selection:
    """The parts of a spec that a command selects: names separated by commas; None selects all."""

    targets: Annotated[str | None, targets_option(_ALL)] = None
    precisions: Precisions = None
    backends: Annotated[str | None, several("backend", _BACKENDS, _ALL)] = None


def precision_option(default_text: str) -> Option:
    """The option `--precision` for engines. default_text: the default, for help."""
    return Option("Only engines of this precision.", type=click.Choice(PRECISIONS), shown=default_text)


@dataclass(frozen=True)
class EngineChoice:
    """The options that choose one engine of a version."""

    target: Target = "auto"
    precision: Annotated[str | None, precision_option("the precision that fits best")] = None


# Passed as `why: str`.
why_option = click.option("--why", metavar="TEXT", default="", help="Reason, stored with this change.")
# Passed as `accept_loss: bool`.
accept_loss_option = click.option(
    "--accept-loss",
    is_flag=True,
    help="Accept that nodes lose targets or precisions that the channel serves; the channel's history records it.",
)
# Passed as `random_inputs: bool`.
random_inputs_option = click.option(
    "--accept-random-inputs",
    "random_inputs",
    is_flag=True,
    help="Accept engines that are proven only on random inputs; the channel's history records it.",
)


def log_format() -> str:
    """The format of stderr for the running command: 'text' or 'json'."""
    click_context = click.get_current_context(silent=True)
    settings = click_context.find_object(dict) if click_context else None
    return str((settings or {}).get(LOG_FORMAT, "text"))


def emit_json(value: object) -> None:
    """Print a JSON value on stdout; escapes non-ASCII characters unless stdout is UTF-8. Raises ValueError for NaN."""
    is_ascii = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
    echo(visible_json(json.dumps(value, indent=2, ensure_ascii=is_ascii, allow_nan=False)))


def emit(as_json: bool, document: object, show: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
    """Print a result on stdout: its JSON document, or the output of `show` for the arguments."""
    if as_json:
        emit_json(document)
    else:
        show(*arguments, **named)


def say(text: str) -> None:
    """Write a remark to stderr, in the command's log format; stdout contains only the result."""
    if log_format() == "json":
        write_line("remark", message=text)
    else:
        echo(text, err=True)


def _read_runtimes(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Parse 'tensorrt-rtx=1.3' to {package: version}. Raises click's usage error for another text."""
    versions = {}
    for text in texts:
        name, separator, version = text.partition("=")
        if not (name and separator and version):
            raise click.BadParameter(f"{text!r} is not NAME=VERSION, such as tensorrt=10.9.0")
        versions[name.lower().replace("_", "-")] = version
    return versions


def runtimes_option(where: str) -> Option:
    """The option `--runtime`: versions of runtimes as {package: version}. where: the machines with them, for help."""
    return Option(
        f"Runtime version {where}; NAME: tensorrt, tensorrt-rtx or onnxruntime; repeatable.",
        name="--runtime",
        type=str,
        multiple=True,
        metavar="NAME=VERSION",
        callback=_read_runtimes,
    )
