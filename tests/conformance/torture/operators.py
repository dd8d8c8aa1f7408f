"""Single operators at the edges of what they are defined for."""

import numpy as np

from tests.conformance.torture.graph import add

add(
    "power_of_numbers_below_zero_by_an_input",
    "g (float[n, 4] x, float[4] e) => (float[n, 4] y) { y = Pow(x, e) }",
    fill=lambda sizes, rng: {
        "x": rng.choice([-3.0, -0.5, -1.0, 0.0, 2.0], (sizes["n"], 4)).astype("f"),
        "e": np.array([0, 1, 2, 3], "f"),
    },
    words="Pow",
)
add(
    "averages_of_windows_beyond_the_edge",
    """g (float[1, 2, 8, 8] x) => (float[1, 2, 4, 4] y) {
        y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1, count_include_pad = 1> (x) }""",
    words="AveragePool|ceil_mode",
)
add(
    "division_of_unsigned_numbers",
    "g (uint8[4] a, uint8[4] b) => (uint8[4] y, uint8[4] z) { y = Div(a, b) z = Add(a, b) }",
    fill=lambda sizes, rng: {"a": np.array([200, 255, 7, 128], "uint8"), "b": np.array([3, 2, 2, 200], "uint8")},
    words="Div|unsigned|uint8",
)
add(
    "normalization_of_zeros",
    "g (float[n, 4] x) => (float[n, 4] y) { y = LpNormalization <axis = 1> (x) }",
    opset=22,
    fill=lambda sizes, rng: {"x": np.array([[0, 0, 0, 0], [3, 0, -4, 0]] * 4, "f")[: sizes["n"]]},
    words="LpNormalization",
)
add(
    "clip_of_unsigned_numbers",
    "g (uint8[4] x) => (float[4] y) { c = Clip(x, low, high) y = Cast <to = 1> (c) }",
    {"low": np.array(10, "uint8"), "high": np.array(130, "uint8")},
    fill=lambda sizes, rng: {"x": np.array([200, 255, 7, 128], "uint8")},
    words="Clip|unsigned|uint8",
)
