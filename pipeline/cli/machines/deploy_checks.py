"""What `enginery deploy` was told, checked: what is wrong there would show in each flow run, hours later."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from enginery.core.errors import InputError, UnknownNameError
from enginery.core.hardware.targets import GENERATIONS
from pipeline.orchestration.deployments.plan import FLEET_CRON

# Prefect's own rule for names.
_BANNED = "/%&<>"
# Segments go to both engines, and each begins with requests from before it, so a canary with several requests in flight
# takes up to three times this: a day, which is what a task on Ray's workers may take (`gpu_workers.LIMITS`).
LONGEST_ON_RAY = timedelta(hours=8)


def checked_name(option: str, given: str) -> str:
    """A name that Prefect takes. Raises InputError."""
    if not given.strip() or set(given) & set(_BANNED):
        raise InputError(f"{option} {given!r}: give a name without any of {' '.join(_BANNED)}")
    return given


def registry_uri(given: str | None, otherwise: str | None) -> str:
    """The registry's URI, the same from whatever folder a worker runs in. Raises InputError for none."""
    from enginery.registry.store.base import absolute_uri

    if given is None and otherwise is not None:
        return otherwise
    if given is None:
        raise InputError("the deployments need a registry that the workers reach; give --registry or ENGINERY_REGISTRY")
    return absolute_uri(given)


def absolute_place(option: str, given: str) -> str:
    """A folder's path, the same from whatever folder a worker runs in; an s3:// or file:// URI as it is. Raises
    InputError for what is neither."""
    from pipeline.intake.places import place_at

    if not given:
        raise InputError(f"{option} is empty; give a folder, file:///folder or s3://bucket/prefix, or leave it out")
    if "://" not in given:
        return str(Path(given).expanduser().absolute())
    if given.startswith("s3://"):
        from enginery.registry.store.s3.place import parse_place

        parse_place(given)
    with place_at(given):
        return given


def absolute_file(given: str | None) -> str | None:
    """A file's path, the same from whatever folder a worker runs in."""
    return str(Path(given).expanduser().absolute()) if given else None


def check_on(name: str, only: tuple[str, ...], duration: timedelta | None) -> None:
    """Whether Ray's workers with the GPU `name` prove and run canaries. Raises InputError, UnknownNameError."""
    from pipeline.orchestration.gpu_workers import gpu_named

    gpu_named(name)
    if only and not {"validate-pending", "canary"} & set(only):
        raise InputError(f"--on is about validate-pending and canary, and not about {', '.join(only)}; leave it out")
    if duration is not None and duration > LONGEST_ON_RAY:
        raise InputError(
            "--canary-duration: a canary on Ray's workers takes up to three times as long, and ends after a day; "
            "give 8h or less"
        )


def replay_s(given: timedelta | None) -> float | None:
    """Seconds that canaries replay. Raises InputError for 0."""
    if given is not None and not given:
        raise InputError("--canary-duration is 0; give how long to replay, such as 30m, or leave it out")
    return None if given is None else given.total_seconds()


def cron(given: str) -> str:
    """Five fields that Prefect's server takes, which would refuse them much later. Raises InputError."""
    if given == FLEET_CRON:
        return given
    from prefect.client.schemas.schedules import CronSchedule

    try:
        CronSchedule(cron=given)
    except ValueError:
        given_right = False
    else:
        given_right = len(given.split()) == 5
    if not given_right:
        raise InputError(f"--fleet-schedule {given!r}: give five fields of cron, such as {FLEET_CRON!r}")
    return given


def slot_counts(given: Mapping[str, object]) -> dict[str, int]:
    """Builds at once of each generation. Raises InputError, UnknownNameError."""
    known = [generation.sm for generation in GENERATIONS]
    found: dict[str, int] = {}
    for name, count in given.items():
        if name not in known:
            raise UnknownNameError(f"--slots {name}: no GPU generation has that name; there are {', '.join(known)}")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
            raise InputError(f"--slots {name}={count}: give a whole number from 1 to 10000")
        found[name] = count
    return found
