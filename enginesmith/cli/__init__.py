"""The `enginesmith` command: finds a command's file, runs it, and turns errors into one message and an exit code.

Nothing heavy is imported here: `enginesmith --help` answers in under 0.3 s.
"""

import atexit
import gc
import importlib
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import click

from enginesmith.cli.streams import code_of_lost, leave, prepare_streams, say
from enginesmith.core.errors import EnginesmithError, SpecError
from enginesmith.core.text import visible, write_line
from enginesmith.rooms import ROOMS

# Where a command's file is, and what it does, by section of `enginesmith --help`; those of every day first.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Every day": {
        "init": ("pipeline.cli.models.init", "Write a spec by looking at a model."),
        "plan": ("pipeline.cli.models.plan", "Show what would be built, and why."),
        "build": ("pipeline.cli.models.build", "Build, prove and publish a model's engines."),
        "status": ("pipeline.cli.models.status", "Show builds and their units, with phases and logs."),
        "list": ("enginesmith.cli.listing", "List models and versions."),
        "show": ("pipeline.cli.registry.registry", "Show one version and its engines."),
        "pull": ("enginesmith.cli.pull", "Download the engine for a machine, or follow a channel."),
        "validate": ("pipeline.cli.operations.validate", "Run a version's engines here and attach the proof."),
        "promote": ("pipeline.cli.registry.registry", "Point a channel to a version."),
        "doctor": ("pipeline.cli.machines.doctor", "Show what this machine can build and run."),
    },
    "Quality and speed": {
        "report": ("pipeline.cli.models.report", "Write the HTML page of a version or a canary."),
        "profile": ("pipeline.cli.operations.engines", "Time an engine by bucket and node, or against another."),
        "check": ("pipeline.cli.operations.check", "Build a change, and compare it with what is served."),
        "trend": ("pipeline.cli.operations.trend", "Show recorded latencies, and where they changed."),
        "compare": ("pipeline.cli.operations.compare", "Build with every backend, compare, and recommend one."),
        "fuzz": ("pipeline.cli.operations.engines", "Compare an engine with its graph on random inputs."),
        "attribute": ("pipeline.cli.operations.attribute", "Find the nodes of a graph or an engine that drifted."),
        "sensitivity": ("pipeline.cli.models.sensitivity", "Rank parts of a model by their error in int8."),
        "golden": ("pipeline.cli.models.golden", "Make, show, compare and freeze golden sets."),
        "check-reproducible": ("pipeline.cli.operations.engines", "Build an engine again: same bytes, same outputs?"),
        "refit": ("pipeline.cli.operations.refit", "Give engines new weights without building them."),
    },
    "Traffic": {
        "traffic": ("pipeline.cli.traffic.traffic", "Show the sizes, rates and bursts of recorded requests."),
        "buckets": ("pipeline.cli.traffic.buckets", "Choose the buckets that cost recorded traffic least."),
    },
    "Serving": {
        "resolve": ("enginesmith.cli.pull", "Show which engines fit a machine, and why not the others."),
        "initialize": ("enginesmith.cli.initialize", "Pull what KServe's storage URIs name."),
        "rollout": ("pipeline.cli.serving.rollout", "Bring a version to a channel in waves."),
        "rollback": ("pipeline.cli.registry.registry", "Point a channel back to the version before."),
        "history": ("pipeline.cli.registry.channels", "Show who moved a channel, when and why."),
        "feed": ("pipeline.cli.serving.feeds", "Group channels that nodes follow by one request."),
        "notify": ("pipeline.cli.serving.feeds", "Tell watchers that channels moved, so that they look now."),
        "policy": ("pipeline.cli.registry.channels", "Show or set what a channel requires of a version."),
        "record": ("pipeline.cli.operations.record", "Record requests for a canary or for buckets."),
        "canary": ("pipeline.cli.operations.canary", "Compare a candidate with the version in service."),
        "fleet": ("pipeline.cli.machines.fleet", "Compare a cluster's nodes with the registry."),
        "load": ("pipeline.cli.traffic.load", "Send requests as users make them, and time the answers."),
        "capacity": ("pipeline.cli.traffic.capacity", "Show machines and cost for a rate of requests."),
    },
    "Registry": {
        "verify": ("pipeline.cli.registry.registry", "Re-hash the registry and report damage."),
        "sign": ("enginesmith.cli.trust", "Sign a version with a key or an identity."),
        "verify-signature": ("enginesmith.cli.trust", "Check the signatures of a version."),
        "pin": ("enginesmith.cli.retention", "Keep a version whatever its age."),
        "unpin": ("enginesmith.cli.retention", "Remove a pin."),
        "gc": ("enginesmith.cli.retention", "Delete what nothing needs any more, in two steps."),
        "mirror": ("enginesmith.cli.copies", "Copy versions to another registry."),
        "cache": ("pipeline.cli.registry.cache", "Serve a registry to many nodes, each blob fetched once."),
        "export-oci": ("enginesmith.cli.copies", "Write engines as OCI images."),
        "site": ("pipeline.cli.registry.site", "Write the registry as a website of static files."),
        "serve": ("pipeline.cli.registry.site", "Show the registry as a website on a port."),
    },
    "Automation": {
        "register": ("pipeline.cli.models.specs", "Store a spec in the registry, and let Prefect build it."),
        "watch-specs": ("pipeline.cli.models.specs", "Register each new spec of a folder or bucket."),
        "catalog": ("pipeline.cli.models.specs", "Build every spec of a folder, a bucket or the registry."),
        "deploy": ("pipeline.cli.machines.deploy", "Set up deployments and triggers on a Prefect server."),
        "metrics": ("pipeline.cli.registry.metrics", "Serve a registry's numbers to Prometheus."),
    },
    "Reference": {
        "backends": ("pipeline.cli.machines.doctor", "List compilers and what each builds and runs here."),
        "schema": ("pipeline.cli.models.specs", "Print the JSON Schema of a spec."),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}

# Commands whose name is taken by something else in Python.
FUNCTIONS = {"list": "list_models", "backends": "list_backends"}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the sections."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the command's file."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, FUNCTIONS.get(cmd_name, cmd_name.replace("-", "_")))
        assert isinstance(command, click.Command)  # noqa: S101 - our own table
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands by section from the table, so that help imports none of them."""
        width = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in commands.items()])


# Where the root context keeps the command's name.
_COMMAND = "command"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="enginesmith", prog_name="enginesmith")
@click.pass_context
def enginesmith(ctx: click.Context) -> None:
    """Compile a model for every GPU generation in a fleet, prove each engine, publish it.

    Exit codes: 0 done, 1 a build or check failed, 2 bad input, 3 something the run depends on is out of reach, 130
    interrupted.
    """
    ctx.ensure_object(dict)[_COMMAND] = ctx.invoked_subcommand or ""


# Commands of which nothing is kept when they are interrupted.
_KEEP_NOTHING = frozenset({"capacity", "load", "profile", "traffic", "trend"})
# The packages that each extra installs, as far as anything here imports them (`google.protobuf` comes
# with onnx, `google.cloud` does not). tests/enginesmith/cli/test_extras.py holds it to pyproject.toml.
_PACKAGES = {
    "build": ("PIL google jinja2 junitparser matplotlib ml_dtypes numpy onnx onnx_ir onnxruntime prometheus_client "
              "pydantic safetensors tensorrt_rtx"),
    "export": "onnxscript torch",
    "prefect": "httpx prefect",
    "signing": "cryptography model_signing",
    "gcs": "google.cloud google.auth google.api_core requests",
    "tvm": "tvm tvm_ffi",
    "serve": "aiohttp",
    "grammar": "llguidance",
    "nvml": "pynvml",
    "tracing": "opentelemetry",
    "trend": "ruptures",
    "xla": "jax",
    **{name: name for name in ("azure", "iree", "kubernetes", "ray", "tensorrt")},
}  # fmt: skip
# Those of the distribution `enginesmith`; all others are of `enginesmith-pipeline`.
_CLIENT_EXTRAS = frozenset({"azure", "gcs", "grammar", "nvml", "serve", "signing"})
_EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages.split()}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (None: the process's own arguments) and exit."""
    prepare_streams()
    if arguments is None:
        # Without this the interpreter collects garbage before it ends, an eighth of the time of a cached build.
        atexit.register(gc.freeze)
        # Imports make objects that stay; collections at every 700 of them are a twentieth of the time of a plan.
        gc.set_threshold(10_000, 20, 20)
    signal.signal(signal.SIGTERM, _interrupt)
    code = 0
    chosen: dict[str, str] = {}
    try:
        # Not standalone: click then returns the code of ctx.exit() instead of leaving by itself.
        code = enginesmith(arguments, standalone_mode=False, obj=chosen) or 0
    except (click.Abort, KeyboardInterrupt):
        kept = "" if chosen.get(_COMMAND) in _KEEP_NOTHING else "; what was finished is kept, and is not done again"
        _say_last(chosen, "interrupted", [f"interrupted{kept}"])
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
        _say_last(chosen, "error", _entries(error))
        leave(error.exit_code)
    except SystemExit as ended:
        leave(int(ended.code or 0))
    except OSError as error:
        code = code_of_lost(error)
    leave(code)


def _entries(error: EnginesmithError) -> list[str]:
    """What is wrong, an entry for each mistake: each starts with 'error: ', and its further lines are indented."""
    found = []
    for entry in error.lines if isinstance(error, SpecError) else [str(error)]:
        first, *rest = f"error: {entry}".split("\n")
        found.append("\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in rest)]))
    return found


def _say_last(chosen: Mapping[str, str], event: str, entries: Sequence[str]) -> None:
    """Write why the command ended to stderr, in its log format. entries: as `_entries` gives them."""
    if chosen.get("log_format") == "json":
        write_line(event, "error", message="\n".join(entry.removeprefix("error: ") for entry in entries))
    else:
        say(visible("\n".join(entries)))


def _remedy(error: ModuleNotFoundError) -> str | None:
    """What to install for a missing package; None for a missing module of an installed package of our own: a bug."""
    name = error.name or ""
    package = name.split(".")[0]
    if name in ROOMS:
        return "this needs enginesmith-pipeline, which is not installed: pip install '.[build]' in a clone"
    if not package or package in (*ROOMS, "enginesmith"):
        return None
    extra = extra_of(name)
    where = "./enginesmith" if extra in _CLIENT_EXTRAS else "."
    what = f"'{where}[{extra}]' in a clone" if extra else package
    return f"this needs {package}, which is not installed: pip install {what}"


def extra_of(module: str) -> str | None:
    """The extra that installs a module ('google.cloud.storage'); None where none does."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_EXTRAS[name] for name in names if name in _EXTRAS), None)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
