"""`python -m validation.gpu`: runs the kit, or writes its page. argparse, as a bare machine has no click."""

import argparse
import math
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from enginery.core.errors import EngineryError
from validation.gpu.kit import KitOptions, run_kit
from validation.gpu.models import MODELS, PRECISIONS, SIZES
from validation.gpu.page import page
from validation.gpu.peers import PEERS
from validation.gpu.results import Results, TrialOutcome

_PASSING = ("passed", "done", "skipped")


def main(words: list[str]) -> int:
    """Exit code 0: everything that was tried for this device passed; 1: something did not; else the error's own."""
    try:
        return _page(words[1:]) if words[:1] == ["page"] else _check(_parser().parse_args(words))
    except EngineryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was measured so far is kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m validation.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU is for trying the kit out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"), help="where the results go")
    parser.add_argument(
        "--carry", type=Path, action="append", default=[], help="folder of published engines; repeat it"
    )
    parser.add_argument(
        "--model", dest="models", type=_names(MODELS), default=list(MODELS), help="mlp,conv,block; or none"
    )
    parser.add_argument(
        "--precision", dest="precisions", type=_names(PRECISIONS), default=list(PRECISIONS), help=",".join(PRECISIONS)
    )
    parser.add_argument(
        "--backend",
        dest="backends",
        type=_words,
        default=[],
        help="names, separated by commas; default: all that are registered",
    )
    parser.add_argument(
        "--peer", dest="peers", type=_names(PEERS), default=list(PEERS), help=f"{','.join(PEERS)}; or none"
    )
    parser.add_argument("--seconds", type=_seconds, default=2.0, help="for each latency")
    parser.add_argument("--size", choices=SIZES, default="real", help="of the kit's models")
    parser.add_argument("--timeout", type=_seconds, default=1200.0, help="seconds for each try")
    parser.add_argument("--no-peaks", action="store_true", help="do not measure the roofs")
    return parser


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A list of known names, by commas; 'none' is none of them."""

    def parse(text: str) -> list[str]:
        found = [] if text == "none" else _words(text)
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return parse


def _seconds(text: str) -> float:
    """A time that can be waited: more than 0, and an end."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _check(given: argparse.Namespace) -> int:
    asked = KitOptions(
        device=given.device,
        models=given.models,
        precisions=given.precisions,
        backends=given.backends,
        peers=given.peers,
        carry=given.carry,
        seconds=given.seconds,
        size=given.size,
        timeout_s=given.timeout,
        peaks=not given.no_peaks,
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found = run_kit(asked, lambda line: print(line, file=sys.stderr, flush=True), partial(_keep, given.out))
    bad = [item for item in _own(found) if item.outcome not in _PASSING]
    print(
        f"{given.out}: {len(found.tries)} tried, {len(found.skipped)} not, {len(found.carried)} carried; {len(bad)} bad"
    )
    return 1 if bad else 0


def _keep(path: Path, found: Results) -> None:
    """Write the results so that the file is whole at any moment."""
    part_path = path.with_name(f"{path.name}.part")
    part_path.write_bytes(found.to_bytes())
    part_path.replace(path)


def _own(found: Results) -> list[TrialOutcome]:
    """What must pass: engines for this very device. Those for other generations, and PyTorch, are questions."""
    return [*(item for item in found.tries if item.kind == "engine"), *found.carried]


def _page(words: list[str]) -> int:
    sys.stdout.write(page([Results.load(Path(word)) for word in words]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
