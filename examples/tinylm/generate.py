"""Writes text with a pulled engine, byte by byte: `python generate.py "The value of"`, after `enginesmith build`."""

import argparse
from tempfile import TemporaryDirectory

import enginesmith
from enginesmith.core.errors import EnginesmithError
from enginesmith.generation import Prompt, SamplingSettings


def pull(registry: str, precision: str, dest: str) -> enginesmith.Generator:
    """A generator over the newest engine of a precision for this machine's CPU."""
    engine = enginesmith.pull("tinylm:candidate", registry=registry, target="cpu", precision=precision, dest=dest)
    return enginesmith.Generator.opened(engine)


def main() -> None:
    """Pull, and print each prompt with its answer, or the reason why there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--registry", default="registry")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--count", type=int, help="bytes to write; default: until the caches are full")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest byte")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        answers = answer(options)
    except EnginesmithError as error:
        raise SystemExit(f"error: {error}") from error
    for text, prompt in zip(options.prompts, answers, strict=True):
        print(text + bytes(prompt).decode(errors="replace"))


def answer(asked: argparse.Namespace) -> list[list[int]]:
    """The bytes after each prompt."""
    settings = SamplingSettings(asked.temperature, asked.top_k, asked.top_p, asked.repetition_penalty)
    prompts = [Prompt(text.encode(), settings, asked.count, asked.seed) for text in asked.prompts]
    with TemporaryDirectory() as folder:
        return pull(asked.registry, asked.precision, folder).generate(prompts)


if __name__ == "__main__":
    main()
