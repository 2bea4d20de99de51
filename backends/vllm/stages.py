"""Stages of an engine's start in its log, for the driver's progress line. Taken from vLLM 0.16 and 0.19."""

from __future__ import annotations

STAGES = {
    r"Initializing a V1 LLM engine": "an engine's process is up",
    r"Starting to load model": "loading weights",
    r"Loading safetensors checkpoint shards:\s+(\d+%)": r"loading weights, \1",
    r"Loading weights took": "weights are loaded",
    r"vLLM's torch\.compile|Dynamo bytecode transform|Compiling a graph": "compiling",
    r"torch\.compile (takes|took)": "compiled",
    r"Capturing CUDA graphs[^:]*:\s+(\d+%)": r"capturing CUDA graphs, \1",
    r"Graph capturing finished": "CUDA graphs are captured",
    r"init engine \(": "an engine is ready",
}
"""Pattern of a log line → stage, as a template for `re.Match.expand`. Several engines write into one log."""
