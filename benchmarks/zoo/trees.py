"""Two ensembles of decision trees as ONNX graphs: a forest and boosted trees, grown here on scikit-learn's digits.

    python -m benchmarks.zoo.trees forest|boosted OUT

No package is known that ships one under a free licence. skl2onnx writes them, out of the environment of `peers`.
"""

import sys
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier

GROWN = {
    "forest": RandomForestClassifier(n_estimators=60, max_depth=10, random_state=0, n_jobs=1),
    "boosted": GradientBoostingClassifier(n_estimators=30, random_state=0),
}


def write_trees(kind: str, path: Path) -> None:
    """Grow trees on every other digit and write them."""
    from skl2onnx import to_onnx

    digits = load_digits()
    trees = GROWN[kind].fit(digits.data[::2].astype("f4"), digits.target[::2])
    model = to_onnx(
        trees, digits.data[:1].astype("f4"), options={"zipmap": False}, target_opset={"": 17, "ai.onnx.ml": 3}
    )
    path.write_bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    write_trees(sys.argv[1], Path(sys.argv[2]))
