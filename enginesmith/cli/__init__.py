"""The `enginesmith` command: finds a command's file, runs it, and turns errors into one message and an exit code.

Nothing heavy is imported here: `enginesmith --help` answers in under 0.3 s.
"""

import atexit
import gc
import importlib
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from enginesmith.cli.options import Group, TakesGlobals
from enginesmith.cli.streams import code_of_lost, leave, prepare_streams
from enginesmith.cli.streams import write_stderr as say
from enginesmith.core.errors import EnginesmithError, InputError, SpecError
from enginesmith.core.text import visible, write_line
from enginesmith.rooms import ROOMS

# Command -> its function, as MODULE:FUNCTION, and its description.
Table = Mapping[str, tuple[str, str]]

SECTIONS: Mapping[str, Table] = {
    "Every day": {
        "init": ("pipeline.cli.models.init:init", "Write a spec by looking at a model."),
        "plan": ("pipeline.cli.models.build:plan", "Show what would be built, and why."),
        "build": ("pipeline.cli.models.build:build", "Build, prove and publish a model's engines."),
        "status": ("pipeline.cli.models.report:status", "Show builds and their units, with phases and logs."),
        "list": ("enginesmith.cli.registry:list_models", "List models and versions."),
        "show": ("pipeline.cli.registry.registry:show", "Show one version and its engines, or compare two."),
        "pull": ("enginesmith.cli.pull:pull", "Download the engine for a machine, or follow a channel."),
        "validate": ("pipeline.cli.operations.validate:validate", "Run a version's engines here and attach the proof."),
        "promote": ("pipeline.cli.registry.registry:promote", "Point a channel to a version."),
        "rollback": ("pipeline.cli.registry.registry:rollback", "Point a channel back to its previous version."),
        "rollout": ("pipeline.cli.serving.rollout:rollout", "Roll out a version to a channel in waves."),
        "doctor": ("pipeline.cli.machines.doctor:doctor", "Show what this machine can build and run."),
    },
    "Quality and speed": {
        "report": ("pipeline.cli.models.report:report", "Write the HTML page of a version or a canary."),
        "profile": ("pipeline.cli.operations.profile:profile", "Time an engine, compare two, or show recorded times."),
        "check": ("pipeline.cli.operations.check:check", "Build a change, and compare it with the served version."),
        "rehearse": ("pipeline.cli.operations.rehearse:rehearse", "Try another toolchain on the served versions."),
        "canary": ("pipeline.cli.operations.canary:canary", "Compare a candidate with the version in service."),
        "fleet": ("pipeline.cli.machines.fleet:fleet", "Compare a cluster's nodes with the registry."),
    },
    "Groups": {
        "debug": ("", "Find out why an engine is wrong, slow or different."),
        "traffic": ("", "Record requests, and choose buckets and machines for them."),
        "registry": ("", "Inspect, copy, sign, clean and repair a registry."),
        "backends": ("", "List and compare the compilers."),
        "prefect": ("", "Deploy flows, and register specs for Prefect to build."),
        "site": ("", "Show the registry as a website."),
    },
}
GROUPS: Mapping[str, Table] = {
    "debug": {
        "fuzz": ("pipeline.cli.operations.profile:fuzz", "Compare an engine with its graph on random inputs."),
        "attribute": (
            "pipeline.cli.operations.attribute:attribute",
            "Find the nodes of a graph or an engine that drifted.",
        ),
        "sensitivity": ("pipeline.cli.models.report:sensitivity", "Rank parts of a model by their error in int8."),
        "golden": ("pipeline.cli.models.golden:golden", "Make, show, compare and freeze golden sets."),
        "reproduce": (
            "pipeline.cli.operations.profile:check_reproducible",
            "Rebuild an engine and compare bytes and outputs.",
        ),
        "refit": ("pipeline.cli.operations.attribute:refit", "Give engines new weights without building them."),
        "schema": ("pipeline.cli.models.init:schema", "Print the JSON Schema of a spec."),
    },
    "traffic": {
        "record": ("pipeline.cli.operations.attribute:record", "Record requests for a canary or for buckets."),
        "show": ("pipeline.cli.traffic.traffic:traffic", "Show the sizes, rates and bursts of recorded requests."),
        "buckets": ("pipeline.cli.traffic.traffic:buckets", "Choose the cheapest buckets for recorded traffic."),
        "capacity": ("pipeline.cli.traffic.traffic:capacity", "Show how many machines a request rate needs."),
    },
    "registry": {
        "history": ("pipeline.cli.registry.channels:history", "Show who moved a channel, when and why."),
        "policy": ("pipeline.cli.registry.channels:policy", "Show or set what a channel requires of a version."),
        "pin": ("enginesmith.cli.registry:pin", "Protect a version from gc, or remove its pin."),
        "gc": ("enginesmith.cli.registry:gc", "Delete files that nothing needs, in two steps."),
        "attach": ("enginesmith.cli.registry:attach", "Add a file to a published version."),
        "mirror": ("enginesmith.cli.registry:mirror", "Copy versions to another registry."),
        "fsck": ("pipeline.cli.registry.registry:verify", "Verify the registry's files, and report damage."),
        "export": ("enginesmith.cli.registry:export_oci", "Write engines as OCI images."),
        "sign": ("enginesmith.cli.registry:sign", "Sign a version with a key or an identity."),
        "verify": ("enginesmith.cli.registry:verify_signature", "Check the signatures of a version."),
        "metrics": ("pipeline.cli.registry.channels:metrics", "Serve a registry's metrics to Prometheus."),
    },
    "backends": {
        "list": ("pipeline.cli.machines.doctor:list_backends", "List compilers and what each builds and runs here."),
        "compare": ("pipeline.cli.operations.check:compare", "Build with every backend, compare, and recommend one."),
    },
    "prefect": {
        "register": ("pipeline.cli.models.init:register", "Store a spec in the registry, and let Prefect build it."),
        "watch": ("pipeline.cli.models.init:watch_specs", "Register each new spec of a folder or bucket."),
        "deploy": ("pipeline.cli.machines.deploy:deploy", "Set up deployments and triggers on a Prefect server."),
    },
    "site": {
        "write": ("pipeline.cli.registry.site:site", "Write the website as static files."),
        "serve": ("pipeline.cli.registry.site:serve", "Serve the website on a port."),
    },
}
# KServe calls this command; help does not list it.
HIDDEN: Table = {"initialize": ("enginesmith.cli.registry:initialize", "Pull the engines of KServe's storage URIs.")}

# The key, in the root context, of the command's full name ('registry gc').
_COMMAND = "command"


class LazyGroup(Group):
    """A group of the commands in a table, each imported when it is called.

    sections: the commands, by the heading under which help lists them.  hidden: those that help does not list.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Table], hidden: Table | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sections = sections
        self._hidden = hidden or {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the sections."""
        return [name for table in self.sections.values() for name in table]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, imported from its file; None for an unknown name."""
        tables = (*self.sections.values(), self._hidden)
        address, help_text = next((table[cmd_name] for table in tables if cmd_name in table), ("", ""))
        if not help_text:
            return None
        if not address:
            return LazyGroup(cmd_name, sections={"Commands": GROUPS[cmd_name]}, help=help_text)
        module, _, function_name = address.partition(":")
        command = getattr(importlib.import_module(module), function_name)
        assert isinstance(command, TakesGlobals)  # noqa: S101 - our own table
        command.name = cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Record the full name of the called command."""
        name, command, other_args = super().resolve_command(ctx, args)
        settings = ctx.find_root().ensure_object(dict)
        settings[_COMMAND] = f"{settings.get(_COMMAND, '')} {name}".strip()
        return name, command, other_args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; for the root by section, and with the global options."""
        if ctx.parent:
            super().format_options(ctx, formatter)
            return
        # From the table, so that help imports no command.
        width = max(map(len, self.list_commands(ctx)))
        for section, commands in self.sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in commands.items()])
        with formatter.section("Global options, before or after a command's name"):
            formatter.write_dl([row for option in self.get_params(ctx) if (row := option.get_help_record(ctx))])


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    hidden=HIDDEN,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="enginesmith", prog_name="enginesmith")
def enginesmith() -> None:
    """Compile a model for every GPU generation in a fleet, prove each engine, publish it.

    Exit codes: 0 done, 1 a build or check failed, 2 bad input, 3 a service is unreachable, 130
    interrupted.
    """


# Commands that store no result when they are interrupted.
_KEEP_NOTHING = frozenset({"profile", "traffic capacity", "traffic show"})
# The packages that each extra installs, as far as Enginesmith imports them (`google.protobuf` comes with onnx,
# `google.cloud` does not). tests/enginesmith/cli/test_extras.py compares this with pyproject.toml.
_PACKAGES = {
    "build": ("PIL google jinja2 junitparser matplotlib ml_dtypes numpy onnx onnx_ir onnxruntime prometheus_client "
              "pydantic pydantic_core safetensors tensorrt_rtx"),
    "export": "onnxscript torch",
    "prefect": "httpx prefect",
    "signing": "cryptography model_signing",
    "gcs": "google.cloud google.auth google.api_core requests",
    "tvm": "tvm tvm_ffi",
    "serve": "aiohttp",
    "nvml": "pynvml",
    "trend": "ruptures",
    "xla": "jax",
    "hf": "huggingface_hub",
    **{name: name for name in ("azure", "iree", "kubernetes", "ray", "tensorrt")},
}  # fmt: skip
# Extras of the distribution `enginesmith`; all others belong to `enginesmith-pipeline`.
_CLIENT_EXTRAS = frozenset({"azure", "gcs", "nvml", "serve", "signing"})
_EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages.split()}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (None: the process's own arguments) and exit."""
    prepare_streams()
    if arguments is None:
        # Otherwise the interpreter collects garbage at exit, which takes an eighth of the time of a cached build.
        atexit.register(gc.freeze)
        # Imports create objects that stay; a collection after every 700 takes a twentieth of the time of `plan`.
        gc.set_threshold(10_000, 20, 20)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = 0
    settings: dict[str, str] = {}
    try:
        status = _call(arguments, settings)
    except (click.Abort, KeyboardInterrupt):
        resume_note = (
            "" if settings.get(_COMMAND) in _KEEP_NOTHING else "; what was finished is kept, and is not done again"
        )
        _say_last(settings, "interrupted", [f"interrupted{resume_note}"])
        leave(130)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        leave(2)
    except ModuleNotFoundError as error:
        if (remedy := _remedy(error)) is None:
            raise
        say(f"error: {remedy}")
        leave(3)
    except EnginesmithError as error:
        _say_last(settings, "error", _entries(error))
        leave(error.exit_code)
    except SystemExit as exit_error:
        leave(int(exit_error.code or 0))
    except OSError as error:
        status = code_of_lost(error)
    leave(status)


def _call(arguments: Sequence[str] | None, settings: dict[str, str]) -> int:
    """Run the command line, and return its exit code. Raises InputError for text that is not UTF-8, and for a current
    folder that was deleted."""
    try:
        # Not standalone: click then returns the code of ctx.exit() instead of exiting itself.
        return enginesmith(arguments, standalone_mode=False, obj=settings) or 0
    except UnicodeEncodeError as error:
        if "surrogate" not in error.reason:
            raise
        text = error.object[max(0, error.start - 40) : error.end + 40]
        raise InputError(f"{text!r} is not UTF-8; write it in UTF-8, and use a locale with UTF-8") from None
    except FileNotFoundError:
        try:
            Path.cwd()
        except FileNotFoundError:
            raise InputError("the current folder was deleted; change to another one") from None
        raise


def _entries(error: EnginesmithError) -> list[str]:
    """The error messages, one entry per mistake: each starts with 'error: ', and its further lines are indented."""
    entries = []
    for entry in error.lines if isinstance(error, SpecError) else [str(error)]:
        first_line, *lines = f"error: {entry}".split("\n")
        entries.append("\n".join([first_line, *(line if line.startswith("  ") else f"  {line}" for line in lines)]))
    return entries


def _say_last(chosen: Mapping[str, str], event: str, entries: Sequence[str]) -> None:
    """Write the command's errors to stderr, in its log format. entries: result of `_entries`."""
    if chosen.get("log_format") == "json":
        write_line(event, "error", message="\n".join(entry.removeprefix("error: ") for entry in entries))
    else:
        say(visible("\n".join(entries)))


def _remedy(error: ModuleNotFoundError) -> str | None:
    """The package to install for a missing module; None if an installed package of this project lacks it (a bug)."""
    name = error.name or ""
    package = name.split(".")[0]
    if name in ROOMS:
        return "this needs enginesmith-pipeline, which is not installed: pip install '.[build]' in a clone"
    if not package or package in (*ROOMS, "enginesmith"):
        return None
    extra = extra_of(name)
    package_folder = "./enginesmith" if extra in _CLIENT_EXTRAS else "."
    install_target = f"'{package_folder}[{extra}]' in a clone" if extra else package
    return f"this needs {package}, which is not installed: pip install {install_target}"


def extra_of(module: str) -> str | None:
    """The extra that installs a module ('google.cloud.storage'); None if none does."""
    segments = module.split(".")
    module_names = (".".join(segments[:count]) for count in range(len(segments), 0, -1))
    return next((_EXTRAS[name] for name in module_names if name in _EXTRAS), None)
