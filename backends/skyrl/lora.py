"""LoRA adapters in SkyRL's own ways. Written for skyrl 0.2.0. The client of 0.1.0's HTTP stack has no call for them.

Both stacks start engines with `max_loras=1` where the configuration has a LoRA rank, and read an adapter from a folder that the
trainer writes (`lora_sync_path`), one and the same at each sync.

               legacy                                                    HTTP
load           update_named_weights(LoraLoadRequest(lora_path)), under a  client.update_lora_from_disk(path), under
               number made of the time                                    client.active_lora_name, in place
answered by    the one adapter that is loaded, if there is one: requests  the name that goes as "model" with a request; a
               cannot say which, nor that none is meant                   client has one name, or none for the base model
chat           the base model, whatever is loaded                         the body's own "model"
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
"""What only engines that take adapters offer."""
EAGER_NOTE = "SkyRL's entry point switches enforce_eager off for LoRA, for speed; it stays on here"


def configure(cfg: Any) -> None:
    """SkyRL's configuration of a policy that is trained through an adapter."""
    cfg.trainer.policy.model.lora.rank = lora.RANK
    cfg.trainer.policy.model.lora.alpha = lora.ALPHA


def engine_arguments(cfg: Any) -> dict[str, Any]:
    """What SkyRL's entry point adds for the legacy engines (main_base.py, create_ray_wrapped_inference_engines_from_config)."""
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
    """Adapters by name: the folder that the trainer writes each to, and, for the HTTP stack, the client that asks under it."""

    def __init__(self, scratch: str, model_path: str) -> None:
        self._folder = Path(scratch) / "lora"
        self._model_path = model_path
        self.clients: dict[str, Any] = {}

    def written(self, name: str, version: int) -> str:
        """The folder of an adapter, which holds this version from now on."""
        folder = self._folder / name
        lora.write(folder, self._model_path, version)
        return str(folder)

    def client(self, name: str, base: Any) -> Any:
        """The HTTP client of an adapter: `base`, as it is handed to another process, with the adapter's name."""
        if name not in self.clients:
            self.clients[name] = pickle.loads(pickle.dumps(base))
            self.clients[name].active_lora_name = name
        return self.clients[name]
