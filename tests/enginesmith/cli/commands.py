"""The command line, called in this process."""

import json

from click.testing import CliRunner, Result

from enginesmith.cli import enginesmith


def run(*arguments: object) -> Result:
    return CliRunner().invoke(enginesmith, [str(argument) for argument in arguments])


def said(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def told(*arguments: object) -> object:
    """What it says as JSON, whatever the exit code."""
    result = run(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)
