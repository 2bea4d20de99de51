"""Imported once by the fork server: the imports that a start consists of."""

import skyrl.backends.skyrl_train.inference_servers.vllm_server_actor  # noqa: F401 - for its effect
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core  # noqa: F401 - for its effect
