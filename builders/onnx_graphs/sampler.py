"""The sampler: one ONNX function that draws the next token from logits, put behind a model's graph.

All of it is float32, whatever the model computes in. In order, as Hugging Face's `generate` has its processors and then
its warpers (transformers, generation/utils.py, `_get_logits_processor`):

1. the repetition penalty p: logits of tokens that were read are divided by p above 0 and multiplied by it below
   (Keskar et al., "CTRL", 2019, arXiv:1909.05858, with the sign of transformers' RepetitionPenaltyLogitsProcessor);
2. the mask of a grammar: what is not allowed is never drawn;
3. the temperature: 0 takes the likeliest, the lowest token id of equals;
4. top-k (Fan et al., 2018, arXiv:1805.04833): exactly k, the lower ids of equals (transformers keeps all equals);
5. top-p (Holtzman et al., 2020, arXiv:1904.09751): the fewest of the likeliest whose share of what top-k left is p.

Then the first token at which the sum of probabilities passes `uniform` times their total: the inverse of their
cumulative distribution. -1 where no token is allowed, or a logit of one that is allowed is no number: such a one is
found by no comparison, wherever TopK puts it.

Only so many candidates are sorted as the spec says, so that they bound top_k too: TensorRT's TopK takes at most 3840.
"""

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from enginesmith.core.errors import ModelError
from enginesmith.core.sampling import SEEN_NEXT, sampling_inputs, sampling_outputs
from enginesmith.core.types import Sampling, TensorSpec

DOMAIN = "enginesmith"
_PREFIX = f"{DOMAIN}/Sample/"

# `lowest` is the least number of float32, which models write in the place of minus infinity.
_BODY = """
<opset_import: ["" : 17], domain: "enginesmith">
Sample (logits, ids, seen, temperature, top_k, top_p, repetition_penalty, uniform, allowed, ranks, count, width)
    => (token, seen_next)
{
    scores = Cast <to = 1> (logits)
    rows = Constant <value = int64[1] {1}> ()
    first = Constant <value = int64[1] {0}> ()
    axis = Constant <value = int64 {1}> ()
    zero = Constant <value = float {0.0}> ()
    one = Constant <value = float {1.0}> ()
    lowest = Constant <value = float {-3.4028234663852886e38}> ()

    places = Cast <to = 7> (ids)
    plain = Cast <to = 1> (ids)
    none = Mul (plain, zero)
    read = Add (none, one)
    seen_next = ScatterElements <axis = 1> (seen, places, read)
    penalty = Unsqueeze (repetition_penalty, rows)
    below = Less (scores, zero)
    raised = Mul (scores, penalty)
    lowered = Div (scores, penalty)
    penalized = Where (below, raised, lowered)
    was_read = Greater (seen_next, zero)
    fair = Where (was_read, penalized, scores)
    open = Where (allowed, fair, lowest)

    likeliest, tokens = TopK <axis = 1, largest = 1, sorted = 1> (open, count)
    best = Slice (likeliest, first, rows, rows)
    greedy = LessOrEqual (temperature, zero)
    divisor = Where (greedy, one, temperature)
    divisors = Unsqueeze (divisor, rows)
    distance = Sub (likeliest, best)
    cooled = Div (distance, divisors)
    weights = Exp (cooled)

    possible = Greater (likeliest, lowest)
    k = Cast <to = 1> (top_k)
    every = LessOrEqual (k, zero)
    many = Cast <to = 1> (count)
    within = Where (every, many, k)
    most = Unsqueeze (within, rows)
    among_k = Less (ranks, most)
    drawable = And (among_k, possible)
    left = Where (drawable, weights, zero)

    total = ReduceSum <keepdims = 1> (left, rows)
    shares = Div (left, total)
    before = CumSum <exclusive = 1> (shares, axis)
    p = Unsqueeze (top_p, rows)
    among_p = Less (before, p)
    all_of_them = GreaterOrEqual (p, one)
    top = Less (ranks, one)
    these = Or (among_p, all_of_them)
    with_top = Or (these, top)
    kept = Where (with_top, left, zero)

    sums = CumSum (kept, axis)
    end = Sub (count, rows)
    whole = Slice (sums, end, count, rows)
    chances = Unsqueeze (uniform, rows)
    drawn = Mul (chances, whole)
    passed = LessOrEqual (sums, drawn)
    steps = Cast <to = 1> (passed)
    position = ReduceSum <keepdims = 1> (steps, rows)
    some = Greater (kept, zero)
    ones = Cast <to = 1> (some)
    number = ReduceSum <keepdims = 1> (ones, rows)
    behind = Sub (number, one)
    ending = Max (behind, zero)
    inside = Min (position, ending)
    greedily = Unsqueeze (greedy, rows)
    chosen = Where (greedily, zero, inside)
    index = Cast <to = 7> (chosen)
    found = GatherElements <axis = 1> (tokens, index)
    below_best = LessOrEqual (open, best)
    comparable = Cast <to = 1> (below_best)
    numbers = ReduceSum <keepdims = 1> (comparable, rows)
    all_numbers = GreaterOrEqual (numbers, width)
    possible_best = Greater (best, lowest)
    sound = And (possible_best, all_numbers)
    missing = Constant <value = int64[1] {-1}> ()
    tokens_or_none = Where (sound, found, missing)
    token = Squeeze (tokens_or_none, rows)
}
"""


def append_sampler(model: ModelProto, sampling: Sampling) -> None:
    """Put a sampler behind a model, in place: inputs and outputs as `core.sampling` has them.

    Its nodes are those of the function, put in, because not every compiler takes functions. Raises ModelError for a
    model without the ids or the logits.
    """
    graph = model.graph
    inputs, outputs = ({item.name: item for item in items} for items in (graph.input, graph.output))
    ids, logits = inputs.get(sampling.ids), outputs.get(sampling.logits)
    if ids is None or logits is None:
        raise ModelError(f"the graph has no {sampling.ids!r} or no {sampling.logits!r}; `sampling` names them")
    axis = ids.type.tensor_type.shape.dim[0]
    batch = axis.dim_param or axis.dim_value
    last = _last_logits(graph, sampling.logits, len(logits.type.tensor_type.shape.dim))
    added = sampling_inputs(sampling, batch)
    graph.input.extend(_value(spec) for spec in added)
    graph.output.extend(_value(spec) for spec in sampling_outputs(sampling, batch))
    count = min(sampling.candidates, sampling.vocabulary)
    constants = {
        "ranks": np.arange(count, dtype=np.float32)[None],
        "count": np.array([count]),
        "width": np.array(sampling.vocabulary, np.float32),
    }
    graph.initializer.extend(numpy_helper.from_array(array, _PREFIX + name) for name, array in constants.items())
    given = {"logits": last, "ids": sampling.ids, "token": sampling.token, SEEN_NEXT: SEEN_NEXT}
    given |= {spec.name: spec.name for spec in added}
    function = onnx.parser.parse_function(_BODY)
    graph.node.extend(_renamed(node, given, index) for index, node in enumerate(function.node))


def _last_logits(graph: GraphProto, name: str, rank: int) -> str:
    """The logits [batch, vocabulary] of the last place."""
    if rank == 2:
        return name
    graph.initializer.append(numpy_helper.from_array(np.array(-1), _PREFIX + "last_place"))
    last = helper.make_node("Gather", [name, _PREFIX + "last_place"], [_PREFIX + "last"], axis=1, name=_PREFIX + "last")
    graph.node.append(last)
    return _PREFIX + "last"


def _renamed(node: NodeProto, given: dict[str, str], index: int) -> NodeProto:
    """A node of the function's with names that no other node of the graph has. given: those of its ends."""
    node.name = f"{_PREFIX}{index}_{node.op_type}"
    for names in (node.input, node.output):
        names[:] = [given.get(name, _PREFIX + name) for name in names]
    return node


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    return helper.make_tensor_value_info(spec.name, kind, spec.shape)
