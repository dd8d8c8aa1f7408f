"""`enginery init` and `enginery schema`."""

import json
from importlib.resources import files
from pathlib import Path

import click

from enginery.core.errors import InputError
from pipeline.cli.options import say
from pipeline.cli.tables import echo


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="model.yaml")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(path: Path, force: bool) -> None:
    """Write a commented starter spec to PATH (default: model.yaml)."""
    text = files("pipeline").joinpath("starter.yaml").read_text(encoding="utf-8")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{path} exists; choose another name, or overwrite it with --force") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    say(f"wrote {path}; fill in the files it names, then: enginery plan {path}")


@click.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors and pre-commit checks."""
    from pipeline.spec.model import ModelSpec

    described = ModelSpec.model_json_schema()
    described = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": "Enginery model spec"}
    echo(json.dumps(described, indent=2))
