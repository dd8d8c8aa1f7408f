from itertools import product

from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.channel_writes import read_rollout
from pipeline.rollout import operations
from pipeline.rollout.operations import Operator
from tests.enginesmith.registry.memory import Actor, after, interleave
from tests.pipeline.rollout.fleet import NODES, WHERE, at, look, running, served


def test_a_concurrent_abort_and_controller_agree():
    for steps, waves in product(range(0, 40, 3), (("100%",), ("10%", "100%"))):
        store, _ = running(*waves, soak=60)
        one, two_ = Actor("controller"), Actor("ada")
        works = [
            (one, lambda one=one, store=store: look(store.seen_by(one), 60)),
            (two_, lambda a=two_, store=store: operations.abort(store.seen_by(a), *WHERE, Operator("ada", at(60)))),
        ]
        interleave(works, after(one, steps))
        state, version = read_rollout(store, *WHERE).state, read_channel(store, *WHERE).version
        assert (state, version) in (("done", "2"), ("running", "1") if len(waves) > 1 else (), ("aborted", "1"))
        assert (two_.error is None) == (state == "aborted"), two_.error
        assert one.error is None and (state == "running" or served(store, NODES[0]) == version)
