"""The imports of a start. The fork server imports this module once."""

import skyrl.backends.skyrl_train.inference_servers.vllm_server_actor  # noqa: F401 - for its effect
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core  # noqa: F401 - for its effect
