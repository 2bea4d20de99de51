"""LoRA adapters as SkyRL loads and serves them. Written for skyrl 0.2.0. The client of 0.1.0's HTTP stack has no call for them.
That of 0.3.0 and later loads them under names (`load_lora_adapter`), and a request names its model.

Both stacks start engines with `max_loras=1` if the configuration has a LoRA rank. They read an adapter from a folder that the
trainer writes (`lora_sync_path`), the same folder at each sync.

               legacy                                                    HTTP
load           update_named_weights(LoraLoadRequest(lora_path)), under a  client.update_lora_from_disk(path), under
               number derived from the time                               client.active_lora_name, in place
answered by    the loaded adapter, if there is one: a request can name    the adapter named as "model" in a request; a
               neither an adapter nor the base model                      client has one name, or none for the base model
chat           the base model, even if an adapter is loaded               the body's own "model"
unload         not offered                                                not offered by the client
full weights   not while engines take adapters (SkyRL: "assume base model is already synced")
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from backends.policies import lora
from harness.contract.capability import Capability

OF_ADAPTERS = frozenset(
    {Capability.LORA, Capability.ADAPTER_BY_NAME, Capability.SEVERAL_ADAPTERS, Capability.UNLOAD_ADAPTER}
)
"""Capabilities that only engines with adapters offer."""
EAGER_NOTE = "SkyRL's entry point switches enforce_eager off for LoRA, for speed; it stays on here"


def configure(cfg: Any) -> None:
    """Configure SkyRL for a policy that is trained through an adapter."""
    cfg.trainer.policy.model.lora.rank = lora.RANK
    cfg.trainer.policy.model.lora.alpha = lora.ALPHA


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
    """Adapters by name: each has a folder that the trainer writes and, in the HTTP stack, its own client."""

    def __init__(self, scratch: str, model_path: str) -> None:
        self._folder = Path(scratch) / "lora"
        self._model_path = model_path
        self.clients: dict[str, Any] = {}

    def written(self, name: str, version: int) -> str:
        """Write this version to the adapter's folder, and return the folder."""
        folder = self._folder / name
        lora.write(folder, self._model_path, version)
        return str(folder)

    def client(self, name: str, base: Any) -> Any:
        """The HTTP client of an adapter: a pickled copy of `base` with the adapter's name."""
        if name not in self.clients:
            self.clients[name] = pickle.loads(pickle.dumps(base))
            # from 0.3.0 on a client has no active adapter, and its requests name a model
            own = "active_lora_name" if hasattr(base, "active_lora_name") else "model_name"
            setattr(self.clients[name], own, name)
        return self.clients[name]
