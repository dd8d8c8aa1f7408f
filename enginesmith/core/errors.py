"""Errors that end a command, and the exit code each one stands for.

::

    EnginesmithError                1  something failed; the message says what, which value, and the remedy
    ├── InputError               2  what the user gave is wrong
    │   ├── SpecError               a spec; carries one line per mistake
    │   ├── ModelError              a model: an ONNX file, a .pt2, an entry point
    │   ├── DataError               calibration or golden data
    │   └── UnknownNameError          a reference, target or precision that names nothing
    ├── UnavailableError         3  something the run depends on is out of reach (registry, Ray, Prefect, disk full)
    │   └── UndecidedError            a write whose answer was lost: it may have happened or not
    ├── IntegrityError           1  bytes do not match their digest, or a manifest does not match itself
    ├── ConflictError            1  somebody else published first, with other content
    └── StepError                1  a step of the pipeline failed in its own process; carries the log

Expected outcomes of building and checking are values, not errors: see `BuildFailure` and
`enginesmith.core.reports.proof.Report`.
"""

from collections.abc import Mapping, Sequence


class EnginesmithError(Exception):
    """Base of every error a command reports without a traceback."""

    exit_code = 1


class InputError(EnginesmithError):
    """What the user gave is wrong."""

    exit_code = 2


class SpecError(InputError):
    """A spec with mistakes: one line for each, with the key's path, the value and the remedy."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)

    def __reduce__(self) -> "tuple[type[SpecError], tuple[tuple[str, ...]]]":
        return (SpecError, (self.lines,))


class ModelError(InputError):
    """A model that cannot be read, exported or checked."""


class DataError(InputError):
    """Calibration or golden data that does not fit the model."""


class UnknownNameError(InputError):
    """A reference, target, precision or channel that names nothing."""


class UnavailableError(EnginesmithError):
    """Something the run depends on (registry, Ray, Prefect, disk) is out of reach."""

    exit_code = 3


class UndecidedError(UnavailableError):
    """The answer to a conditional write was lost, and the present content does not show whether it happened."""


class IntegrityError(EnginesmithError):
    """Stored bytes do not match their digest, or a document is malformed."""


class ConflictError(EnginesmithError):
    """Another publisher wrote other content under the same name first."""


class StepError(EnginesmithError):
    """A step that ran in a process of its own failed; `log` is the end of what it printed.

    kind: 'error' (an exception, or an exit without a result), 'crash' (a signal, or its worker is gone), 'timeout',
    'memory' (over its own limit), 'node-memory' (its node ran out), 'node-lost', 'no-node' (none fits), 'cancelled'.
    peak_mib: the most memory it was seen to hold, 0 when unknown.
    """

    def __init__(self, message: str, kind: str = "error", log: str = "", peak_mib: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.log = log
        self.peak_mib = peak_mib

    def __reduce__(self) -> "tuple[type[StepError], tuple[str, str, str, float]]":
        return (StepError, (str(self), self.kind, self.log, self.peak_mib))


def error_to_json(error: EnginesmithError) -> dict[str, object]:
    """An error's class and constructor arguments as JSON; of a class of another module, its nearest base class here."""
    known = next(cls for cls in type(error).__mro__ if cls.__module__ == __name__)
    arguments = error.__reduce__()[1] if type(error) is known else (str(error),)
    return {"error": known.__name__, "arguments": arguments}


def error_from_json(data: Mapping[str, object]) -> EnginesmithError:
    """The error that `error_to_json` wrote."""
    arguments = data.get("arguments")
    made: EnginesmithError = globals()[str(data.get("error"))](
        *(arguments if isinstance(arguments, list | tuple) else ())
    )
    return made
