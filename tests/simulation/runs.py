"""One seed, one run: a registry with two versions, some actors at once, then what must hold when all is over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from shutil import rmtree

from enginesmith.core.errors import digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.layout import blob_key
from enginesmith.registry.versions import channel_writes, index
from enginesmith.registry.versions.channel_state import change_channel, read_channel
from tests.enginesmith import registries
from tests.simulation.actors import ATTACHED, GRACE, MODEL, NODES, PLAN, SHORT, Registry
from tests.simulation.choices import Choices, shorten
from tests.simulation.folders import Folder
from tests.simulation.patched import patched
from tests.simulation.rules import Rules
from tests.simulation.store import Content, SimulatedStore
from tests.simulation.world import BEGIN, Actor, Call, Temper, Violation, World

CONTENTS = ("a", "c", "b", "b", "d", "f")
NUMBERS = ["publish", "publish", "list"]
KINDS = (
    *("publish", "promote", "rollback", "gc", "nightly", "nightly", "pull", "repair", "pin", "mirror", "watch", "list"),
    *("attest", "attest", "index", "site gc", "attach", "ensemble", "publish y", "outside"),
)
# Scenes whose collections have no grace period.
IMPATIENT = ("sweeping", "copying")
# The blob of version 3, which no channel serves, that a disk may have lost.
_LOST = digest_of_bytes(b"engine c")
COLLECTING = ("publish", "promote", "promote", "publish z", "publish y", "rollback", "pin", "attach", "ensemble")
# Evidence of a version that is not served yet, and will be at once.
COMING = (("attest", "promote", "promote"), ("attest", "start", "abort"))
# Scenes of one kind of race, and the kinds of work that race there: writers and a collection without a grace period;
# what channels leave and a collection; steps of a rollout that ends soon; moves, publications and the index; evidence;
# mirrors and the collections of their site; what a disk lost.
CLOSE: dict[str, Sequence[Sequence[str]]] = {
    "sweeping": (
        *(("publish",), ("publish", "promote"), ("publish", "pin"), ("attach", "attach", "attest")),
        *(("ensemble",), ("publish y", "publish y", "attest"), ("outside", "moves", "moves")),
    ),
    "leaving": (("promote", "promote", "rollback"), ("start", "abort"), ("bounces", "bounces", "rollback")),
    "stepping": (
        ("start", "advance", "advance", "abort", "pause"),
        ("start", "advance", "advance", "abort", "promote"),
    ),
    "moving": (("moves", "moves", "rollback"), ("publish", "publish", "list", "index")),
    "proving": (
        *(("attest", "attest", "promote", "repair"), ("attest", "start", "advance", "watch"), ("attest",)),
        *(*COMING, *COMING),
    ),
    "copying": (("mirror", "mirror", "site gc", "moves"), ("mirror", "site gc", "promote", "attest")),
    "healing": (("publish", "repair", "repair"),),
}
SCENES = ("any", "rolling", "rolling", "collecting", "collecting", "collecting", "racing", "racing", *CLOSE)
ROLLING = (
    *("start", "start", "abort", "pause", "advance", "advance", "well", "unhealthy", "promote", "rollback"),
    *("pull", "watch"),
)


# Seeds of decisions that are tried for each step that a shorter run leaves out.
REDRAWN = 20


@dataclass(frozen=True)
class Failure:
    """A seed that broke a rule. script: its decisions.  trace: what happened, in lines.  steps: how many things its
    actors have to do.  omitted: numbers of those that they do not.  redrawn: seed of the decisions; None: the run's."""

    seed: int
    why: str
    script: tuple[int, ...]
    trace: tuple[str, ...]
    steps: int
    omitted: frozenset[int] = frozenset()
    redrawn: int | None = None


@cache
def beginning(indexed: bool) -> Content:
    """A registry in which version 1 is stable, zeta the candidate, 3 kept for its number, and 2, alpha, an engine and a
    file that was attached garbage that is due. indexed: whether it has an index."""
    world = World(Choices(0, ()), Temper(), name="beginning")
    content = Content()
    registry = Registry(world, SimulatedStore(world, content), Rules(world, content, GRACE))

    def work() -> None:
        registry.publish("a")
        registry.promote("1")
        registry.publish("b")
        registry.publish("c")
        registry.publish("y", "alpha")
        registry.attest("alpha")
        registry.publish("z", "zeta")
        few_reporters = partial(replace, reporters_ppm=1000)  # of nodes outside of rollouts; each collection doubles it
        change_channel(registry.store, MODEL, "stable", lambda state: state and few_reporters(state))
        registry.store.put_bytes(ATTACHED)
        registries.engine(registry.store, data=b"engine d")  # of a publication that was killed
        for call in world.calls:
            assert call.acknowledged, call.error
        assert registry.collect().acknowledged
        if indexed:
            index.make_index(registry.store)

    with patched(world):
        world.run([Actor("beginning", work)], calm=True)
    return content


def run_seed(
    seed: int, script: Sequence[int] | None = None, omitted: frozenset[int] = frozenset(), redrawn: int | None = None
) -> Failure | None:
    """Run one seed, and return how it failed; None if every rule held. The others: as in `Failure`."""
    choices = Choices(seed, script)
    scene = choices.random.choice(SCENES)
    temper = _temper(choices, scene in CLOSE)
    world = World(choices, temper, BEGIN + 2 * GRACE)
    content = beginning(choices.random.random() < (0.7 if scene == "moving" else 0.3)).copy()
    waits = temper.stale or scene == "leaving" or (scene not in IMPATIENT and choices.random.random() < 0.7)
    grace = GRACE if waits else timedelta()
    rules = Rules(world, content, grace, kept_moves=choices.random.choice((0, 1)))
    if scene == "healing" or choices.random.random() < 0.1:
        rules.lost = frozenset({_LOST})
        content.set(blob_key(_LOST), choices.random.choice((None, b"rotten")), BEGIN)
    site_begins = beginning(False).copy() if scene == "copying" or choices.random.random() < 0.3 else Content()
    site_rules = Rules(world, site_begins, grace, copies=True)
    site = Registry(world, SimulatedStore(world, site_rules.content, site_rules.changed, "site"), site_rules)
    store = SimulatedStore(world, content, rules.changed)
    folders = [Folder(store, parse_reference(f"{MODEL}:stable"), node) for node in (None, *NODES[:2])]
    registry = Registry(world, store, rules, site, folders)
    works = _works(registry, choices, scene)
    actors = _actors(works, choices, scene, omitted)
    if redrawn is not None:
        choices.random.seed(redrawn)
    try:
        with patched(world):
            world.run(actors)
            world.run([Actor("afterwards", lambda: _afterwards(registry))], calm=True)
    except Violation as violation:
        steps = sum(map(len, works))
        return Failure(seed, str(violation), tuple(choices.taken), world.trace, steps, omitted, redrawn)
    finally:
        for folder in folders:
            if folder.path:
                rmtree(folder.path)
    return None


def shortest(failure: Failure) -> Failure:
    """The same failure with as few actors, steps, faults and switches as still show it."""
    alike = failure

    def fails(script: Sequence[int] | None, omitted: frozenset[int], redrawn: int | None) -> bool:
        nonlocal alike
        trace = run_seed(failure.seed, script, omitted, redrawn)
        if trace is None or _kind(trace.why) != _kind(failure.why):
            return False
        alike = trace
        return True

    def fails_without(steps: Sequence[int]) -> bool:
        omitted_numbers = frozenset(number for number, is_done in enumerate(steps) if not is_done)
        return fails(alike.script, omitted_numbers, alike.redrawn) or any(
            fails(None, omitted_numbers, redrawn_index) for redrawn_index in range(REDRAWN)
        )

    shorten([1] * failure.steps, fails_without)
    shorten(alike.script, lambda script: fails(script, alike.omitted, alike.redrawn))
    return alike


def _kind(why: str) -> str:
    return "".join(char for char in why if not char.isdigit())[:40]


def _temper(choices: Choices, close: bool) -> Temper:
    """How rough this seed is: each kind of trouble is there or not, so that no kind hides another (swarm testing).
    Lists are stale where a grace period is longer than any writer works. close: few troubles, and many short stalls."""
    draw = choices.random.random
    if close:
        return Temper(
            switch=choices.random.choice((0.02, 0.1, 0.3)),
            stall=choices.random.choice((0.0, 0.03)),
            stall_s=200,
            ask_again=choices.random.choice((0.0, 0.0, 0.3)),
            crash=choices.random.choice((0.0, 0.0, 0.01)),
        )
    is_stale = draw() < 0.2
    some_function = lambda probability, value: value if draw() < probability else 0.0  # noqa: E731
    return Temper(
        switch=choices.random.choice((0.02, 0.1, 0.3, 0.6)),
        refuse=some_function(0.4, 0.03),
        lose=some_function(0.4, 0.05),
        ask_again=some_function(0.4, choices.random.choice((0.03, 0.3))),
        crash=some_function(0.5, 0.01),
        stall=some_function(0.6, choices.random.choice((0.004, 0.03))),
        stall_s=choices.random.choice((200.0, 450.0, 600.0, *(() if is_stale else (2400.0, 3590.0, 7200.0, 7200.0)))),
        stale=0.3 if is_stale else 0.0,
        skew_s=choices.random.choice((0.0, 0.0, 60.0, 4 * 3600.0)),
        apart=some_function(0.3, 0.7),
    )


def _works(registry: Registry, choices: Choices, scene: str) -> list[list[Callable[[], object]]]:
    """What three to six actors do: one to three things each."""
    draw = choices.random
    works: list[list[Callable[[], object]]] = []
    kinds, is_fresh = draw.sample(KINDS, draw.randint(2, 5)), scene in ("collecting", "racing")
    if scene == "rolling":
        kinds = ["start", *draw.sample(ROLLING, draw.randint(2, 5)), *draw.sample(KINDS, draw.randint(0, 2))]
    elif scene == "collecting":
        kinds = draw.sample(COLLECTING, draw.randint(1, 3))
        works += [[_work(registry, choices, ["nightly"], is_fresh)] for _ in range(draw.randint(1, 2))]
    elif scene == "racing":
        kinds = draw.choice((NUMBERS, ["promote", "promote", "rollback", "rollback", "list"]))
    elif scene in CLOSE:
        kinds, pause = draw.choice(CLOSE[scene]), 1810.0 if scene == "leaving" else 1.0
        works += [[lambda: _repeat(registry, registry.collect, 3, pause)]] if scene in ("sweeping", "leaving") else []
        works += [[lambda: _repeat(registry, registry.listing, 8, 40.0)]] if scene == "moving" else []
    for _ in range(draw.randint(3, 6) - len(works)):
        works.append([_work(registry, choices, kinds, is_fresh, scene) for _ in range(draw.randint(1, 3))])
    return works


def _actors(
    works: Sequence[Sequence[Callable[[], object]]], choices: Choices, scene: str, omitted: frozenset[int]
) -> list[Actor]:
    """An actor for each list of works, without those whose numbers are omitted; none for a list that is left empty."""
    numbers, actors = count(), []
    for number, steps in enumerate(works):
        is_slow = choices.random.random() < (0.8 if scene in CLOSE else 0.5)
        done = [step for step in steps if next(numbers) not in omitted]
        if done:
            actors.append(Actor(f"actor-{number}", lambda done=done: [step() for step in done], slow=is_slow))  # type: ignore[misc]
    return actors


def _repeat(registry: Registry, work: Callable[[], object], times: int, pause: float) -> None:
    for _ in range(times):
        work()
        registry.world.sleep(pause)


def _work(
    registry: Registry, choices: Choices, kinds: Sequence[str], fresh: bool, scene: str = ""
) -> Callable[[], object]:
    draw = choices.random
    kind = draw.choice(kinds)
    content, version = draw.choice(CONTENTS[2 if fresh else 0 :]), draw.choice(("1", "2", "2", "3", "alpha", "zeta"))
    node, looks = draw.choice((None, *NODES)), draw.choice((1, 2, 4))
    wait, pause = draw.choice((0.0, 0.0, 0.0, 600.0, 2400.0)), draw.choice((1.0, 60.0, 650.0, 1900.0))
    lasts = draw.random() < 0.3
    second_number, folder = draw.choice((0, 0, 5)), draw.randrange(len(registry.folders))
    if scene in ("sweeping", "stepping", "moving", "proving", "copying", "healing"):
        wait, pause, second_number = 0.0, 1.0, 5 if scene == "stepping" else 0
    if scene == "proving":  # of what channels serve or will, whose snapshots get the evidence
        version = "3" if kinds in COMING else draw.choice(("1", "1", version))
    if scene == "leaving":
        version, second_number = draw.choice(("2", "2", version)), 0
    lasts_s = 0.0 if scene == "stepping" else wait or 600.0
    works: dict[str, Callable[[], object]] = {
        "publish": lambda: registry.publish(content, pause=wait if lasts else 0.0),
        "promote": lambda: registry.promote(version),
        "rollback": registry.rollback,
        "gc": registry.collect,
        "list": registry.listing,
        "publish z": lambda: registry.publish("z", "zeta"),
        "publish y": lambda: registry.publish("y", "alpha"),
        "attach": lambda: registry.attach(version),
        "ensemble": lambda: registry.ensemble(version),
        "outside": lambda: registry.report_outside(looks),
        "nightly": lambda: _repeat(registry, registry.collect, 4, pause),
        "pull": lambda: registry.pull(f"{MODEL}:stable", node),
        "mirror": registry.mirror,
        "site gc": registry.site.collect,  # type: ignore[union-attr]
        "attest": lambda: registry.attest(version),
        "index": registry.make_index,
        "bounces": lambda: [move() for _ in range(3) for move in (lambda: registry.promote("2"), registry.rollback)],
        "moves": lambda: [registry.promote(each) for each in ("2", "3", "zeta", "1")],
        "watch": lambda: registry.watch(folder, looks, pause),
        "start": lambda: registry.start(version, SHORT if scene == "stepping" else PLAN),
        "abort": registry.abort,
        "pause": lambda: (registry.advance(), registry.pause(lasts_s), registry.report(""), registry.advance()),
        "advance": lambda: _repeat(registry, registry.advance, looks, pause),
        "well": lambda: registry.report(""),
        "unhealthy": lambda: registry.report("unhealthy"),
        "repair": registry.repair,
        "pin": lambda: (registry.pin(version), registry.world.sleep(wait), registry.unpin(version)),
    }

    def work() -> None:
        if wait:
            registry.world.sleep(wait)
        call = works[kind]()
        for _ in range(second_number):  # somebody who insists
            if not isinstance(call, Call) or call.error is None:
                break
            registry.world.sleep(pause)
            call = works[kind]()

    return work


def _afterwards(registry: Registry) -> None:
    """The rules a day later, when nobody works: acknowledged writes are there, rollouts end, each kind of work ends."""
    for call in registry.world.calls:
        key = f"models/{MODEL}/versions/{call.result}/manifest.json"
        if call.what.startswith("publish") and call.acknowledged and key not in registry.rules.published:
            raise Violation(f"{call.what} was acknowledged as {call.result}, which was never there")
    registry.listing()
    registry.world.sleep(26 * 3600)
    _check_snapshots(registry)
    _end_rollouts(registry)
    garbage = registry.rules.garbage()
    works = (registry.collect, lambda: registry.publish("e"), registry.rollback, lambda: registry.listing(mended=True))
    # A repair sets aside what is corrupt, and writes the snapshots of who did not see his evidence in a stale list.
    first_repairs = () if registry.store.is_sound(_LOST) and not registry.world.temper.stale else (registry.repair,)
    for number, work in enumerate((*works, registry.collect, *first_repairs, registry.repair)):
        if number == len(works):
            registry.world.sleep(GRACE.total_seconds() + 60)
        call = work()
        garbage &= registry.rules.garbage()
        if call.error is not None and not any(words in str(call.error) for words in _NOTHING_TO_DO):
            raise Violation(f"afterwards, {call.what} ends in {type(call.error).__name__}: {call.error}")
    if set(call.result) != {f"missing {digest}" for digest in registry.rules.missing()}:
        raise Violation(f"after a repair there is still {call.result}")
    if garbage:
        raise Violation(f"blob {min(garbage)[:14]} was garbage for longer than the grace period, and is still there")
    registry.pull(f"{MODEL}:stable")
    _end_copies(registry)


def _check_snapshots(registry: Registry) -> None:
    """After a collection what channels and rollouts serve has all evidence, whoever was killed while it was added."""
    call = registry.collect()
    if call.error is not None:
        raise Violation(f"afterwards, {call.what} ends in {call.error}")
    registry.listing(mended=True)
    for name in ("stable", "candidate"):
        state = read_channel(registry.store, MODEL, name)
        fault = state and channel_writes.find_fault(registry.store, state)
        if fault and not registry.world.temper.stale:
            raise Violation(f"afterwards, of {name}, {fault}")


def _end_copies(registry: Registry) -> None:
    """What a killed watcher and a killed mirror left is whole, and the next one brings what the channel serves."""
    serving_channel = read_channel(registry.store, MODEL, "stable")
    assert serving_channel is not None
    for number, folder in enumerate(registry.folders):
        if folder.path:
            folder.check()
            call = registry.watch(number)
            if call.result != serving_channel.version:
                raise Violation(f"afterwards, {call.what} gives {call.error or call.result}")
            folder.check()
    site = registry.site
    if site is None or not site.store.content.objects:
        return
    # As in `_afterwards`: where lists are stale, evidence may lack in a snapshot, which one repair writes.
    first_repairs = (site.repair,) if registry.world.temper.stale else ()
    calls = [work() for work in (site.collect, registry.mirror, *first_repairs, site.repair)]
    for call in calls:
        if call.error is not None or (call is calls[-1] and call.result):
            raise Violation(f"afterwards, {call.what} of the other site ends in {call.error or call.result}")
    copied_channel = read_channel(site.store, MODEL, "stable")
    if copied_channel is None or copied_channel.manifest != serving_channel.manifest:
        raise Violation("afterwards, a mirror leads elsewhere")


_NOTHING_TO_DO = ("nothing to roll back to", "was deleted since")


def _end_rollouts(registry: Registry) -> None:
    """Run a controller until it has nothing left to do: two waves, each opened by one poll and ended by another."""
    for _ in range(20):
        if not channel_writes.running_rollouts(registry.store):
            break
        registry.resume()
        registry.report("")
        ended_state = registry.advance()
        if ended_state.error is not None:
            raise Violation(f"afterwards, a look of the controller ends in {ended_state.error}")
        registry.world.sleep(700)
    else:
        raise Violation("afterwards, a rollout goes on without end")
    for name in ("stable", "candidate"):
        state = read_channel(registry.store, MODEL, name)
        if state and state.active_rollout:
            raise Violation(f"afterwards, no controller looks at the rollout of {name}")
