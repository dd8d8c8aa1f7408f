"""Speech at 16 kHz: sentences of this project's documents, spoken by espeak-ng out of the package espeakng-loader."""

import ctypes
import re
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from benchmarks.zoo.packages import unpack
from enginesmith.arrays import Array

RATE = 16_000
_ESPEAK_RATE = 22_050  # of espeak-ng's formant synthesis
_VOICES = ("en-us", "en-gb-x-rp", "de", "fr", "es", "it", "sv", "pl")
_SENTENCES = 32
_SYNCHRONOUS, _UTF8 = 2, 1  # AUDIO_OUTPUT_SYNCHRONOUS and espeakCHARS_UTF8 of espeak-ng/speak_lib.h


@cache
def speech() -> Array:
    """Sentences with pauses between them, several minutes: float32 [samples] in -1..1, equal in every process.

    Raises SystemExit where the library does not speak: nothing stands in for it.
    """
    page = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
    sentences = re.findall(r"[A-Z][a-z][^.`|\[\]*#]{40,200}\.", " ".join(page.split()))[:_SENTENCES]
    library = _open_library()
    pause, spoken_clips = np.zeros(_ESPEAK_RATE // 2, np.float32), list[Array]()
    for sentence, voice in zip(sentences, islice(cycle(_VOICES), len(sentences)), strict=True):
        spoken_clips += [_speak(library, sentence, voice), pause]
    sound = np.concatenate(spoken_clips)
    return np.asarray(resample_poly(sound, 320, 441), np.float32)


def cut_speech(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Pieces of the sentences, with a little noise: float32 of `shape`, whose last axis is time."""
    whole_array, length = speech(), shape[-1]
    starts = generator.integers(0, len(whole_array) - length, int(np.prod(shape[:-1])))
    pieces = np.stack([whole_array[start : start + length] for start in starts])
    return np.asarray(pieces + 0.001 * generator.standard_normal(pieces.shape), np.float32).reshape(shape)


def _open_library() -> ctypes.CDLL:
    folder = unpack("espeakng-loader", "espeakng_loader")
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), 0)
    if rate != _ESPEAK_RATE:
        raise SystemExit(f"espeak-ng does not start (it says {rate}); remove {folder} and try again")
    return library


def _speak(library: ctypes.CDLL, text: str, voice: str) -> Array:
    """float32 [samples] at espeak-ng's rate."""
    clips = list[Array]()
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

    def receive(wave: "ctypes._Pointer[ctypes.c_short]", count: int, _: int) -> int:
        if wave and count:
            clips.append(np.ctypeslib.as_array(wave, (count,)).copy())
        return 0

    callback, data = kind(receive), text.encode()
    library.espeak_SetSynthCallback(callback)
    error_code = library.espeak_SetVoiceByName(voice.encode())
    error_code = error_code or library.espeak_Synth(data, len(data) + 1, 0, 0, 0, _UTF8, None, None)
    if error_code or not clips:
        raise SystemExit(f"espeak-ng says nothing in the voice {voice!r} (error {error_code}): {text[:60]!r}")
    return np.concatenate(clips).astype(np.float32) / 32768
