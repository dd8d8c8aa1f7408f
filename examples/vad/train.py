"""Trains the example once on synthesized voices, and writes the example's data files.

Run `python train.py` in this folder; the result is committed. The seed fixes all but the last digits, which differ with
the machine and with the version of torch.

A voice is a source-filter synthesis (Klatt, "Software for a cascade/parallel formant synthesizer", 1980): pulses of a
gliding pitch through three resonances of a vowel, and hissing consonants. It is mixed with other sounds: noises of
several colours, hum, beeps, clicks.
"""

from pathlib import Path

import numpy as np
import torch
from model import FRAME, RATE, TAIL, WIDTH, build
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
SEED, CLIPS, SECONDS, STEPS, BATCH = 20, 256, 3, 240, 32
# Formants in Hz of a man's vowels (Peterson and Barney, 1952): heed, hid, head, had, hod, hawed, hood, who'd, hud.
VOWELS = (
    (270, 2290, 3010), (390, 1990, 2550), (530, 1840, 2480), (660, 1720, 2410), (730, 1090, 2440),
    (570, 840, 2410), (440, 1020, 2240), (300, 870, 2240), (640, 1190, 2390),
)  # fmt: skip
# Clips of each file.
SIZES = {"calibration": 4, "golden": 4, "held_out": 32}


def clip(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A sound (float32, in [-1, 1]) of SECONDS, and for each frame of it whether a voice is heard (int64)."""
    sound, voiced_array = np.zeros(SECONDS * RATE), np.zeros(SECONDS * RATE, bool)
    position = int(rng.uniform(0, 1.5) * RATE)
    while position < len(sound):
        phrase = speak(rng)[: len(sound) - position]
        sound[position : position + len(phrase)] += phrase
        voiced_array[position : position + len(phrase)] = True
        position += len(phrase) + int(rng.uniform(0.4, 1.6) * RATE)
    sound *= rng.uniform(0.1, 0.5) / max(np.abs(sound).max(), 1e-9)
    received_array = np.clip(sound + surroundings(rng, len(sound)), -1, 1)
    sound = np.round(received_array * 32767).astype(np.float32) / 32768  # as a file of 16 bits has it
    return sound, (voiced_array.reshape(-1, FRAME).mean(1) > 0.5).astype(np.int64)


def speak(rng: np.random.Generator) -> np.ndarray:
    """A phrase of two to six syllables, each a consonant and a vowel."""
    pitch, size = rng.uniform(85, 240), rng.uniform(0.9, 1.25)
    return np.concatenate([part for _ in range(rng.integers(2, 7)) for part in syllable(rng, pitch, size)])


def syllable(rng: np.random.Generator, pitch: float, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Its consonant, a short noise, and its vowel: pulses of a gliding pitch (Hz) through formants times `size`."""
    consonant = resonate(rng.normal(size=int(rng.uniform(0.02, 0.08) * RATE)), rng.uniform(2000, 6000), 1500)
    count = int(rng.uniform(0.1, 0.25) * RATE)
    glide = pitch * np.linspace(rng.uniform(0.85, 1.15), rng.uniform(0.85, 1.15), count)
    vowel = np.diff(np.floor(np.cumsum(glide) / RATE), prepend=0) + rng.normal(0, 0.01, count)
    for formant, width in zip(VOWELS[rng.integers(len(VOWELS))], (80, 100, 140), strict=True):
        vowel = resonate(vowel, formant * size, width)
    return fade(consonant) * rng.uniform(0.05, 0.3), fade(vowel)


def resonate(sound: np.ndarray, frequency: float, width: float) -> np.ndarray:
    """A sound through a resonance of a frequency and a width in Hz, by the first 40 ms of its impulse response."""
    time = np.arange(RATE // 25) / RATE
    response = np.exp(-np.pi * width * time) * np.sin(2 * np.pi * frequency * time)
    count = len(sound) + len(response)
    return np.fft.irfft(np.fft.rfft(sound, count) * np.fft.rfft(response, count), count)[: len(sound)]


def fade(sound: np.ndarray) -> np.ndarray:
    """A sound of peak 1 that begins and ends softly."""
    edge = np.minimum(1, np.minimum(np.arange(len(sound)), np.arange(len(sound))[::-1]) / (0.01 * RATE))
    return sound * edge / max(np.abs(sound).max(), 1e-9)


def surroundings(rng: np.random.Generator, count: int) -> np.ndarray:
    """Sounds without a voice, `count` samples: coloured noise, and often hum, beeps or clicks."""
    spectrum = np.fft.rfft(rng.normal(size=count))
    noise = np.fft.irfft(spectrum / np.maximum(np.arange(len(spectrum)), 50) ** rng.uniform(0, 1), count)
    sound = noise / noise.std() * 10 ** rng.uniform(-4, -1.7)
    time = np.arange(count) / RATE
    if rng.random() < 0.3:
        sound += rng.uniform(0.005, 0.05) * np.sign(np.sin(2 * np.pi * rng.choice([50, 60, 100, 120]) * time))
    for _ in range(rng.poisson(1.5)):
        begin, length = int(rng.uniform(0, count)), int(rng.uniform(0.05, 0.6) * RATE)
        beep = np.sin(2 * np.pi * rng.uniform(300, 4000) * time[:length])
        knock = rng.normal(size=length) * np.exp(-time[:length] / rng.uniform(0.005, 0.05))
        event = rng.uniform(0.02, 0.4) * (beep if rng.random() < 0.5 else knock)
        sound[begin : begin + length] += event[: count - begin]
    return sound


def clips(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sounds (count, frames, 320) float32, and voice (count, frames) int64."""
    sounds, voices = zip(*(clip(rng) for _ in range(count)), strict=True)
    return np.stack(sounds).reshape(count, -1, FRAME), np.stack(voices)


def listen(model: nn.Module, sounds: torch.Tensor) -> torch.Tensor:
    """Logits (clips, frames, 2) of sounds (clips, frames, 320): computes all spectra, then frame after frame."""
    with torch.no_grad():
        spectra = model.spectra(nn.functional.pad(sounds.flatten(1), (TAIL, 0)))
    memory, answers = sounds.new_zeros(len(sounds), WIDTH), []
    for frame in model.features(spectra.unflatten(1, (-1, 2)).flatten(2)).unbind(1):
        memory = model.memory(frame, memory)
        answers.append(memory)
    return model.decide(torch.stack(answers, 1))


def train(sounds: torch.Tensor, voices: torch.Tensor) -> nn.Module:
    """Train from scratch with AdamW and a one-cycle learning rate."""
    torch.manual_seed(SEED)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    for step in range(STEPS):
        pick = torch.randint(len(sounds), (BATCH,))
        loss = nn.functional.cross_entropy(listen(model, sounds[pick]).flatten(0, 1), voices[pick].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 40 == 0:
            print(f"step {step}: {loss.item():.3f} nats a frame", flush=True)
    return model.eval()


def main() -> None:
    """Write weights.safetensors, calibration.npz, golden.npz and held_out.npz."""
    rng = np.random.default_rng(SEED)
    model = train(*map(torch.from_numpy, clips(rng, CLIPS)))
    save_file(model.state_dict(), HERE / "weights.safetensors")
    for name, count in SIZES.items():
        sounds, voices = clips(rng, count)
        with torch.no_grad():
            guesses = listen(model, torch.from_numpy(sounds)).argmax(-1).numpy()
        print(f"{name}: {count} clips, {(guesses == voices).mean():.4f} of the frames are right")
        if name != "held_out":
            frames = voices.shape[1]
            arrays = {"sound": sounds.reshape(-1, FRAME), "clip": np.arange(count).repeat(frames)}
            np.savez_compressed(
                HERE / f"{name}.npz", **arrays, **({"voice": voices.ravel()} if name == "golden" else {})
            )


if __name__ == "__main__":
    main()
