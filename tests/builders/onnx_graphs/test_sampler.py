"""The sampler's graph against the reference in numpy, for all of its settings."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.onnx_graphs.sampler import append_sampler
from enginesmith.core.errors import ModelError
from enginesmith.core.sampling import SamplingSettings
from enginesmith.core.types import Sampling
from enginesmith.sampling import first_inputs, sample, settings_inputs
from validation.calls.sampler import is_right

SIZE = 9


def open_sampler(candidates: int = SIZE, shape: str = "batch, 9", dtype: str = "float") -> ort.InferenceSession:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (int64[batch, places] ids, {dtype}[{shape}] x) '
        f"=> ({dtype}[{shape}] logits) {{ logits = Identity (x) }}"
    )
    append_sampler(model, Sampling("ids", "logits", "next_token", SIZE, candidates))
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString())


SESSIONS = {count: open_sampler(count) for count in (SIZE, 4)}


def draw(x, settings, session=SESSIONS[SIZE], **others):
    """Tokens of rows of logits, each with the same settings. others: inputs of the sampler that are not neutral."""
    x = np.asarray(x, others.pop("dtype", np.float32))
    sampling = Sampling("ids", "logits", "next_token", SIZE, SIZE)
    inputs = first_inputs(sampling, len(x)) | settings_inputs([settings] * len(x))
    inputs |= {"ids": np.full((len(x), 1), SIZE - 1), "x": x}
    inputs |= {name: np.asarray(value, inputs[name].dtype) for name, value in others.items()}
    return session.run(["next_token", "seen_next"], inputs)


SCORES = st.one_of(st.integers(-3, 3), st.floats(-30, 30, width=32), st.just(np.finfo(np.float32).min))
ROWS = st.lists(SCORES, min_size=SIZE, max_size=SIZE)
FLAGS = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)
SETTINGS = st.builds(
    SamplingSettings,
    st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5, SIZE, 50]),
    st.sampled_from([0.0, 0.1, 0.5, 0.99, 1.0]),
    st.sampled_from([0.5, 1.0, 1.3]),
)
UNIFORM = st.one_of(st.just(0.0), st.just(1 - 2.0**-24), st.floats(0, 1, width=32, exclude_max=True))


@given(ROWS, FLAGS, FLAGS, SETTINGS, UNIFORM, st.sampled_from(list(SESSIONS)))
def test_every_token_is_that_of_the_reference(row, seen, allowed, settings, uniform, candidates):
    (token,), _ = draw([row], settings, SESSIONS[candidates], seen=[seen], allowed=[allowed], uniform=[uniform])
    read = np.array(seen) | (np.arange(SIZE) == SIZE - 1)
    logits = np.array(row, np.float32)
    assert is_right(int(token), logits, settings, uniform, read, np.array(allowed), candidates)
    possible = np.flatnonzero(allowed)
    assert token in possible or (token == -1 and not np.any(logits[possible] > np.finfo(np.float32).min))


def test_equal_logits_go_to_the_lower_token_and_top_k_keeps_exactly_k():
    row = [[0, 2, 1, 2, 2, 1, 0, 0, 0]]
    assert draw(row, SamplingSettings())[0] == [1]
    drawn = {int(draw(row, SamplingSettings(1.0, top_k=2), uniform=[u])[0][0]) for u in (0.0, 0.3, 0.6, 0.99)}
    assert drawn == {1, 3}


def test_top_p_keeps_the_fewest_that_have_the_share_and_always_one():
    row = np.log(np.array([[0.5, 0.3, 0.2, *[1e-9] * 6]]))
    for p, kept in ((0.0, {0}), (0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2})):
        drawn = {int(draw(row, SamplingSettings(1.0, top_p=p), uniform=[u])[0][0]) for u in np.arange(0, 1, 0.02)}
        assert drawn == kept, p


def test_no_token_is_drawn_where_none_is_allowed_or_the_logits_are_no_numbers():
    for settings in (SamplingSettings(), SamplingSettings(1.0, 3, 0.5)):
        rows = [[1.0] * SIZE, [np.nan] * SIZE, [-np.inf] * SIZE, [0.0] * SIZE]
        allowed = np.ones((4, SIZE), bool)
        allowed[0] = False
        assert draw(rows, settings, allowed=allowed)[0].tolist()[:3] == [-1, -1, -1]
        assert draw(rows, settings, allowed=allowed)[0][3] >= 0


@pytest.mark.parametrize("place", range(SIZE))
@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(1.0, 3, 0.5)])
def test_one_logit_that_is_no_number_is_found_wherever_it_stands_but_not_where_it_is_not_allowed(place, settings):
    row, allowed = np.arange(SIZE, dtype=np.float32), np.arange(SIZE) != place
    row[place] = np.nan
    none = np.zeros(SIZE, bool)
    for session, count in ((SESSIONS[SIZE], SIZE), (SESSIONS[4], 4)):
        assert draw([row], settings, session)[0] == [-1]
        assert draw([row], settings, session, allowed=[allowed])[0][0] >= 0
        assert sample(row, settings, 0.0, none, ~none, count) == -1
        assert sample(row, settings, 0.0, none, allowed, count) >= 0


def test_each_row_has_its_own_settings_and_what_was_read_is_held():
    (one, other), seen = draw(
        [[0, 5, 4, *[0] * 6]] * 2, SamplingSettings(), repetition_penalty=[2.0, 1.0], seen=[[0, 1, *[0] * 7]] * 2
    )
    assert (one, other) == (2, 1)
    assert seen.tolist() == [[0, 1, *[0] * 6, 1]] * 2


def test_the_last_of_several_places_is_drawn_and_half_precision_is_widened():
    session = open_sampler(shape="batch, places, 9", dtype="float16")
    places = np.zeros((1, 2, SIZE), np.float16)
    places[0, :, 3], places[0, 1, 6] = 1, 2
    inputs = first_inputs(Sampling("ids", "logits", "next_token", SIZE, SIZE), 1)
    token, seen = session.run(["next_token", "seen_next"], {**inputs, "ids": np.array([[1, 2]]), "x": places})
    assert token == [6]
    assert np.flatnonzero(seen).tolist() == [1, 2]


def test_a_graph_without_the_logits_is_refused():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Neg (x) }'
    )
    with pytest.raises(ModelError, match="no 'ids' or no 'logits'"):
        append_sampler(model, Sampling("ids", "logits", "next_token", SIZE, SIZE))
