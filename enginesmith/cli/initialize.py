"""The command that KServe calls as a storage initializer: source URIs and folders, in pairs."""

import click

from enginesmith.cli import pull
from enginesmith.cli.options import registry_option
from enginesmith.core.errors import InputError
from enginesmith.exchange.kserve import pull_arguments


@click.command()
@click.argument("pairs", metavar="SRC DEST ...", nargs=-1, required=True)
@registry_option
def initialize(pairs: tuple[str, ...], registry: str) -> None:
    """Pull each enginesmith:// URI SRC into the folder DEST, as KServe asks a storage initializer to.

    SRC: enginesmith://REF?OPTION=VALUE&..., with options of `enginesmith pull`, such as
    enginesmith://digits@3?target=l4. It lies as --layout triton unless the URI has another layout.
    """
    if len(pairs) % 2:
        raise click.UsageError(f"{pairs[-1]!r} has no folder: give SRC and DEST in pairs")
    asked = [pull_arguments(uri) for uri in pairs[::2]]
    for uri, arguments, dest in zip(pairs[::2], asked, pairs[1::2], strict=True):
        named = [] if "--registry" in arguments else ["--registry", registry]
        try:
            pull.pull.main([*arguments, *named, "--dest", dest, "--quiet"], standalone_mode=False)
        except click.UsageError as error:
            raise InputError(f"{uri!r}: {error.format_message()}") from error
