"""How far rounding moves right answers: in the reference's own arithmetic, and in a bare engine's. No stack takes part.

Both are measured on random contexts against the reference's forward pass. It runs in float32 if the engine computes in 16 bits,
and in double precision if the engine computes in float32.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from backends.vllm.bare import Answered, Asked, Row
from harness import PROJECT
from harness.records.reference import Moved

ROWS, TOKENS, BEST = 16, 96, 4
"""For the reference's own arithmetic: contexts, tokens per context, and most probable tokens that count at each position."""
ENGINE_TOKENS, ENGINE_BEST = 32, 16
"""For the bare engine: tokens by which it continues each context, and most probable tokens that count at each position."""
ENGINE_DEADLINE_S = 900
FARTHEST = 8.0
"""An engine's largest error is at most this many times the reference's own in that dtype: a larger error is not rounding."""

Logprobs = Callable[[list[int]], torch.Tensor]
"""Tokens → log-probabilities of the token after each: positions × vocabulary."""


def contexts(vocabulary: int) -> list[list[int]]:
    """Random tokens: `ROWS` × `TOKENS`."""
    dice = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(vocabulary, (ROWS, TOKENS), generator=dice).tolist()
    return found


def of_arithmetic(exact: Logprobs, rounded: Logprobs, rows: Iterable[list[int]]) -> Moved:
    """Errors of the most probable tokens at each position, and of one token drawn at random."""
    dice = torch.Generator().manual_seed(0)
    moved = []
    for row in rows:
        right = exact(row)
        best = right.topk(BEST, dim=1).indices
        chosen = torch.cat([best, torch.multinomial(right.exp(), 1, generator=dice)], dim=1)
        moved.append((rounded(row) - right).gather(1, chosen))
    return _moved(torch.cat(moved))


def of_engine(exact: Logprobs, asked: Asked, answered: Answered) -> dict[str, Moved]:
    """Errors of the most probable tokens at each position, for each way of asking the engine."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def right(row: Row) -> torch.Tensor:
        prompt = asked.prompts[row.prompt]
        read = (*prompt, *row.tokens)
        if read not in known:  # every way nearly always gives the same tokens
            known[read] = exact(list(read))[len(prompt) - 1 : -1]
        return known[read]

    def moved(row: Row) -> torch.Tensor:
        values = [
            got - float(expected[token])
            for expected, position in zip(right(row), row.logprobs, strict=True)
            for token, got in position.items()
        ]
        return torch.tensor(values, dtype=torch.float64)

    return {way: _moved(torch.cat([moved(row) for row in rows])) for way, rows in answered.rows.items()}


def bare_engine(asked: Asked) -> Answered:
    """Start an engine, ask it and end it. Raises RuntimeError with the end of its log if it fails."""
    command = [sys.executable, "-m", "backends.vllm.bare"]
    sent = msgspec.json.encode(asked)
    done = subprocess.run(command, input=sent, cwd=PROJECT, capture_output=True, timeout=ENGINE_DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the bare engine failed:\n{(done.stdout + done.stderr).decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(Path(asked.answers).read_bytes(), type=Answered)


def check(reference: Moved, engine: dict[str, Moved]) -> None:
    """Raises ValueError if an engine's errors exceed rounding: they would hide the errors of stacks."""
    for way, moved in engine.items():
        if not moved.largest <= FARTHEST * reference.largest:
            raise ValueError(
                f"a bare engine is {moved.largest:.3g} nats off (prompts {way}), {FARTHEST:g} times more than what rounding "
                f"does to the reference ({reference.largest:.3g}): this is no noise"
            )


def _moved(differences: torch.Tensor) -> Moved:
    return Moved(
        numbers=differences.numel(),
        largest=float(differences.abs().max()),
        rms=float(differences.square().mean().sqrt()),
        quarter=float(differences.abs().quantile(0.25)),
    )
