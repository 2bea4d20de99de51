"""What a stack may be able to do beyond `generate`. One documented member per optional ability.

A target declares its capabilities; a scenario names those it needs. A capability that the baseline has and the
candidate lacks is a finding (`missing`), never a silent skip. A declared capability that is never exercised is red.
"""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """An optional ability of a stack (`StackAdapter`)."""

    GENERATE_MESSAGES = "generate_messages"
    """generate() accepts chat messages (`prompts`) in place of token ids. SkyRL API reference, InferenceEngineClient.generate."""
    SAMPLE = "sample"
    """sample(): several independent continuations of one prompt. SkyRL #934; SkyRL API reference, InferenceEngineInterface.sample."""
    CHAT_COMPLETION = "chat_completion"
    """chat_completion() with an OpenAI-style body. SkyRL API reference, InferenceEngineInterface.chat_completion."""
    COMPLETION = "completion"
    """completion() with an OpenAI-style body. SkyRL API reference, InferenceEngineInterface.completion."""
    HTTP_ENDPOINT = "http_endpoint"
    """http(): the stack's OpenAI address. SkyRL #1014, task 7; SkyRL, enable_http_endpoint."""
    HTTP_STREAMING = "http_streaming"
    """The OpenAI address answers "stream": true with server-sent events. vLLM documentation, OpenAI-Compatible Server."""
    HTTP_CHOICES = "http_choices"
    """/v1/completions of the OpenAI address gives n > 1 choices a prompt. vLLM documentation, OpenAI-Compatible Server."""
    GYM_GENERATOR = "gym_generator"
    """gym_generate(): trajectories of a skyrl-gym environment by SkyRL's own generator. SkyRL #1014, task 7; SkyRL
    documentation, SkyRLGymGenerator."""
    TOKENIZE = "tokenize"
    """tokenize() and detokenize(). SkyRL #904, "Data plane"."""
    PAUSE_KEEP = "pause_keep"
    """pause(keep): freeze in-flight requests, continue them on resume(). SkyRL API reference, pause_generation; vLLM `/pause`."""
    PAUSE_ABORT = "pause_abort"
    """pause(abort): end in-flight requests with what they have, finish reason "abort". SkyRL #904, PauseMode; vLLM `/pause`."""
    PARTIAL_ANSWERS = "partial_answers"
    """What pause(abort) cut short comes back to the caller as it is, with the finish reason "abort". SkyRL #904, PauseMode.ABORT."""
    RETRY_ABORTED = "retry_aborted"
    """generate() goes on by itself, after resume(), with what pause(abort) cut short: the caller never sees "abort".
    SkyRL #1014, task 5: "Partial responses accumulated", "Retry re-feeds accumulated tokens"."""
    RETRY_ABORTED_BATCH = "retry_aborted_batch"
    """The same for a generate() of several prompts. SkyRL 0.1.0, InferenceEngineClient.generate: "For batched generate(),
    pause/continue cannot be supported"; SkyRL #1014, task 5, for the client that does."""
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
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """reset_prefix_cache(). SkyRL API reference, InferenceEngineInterface.reset_prefix_cache."""
    RESET_RUNNING_REQUESTS = "reset_running_requests"
    """reset_prefix_cache(reset_running_requests=True): also preempt what runs. SkyRL #904; vLLM `/reset_prefix_cache`."""
    HEALTH = "health"
    """health(): true while at least one server is. SkyRL #899, review of `/health`."""
    IS_PAUSED = "is_paused"
    """is_paused(): server → state. SkyRL #899, review of `/is_paused`."""
    WORLD_SIZE = "world_size"
    """world_size(): inference workers over all servers. SkyRL #904; SkyRL #1014, task 8."""
    WEIGHT_SYNC = "weight_sync"
    """prepare_weight_sync() and sync_weights(): SkyRL's own transfer strategies. SkyRL #1014, tasks 1 to 3."""
    TRAINER = "trainer"
    """train(): one optimizer step on rollouts makes a policy version, and sync_weights() sends it, also out of FSDP2's shards.
    SkyRL #1014, tasks 1 and 4."""
    STALENESS_MANAGER = "staleness_manager"
    """The trainer's staleness manager: it says when a rollout may be asked for. SkyRL documentation, Fully Async Training,
    "Async staleness manager"; SkyRL #1014, task 5."""
    PICKLE_CLIENT = "pickle_client"
    """The client survives serialization into another process. SkyRL #904, "Serializable"."""
    LORA = "lora"
    """load_lora_adapter() and generate() under an adapter: only the adapter's weights travel. SkyRL #1014, task 11."""
    ROUTED_EXPERTS = "routed_experts"
    """generate() returns which experts each token was routed to. SkyRL API reference, GeneratorOutput.rollout_expert_indices."""
    QUANTIZED = "quantized"
    """Engines hold quantized weights and take full-precision weights in a sync (FlashRL). SkyRL #1014, task 12."""
    ROUTER = "router"
    """The data plane has an HTTP address of its own, which can be probed for control-plane routes. SkyRL #899, router."""
    KILL_SERVER = "kill_server"
    """The harness may kill a server, out of band, and ask the stack afterwards. SkyRL #899, review of `/health`."""
    SCORE = "score"
    """Only the reference: exact log-probabilities of given tokens under a policy version."""
