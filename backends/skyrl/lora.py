"""LoRA adapters as SkyRL loads and serves them. Written for skyrl 0.2.0. The client of 0.1.0's HTTP stack has no call for them.
Its
trainer hands a `LoraLoadRequest` to update_named_weights(), as legacy's does. One client of 0.3.0 and later serves all names: each
call names its model (last column).

Both stacks start engines with `max_loras=1` if the configuration has a LoRA rank; from 0.3.0 on the number is a setting.
They read an adapter from a folder that the trainer writes (`lora_sync_path`), the same folder at each sync.

             legacy                                 HTTP of 0.2.0                         HTTP of 0.3.0 and later
load         update_named_weights(                  update_lora_from_disk(path), under    load_lora_adapter(name, path),
             LoraLoadRequest(lora_path)), under a   client.active_lora_name, in place     in place
             number derived from the time
answered by  the loaded adapter, if there is one:   client.active_lora_name, or the base  generate(model=), or "model" of
             a request can name none                model if there is none                sample()'s body. None is refused
chat         the base model, even if an adapter     the body's own "model"                the body's own "model". None is
             is loaded                                                                    refused
unload       not offered                            not offered                           unload_lora_adapter(name)
full weights   not while engines take adapters (SkyRL: "assume base model is already synced")
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from backends.policies import lora
from harness.contract.capability import Capability

OF_ADAPTERS = frozenset(
    {
        Capability.ADAPTER_SYNC,
        Capability.LORA,
        Capability.NAMED_MODELS,
        Capability.ADAPTER_BY_NAME,
        Capability.SEVERAL_ADAPTERS,
        Capability.UNLOAD_ADAPTER,
    }
)
"""Capabilities that only engines with adapters offer."""
EAGER_NOTE = "SkyRL's configuration switches enforce_eager off for LoRA, for speed; it stays on here"
ATTENTION = ["qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
"""Modules of a mixture that take an adapter, under the names of the checkpoint and of vLLM."""
ATTENTION_NOTE = "a mixture's adapters are for its attention only (lora_target_modules): those of experts need Triton"
MOST_AT_ONCE = 2
AT_ONCE_NOTE = (
    f'max_loras is {MOST_AT_ONCE} instead of 1: "Increase past 1 to enable multi-tenant LoRA serving via '
    'RemoteInferenceClient.load_lora_adapter" (SkyRL 0.3.0, SkyRLLoraConfig)'
)


def configure(cfg: Any, kept: int | None = None, *, experts: bool = False) -> list[str]:
    """Configure SkyRL for a policy that is trained through an adapter, whose engines keep `kept` adapters. `experts`: True if it is a
    mixture. Returns notes for the report."""
    configured = cfg.trainer.policy.model.lora
    configured.rank = lora.RANK
    configured.alpha = lora.ALPHA
    notes = [ATTENTION_NOTE] if experts else []
    if not hasattr(configured, "max_loras"):
        return notes
    configured.max_loras = MOST_AT_ONCE
    configured.max_cpu_loras = kept
    return [*notes, AT_ONCE_NOTE]


def more_engine_arguments(cfg: Any, kept: int | None, *, experts: bool) -> dict[str, Any]:
    """Arguments of engines with adapters that SkyRL's configuration has no key for (`engine_init_kwargs`)."""
    configured = cfg.trainer.policy.model.lora
    if not configured.rank:
        return {}
    keeps = {} if kept is None or hasattr(configured, "max_cpu_loras") else {"max_cpu_loras": kept}
    return keeps | ({"lora_target_modules": ATTENTION} if experts else {})


def engine_arguments(cfg: Any) -> dict[str, Any]:
    """What SkyRL's entry point adds for legacy engines (main_base.py, create_ray_wrapped_inference_engines_from_config)."""
    configured = cfg.trainer.policy.model.lora
    if not configured.rank:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": configured.rank,
        "max_loras": 1,
        "fully_sharded_loras": cfg.generator.inference_engine.fully_sharded_loras,
    }


class Adapters:
    """Adapters by name: each has a folder that the trainer writes and, in the HTTP stack of 0.2.0, its own client."""

    def __init__(self, scratch: str, model_path: str) -> None:
        self._folder = Path(scratch) / "lora"
        self._model_path = model_path
        self.names: set[str] = set()
        """Names that were loaded, or may have been."""
        self.clients: dict[str, Any] = {}

    def written(self, name: str, version: int, *, half: bool = False, wrong: str | None = None) -> str:
        """Write this version, or half of it, to the adapter's folder, and return the folder. `wrong` as in `LoadLoraRequest`."""
        self.names.add(name)
        folder = self._folder / name.replace("/", "_")  # the base model's name is its path
        if wrong == "folder":
            return str(folder.with_name(f"{folder.name}-missing"))
        lora.write(folder, self._model_path, version, 2 * lora.RANK if wrong == "rank" else lora.RANK)
        if half:
            lora.cut(folder)
        return str(folder)

    def client(self, name: str, base: Any) -> Any:
        """The client of an adapter in 0.2.0: a pickled copy of `base` with the adapter's name."""
        if name not in self.clients:
            self.clients[name] = pickle.loads(pickle.dumps(base))
            self.clients[name].active_lora_name = name
        return self.clients[name]
