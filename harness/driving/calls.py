"""The calls of the contract as scenarios make them. `Stack` sends and records them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from harness.contract import messages
from harness.contract.capability import Capability
from harness.contract.errors import NotOffered

R = TypeVar("R", bound=messages.Message)


class Condition(msgspec.Struct, kw_only=True):
    """The state that calls leave in a stack, for the next clean room. The next driver of a kept stack gets it from the last one."""

    version: int | None = None
    """The policy version of all engines; None if unknown."""
    paused: bool = False
    adapters: set[str] = set()
    """Names of the loaded LoRA adapters."""
    left: bool = False
    """True after a failed sync: the trainer has to join again (`prepare_weight_sync`)."""
    delayed: bool = False
    """True while messages to the engines are delayed."""
    broken: bool = False
    """True while a hop is broken."""
    formed: bool = False
    """True while arguments of the client's methods are given in another form."""
    canary_seed: int = 0
    cancelled: bool = False
    """True after a call whose caller went away: a stack that does not notice may ask its engines for the rest, one after the other."""
    abandoned: dict[str, str] = {}
    """Prompt of a failed batch (`prompt_key`) → its scenario. The batch's other rows may reach an engine at any time."""


def prompt_key(prompt: Sequence[int]) -> str:
    """A prompt as a key of `Condition.abandoned`."""
    return " ".join(map(str, prompt))


class Calls(ABC):
    """The contract's calls. Token ids are ints; `session_ids` has one entry per prompt; `label` names a call for the checks.

    It keeps track of the state that calls leave, for the next clean room.
    """

    def __init__(self) -> None:
        self._condition = Condition()
        self._may_spoil = False
        """True if the current scenario declares that it breaks the stack."""
        self._spoiled = False
        self._killed = False
        """True if a scenario killed a server. A death is then expected."""

    @abstractmethod
    async def _call(self, method: str, request: messages.Message, result: type[R], label: str | None = None) -> R:
        """Send and record one call. Raises a `StackError` if it fails."""

    def _of_adapters(self, method: str, request: dict[str, Any]) -> set[Capability]:
        """The capabilities that this call needs beyond `LORA`, given the adapters loaded already. Any stack can be asked under the
        adapter that it has, or under no name."""
        loaded = self._condition.adapters
        match method:
            case "load_lora_adapter" if loaded - {request["name"]}:
                return {Capability.SEVERAL_ADAPTERS}
            case "generate" | "sample" if {request.get("lora_adapter")} not in ({None}, loaded):
                return {Capability.ADAPTER_BY_NAME}
            case _:
                return set()

    # --- data plane

    async def generate(
        self,
        prompts: list[list[int]],
        *,
        session_ids: list[messages.SessionId] | None = None,
        lora_adapter: str | None = None,
        cache_salt: str | None = None,
        single: bool = False,
        mm_features: list[dict[str, Any]] | None = None,
        label: str | None = None,
        **sampling_params: Any,
    ) -> messages.Generation:
        """Continue each prompt, under `lora_adapter` and `cache_salt` if given. Results in the order of the prompts.
        `single`: by the client for single requests. `mm_features`: the images of each row."""
        request = messages.GenerateRequest(
            prompt_token_ids=prompts,
            session_ids=session_ids,
            lora_adapter=lora_adapter,
            cache_salt=cache_salt,
            single=single,
            mm_features=mm_features,
            sampling_params=sampling_params,
        )
        return await self._call("generate", request, messages.Generation, label)

    async def generate_messages(
        self,
        conversations: list[list[dict[str, Any]]],
        *,
        session_ids: list[messages.SessionId] | None = None,
        label: str | None = None,
        **sampling_params: Any,
    ) -> messages.Generation:
        """Continue each conversation, rendered by the stack with the model's chat template."""
        request = messages.GenerateRequest(
            prompts=conversations, session_ids=session_ids, sampling_params=sampling_params
        )
        return await self._call("generate", request, messages.Generation, label)

    async def generate_request(
        self, request: messages.GenerateRequest, *, label: str | None = None
    ) -> messages.Generation:
        """Send a request as it is, for requests that the other two methods cannot build (malformed on purpose)."""
        return await self._call("generate", request, messages.Generation, label)

    async def sample(
        self,
        prompt: list[int],
        num_samples: int,
        *,
        session_id: messages.SessionId | None = None,
        lora_adapter: str | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        as_given: bool = False,
        image: str | None = None,
        label: str | None = None,
        **sampling_params: Any,
    ) -> messages.Generation:
        """`num_samples` independent continuations of one prompt, under `lora_adapter` and behind an `image` (base64) if given."""
        request = messages.SampleRequest(
            prompt_token_ids=prompt,
            num_samples=num_samples,
            session_id=session_id,
            lora_adapter=lora_adapter,
            sampling_params=sampling_params,
            prompt_logprobs=prompt_logprobs,
            as_given=as_given,
            topk_prompt_logprobs=topk_prompt_logprobs,
            image=image,
        )
        return await self._call("sample", request, messages.Generation, label)

    async def tinker_sample(
        self,
        prompt: list[int],
        num_samples: int,
        *,
        seed: int,
        max_tokens: int,
        temperature: float = 1.0,
        stop: list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        of: Literal["policy", "base model"] = "policy",
        forwarded: bool = False,
        session_id: str | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        image: str | None = None,
        label: str | None = None,
    ) -> messages.Generation:
        """As `sample`, through SkyRL's backend of the Tinker API, whose requests have no other parameters, or `forwarded` by the API's
        process. `session_id` names one request of a sampling session."""
        params = {"seed": seed, "max_tokens": max_tokens, "temperature": temperature, "logprobs": int(forwarded)}
        stops = {"stop": stop, "stop_token_ids": stop_token_ids}
        request = messages.SampleRequest(
            prompt_token_ids=prompt,
            num_samples=num_samples,
            session_id=session_id,
            sampling_params=params | {name: given for name, given in stops.items() if given is not None},
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            image=image,
            tinker="base model" if forwarded else of,
            forwarded=forwarded,
        )
        return await self._call("sample", request, messages.Generation, label)

    async def chat_completion(
        self, body: dict[str, Any], *, headers: dict[str, str] | None = None, label: str | None = None
    ) -> dict[str, Any]:
        """The response's body, or an error body as the stack returns it."""
        request = messages.OpenAIRequest(body=body, headers=headers or {})
        return (await self._call("chat_completion", request, messages.OpenAIResponse, label)).body

    async def completion(self, body: dict[str, Any], *, label: str | None = None) -> dict[str, Any]:
        """The response's body, or an error body as the stack returns it."""
        return (await self._call("completion", messages.OpenAIRequest(body=body), messages.OpenAIResponse, label)).body

    async def http(self, request: messages.HttpRequest, *, label: str | None = None) -> messages.HttpResponse:
        """Send a request to the stack's OpenAI address. `fixtures/openai_client.py` makes such requests."""
        return await self._call("http", request, messages.HttpResponse, label)

    async def gym_generate(self, request: messages.GymRequest, *, label: str | None = None) -> messages.GymOutput:
        """Trajectories of SkyRL's gym generator, in the order of the prompts."""
        return await self._call("gym_generate", request, messages.GymOutput, label)

    async def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        request = messages.TokenizeRequest(texts=texts, add_special_tokens=add_special_tokens)
        return (await self._call("tokenize", request, messages.TokenizeResult)).token_ids

    async def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        return (
            await self._call("detokenize", messages.DetokenizeRequest(token_ids=token_ids), messages.DetokenizeResult)
        ).texts

    async def render_chat(self, messages_: list[dict[str, Any]]) -> list[int]:
        """The prompt that the model's chat template makes of a conversation."""
        request = messages.RenderChatRequest(messages=messages_)
        return (await self._call("render_chat", request, messages.RenderChatResult)).token_ids

    # --- control plane

    async def pause(
        self, mode: messages.PauseMode = "keep", *, clear_cache: bool = False, label: str | None = None
    ) -> None:
        self._condition.paused = True  # also when it fails: it may have reached some servers
        await self._call("pause", messages.PauseRequest(mode=mode, clear_cache=clear_cache), messages.Empty, label)

    async def resume(self) -> None:
        await self._call("resume", messages.Empty(), messages.Empty)
        self._condition.paused = False

    async def sleep(self, level: int = 2, tags: list[str] | None = None, *, label: str | None = None) -> None:
        await self._call("sleep", messages.SleepRequest(level=level, tags=tags), messages.Empty, label)

    async def wake_up(self, tags: list[str] | None = None, *, label: str | None = None) -> None:
        await self._call("wake_up", messages.WakeUpRequest(tags=tags), messages.Empty, label)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, label: str | None = None) -> None:
        request = messages.ResetPrefixCacheRequest(reset_running_requests=reset_running_requests)
        await self._call("reset_prefix_cache", request, messages.Empty, label)

    async def health(self) -> bool:
        return (await self._call("health", messages.Empty(), messages.HealthResult)).healthy

    async def is_paused(self) -> dict[str, bool]:
        return (await self._call("is_paused", messages.Empty(), messages.IsPausedResult)).servers

    async def world_size(self) -> int:
        return (await self._call("world_size", messages.Empty(), messages.WorldSizeResult)).world_size

    # --- weight sync and client

    async def prepare_weight_sync(self) -> None:
        await self._call("prepare_weight_sync", messages.Empty(), messages.Empty)
        self._condition.left = False

    async def sync_weights(
        self,
        version: int,
        *,
        chunks: int = 1,
        layout: messages.Layout = "single",
        fail_after_chunks: int | None = None,
        sparse: bool = False,
        unfit: messages.Unfit | None = None,
        weight_label: str | None = None,
        training: messages.Training | None = None,
        label: str | None = None,
    ) -> messages.Empty:
        """Load a policy version into every engine through the stack's own weight sync. Every server reports `weight_label`
        afterwards, if one is given. With `training`, the stack's own worker of that kind sends the parameters. The result has
        nothing in it: it tells a sync that is done from one that failed (`Stack.attempt`).

        With `fail_after_chunks` the trainer fails in the middle, and the call must fail; with `unfit` it sends what does not fit the
        engines' model. The next scenario gets a fresh start of the stack.
        """
        if fail_after_chunks is not None or unfit is not None:
            self.spoil("a sync that fails, or of what does not fit")
        self._condition.version, self._condition.left = None, True  # until it is done
        request = messages.SyncWeightsRequest(
            version=version,
            chunks=chunks,
            layout=layout,
            fail_after_chunks=fail_after_chunks,
            sparse=sparse,
            unfit=unfit,
            weight_label=weight_label,
            training=training,
        )
        done = await self._call("sync_weights", request, messages.Empty, label)
        self._condition.version, self._condition.left = version, False
        return done

    async def sync_weights_paused(self, version: int, *, chunks: int = 1) -> None:
        """`sync_weights` while generation is paused (keep), as SkyRL's trainers do (SkyRL 0.2.0, save_weights_for_sampler).

        Data-parallel engines need the pause. After their last answer they run dummy batches for a while, each for the sake of
        the others, and a batch during a sync would use half of the new weights. A pause returns once they are idle (vLLM).
        """
        await self.pause("keep")
        await self.sync_weights(version, chunks=chunks)
        await self.resume()

    async def finish_session(self, session_id: messages.SessionId) -> None:
        """Tell the router that no more requests of this session will come."""
        await self._call("finish_session", messages.FinishSessionRequest(session_id=session_id), messages.Empty)

    async def sync_count(self) -> int:
        """Number of syncs that the client completed."""
        return (await self._call("sync_count", messages.Empty(), messages.SyncCountResult)).count

    async def weight_labels(self) -> dict[str, str]:
        """server → label of its weights."""
        return (await self._call("weight_labels", messages.Empty(), messages.WeightLabelsResult)).servers

    async def train(self, request: messages.TrainRequest, *, label: str | None = None) -> messages.TrainResult:
        """One optimizer step on rollouts makes a new policy version. No engine has it before a sync."""
        return await self._call("train", request, messages.TrainResult, label)

    async def digests(self, *, label: str | None = None) -> dict[str, list[dict[str, str]]]:
        """server → rank → parameter → digest, out of band."""
        return (await self._call("digests", messages.Empty(), messages.DigestsResult, label)).servers

    async def workers(self, *, label: str | None = None) -> dict[str, list[messages.WorkerDescription]]:
        """server → rank → how the worker takes weights, out of band."""
        return (await self._call("workers", messages.Empty(), messages.WorkersResult, label)).servers

    async def device_memory(self, *, label: str | None = None) -> dict[str, list[messages.WorkerMemory]]:
        """server → rank → memory of the worker's device, out of band."""
        return (await self._call("device_memory", messages.Empty(), messages.DeviceMemoryResult, label)).servers

    async def start_staleness_manager(
        self, *, max_concurrent: int, mini_batch_size: int, max_staleness_steps: int
    ) -> None:
        """Start a fresh staleness manager at global step 1. `max_staleness_steps` counts training steps, the others rollouts."""
        request = messages.StalenessRequest(
            max_concurrent=max_concurrent, mini_batch_size=mini_batch_size, max_staleness_steps=max_staleness_steps
        )
        await self._call("start_staleness_manager", request, messages.Empty)

    async def acquire_slot(self, rollout: str) -> None:
        """Wait until this rollout may be requested."""
        await self._call("acquire_slot", messages.RolloutRequest(rollout=rollout), messages.Empty)

    async def accept_rollout(self, rollout: str) -> None:
        await self._call("accept_rollout", messages.RolloutRequest(rollout=rollout), messages.Empty)

    async def trained(self, consumed: list[str], *, global_step: int, label: str | None = None) -> None:
        """A training step has used the rollouts `consumed`. `global_step` begins now."""
        await self._call(
            "trained", messages.TrainedRequest(consumed=consumed, global_step=global_step), messages.Empty, label
        )

    async def start_trainer_run(self, request: messages.TrainerRunRequest) -> None:
        """Begin a run of the stack's own trainer."""
        await self._call("start_trainer_run", request, messages.Empty)

    async def trainer_wants(self, within_s: float, label: str | None = None) -> messages.TrainerWants:
        """What the trainer asks for next."""
        request = messages.TrainerWantsRequest(within_s=within_s)
        return await self._call("trainer_wants", request, messages.TrainerWants, label)

    async def trainer_goes_on(self, *, fails: bool = False) -> None:
        """The trainer has what it asked for; `fails`: it could not be done."""
        await self._call("trainer_goes_on", messages.TrainerGoesOnRequest(fails=fails), messages.Empty)

    async def end_trainer_run(self) -> None:
        """Give up a run that is not over."""
        await self._call("end_trainer_run", messages.Empty(), messages.Empty)

    async def load_lora_adapter(
        self, name: str, version: int, *, wrong: Literal["folder", "rank"] | None = None, label: str | None = None
    ) -> None:
        """Load a version of a LoRA adapter under a name into every engine. It replaces an adapter of that name."""
        loaded = set(self._condition.adapters)
        self._condition.adapters.add(name)  # also when it fails: it may have reached some servers
        try:
            request = messages.LoadLoraRequest(name=name, version=version, wrong=wrong)
            await self._call("load_lora_adapter", request, messages.Empty, label)
        except NotOffered:
            self._condition.adapters = loaded
            raise

    async def write_lora_adapter(self, name: str, version: int, *, half: bool = False) -> None:
        """Write a version of a LoRA adapter to the folder of this name, or half of it. No engine is told."""
        request = messages.WriteLoraRequest(name=name, version=version, half=half)
        await self._call("write_lora_adapter", request, messages.Empty)

    async def unload_lora_adapter(self, name: str, *, label: str | None = None) -> None:
        """Remove a name from every engine. Later requests for it are refused."""
        await self._call("unload_lora_adapter", messages.UnloadLoraRequest(name=name), messages.Empty, label)
        self._condition.adapters.discard(name)

    async def pickle_client(self) -> None:
        await self._call("pickle_client", messages.Empty(), messages.Empty)

    async def client_life(self, life: str, **about: bool | int | str | dict[str, str]) -> list[str]:
        """Make the stack's client again, close it, drop it, or use it in other loops (`ClientLifeRequest`). Returns what is left."""
        request = msgspec.convert({"life": life, **about}, messages.ClientLifeRequest)
        return (await self._call("client_life", request, messages.ClientLifeResult)).left

    async def other_stack(self, **about: str | float | None) -> messages.OtherStackResult:
        """Start and end another stack in a process of its own (`OtherStackRequest`)."""
        request = msgspec.convert(about, messages.OtherStackRequest)
        return await self._call("other_stack", request, messages.OtherStackResult)

    # --- probing and breaking, out of band

    async def request_schemas(self) -> dict[str, dict[str, Any]]:
        """Call → JSON Schema of its public request, out of band."""
        return (await self._call("request_schemas", messages.Empty(), messages.RequestSchemasResult)).calls

    async def engine_arguments(self, **options: messages.Scalar) -> messages.EngineArgumentsResult:
        """What engines would be started with, if the configuration gave them these options as well."""
        request = messages.EngineArgumentsRequest(options=options)
        return await self._call("engine_arguments", request, messages.EngineArgumentsResult)

    async def engine_arguments_without_a_device(self) -> messages.EngineArgumentsResult:
        """The same on a driver that finds no accelerator of its own."""
        request = messages.EngineArgumentsRequest(device=False)
        return await self._call("engine_arguments", request, messages.EngineArgumentsResult)

    async def sync_backend(self, named: str) -> str | None:
        """The backend by which weights would travel, if the configuration named this one."""
        request = messages.EngineArgumentsRequest(sync_backend=named)
        return (await self._call("engine_arguments", request, messages.EngineArgumentsResult)).sync_backend

    async def serving_arguments(self, **options: Any) -> dict[str, Any]:
        """Those of these options that the OpenAI address would be served with, if the configuration gave them as well. Without any:
        vLLM's own options for it, with their defaults."""
        request = messages.ServingArgumentsRequest(options=options)
        return (await self._call("serving_arguments", request, messages.ServingArgumentsResult)).arguments

    async def override_configuration(
        self,
        overrides: dict[str, messages.Scalar | list[str]] | None = None,
        *,
        validated: bool = False,
        label: str | None = None,
    ) -> dict[str, messages.Scalar]:
        """Key → value in a configuration with these overrides; without any, of every key for generation. `validated`: checked as
        the entry point checks it."""
        request = messages.OverrideRequest(overrides=overrides or {}, validated=validated)
        return (await self._call("override_configuration", request, messages.OverrideResult, label)).values

    async def probe_security(self) -> messages.ProbeSecurityResult:
        """The bound addresses, and what they do for a caller without credentials."""
        return await self._call("probe_security", messages.Empty(), messages.ProbeSecurityResult)

    async def census(self) -> messages.CensusResult:
        """What a caller of the client meets."""
        return await self._call("census", messages.Empty(), messages.CensusResult)

    async def delay(self, seed: int | None) -> None:
        """Delay what reaches the engines by the schedule of `seed`, until the next clean room. None ends that."""
        self._condition.delayed = seed is not None
        await self._call("delay", messages.DelayRequest(seed=seed), messages.Empty)

    async def break_hop(self, fault: messages.HopFault | None) -> int:
        """Break requests by this fault, until the next clean room. Returns how often the previous one took effect. None ends that."""
        self._condition.broken = fault is not None
        return (await self._call("break_hop", messages.BreakHopRequest(fault=fault), messages.BreakHopResult)).struck

    async def form(self, form: str | None) -> list[str]:
        """Give an argument of the client's methods in this form, until the next clean room. Returns the forms of the last call that
        was made with "as it is". None ends that. "used again" changes what unanswered calls were given."""
        self._condition.formed = form is not None
        return (await self._call("form", messages.FormRequest(form=form), messages.FormResult)).forms

    async def kill_server(self, server: str, part: Literal["server", "engine"] = "server") -> None:
        """Kill a server's processes, its engine's alone, or the `ROUTER`. The next scenario gets a fresh start of the stack."""
        self.spoil("kill_server")
        self._killed = True
        await self._call("kill_server", messages.KillServerRequest(server=server, part=part), messages.Empty)

    def give_up(self) -> None:
        """The stack no longer answers. The next scenario gets a fresh start of it."""
        self._spoiled = True

    def spoil(self, how: str) -> None:
        """Mark the stack as unusable for the next scenario. Raises ValueError if the scenario does not declare spoils=True."""
        if not self._may_spoil:
            raise ValueError(f"{how} breaks the stack, and the scenario does not declare it: spoils=True")
        self._spoiled = True
