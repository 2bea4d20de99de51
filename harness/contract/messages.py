"""The contract: what every stack is asked, in the words of the field. An implementer reads this first.

A *stack adapter* translates these calls to one implementation and holds no test logic. It runs inside its host
process (`harness/driving/host.py`), in the stack's own environment, and may raise whatever the stack raises: the host turns
it into `CallFailed`. Everything but `generate` and the lifecycle is a `Capability`; calling what is not offered raises
`NotOffered`. Token ids are ints, log-probabilities natural logarithms, times nanoseconds since the epoch.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

from harness.contract.capability import Capability
from harness.contract.devices import Devices
from harness.contract.topology import Topology

PauseMode = Literal["abort", "keep", "wait"]
SessionId = str | int
Layout = Literal["single", "fsdp2", "megatron"]
FIRST_TRAINED = 2**32
"""Policy versions from this number on were trained; lower ones are made by rule (`backends/policies/versions.py`)."""
Start = Literal["ray", "fork", "inline"]
"""As SkyRL ships it; forked, for development; inline in the driver's process, for pure Python stacks."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""The dtype in which engines hold weights and compute."""
MAX_MODEL_LEN = 512
"""Most tokens of prompt plus answer, in every engine under test."""
DEFAULT_DTYPE: Mapping[str, Dtype] = {"cpu": "float32", "cuda": "bfloat16"}
"""Engine → its dtype unless --dtype sets another."""

REQUEST_CAP = 128
"""Most requests per server that a client with `Capability.REQUEST_CAP` has in flight at once. The others wait in the client."""

ENGINE_PLACES = 64
"""Most requests that an engine runs at once (vLLM, max_num_seqs). The others wait at the engine."""

START_DEADLINE_S: Mapping[str, float] = {"cpu": 390.0, "cuda": 1800.0}
"""Engine → seconds in which the parts of a stack must be up. On CUDA they load weights, compile and capture graphs."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests and results."""


# --- data plane -----------------------------------------------------------------------------------------------------


class GenerateRequest(Message, frozen=True, kw_only=True):
    """A batch of prompts under one set of sampling parameters (SkyRL API reference, InferenceEngineInput).

    Exactly one of `prompt_token_ids` (rows × tokens) and `prompts` (rows × chat messages) is given. `sampling_params`
    uses vLLM's names (max_tokens, temperature, top_p, seed, stop, logprobs, …). `session_ids`, if given, has one entry per row.
    """

    prompt_token_ids: list[list[int]] | None = None
    prompts: list[list[dict[str, Any]]] | None = None
    sampling_params: dict[str, Any] = {}
    session_ids: list[SessionId] | None = None
    lora_adapter: str | None = None
    """Name of the loaded adapter that answers; None is the base model. An OpenAI-style body names it in "model"."""
    cache_salt: str | None = None
    """The rows share a prefix cache only with requests of the same salt (vLLM documentation, Automatic Prefix Caching)."""
    single: bool = False
    """True if each row goes through the stack's client for single requests, which returns no text."""
    mm_features: list[dict[str, Any]] | None = None
    """One entry per row: its images, as vLLM's renderer gives them (SkyRL, InferenceEngineInput.mm_features)."""


class Generation(Message, frozen=True, kw_only=True):
    """The answers to a batch (SkyRL API reference, InferenceEngineOutput). One entry per row, in the order of the prompts.

    `responses` is None where the stack returns no text (sample() of the HTTP stack, and single requests). `response_logprobs` has one
    number per response token, or is None if the request asked for none. None in place of a number stands for a
    non-finite one, which JSON cannot express.
    """

    response_ids: list[list[int]]
    responses: list[str] | None
    stop_reasons: list[str | None]
    response_logprobs: list[list[float | None] | None] | None = None
    routed_experts: list[list[list[list[int]]] | None] | None = None
    """Rows × positions × layers × top_k expert indices, the most probable expert first. One position per token that the
    model read: prompt and response without its last token (SkyRL, rollout_expert_indices)."""
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token of a sample() that asked; None for the first, which nothing precedes."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Per prompt token the most probable (token, log-probability) there, the most probable first; None for the first token."""


class SampleRequest(Message, frozen=True, kw_only=True):
    """`num_samples` independent continuations of one prompt (SkyRL #934). A session's server answers; without one, any server."""

    prompt_token_ids: list[int]
    num_samples: int
    sampling_params: dict[str, Any] = {}
    session_id: SessionId | None = None
    prompt_logprobs: bool = False
    """True if the result shall have the prompt tokens' log-probabilities (SkyRL, RemoteInferenceClient.sample)."""
    lora_adapter: str | None = None
    """As in `GenerateRequest`."""
    as_given: bool = False
    """True if the sampling parameters go to the client under vLLM's names, also where its own names for them differ."""
    topk_prompt_logprobs: int = 0
    """With `prompt_logprobs`: also this many of the most probable tokens at each position of the prompt."""
    image: str | None = None
    """A PNG in base64 that stands in front of the prompt's tokens (Tinker, ModelInput: image chunks)."""
    tinker: Literal["policy", "base model"] | None = None
    """Sample from this through SkyRL's backend of the Tinker API, in place of the client. There each sample is a request of its own,
    and always has log-probabilities."""
    forwarded: bool = False
    """With `tinker`: the process of the Tinker API sends the samples to the router by itself, as one request for all of them."""


class OpenAIRequest(Message, frozen=True, kw_only=True):
    """An OpenAI-style request body; may hold "session_id" (SkyRL API reference, chat_completion and completion)."""

    body: dict[str, Any]
    headers: dict[str, str] = {}


class OpenAIResponse(Message, frozen=True, kw_only=True):
    """The body as the stack returned it: a completion, or an error response as documented."""

    body: dict[str, Any]


class HttpRequest(Message, frozen=True, kw_only=True):
    """A request to the stack's OpenAI address, as a client sends it: `path` with its query, `body` as text."""

    method: str = "POST"
    path: str
    headers: dict[str, str] = {}
    body: str = ""
    encoding: Literal["utf-8", "utf-8-sig", "utf-16", "latin-1", "gzip", "deflate"] = "utf-8"
    """How the body is sent: in a character encoding, or as compressed UTF-8. No header says so by itself."""
    server: str = ""
    """The server whose own address is asked, in place of the stack's."""
    configured: bool = False
    """True to ask host and port that the configuration names for the OpenAI address, whatever listens there."""

    @property
    def content(self) -> bytes:
        """The body as it is sent."""
        match self.encoding:
            case "gzip":
                return gzip.compress(self.body.encode(), mtime=0)
            case "deflate":
                return zlib.compress(self.body.encode())
            case charset:
                return self.body.encode(charset)


class HttpResponse(Message, frozen=True, kw_only=True):
    """The response, with any status. A stream is read to its end."""

    status: int
    headers: dict[str, str] = {}
    body: str = ""


class TrajectoryId(Message, frozen=True, kw_only=True):
    """`repetition_id` counts the samples of one prompt (SkyRL, TrajectoryID). Its session is "<instance>_<repetition>"."""

    instance_id: str
    repetition_id: int

    @property
    def session(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


class GymRequest(Message, frozen=True, kw_only=True):
    """Input (SkyRL, GeneratorInput) and configuration (SkyRL, GeneratorConfig) of SkyRL's gym generator.

    `prompts` are chat messages. `env_extras` has one entry per prompt, for the environment of `backends/skyrl/gym_env.py`.
    `trajectory_ids`, if given, has one entry per prompt. No further turn begins beyond `max_input_length` tokens.
    `batched`: one request for all prompts, one turn each. Without `use_conversation_multi_turn` all turns and observations
    are one assistant message.
    `step_wise`: each turn is a trajectory of its own, and reads the conversation so far rendered anew from its texts (SkyRL,
    step_wise_trajectories). Without `close_stopped`, nothing follows an answer that a stop string ended (SkyRL,
    append_eos_token_after_stop_str_in_multi_turn).
    `overlong_filtering`: trajectories that were cut short take no part in the loss (SkyRL, apply_overlong_filtering).
    `zero_reward_on_non_stop`: they get no reward (SkyRL's option of that name).
    `configured` are the configuration's sampling parameters; None: those of the call. An evaluation's calls bring their own
    (SkyRL, `eval_sampling_params`).
    `chat_template` names a chat template of the generator's own (SkyRL, GeneratorConfig.chat_template). It renders the conversation's
    texts before each turn, and after the last turn the tokens that are trained on. Excludes `batched` and `step_wise`.
    `earlier_client`: the generator holds the client that the last pickle_client() replaced, and that makes no syncs any more.
    """

    prompts: list[list[dict[str, str]]]
    env_extras: list[dict[str, Any]]
    sampling_params: dict[str, Any] = {}
    configured: dict[str, Any] | None = None
    trajectory_ids: list[TrajectoryId] | None = None
    max_turns: int = 1
    max_input_length: int = 512
    batched: bool = False
    use_conversation_multi_turn: bool = True
    step_wise: bool = False
    close_stopped: bool = True
    overlong_filtering: bool = False
    zero_reward_on_non_stop: bool = False
    chat_template: str | None = None
    earlier_client: bool = False


class GymOutput(Message, frozen=True, kw_only=True):
    """The finished trajectories (SkyRL, GeneratorOutput). One entry per prompt, in the order of the prompts; with `step_wise` one per
    turn, and for each whose turn it is (`trajectory_ids`) and whether it is the last one (`is_last_step`).

    A reward is one number per trajectory, or one per response token. `loss_masks` has 1 for the policy's own tokens.
    `rollout_expert_indices`, of a mixture of experts: tokens × layers × top_k for each token that was fed to the model, which are
    those of prompt and response without the last.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float | list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str | None]
    rollout_logprobs: list[list[float | None] | None] | None = None
    rollout_expert_indices: list[list[list[list[int]]] | None] | None = None
    trajectory_ids: list[TrajectoryId] | None = None
    is_last_step: list[bool] | None = None
    rollout_metrics: dict[str, float] = {}


class RenderChatRequest(Message, frozen=True, kw_only=True):
    """A conversation, which the model's chat template makes a prompt of (SkyRL, render_chat_completion)."""

    messages: list[dict[str, Any]]


class RenderChatResult(Message, frozen=True, kw_only=True):
    token_ids: list[int]


class TokenizeRequest(Message, frozen=True, kw_only=True):
    texts: list[str]
    add_special_tokens: bool = True


class TokenizeResult(Message, frozen=True, kw_only=True):
    token_ids: list[list[int]]


class DetokenizeRequest(Message, frozen=True, kw_only=True):
    token_ids: list[list[int]]


class DetokenizeResult(Message, frozen=True, kw_only=True):
    texts: list[str]


# --- control plane --------------------------------------------------------------------------------------------------


class PauseRequest(Message, frozen=True, kw_only=True):
    mode: PauseMode = "keep"
    clear_cache: bool = False


class SleepRequest(Message, frozen=True, kw_only=True):
    """`level` 1 offloads weights, 2 discards them (vLLM sleep mode). `tags` None puts everything to sleep; else what they name."""

    level: int = 2
    tags: list[str] | None = None


class WakeUpRequest(Message, frozen=True, kw_only=True):
    """`tags` None wakes everything; else some of "weights", "kv_cache" (vLLM sleep mode)."""

    tags: list[str] | None = None


class ResetPrefixCacheRequest(Message, frozen=True, kw_only=True):
    reset_running_requests: bool = False


class Empty(Message, frozen=True, kw_only=True):
    """A request without arguments, or a result without content."""


class HealthResult(Message, frozen=True, kw_only=True):
    healthy: bool


class IsPausedResult(Message, frozen=True, kw_only=True):
    """server → is it paused (SkyRL #899)."""

    servers: dict[str, bool]


class WorldSizeResult(Message, frozen=True, kw_only=True):
    world_size: int


# --- weight sync ----------------------------------------------------------------------------------------------------


Unfit = Literal["name", "shape", "numbers", "size"]
"""What of a sent parameter does not fit the engines' model. Numbers: none of it is one, as after a training that diverged. Size: they
are far too large, as in a training that is about to diverge."""
UNKNOWN = "parity_unknown"
"""Part of a parameter's name that no model has."""


TOO_LARGE = 1e5


def unfitting(tensors: Mapping[str, Any], unfit: Unfit) -> dict[str, Any]:
    """The tensors with the middle one under a name that no model has, without its first row, or with NaN in place of numbers; or with
    those that have a row for each token `TOO_LARGE` times as large, and so all logits."""
    if unfit == "size":
        most = max(len(tensor) for tensor in tensors.values())
        return {name: tensor * TOO_LARGE if len(tensor) == most else tensor for name, tensor in tensors.items()}
    middle = list(tensors)[len(tensors) // 2]
    changed = {"name": tensors[middle], "shape": tensors[middle][1:], "numbers": tensors[middle] * float("nan")}[unfit]
    known = f"{middle}.{UNKNOWN}" if unfit == "name" else middle
    return {known if name == middle else name: changed if name == middle else kept for name, kept in tensors.items()}


Training = Literal["synchronous", "asynchronous"]
"""Synchronous: no rollout runs while weights move. Asynchronous: rollouts go on (SkyRL documentation, Fully Async Training)."""


class SyncWeightsRequest(Message, frozen=True, kw_only=True):
    """Load policy version `version` into every engine through the stack's own weight sync.

    The trainer sends the parameters in `chunks` pieces. `layout` says how the trainer holds them: whole in one process, as
    FSDP2's shards in two, or in the GPTModels of Megatron-core's four ranks (TP2×PP2). The sync gathers the parts. With
    `fail_after_chunks` the trainer fails after sending that many: the call fails with the error TrainerFailed. The next
    `prepare_weight_sync` joins the trainer again. `sparse`: it sends every second parameter only, and the engines have all others of
    this version already. `unfit`: it sends a parameter that the engines' model does not have (`unfitting`).
    """

    version: int
    chunks: int = 1
    layout: Layout = "single"
    fail_after_chunks: int | None = None
    sparse: bool = False
    unfit: Unfit | None = None
    weight_label: str | None = None
    """Name of the sent weights, which every server reports once the sync is complete (`weight_labels`)."""
    training: Training | None = None
    """Kind of training whose worker of the stack's own sends the parameters, and drops the prefix cache with them as it does then
    (SkyRL, broadcast_to_inference_engines). None: the parameters are sent, and the cache is the caller's business."""


class FinishSessionRequest(Message, frozen=True, kw_only=True):
    session_id: SessionId


class SyncCountResult(Message, frozen=True, kw_only=True):
    """Number of syncs that the client completed, repeated ones included (SkyRL, RemoteInferenceClient.weight_version)."""

    count: int


class WeightLabelsResult(Message, frozen=True, kw_only=True):
    """server → label of the weights that it holds, as the server says it (vLLM, /weight_info)."""

    servers: dict[str, str]


class TrainRequest(Message, frozen=True, kw_only=True):
    """One optimizer step of a policy gradient on rollouts, one row each (SkyRL, GeneratorOutput), from `base_version`.

    The loss is the mean of -advantage × log-probability over all tokens that train. The step goes down its gradient. Its length is
    `learning_rate`, whatever the gradient's length, or a part of it if the full step would ruin the policy.
    """

    base_version: int
    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    loss_masks: list[list[int]] | None = None
    """1 for each response token that trains; None if all do."""
    advantages: list[float]
    """One per row."""
    rollout_logprobs: list[list[float]] | None = None
    """The engines' values for the same tokens. The loss does not use them; the checks compare them with the trainer's."""
    learning_rate: float
    """Distance in the space of all parameters, not a multiple of the gradient."""


class TrainResult(Message, frozen=True, kw_only=True):
    """`version` follows from the content of the new weights: at least `FIRST_TRAINED`, and equal for equal weights."""

    version: int
    response_logprobs: list[list[float]]
    """The trainer's values for each response token under `base_version`, at temperature 1."""
    loss: float
    grad_norm: float
    """Length of the gradient."""


class StalenessRequest(Message, frozen=True, kw_only=True):
    """A fresh staleness manager at global step 1 (SkyRL documentation, Fully Async Training). A rollout is one request of the
    trainer, and `mini_batch_size` rollouts make one training step. At most the rollouts of all steps up to
    `max_staleness_steps` after the current one may be requested, and at most `max_concurrent` may run."""

    max_concurrent: int
    mini_batch_size: int
    max_staleness_steps: int


class RolloutRequest(Message, frozen=True, kw_only=True):
    """One rollout, under the trainer's name for it."""

    rollout: str


class TrainedRequest(Message, frozen=True, kw_only=True):
    """A training step has used the rollouts `consumed`. `global_step` is the step that begins now."""

    global_step: int
    consumed: list[str] = []
    """For the recording only: the manager counts and needs no names."""


class TrainerRunRequest(Message, frozen=True, kw_only=True):
    """Epochs of the stack's own fully asynchronous trainer over these prompts, each with what its environment gets (SkyRL,
    FullyAsyncRayPPOTrainer.train). It begins greedy rollouts by itself, and asks its caller for weights and training.

    `mini_batch_size`, `workers`: groups of `samples` rollouts, as `max_staleness_steps` in StalenessRequest.
    `saves`: a checkpoint after each step, in place of all that were there before the run (SkyRL, `ckpt_interval`). `resumes`: the run
    goes on from the last checkpoint, with checkpoints of its own (`resume_mode`: latest). `evaluates`: the policy is evaluated on the
    first prompt before the first step and after each (`eval_before_train`, `eval_interval`)."""

    prompts: list[list[dict[str, str]]]
    env_extras: list[dict[str, Any]]
    mini_batch_size: int
    workers: int
    max_staleness_steps: int
    max_tokens: int
    max_turns: int = 1
    samples: int = 1
    epochs: int = 1
    saves: bool = False
    resumes: bool = False
    evaluates: bool = False


class RolloutGroup(Message, frozen=True, kw_only=True):
    """Finished rollouts of one prompt, whose number in the request is `uid`. They were begun in training step `begun_at`."""

    uid: str
    begun_at: int
    responses: list[list[int]]


class TrainerGoesOnRequest(Message, frozen=True, kw_only=True):
    """The trainer has what it asked for; `fails`: it could not be done, and the call by which the trainer does it raises."""

    fails: bool = False


class TrainerWantsRequest(Message, frozen=True, kw_only=True):
    within_s: float


class TrainerWants(Message, frozen=True, kw_only=True):
    """What a trainer asks for. "weights": those of the next policy version, in the engines. "training": step `step` on `groups`.
    "nothing": its run is over; `ended` says how, if not well. "unknown": it asked for nothing in time.

    `evaluated`: the steps under which the run has logged evaluations so far, in order. Step 0 is before all training."""

    what: Literal["weights", "training", "nothing", "unknown"]
    step: int = 0
    groups: list[RolloutGroup] = []
    ended: str | None = None
    evaluated: list[int] = []


class LoadLoraRequest(Message, frozen=True, kw_only=True):
    """Load version `version` of an adapter under `name` into every engine. It replaces an adapter of that name
    (vLLM documentation, /v1/load_lora_adapter with load_inplace). The caller has to reset the prefix cache.

    `wrong`: the folder from which it is loaded does not exist, or its rank is twice the largest one that engines take
    (vLLM documentation, LoRA Adapters: max_lora_rank)."""

    name: str
    version: int
    wrong: Literal["folder", "rank"] | None = None


class WriteLoraRequest(Message, frozen=True, kw_only=True):
    """Write version `version` of an adapter to the folder from which `name` was loaded, and tell no engine: what a trainer does before
    it loads (SkyRL, `lora_sync_path`: one folder for all steps). Engines go on with what they have loaded. `half`: the file of the
    weights is in place and half as long as it will be, as while the trainer writes it."""

    name: str
    version: int
    half: bool = False


class UnloadLoraRequest(Message, frozen=True, kw_only=True):
    name: str


class RequestSchemasResult(Message, frozen=True, kw_only=True):
    """Call → JSON Schema of what its caller may ask for, as the stack's own types say it (out of band): the sampling parameters of
    generate() and sample(), the body of an OpenAI call. Fields of the harness's or the engine's own use are left out."""

    calls: dict[str, dict[str, Any]]


class DigestsResult(Message, frozen=True, kw_only=True):
    """server → worker rank → parameter → "sha256-prefix:shape:dtype", as the workers hold them (out of band)."""

    servers: dict[str, list[dict[str, str]]]


class WorkerDescription(Message, frozen=True, kw_only=True):
    """How one worker takes weights and runs (out of band). `extensions` are the full names of the classes that extend its class
    (vLLM, worker_extension_cls). `transport` is how weights reach the worker; None before the first sync is prepared. `settings`
    are those that its engine runs with."""

    rank: int
    extensions: list[str] = []
    transport: Literal["broadcast", "ipc"] | None = None
    settings: dict[str, str] = {}


class WorkersResult(Message, frozen=True, kw_only=True):
    """server → its workers. `configured` are the settings that the stack was told to start its engines with."""

    servers: dict[str, list[WorkerDescription]]
    configured: dict[str, str] = {}


Scalar = bool | int | float | str | None
"""A value of a configuration or of an engine's argument that is a number, a switch, a text or None."""


class EngineArgumentsRequest(Message, frozen=True, kw_only=True):
    """What would engines be started with, if the configuration gave these `options` to the engine beside its own, and named this
    backend for weight syncs (SkyRL, weight_sync_backend; None: its own)? Starts nothing. `device`: False asks on a driver that finds
    no accelerator, such as the head node of a cluster whose engines run elsewhere."""

    options: dict[str, Scalar] = {}
    sync_backend: str | None = None
    device: bool = True


class EngineArgumentsResult(Message, frozen=True, kw_only=True):
    """What the stack's own code makes of its configuration. `arguments`: name → value of each argument of an engine that is a number,
    a text or None; those of `options` only, if there are any. `configured`: arguments with a key of their own in the configuration.
    `sync_backend`: the backend by which weights would travel, in the stack's own word; None if the stack was not asked."""

    arguments: dict[str, Scalar]
    sync_backend: str | None = None
    configured: list[str] = []


SEVERAL_TEXTS = frozenset({"api_key", "allowed_origins"})
"""Options of the OpenAI address that hold a list of texts (vLLM documentation, vllm serve, Frontend). One text is a list of one."""


class ServingArgumentsRequest(Message, frozen=True, kw_only=True):
    """What would the OpenAI address be served with, if the configuration gave these `options` beside its own? Starts nothing.

    An option is a `Scalar`, or a mapping. Without any: which options does vLLM have for the address?"""

    options: dict[str, Any] = {}


class ServingArgumentsResult(Message, frozen=True, kw_only=True):
    """Name → value of each of the `options` that the stack's own code hands to what serves the OpenAI address. Without `options`:
    vLLM's own options for it, with their defaults (vLLM documentation, vllm serve, Frontend)."""

    arguments: dict[str, Any]


class OverrideRequest(Message, frozen=True, kw_only=True):
    """What does the stack's configuration hold, if these values are given for these keys (SkyRL, SkyRLTrainConfig.from_cli_overrides,
    with a dict)? Starts nothing. `validated`: the configuration is also checked as the entry point checks it before it starts
    anything (SkyRL, validate_cfg)."""

    overrides: dict[str, Scalar | list[str]] = {}
    validated: bool = False


class OverrideResult(Message, frozen=True, kw_only=True):
    """Key → value in the configuration: of the keys in `overrides`; of every key for generation whose value is a number, a switch, a
    text or None if there are none. `sampling`: sampling parameter → value of each that the trainer gives to every request under
    this configuration and that is a number, a switch, a text or None."""

    values: dict[str, Scalar]
    sampling: dict[str, Scalar] = {}


class WorkerMemory(Message, frozen=True, kw_only=True):
    """Memory of one worker's device, in bytes (out of band). Workers on one device report the same total and free bytes."""

    rank: int
    device: str | None = None
    """The device's UUID. None for a worker on a CPU, which has no device memory."""
    total: int = 0
    free: int = 0
    """Bytes that no process uses: total - free is in use by all processes."""
    pool: dict[str, int] = {}
    """Tag ("weights", "kv_cache") → bytes that sleep() can release and wake_up() takes back. They count also while
    released. Empty if the worker has no such pool."""


class DeviceMemoryResult(Message, frozen=True, kw_only=True):
    """server → its workers."""

    servers: dict[str, list[WorkerMemory]]


# --- observation and lifecycle --------------------------------------------------------------------------------------


class ObserveRequest(Message, frozen=True, kw_only=True):
    """What the instruments saw since the last call of this kind."""


class ObserveResult(Message, frozen=True, kw_only=True):
    observations: list[dict[str, Any]]


class InFlightResult(Message, frozen=True, kw_only=True):
    """Requests in flight in the engines, and tokens produced for them so far, from the engine taps."""

    requests: int
    tokens: int
    servers: dict[str, int]


class Listener(Message, frozen=True, kw_only=True):
    """A listening TCP socket of the stack's process tree."""

    address: str
    """IP address; "0.0.0.0" and "::" are every interface."""
    port: int
    process: str
    """Role of the process that holds it ("router", "server-0/worker-0"), or its name."""
    shipped: str | None = None
    """Address that the stack asked to bind to, if the harness's loopback patch changed it."""


class ProbedAddress(Message, frozen=True, kw_only=True):
    """An HTTP address of the stack. `data_plane`: True if callers of generation use it."""

    name: str
    """"router", "endpoint", or the server's name."""
    data_plane: bool
    port: int | None = None
    """None if the stack serves it without a socket."""
    shared: bool | None = None
    """True if another process of this user may listen on the port too, and get a part of the requests. None: not probed."""


ORIGIN = "http://page.invalid"
"""Origin of a web page that has nothing to do with the stack."""

RouteKind = Literal["control", "weights", "information", "pickle", "nothing", "page"]


class Answer(Message, frozen=True, kw_only=True):
    """An address's answer to one request without credentials. The request changes nothing that the clean room checks."""

    address: str
    route: str
    """Method and path: "POST /pause"."""
    kind: RouteKind
    """"pickle": the request carried a serialized object. "nothing": a path that no server has, for comparison. "page": a browser asks
    whether a page of `ORIGIN` may call this route."""
    status: int
    unpickled: bool = False
    """True if the marker that unpickling leaves was there afterwards."""
    shares: dict[str, str] = {}
    """Of a "page": the headers that begin with "access-control-", by their names in lower case."""


class ProbeSecurityResult(Message, frozen=True, kw_only=True):
    """What the probe found. `canaries`: instrument ("sockets", "ports", "pickle") → True if it saw what the harness put there."""

    addresses: list[ProbedAddress]
    listeners: list[Listener]
    answers: list[Answer]
    canaries: dict[str, bool]


OfferKind = Literal[
    "method",
    "parameter",
    "protocol",
    "attribute",
    "field",
    "exception",
    "key",
    "variable",
    "switch",
    "option",
    "need",
    "import",
]


class Offer(Message, frozen=True, kw_only=True):
    """One thing that a caller of the stack's client meets, as text that is the same from run to run."""

    name: str
    """"generate", "generate(input_batch)", "PauseMode.KEEP"; a configuration key by its path; an environment variable.
    "client" is the client's constructor."""
    kind: OfferKind
    """A protocol is one of the standard library's, or a base class ("client is Hashable"). A field is one of a type that the client's
    methods name. An exception is raised by the client's own code. A switch is an environment variable that stands for yes or no, in
    whichever part of the stack. An option is one of vLLM's, with the value that the engines run with under this configuration. A need
    is what the stack's generator asks of any client that it is given. An import is what users import from the stack's modules:
    "module:name"."""
    form: str = ""
    """Of a method "async", "sync", "async generator" or "generator"; of a parameter how it is given (`inspect.Parameter.kind`)."""
    type: str = ""
    """The annotation, of a method that of its result. Empty if there is none."""
    default: str | None = None
    """None: there is none, and a parameter without one has to be given."""


class CensusResult(Message, frozen=True, kw_only=True):
    """The public surface of the client, by introspection in the stack's own process."""

    offers: list[Offer]
    kept_back: list[str] = []
    """Those of the stack's own environment variables that its entry point leaves in the user's shell. On a cluster that was up
    before they do not reach the processes that read them (Ray documentation, Environment Dependencies: env_vars)."""


class FormRequest(Message, frozen=True, kw_only=True):
    """From now on a method of the stack's client gets one of its arguments in this form, where it has it
    (`harness.records.argument_forms`). "as it is": the forms of its arguments are listed. "used again": "max_tokens" becomes 1 in what
    unanswered calls were given, and nothing follows for later ones. None: nothing."""

    form: str | None = None


class FormResult(Message, frozen=True, kw_only=True):
    """The forms that the arguments of the last call with "as it is" can have: "place: form". Empty if its client is not watched."""

    forms: list[str]


ROUTER = "router"
"""Name of the router's process."""


def belongs(role: str, server: str) -> bool:
    """True if a process of this role ("router", "server-0/worker-0") is the server's, or is the router."""
    return role == server or role.startswith(f"{server}/")


class KillServerRequest(Message, frozen=True, kw_only=True):
    """`part`: every process of the server, or only those of its engine, so that its web server lives. If one process is both, all
    of them."""

    server: str
    """Name of the server, or `ROUTER`."""
    part: Literal["server", "engine"] = "server"


class DelayRequest(Message, frozen=True, kw_only=True):
    """From now on each request and control call waits before its engine takes it, as the schedule of this seed says
    (`harness.contract.delays`). None: they wait no longer."""

    seed: int | None = None


HopForm = Literal[
    "slow",
    "idle",
    "chunked",
    "sized",
    "upper_case",
    "repeated",
    "charset",
    "absolute",
    "request_upper_case",
    "request_repeated",
    "request_chunked",
]
"""Legal forms of a message. Of an answer: headers late and the body bit by bit; the kept connection closed right after it; its length
left open, or told; names of headers in upper case; several headers of one name; a charset. Of a request: its address in absolute form
(RFC 9112, 3.2.2), and headers as for answers."""


class HopFault(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What happens to calls on one hop: to requests once per server that the hop leads to, to control calls once, at the first
    server."""

    hop: Literal["router", "server"]
    """Where the hop leads: from the client to the router, or to a server (from the router, or from a client without one)."""
    moment: Literal["before", "after"] = "before"
    """Before: the request goes no further. After: an engine has run it, and its answer is replaced."""
    status: int = 500
    body: Literal["vllm", "sentence", "json", "string", "html", "text", "empty", "cut"] = "vllm"
    """The error as vLLM writes it: an object with a message, or a sentence, as of /pause. Another JSON object, a JSON string, a page,
    plain text, nothing, or half a JSON object."""
    connection: Literal["kept", "closed", "reset", "torn", "hanging", "whole"] = "kept"
    """Closed and reset: before the first byte of an answer. Torn: in the middle of its body. Hanging: the request waits until the
    fault is over, and goes on then. Whole: nothing is replaced, and the message has another legal form."""
    form: HopForm | None = None
    """With a whole connection only."""
    call: Literal[
        "request", "pause", "resume", "is_paused", "sleep", "wake_up", "reset_prefix_cache", "load_lora_adapter"
    ] = "request"
    """What meets the fault: requests of the data plane, or this control call."""


BROKEN_HOP_SAYS = "the hop is broken"
"""What an error of a broken hop says, in every kind of body that has a message."""


NOBODY = "127.0.0.1:9"
"""An address at which nobody answers (RFC 863's port, which nothing is given)."""


class ClientLifeRequest(Message, frozen=True, kw_only=True):
    """What happens to the stack's client. Calls in flight stay with the one that got them.

    "made again": a new one takes its place; the earlier one is closed with the stack. "closed": it is closed by its own method, and
    stays. "collected": a new one takes its place, and nobody closes or keeps the earlier one. "in another thread": a new one takes
    its place, whose calls run in the event loop of another thread. "in two loops": the same one is called from two event loops by
    turns. "alone": it is all that is kept of what the stack's entry point made. "as configured": the one that the stack's entry point
    makes of the configuration takes its place, for the same servers. "beside": the entry point makes another one for the first server
    alone, with an OpenAI address of its own; the earlier one and its address stay the ones that are asked. "looked at": nothing
    happens.

    `merged_adapter`: the configuration's policy is trained through an adapter that the trainer merges into the weights that it sends,
    so that engines take none (SkyRL: strategy "megatron" with a LoRA rank). `in_loop`: the entry point is called from within a running
    event loop, as in a notebook, and not in a thread of its own. `names`: the addresses of the stack that the configuration has; with
    the servers' alone, the entry point starts a proxy of its own (SkyRL: external_proxy_url, external_server_urls); "another's": those
    of servers, under the keys of another implementation, and nothing is started; "nobody's": `NOBODY` as a server's.
    `answer_limit_s`: that proxy's longest time for an answer in seconds, if it has one. `variables`: the environment in which the
    entry point is called has these as well. `port_taken`: at the port that the configuration names for the OpenAI address, another
    process listens. `another_model`: the configuration names another checkpoint than the servers serve. All for
    "as configured" only; a stack without addresses has no use for `names` and `answer_limit_s`.

    `without_tokenizer`: the client is given none of its own, and asks its servers (SkyRL, RemoteInferenceClient.tokenizer: "Optional
    HF tokenizer"). For "made again" only."""

    life: Literal[
        "made again",
        "closed",
        "collected",
        "in another thread",
        "in two loops",
        "alone",
        "as configured",
        "beside",
        "looked at",
    ]
    merged_adapter: bool = False
    in_loop: bool = False
    names: Literal["proxy and servers", "proxy", "servers", "another's", "nobody's"] = "proxy and servers"
    answer_limit_s: int | None = None
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    port_taken: bool = False
    another_model: bool = False
    without_tokenizer: bool = False


class ClientLifeResult(Message, frozen=True, kw_only=True):
    """What event loops said of objects that nobody closed, since the last such call ("Unclosed client session")."""

    left: list[str] = []


class OtherStackRequest(Message, frozen=True, kw_only=True):
    """Another stack begins and ends, in a process of its own. It is started as this one is, which is not touched.

    `wrong`: why it cannot start. "no model": its model's path does not exist; "no weights": the model's folder has everything but
    weights; "option": the engine refuses an option. None: nothing is wrong. A start includes the answer to a first request.
    `then`: what becomes of the process after the stack has failed to start or was ended by its own methods. "stays"; "exits", as a
    Python program does. "killed": it gets SIGKILL while the stack is up.
    `start_s`: longest time for a start; then the process is killed. `end_s`: how long after an end something may be left (seconds)."""

    wrong: Literal["no model", "no weights", "option"] | None = None
    then: Literal["stays", "exits", "killed"] = "stays"
    start_s: float
    end_s: float


class Remnant(Message, frozen=True, kw_only=True):
    """A process, or an address that is still bound. `kind`: "router", "server", "engine", …"""

    kind: str
    what: str


class OtherStackResult(Message, frozen=True, kw_only=True):
    """What became of the other stack."""

    error: str | None = None
    """What its start, or its first request, raised; None if it was up."""
    names: list[str] = []
    """What such an error has to name: the path, or the option."""
    in_time: bool = True
    """False if the start ended neither way within `start_s`."""
    took_s: float = 0.0
    """Seconds from the start to its error, or to the first answer."""
    ran: list[Remnant] = []
    """What the stack itself had before its end."""
    end_error: str | None = None
    """What its own methods for the end raised."""
    left: list[Remnant] = []
    """What was left of it `end_s` after its end, while its process lived."""
    outlived: list[Remnant] = []
    """What was left `end_s` after its process was gone."""


class BreakHopRequest(Message, frozen=True, kw_only=True):
    """From now on requests meet this fault. None: no longer."""

    fault: HopFault | None = None


class BreakHopResult(Message, frozen=True, kw_only=True):
    """How often the previous fault took effect."""

    struck: int


class InjectRequest(Message, frozen=True, kw_only=True):
    """Switch to the seeded fault with this id (`harness.contract.faults.Fault.id`); None switches all faults off."""

    fault: str | None = None


class InjectResult(Message, frozen=True, kw_only=True):
    """How often the previous fault took effect: the canary of the fault instrument."""

    fired: int


class Swap(Message, frozen=True, kw_only=True):
    """Changed code for one function of a stack's module (`harness.proving.mutations`)."""

    module: str
    function: str
    """Its qualified name."""
    source: str
    """The module's whole text with the change."""


class SwapRequest(Message, frozen=True, kw_only=True):
    """Swap the code of functions in every process of the stack. All others get their own code back."""

    watch: list[str] = []
    """Modules whose functions are watched from now on."""
    swaps: list[Swap] = []
    """Each of another function."""


class SwapResult(Message, frozen=True, kw_only=True):
    """The answers of all processes together."""

    called: dict[str, list[int]]
    """Function ("module:qualified name") → its lines that ran in any process since the last request."""
    swapped: int
    """Number of functions that got other code, over all processes."""
    refused: str = ""
    """Why a process could not swap the code; empty if all could."""


class StartRequest(Message, frozen=True, kw_only=True):
    """All that an adapter needs to start. Paths are absolute."""

    target: str
    topology: Topology
    capabilities: list[Capability] = []
    """The target's declaration (backends/targets.toml). The description says which of them this start offers."""
    start: Start = "ray"
    engine: Literal["cpu", "cuda"] = "cpu"
    model_path: str
    dtype: Dtype = "float32"
    cuda_graphs: bool = False
    """True if engines compile the model and replay CUDA graphs. Otherwise they are eager."""
    batch_invariant: bool = False
    """True if an engine's result for a row does not depend on the rest of its batch."""
    max_model_len: int = MAX_MODEL_LEN
    seed: int = 0
    scratch: str
    """A short, private folder for sockets and Ray's session (mode 0700)."""
    logs: str
    fault_taps: bool = False
    """True if the stack gets the fault instrument (`inject`). Never in a run whose verdicts count."""
    code_swaps: SwapRequest | None = None
    """The first order, if the stack's processes take other code for their functions (`swap`). It is in force before they import
    anything. None in every run whose verdicts count."""
    base_port: int | None = None
    """First port of the servers of the remote placement; None asks the operating system."""
    devices: Devices | None = None
    """GPUs of the workers and of the trainer; None on a CPU."""
    router_policy: str | None = None
    """How the router chooses a server; None is the stack's own choice."""
    policies: str = ""
    """The run's folder of trained policy versions, for trainer and oracle."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which the adapter gives up and names the part that is not up."""
        return START_DEADLINE_S[self.engine]


class ServerDescription(Message, frozen=True, kw_only=True):
    """One server of an engine. `pids` are the processes that must live for it to work."""

    name: str
    url: str | None = None
    pids: list[int] = []


class Description(Message, frozen=True, kw_only=True):
    """The started stack. `processes` maps a role ("router", "engine-0", …) to the pid of a process that the stack needs."""

    target: str
    topology: Topology
    start: str
    capabilities: list[Capability]
    servers: list[ServerDescription]
    processes: dict[str, int] = {}
    packages: dict[str, str] = {}
    patches: list[dict[str, str]] = []
    """What the harness changed inside the stack's processes: name, reason, version."""
    notes: list[str] = []
    """Differences from the stack as shipped, in words for the report."""


class Plane(StrEnum):
    """What a call is for."""

    DATA = "data"
    """It makes an engine generate."""
    CONTROL = "control"
    OUT_OF_BAND = "out of band"
    """For the harness only: starts the stack, breaks it, or reads what engines and workers did and hold."""


class Method(msgspec.Struct, frozen=True):
    """One row of the table of calls: request and result types, needed capability, plane."""

    name: str
    request: type[Message]
    result: type[Message]
    capability: Capability | None = None
    plane: Plane = Plane.CONTROL
    answers: Literal["lists", "choices", "trajectories"] | None = None
    """Form of the responses in the result: lists of token ids, an OpenAI body, or a gym generator's output."""
    polled: bool = False
    """True if the driver repeats it until it observes something. The number of calls then says nothing about the stack."""


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("start", StartRequest, Description, plane=Plane.OUT_OF_BAND, polled=True),
        # The result of `start`, with current pids.
        Method("describe", Empty, Description, plane=Plane.OUT_OF_BAND, polled=True),
        Method("teardown", Empty, Empty, plane=Plane.OUT_OF_BAND, polled=True),
        Method("generate", GenerateRequest, Generation, plane=Plane.DATA, answers="lists"),
        Method("sample", SampleRequest, Generation, Capability.SAMPLE, plane=Plane.DATA, answers="lists"),
        Method(
            "chat_completion",
            OpenAIRequest,
            OpenAIResponse,
            Capability.CHAT_COMPLETION,
            plane=Plane.DATA,
            answers="choices",
        ),
        Method("completion", OpenAIRequest, OpenAIResponse, Capability.COMPLETION, plane=Plane.DATA, answers="choices"),
        # Raises only if no answer came.
        Method("http", HttpRequest, HttpResponse, Capability.HTTP_ENDPOINT, plane=Plane.DATA),
        Method(
            "gym_generate", GymRequest, GymOutput, Capability.GYM_GENERATOR, plane=Plane.DATA, answers="trajectories"
        ),
        Method("tokenize", TokenizeRequest, TokenizeResult, Capability.TOKENIZE),
        Method("detokenize", DetokenizeRequest, DetokenizeResult, Capability.TOKENIZE),
        Method("render_chat", RenderChatRequest, RenderChatResult, Capability.RENDER_CHAT),
        Method("pause", PauseRequest, Empty),
        Method("resume", Empty, Empty),
        Method("sleep", SleepRequest, Empty, Capability.SLEEP),
        Method("wake_up", WakeUpRequest, Empty, Capability.SLEEP),
        Method("reset_prefix_cache", ResetPrefixCacheRequest, Empty, Capability.RESET_PREFIX_CACHE),
        Method("health", Empty, HealthResult, Capability.HEALTH),
        Method("is_paused", Empty, IsPausedResult, Capability.IS_PAUSED),
        # Never fails, whether anybody knows the session or not.
        Method("finish_session", FinishSessionRequest, Empty, Capability.FINISH_SESSION),
        Method("world_size", Empty, WorldSizeResult, Capability.WORLD_SIZE),
        # Joins trainer and workers into the group that transfers weights. Idempotent; after a failed sync it joins them again.
        Method("prepare_weight_sync", Empty, Empty, Capability.WEIGHT_SYNC),
        Method("sync_weights", SyncWeightsRequest, Empty, Capability.WEIGHT_SYNC),
        Method("sync_count", Empty, SyncCountResult, Capability.SYNC_COUNT),
        Method("weight_labels", Empty, WeightLabelsResult, Capability.WEIGHT_LABELS),
        # The engines keep generating. None has the version before a sync.
        Method("train", TrainRequest, TrainResult, Capability.TRAINER),
        # A fresh manager in place of an earlier one. The next three (SkyRL, _AsyncStalenessManager): acquire_submission_slot,
        # on_rollout_accepted, notify_capacity_change.
        Method("start_staleness_manager", StalenessRequest, Empty, Capability.STALENESS_MANAGER),
        Method("acquire_slot", RolloutRequest, Empty, Capability.STALENESS_MANAGER),
        Method("accept_rollout", RolloutRequest, Empty, Capability.STALENESS_MANAGER),
        Method("trained", TrainedRequest, Empty, Capability.STALENESS_MANAGER),
        # A run in place of an earlier one. It waits with what it wants until it is told to go on.
        Method("start_trainer_run", TrainerRunRequest, Empty, Capability.TRAINER_RUNS),
        Method("trainer_wants", TrainerWantsRequest, TrainerWants, Capability.TRAINER_RUNS),
        Method("trainer_goes_on", TrainerGoesOnRequest, Empty, Capability.TRAINER_RUNS),
        # Gives up a run that is not over. Without a run nothing happens.
        Method("end_trainer_run", Empty, Empty, Capability.TRAINER_RUNS),
        Method("load_lora_adapter", LoadLoraRequest, Empty, Capability.ADAPTER_SYNC),
        Method("write_lora_adapter", WriteLoraRequest, Empty, Capability.LORA),
        Method("unload_lora_adapter", UnloadLoraRequest, Empty, Capability.UNLOAD_ADAPTER),
        # Replaces the client by itself, serialized and read back, as handing it to another process does.
        Method("pickle_client", Empty, Empty, Capability.PICKLE_CLIENT),
        Method("client_life", ClientLifeRequest, ClientLifeResult, Capability.CLIENT_LIVES),
        Method("other_stack", OtherStackRequest, OtherStackResult, Capability.OTHER_STACKS, plane=Plane.OUT_OF_BAND),
        Method("request_schemas", Empty, RequestSchemasResult, plane=Plane.OUT_OF_BAND),
        # Removes every adapter from the engines, for the clean room of stacks with `LORA`.
        Method("forget_adapters", Empty, Empty, plane=Plane.OUT_OF_BAND),
        Method("digests", Empty, DigestsResult, plane=Plane.OUT_OF_BAND),
        Method("workers", Empty, WorkersResult, plane=Plane.OUT_OF_BAND),
        # Raises what a start with these options would raise before any engine is there.
        Method(
            "engine_arguments",
            EngineArgumentsRequest,
            EngineArgumentsResult,
            Capability.ENGINE_OPTIONS,
            plane=Plane.OUT_OF_BAND,
        ),
        Method(
            "serving_arguments",
            ServingArgumentsRequest,
            ServingArgumentsResult,
            Capability.ENGINE_OPTIONS,
            plane=Plane.OUT_OF_BAND,
        ),
        # Raises what a configuration with these overrides raises.
        Method(
            "override_configuration",
            OverrideRequest,
            OverrideResult,
            Capability.CONFIGURATION_OVERRIDES,
            plane=Plane.OUT_OF_BAND,
        ),
        # Also answered while engines are asleep.
        Method("device_memory", Empty, DeviceMemoryResult, Capability.DEVICE_MEMORY, plane=Plane.OUT_OF_BAND),
        Method("observe", ObserveRequest, ObserveResult, plane=Plane.OUT_OF_BAND, polled=True),
        Method("in_flight", Empty, InFlightResult, plane=Plane.OUT_OF_BAND, polled=True),
        # Which addresses are bound, and what each HTTP address does for a caller without credentials.
        Method("probe_security", Empty, ProbeSecurityResult, plane=Plane.OUT_OF_BAND),
        # Answered by the host itself, for every stack whose client it watches.
        Method("form", FormRequest, FormResult, plane=Plane.OUT_OF_BAND),
        # What a caller of the client meets: methods, attributes, types, exceptions, and the configuration keys that the stack reads.
        Method("census", Empty, CensusResult, plane=Plane.OUT_OF_BAND),
        Method("kill_server", KillServerRequest, Empty, Capability.KILL_SERVER),
        # Makes messages wait at the engines. Each that waited is an observation.
        Method("delay", DelayRequest, Empty, Capability.DELAYS, plane=Plane.OUT_OF_BAND),
        # Breaks requests between client, router and servers.
        Method("break_hop", BreakHopRequest, BreakHopResult, Capability.BROKEN_HOPS, plane=Plane.OUT_OF_BAND),
        # Switches to another seeded fault, or to none.
        Method("inject", InjectRequest, InjectResult, plane=Plane.OUT_OF_BAND),
        Method("swap", SwapRequest, SwapResult, plane=Plane.OUT_OF_BAND),
    )
}
"""Every call of the contract by name. Host and handle both use this table. An adapter has a method for each call that it offers:
``async def pause(self, request: PauseRequest) -> None``; it returns nothing for `Empty`."""
DATA_PLANE = tuple(name for name, method in METHODS.items() if method.plane is Plane.DATA)
LISTS, CHOICES = (
    tuple(name for name, method in METHODS.items() if method.answers == form) for form in ("lists", "choices")
)
"""Calls by the form of their answers (`Method.answers`)."""


_OF_LAYOUTS: Mapping[str, frozenset[Capability]] = {
    "single": frozenset(),
    "fsdp2": frozenset({Capability.TRAINER}),
    "megatron": frozenset({Capability.MEGATRON_TRAINER}),
}

_OF_ARGUMENTS: Mapping[str, Mapping[str, Capability]] = {
    "pause": {"clear_cache": Capability.PAUSE_CLEAR_CACHE},
    "sleep": {"tags": Capability.SLEEP_TAGS},
    "wake_up": {"tags": Capability.WAKE_UP_TAGS},
    "sample": {"prompt_logprobs": Capability.PROMPT_LOGPROBS, "lora_adapter": Capability.LORA},
    "generate": {
        "single": Capability.SINGLE_REQUESTS,
        "cache_salt": Capability.CACHE_SALT,
        "prompts": Capability.GENERATE_MESSAGES,
        "lora_adapter": Capability.LORA,
    },
    "gym_generate": {"earlier_client": Capability.PICKLE_CLIENT},
    "sync_weights": {"weight_label": Capability.WEIGHT_LABELS},
    "http": {"configured": Capability.CONFIGURED_ADDRESS},
    "reset_prefix_cache": {"reset_running_requests": Capability.RESET_RUNNING_REQUESTS},
    "client_life": {"another_model": Capability.SERVER_ADDRESSES},
}
"""Method → argument → what a call needs that gives this argument: neither None nor False."""


REFUSABLE = frozenset({Capability.HTTP_STREAMING, Capability.HTTP_CHOICES})
"""Capabilities that a scenario may ask for on any stack: an address without them refuses the body itself."""


def capabilities_of(method: str, request: Mapping[str, Any]) -> frozenset[Capability]:
    """The capabilities that this call needs. Arguments count, unlike in the table.

    `request` is plain (`msgspec.to_builtins`), as it is sent and recorded. A missing argument has its default.
    """
    needed = METHODS[method].capability
    found = set() if needed is None else {needed}
    match method:
        case "pause":
            found = {Capability(f"pause_{request.get('mode', 'keep')}")}
        case "client_life" if request["life"] == "closed":
            found.add(Capability.CLIENT_CLOSES)
        case "client_life" if request["life"].startswith("in "):
            found.add(Capability.CLIENT_THREADS)
        case "other_stack" if request.get("wrong") is None:
            found.add(Capability.STACK_ENDS)
        case "sample" if request.get("tinker") is not None:
            return frozenset({Capability.FORWARDED_TINKER if request.get("forwarded") else Capability.TINKER})
        case "sync_weights":
            found |= _OF_LAYOUTS[request.get("layout", "single")]
        case "http" if request.get("server"):
            return frozenset({Capability.SERVER_ADDRESSES})
        case "http":
            found |= _of_openai_body(request.get("path", ""), request.get("body", ""))
        case _:
            pass
    for name, needs in _OF_ARGUMENTS.get(method, {}).items():
        given = request.get(name)
        found |= set() if given is None or given is False else {needs}
    return frozenset(found)


def _of_openai_body(path: str, text: str) -> set[Capability]:
    """The capabilities that a body needs beyond the address itself. None for an unreadable body: the stack has to refuse it."""
    try:
        body = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return set()
    if not isinstance(body, dict):
        return set()
    several = path == "/v1/completions" and isinstance(body.get("n"), int) and body["n"] > 1
    found = {Capability.HTTP_STREAMING} if body.get("stream") is True else set()
    return found | ({Capability.HTTP_CHOICES} if several else set())
