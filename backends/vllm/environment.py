"""Environment variables of vLLM's processes, the same for every stack that runs vLLM and for the bare engine."""

CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""For a CPU run: small caches, no pinning."""

VARIABLES = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""For every run: loopback, no network, no telemetry. Dev mode opens the control plane."""
