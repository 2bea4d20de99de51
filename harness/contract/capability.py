"""What a stack may be able to do beyond `generate`. One documented member per optional ability.

A target declares its capabilities; a scenario names those it needs. A capability that the baseline has and the
candidate lacks is a finding (`missing`), never a silent skip. A declared capability that is never exercised is red.
"""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """An optional ability of a stack (`METHODS`)."""

    GENERATE_MESSAGES = "generate_messages"
    """generate() accepts chat messages (`prompts`) in place of token ids. SkyRL API reference, InferenceEngineClient.generate."""
    SINGLE_REQUESTS = "single_requests"
    """generate(single=True): each row goes through the stack's client for single requests, token ids in and out. SkyRL 0.4.0,
    RemoteGenerateClient."""
    SAMPLE = "sample"
    """sample(): independent continuations of one prompt. SkyRL #934; SkyRL API reference, InferenceEngineInterface.sample."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """sample() returns the log-probabilities of the prompt's own tokens. SkyRL, RemoteInferenceClient.sample."""
    TINKER = "tinker"
    """sample(tinker=…): SkyRL's backend of the Tinker API samples over the stack's engines. SkyRL, SkyRLTrainBackend.sample."""
    CHAT_COMPLETION = "chat_completion"
    """chat_completion() with an OpenAI-style body. SkyRL API reference, InferenceEngineInterface.chat_completion."""
    COMPLETION = "completion"
    """completion() with an OpenAI-style body. SkyRL API reference, InferenceEngineInterface.completion."""
    HTTP_ENDPOINT = "http_endpoint"
    """http(): the stack's OpenAI address. SkyRL #1014, task 7; SkyRL, enable_http_endpoint."""
    CONFIGURED_ADDRESS = "configured_address"
    """http(configured=True): the configuration names host and port of the OpenAI address. SkyRL, http_endpoint_port."""
    SERVER_ADDRESSES = "server_addresses"
    """http(): each server has an address of its own, with its control calls. SkyRL #904: the control plane reaches every server."""
    HTTP_STREAMING = "http_streaming"
    """The OpenAI address answers "stream": true with server-sent events. vLLM documentation, OpenAI-Compatible Server."""
    HTTP_CHOICES = "http_choices"
    """/v1/completions of the OpenAI address returns n > 1 choices per prompt. vLLM documentation, OpenAI-Compatible Server."""
    GYM_GENERATOR = "gym_generator"
    """gym_generate(): trajectories of a skyrl-gym environment by SkyRL's own generator. SkyRL #1014, task 7; SkyRL
    documentation, SkyRLGymGenerator."""
    REQUEST_CAP = "request_cap"
    """The client has no more than a set number of requests in flight, over all its calls. SkyRL,
    SKYRL_GENERATE_CONCURRENCY_PER_ENGINE."""
    TOKENIZE = "tokenize"
    """tokenize() and detokenize(). SkyRL #904, "Data plane"."""
    PAUSE_KEEP = "pause_keep"
    """pause(keep): freeze in-flight requests, continue them on resume(). SkyRL API reference, pause_generation; vLLM `/pause`."""
    PAUSE_ABORT = "pause_abort"
    """pause(abort): end in-flight requests with partial answers, finish reason "abort". SkyRL #904, PauseMode; vLLM `/pause`."""
    PARTIAL_ANSWERS = "partial_answers"
    """The caller gets the partial answers of aborted requests, with the finish reason "abort". SkyRL #904, PauseMode.ABORT."""
    RETRY_ABORTED = "retry_aborted"
    """After resume(), generate() itself continues the requests that pause(abort) ended: the caller never sees "abort".
    SkyRL #1014, task 5: "Partial responses accumulated", "Retry re-feeds accumulated tokens"."""
    RETRY_ABORTED_BATCH = "retry_aborted_batch"
    """The same for a generate() of several prompts. SkyRL 0.1.0, InferenceEngineClient.generate: "For batched generate(),
    pause/continue cannot be supported"; SkyRL #1014, task 5, for the client that supports it."""
    RETRY_ABORTED_CHAT = "retry_aborted_chat"
    """The same for chat_completion(). SkyRL API reference, InferenceEngineClient.chat_completion: "Always use the retry loop"."""
    PAUSE_WAIT = "pause_wait"
    """pause(wait): let in-flight requests finish, hold new ones. vLLM `/pause`."""
    PAUSE_CLEAR_CACHE = "pause_clear_cache"
    """pause(clear_cache=True): drop the prefix cache with the pause. SkyRL #904, pause(); vLLM `/pause`."""
    SLEEP = "sleep"
    """sleep(level) and wake_up(): hand the accelerator's memory to the trainer and take it back. SkyRL #1014, task 1."""
    WAKE_UP_TAGS = "wake_up_tags"
    """wake_up(tags): take back only "weights" or only "kv_cache". vLLM sleep mode."""
    DEVICE_MEMORY = "device_memory"
    """device_memory() reports memory that sleep() can release. Needs CUDA and colocated engines.
    vLLM documentation, Sleep Mode; SkyRL #1014, task 1."""
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """reset_prefix_cache(). SkyRL API reference, InferenceEngineInterface.reset_prefix_cache."""
    CACHE_SALT = "cache_salt"
    """generate(cache_salt=…): requests share a prefix cache only with those of the same salt. vLLM documentation, Automatic Prefix
    Caching, "Cache Isolation for Security"; SkyRL 0.3.0, GeneratorConfig.use_cache_salt."""
    RESET_RUNNING_REQUESTS = "reset_running_requests"
    """reset_prefix_cache(reset_running_requests=True): also preempt what runs. SkyRL #904; vLLM `/reset_prefix_cache`."""
    HEALTH = "health"
    """health(): True while at least one server is healthy. SkyRL #899, review of `/health`."""
    IS_PAUSED = "is_paused"
    """is_paused(): server → state. SkyRL #899, review of `/is_paused`."""
    WORLD_SIZE = "world_size"
    """world_size(): inference workers over all servers. SkyRL #904; SkyRL #1014, task 8."""
    WEIGHT_SYNC = "weight_sync"
    """prepare_weight_sync() and sync_weights(): SkyRL's own transfer strategies. SkyRL #1014, tasks 1 to 3."""
    NATIVE_WEIGHT_SYNC = "native_weight_sync"
    """The engine's own weight transfer loads weights; the stack adds no class to its workers. SkyRL #1014, task 14."""
    SYNC_COUNT = "sync_count"
    """sync_count(): the client counts the syncs that it completed. SkyRL 0.3.0, RemoteInferenceClient.weight_version: "Number of
    weight syncs to the engines so far"."""
    WEIGHT_LABELS = "weight_labels"
    """sync_weights(weight_label=…) names the weights; weight_labels(): server → name of the weights that it holds. vLLM 0.30,
    /finish_weight_update (weight_version) and /weight_info."""
    FINISH_SESSION = "finish_session"
    """finish_session(): the router learns that a session has ended. SkyRL 0.3.0, RemoteInferenceClient.finish_session."""
    CUDA_IPC = "cuda_ipc"
    """Colocated engines read weights from the trainer's memory through CUDA IPC. Needs CUDA. SkyRL #1014, task 15."""
    TRAINER = "trainer"
    """train(): one optimizer step on rollouts makes a policy version. sync_weights() sends it, also from FSDP2 shards.
    SkyRL #1014, tasks 1 and 4."""
    MEGATRON_TRAINER = "megatron_trainer"
    """sync_weights() sends the weights of Megatron-core's ranks. Needs Megatron-core and Megatron-Bridge. SkyRL #1014, task 9."""
    STALENESS_MANAGER = "staleness_manager"
    """The trainer's staleness manager decides when a rollout may be requested. SkyRL documentation, Fully Async Training,
    "Async staleness manager"; SkyRL #1014, task 5."""
    TRAINER_RUNS = "trainer_runs"
    """The stack's own fully asynchronous trainer can be run over it. SkyRL documentation, Fully Async Training."""
    ENGINE_OPTIONS = "engine_options"
    """engine_arguments(): the configuration can give options to the engine that have no key of their own. SkyRL documentation,
    Configuration Overview, generator.engine_init_kwargs."""
    CONFIGURATION_OVERRIDES = "configuration_overrides"
    """override_configuration(): a configuration is made of values by key. SkyRL, SkyRLTrainConfig.from_cli_overrides: "a dict mapping
    dot-notation keys to values"."""
    PICKLE_CLIENT = "pickle_client"
    """The client survives serialization into another process. SkyRL #904, "Serializable"."""
    CLIENT_LIVES = "client_lives"
    """Clients come and go while the stack lives: made again beside others, or collected unclosed. SkyRL #904, "Serializable": each
    process has its own."""
    CLIENT_CLOSES = "client_closes"
    """A client can be closed, and the stack lives on. SkyRL API reference, RemoteInferenceClient.teardown: "Close HTTP session"."""
    CLIENT_THREADS = "client_threads"
    """Clients work in several threads and event loops. SkyRL, RemoteInferenceClient._get_session: "the event loop has changed"."""
    OTHER_STACKS = "other_stacks"
    """The harness may start another stack beside this one, in a process of its own, also one that cannot start. SkyRL,
    VLLMServerActor.start: "Blocks until server is healthy"."""
    STACK_ENDS = "stack_ends"
    """Such a stack has processes or addresses that its own code starts and ends. SkyRL, ServerActorPool.shutdown: "Shutdown all
    actors and kill them"; VLLMRouter.shutdown: "Terminate the router process"."""
    LORA = "lora"
    """load_lora_adapter(), and generate() and sample() under an adapter: only the adapter's weights travel. SkyRL #1014, task 11."""
    NAMED_MODELS = "named_models"
    """One client serves the base model and every adapter, so each call has to name its model: a call that names none is refused.
    SkyRL 0.3.0, RemoteInferenceClient: "the caller must name the adapter explicitly"."""
    ADAPTER_BY_NAME = "adapter_by_name"
    """Each request names its adapter or the base model; the stack refuses a name that is not loaded. Without this capability the
    loaded adapter answers every generate(). vLLM documentation, LoRA Adapters; SkyRL, active_lora_name."""
    SEVERAL_ADAPTERS = "several_adapters"
    """Engines hold several adapters at a time, each under its own name. vLLM documentation, LoRA Adapters."""
    UNLOAD_ADAPTER = "unload_adapter"
    """unload_lora_adapter() removes a name; the stack refuses it afterwards. vLLM documentation, /v1/unload_lora_adapter."""
    ROUTED_EXPERTS = "routed_experts"
    """generate() returns which experts each token was routed to. SkyRL API reference, GeneratorOutput.rollout_expert_indices."""
    QUANTIZED = "quantized"
    """Engines hold quantized weights and generate (FlashRL). SkyRL #1014, task 12: "FlashRL engine creation works"."""
    QUANTIZED_SYNC = "quantized_sync"
    """Quantized engines take full-precision weights in a sync. SkyRL #1014, task 12: "Weight sync works with quantized models"."""
    KILL_SERVER = "kill_server"
    """The harness may kill a server out of band and call the stack afterwards. SkyRL #899, review of `/health`."""
    DELAYS = "delays"
    """The harness may delay what reaches the engines by a seeded schedule. SkyRL #904: calls of many callers and of the control
    plane meet at servers in any order."""
    BROKEN_HOPS = "broken_hops"
    """The harness may break requests on their way to a server, and their answers. SkyRL #904: requests are proxied to one server."""
    BROKEN_ROUTER_HOP = "broken_router_hop"
    """The same between the client and its router."""
    SCORE = "score"
    """Only the reference offers it: exact log-probabilities of given tokens under a policy version."""
