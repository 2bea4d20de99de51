"""A bare vLLM engine, without a stack around it: shows how its own arithmetic moves right answers.

``python -m backends.vllm.bare`` reads an `Asked` from stdin and writes an `Answered` to the file that it names. It asks for the
same prompts in every way in which an engine may compute them: differences between the ways are the engine's rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backends.vllm import patches
from backends.vllm.environment import CPU_VARIABLES, VARIABLES
from backends.vllm.probes import BATCH_INVARIANT

FEW = 4
"""Prompts of a small batch."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Continue each of `prompts`, all of one length, greedily by `tokens` tokens. At each position, return the `best` most probable
    tokens with their log-probabilities. The answers go to the file `answers`."""

    model_path: str
    dtype: str
    cpu: bool
    cuda_graphs: bool
    batch_invariant: bool
    experts: bool
    """True if the model is a mixture of experts."""
    prompts: list[list[int]]
    tokens: int
    best: int
    answers: str

    @property
    def longest(self) -> int:
        return len(self.prompts[0]) + self.tokens


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One continued prompt: at each position, the token and the log-probabilities by token id."""

    prompt: int
    tokens: list[int]
    logprobs: list[dict[int, float]]


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Way of asking → rows."""

    rows: dict[str, list[Row]]


def main() -> None:
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    os.environ.update(VARIABLES)
    os.environ.update(CPU_VARIABLES if asked.cpu else {})
    os.environ[BATCH_INVARIANT] = "1" if asked.batch_invariant else "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if asked.cpu:
        for patch in (*patches.CPU, *(patches.experts_on_cpu() if asked.experts else ())):
            patch.apply()
    answered = Answered(rows={name: list(rows) for name, rows in _ways(asked, _engine(asked))})
    Path(asked.answers).write_bytes(msgspec.json.encode(answered))


def _engine(asked: Asked) -> Any:
    """An engine whose step may read only about half of the prompts at once, so that it reads large batches in chunks."""
    from vllm import LLM

    memory: dict[str, Any] = (
        {"num_gpu_blocks_override": 256, "gpu_memory_utilization": 0.05}
        if asked.cpu
        else {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**30}
    )
    return LLM(
        model=asked.model_path,
        dtype=asked.dtype,
        enforce_eager=not asked.cuda_graphs,
        enable_prefix_caching=True,
        max_model_len=asked.longest,
        max_num_batched_tokens=max(asked.longest, sum(map(len, asked.prompts)) // 2 + 1),
        max_num_seqs=64,
        max_logprobs=asked.best + 1,
        disable_log_stats=True,
        **memory,
    )


def _ways(asked: Asked, engine: Any) -> Iterator[tuple[str, Iterator[Row]]]:
    every = range(len(asked.prompts))
    for name, batch, forget in (
        ("alone", 1, True),
        (f"by {FEW}", FEW, True),
        ("all, in chunks", len(every), True),
        ("all again", len(every), True),
        ("all, cached", len(every), False),
    ):
        if forget:
            engine.reset_prefix_cache()
        yield name, _continued(asked, engine, [every[at : at + batch] for at in every[::batch]])


def _continued(asked: Asked, engine: Any, batches: Sequence[Sequence[int]]) -> Iterator[Row]:
    from vllm import SamplingParams

    for batch in batches:
        params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True, logprobs=asked.best)
        prompts = [{"prompt_token_ids": asked.prompts[number]} for number in batch]
        for number, output in zip(batch, engine.generate(prompts, params, use_tqdm=False), strict=True):
            made = output.outputs[0]
            yield Row(
                prompt=number,
                tokens=list(made.token_ids),
                logprobs=[{token: found.logprob for token, found in position.items()} for position in made.logprobs],
            )


if __name__ == "__main__":
    main()
