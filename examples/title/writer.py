"""Writes a title token by token: runs the encoder once, and the decoder for each token, the likeliest one."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

# The model's own settings (traceforge-toolkit 0.1.5, traceforge/title/inference.py).
PREFIX = "summarize agent step: "
BEGIN, END = 0, 1
REPETITION_PENALTY = 1.3
MOST_TOKENS = 24


class TitleWriter:
    """Writes titles with two graphs. encode, decode: run one on its inputs, by name, and return its only output."""

    def __init__(self, encode, decode, tokenizer: Path) -> None:
        self._encode, self._decode = encode, decode
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(128)

    def encode(self, text: str) -> list[int]:
        """The ids that the encoder reads."""
        return self._tokenizer.encode(PREFIX + text).ids

    def tokens(self, text: str) -> list[int]:
        """The token ids of a title, with its begin and end."""
        ids = np.array([self.encode(text)], np.int64)
        mask = np.ones_like(ids)
        hidden_states = self._encode({"input_ids": ids, "attention_mask": mask})
        token_ids = [BEGIN]
        while token_ids[-1] != END and len(token_ids) < MOST_TOKENS:
            inputs = {"input_ids": np.array([token_ids], np.int64), "encoder_hidden_states": hidden_states}
            logits = self._decode({**inputs, "encoder_attention_mask": mask})[0, -1].astype(np.float32)
            logit = logits[token_ids]  # Keskar et al., 2019
            logits[token_ids] = np.where(logit < 0, logit * REPETITION_PENALTY, logit / REPETITION_PENALTY)
            token_ids.append(int(logits.argmax()))
        return token_ids

    def write(self, text: str) -> str:
        """A title for an agent's step."""
        return self._tokenizer.decode(self.tokens(text))
