"""Branches and loops."""

from functools import partial

import numpy as np

from tests.conformance.torture.graph import add as add_graph
from tests.conformance.torture.graph import noise

add = partial(add_graph, words=r"If|Loop|Scan|control flow|cond|sub-?graph|decides")


def _both(sizes, rng):
    return {"cond": np.array(bool(sizes["n"] % 2))}


add(
    "if_by_an_input",
    """g (bool cond, float[n, 4] x) => (float[n, 4] y) {
        y = If (cond) <then_branch = t () => (float[n, 4] a) { a = Relu(x) },
                       else_branch = e () => (float[n, 4] b) { b = Neg(x) }>
    }""",
    feeds=({"n": 1}, {"n": 4}, {"n": 5}),
    fill=_both,
)
add(
    "if_by_the_data",
    """g (float[n, 4] x) => (float[n, 4] y) {
        sum = ReduceSum <keepdims = 0> (x)
        zero = Constant <value = float {0}> ()
        cond = Greater (sum, zero)
        y = If (cond) <then_branch = t () => (float[n, 4] a) { a = Mul(x, x) },
                       else_branch = e () => (float[n, 4] b) { b = Abs(x) }>
    }""",
)
add(
    "if_with_a_weight_of_the_outer_graph",
    """g (bool cond, float[n, 4] x) => (float[n, 3] y) {
        y = If (cond) <then_branch = t () => (float[n, 3] a) { a = MatMul(x, w) },
                       else_branch = e () => (float[n, 3] b) { m = MatMul(x, w) b = Neg(m) }>
    }""",
    {"w": noise(1, 4, 3)},
    feeds=({"n": 1}, {"n": 4}),
    fill=_both,
)
_TURNS = """body (int64 i, bool go, float[4] s) => (bool again, float[4] t, float[4] each) {
            again = Identity(go) two = Constant <value = float {2}> () t = Mul(s, two) each = Neg(s) }"""
add(
    "loop_of_three_turns",
    f"""g (float[4] x) => (float[4] y, float[k, 4] all) {{
        times = Constant <value = int64 {{3}}> ()
        yes = Constant <value = bool {{1}}> ()
        y, all = Loop (times, yes, x) <body = {_TURNS}>
    }}""",
)
add(
    "loop_as_often_as_an_input_says",
    f"""g (int64 times, float[4] x) => (float[4] y, float[k, 4] all) {{
        yes = Constant <value = bool {{1}}> ()
        y, all = Loop (times, yes, x) <body = {_TURNS}>
    }}""",
    feeds=({}, {}, {}),
    fill=lambda sizes, rng: {"times": np.array(rng.integers(0, 5))},
)
add(
    "loop_until_the_data_says_stop",
    """g (float[2] x) => (float[2] y) {
        yes = Constant <value = bool {1}> ()
        many = Constant <value = int64 {50}> ()
        y = Loop (many, yes, x) <body = body (int64 i, bool go, float[2] s) => (bool again, float[2] t) {
            two = Constant <value = float {2}> () hundred = Constant <value = float {100}> ()
            t = Mul(s, two) size = Abs(t) most = ReduceMax <keepdims = 0> (size) again = Less(most, hundred) }>
    }""",
)
_DOUBLED = """body (int64 i, bool go, float[2] s) => (bool again, float[2] t) {
            again = Identity(go) t = Add(s, s) }"""
add(
    "loop_that_an_input_lets_begin",
    f"""g (bool cond, float[2] x) => (float[2] y) {{
        times = Constant <value = int64 {{3}}> ()
        y = Loop (times, cond, x) <body = {_DOUBLED}>
    }}""",
    feeds=({"n": 0}, {"n": 1}),
    fill=_both,
)
add(
    "loop_that_never_begins",
    f"""g (float[2] x) => (float[2] y) {{
        times = Constant <value = int64 {{3}}> ()
        no = Constant <value = bool {{0}}> ()
        y = Loop (times, no, x) <body = {_DOUBLED}>
    }}""",
)
add(
    "loop_that_the_outer_graph_stops",
    """g (bool cond, float[2] x) => (float[2] y) {
        times = Constant <value = int64 {3}> ()
        yes = Constant <value = bool {1}> ()
        y = Loop (times, yes, x) <body = body (int64 i, bool go, float[2] s) => (bool again, float[2] t) {
            again = Identity(cond) t = Add(s, s) }>
    }""",
    feeds=({"n": 0}, {"n": 1}),
    fill=_both,
)
add(
    "loop_that_collects_until_it_stops",
    """g (float[2] x) => (float[2] y, float[k, 2] all) {
        yes = Constant <value = bool {1}> ()
        many = Constant <value = int64 {50}> ()
        y, all = Loop (many, yes, x) <body = body (int64 i, bool go, float[2] s)
            => (bool again, float[2] t, float[2] each) {
            four = Constant <value = int64 {4}> () again = Less(i, four) t = Add(s, x) each = Neg(s) }>
    }""",
)
add(
    "loop_within_a_loop",
    """g (float[2] x) => (float[2] y) {
        times = Constant <value = int64 {3}> ()
        yes = Constant <value = bool {1}> ()
        y = Loop (times, yes, x) <body = body (int64 i, bool go, float[2] s) => (bool again, float[2] t) {
            again = Identity(go)
            t = Loop (times, go, s) <body = inner (int64 j, bool on, float[2] u) => (bool more, float[2] v) {
                more = Identity(on) turn = Add(i, j) f = Cast <to = 1> (turn) v = Add(u, f) }> }>
    }""",
)
add(
    "if_within_a_loop",
    """g (float[4] x) => (float[4] y) {
        times = Constant <value = int64 {4}> ()
        yes = Constant <value = bool {1}> ()
        y = Loop (times, yes, x) <body = body (int64 i, bool go, float[4] s) => (bool again, float[4] t) {
            again = Identity(go) one = Constant <value = int64 {1}> () early = LessOrEqual(i, one)
            t = If (early) <then_branch = t () => (float[4] a) { a = Add(s, x) },
                            else_branch = e () => (float[4] b) { b = Neg(s) }> }>
    }""",
)
add(
    "scan_of_running_sums",
    """g (float[3] start, float[n, 3] x) => (float[3] last, float[n, 3] y) {
        last, y = Scan <num_scan_inputs = 1, body = body (float[3] s, float[3] e) => (float[3] t, float[3] o) {
            t = Add(s, e) o = Identity(t) }> (start, x)
    }""",
)
add(
    "scan_whose_pieces_are_summed",
    """g (float[3] start, float[n, 3] x) => (float[3] y) {
        last, all = Scan <num_scan_inputs = 1, body = body (float[3] s, float[3] e) => (float[3] t, float[3] o) {
            t = Add(s, e) o = Neg(s) }> (start, x)
        rows = Constant <value = int64[1] {0}> ()
        sum = ReduceSum <keepdims = 0> (all, rows)
        y = Add(sum, last)
    }""",
)
