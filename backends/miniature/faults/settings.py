"""Faults of settings on their way to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.miniature.client import Client, Setting
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import Engine
from backends.miniature.faults.registry import ONE, seeded
from harness.contract.faults import Fact
from harness.contract.messages import MAX_MODEL_LEN, Generation, SampleRequest, Scalar

LOST = "max_num_seqs"
"""The option that one fault loses."""


@seeded("setting_lost", "one_server", caught_by=["settings"], changes=frozenset({"Miniature.workers"}))
class SettingLost(Engine):
    """One server runs with its engine's default instead of a configured setting."""

    def configure(self, settings: Mapping[str, str]) -> None:
        super().configure(settings)
        if self.name == ONE:
            self.fired += 1
            self.settings["max_model_len"] = "2048"


Arguments = dict[str, Scalar]


@seeded("engine_option_ignored", "misspelt", caught_by=["engine_options"])
class MisspeltOptionIgnored(Engine):
    """An option that the engine does not have is ignored."""

    def arguments(self, options: Mapping[str, Scalar]) -> Arguments:
        known = super().arguments({})
        self.fired += bool(options.keys() - known.keys())
        return super().arguments({name: value for name, value in options.items() if name in known})


@seeded("engine_option_ignored", "one_option", caught_by=["engine_options"])
class OneOptionIgnored(Engine):
    """One option does not reach the engine."""

    lost = LOST

    def arguments(self, options: Mapping[str, Scalar]) -> Arguments:
        self.fired += self.lost in options
        return {**super().arguments(options), self.lost: super().arguments({})[self.lost]}


@seeded("engine_option_ignored", "a_text", caught_by=["engine_options"])
class TextIgnored(OneOptionIgnored):
    """An option that is a text does not reach the engine."""

    lost = "scheduling_policy"


@seeded("engine_option_overrides", caught_by=["engine_options"])
class OptionOverrides(Engine):
    """An option replaces a setting that the configuration has a key for."""

    def arguments(self, options: Mapping[str, Scalar]) -> Arguments:
        clash = {name: value for name, value in options.items() if name in self.settings}
        self.fired += bool(clash)
        return {**super().arguments({name: options[name] for name in options.keys() - clash.keys()}), **clash}


@seeded("engine_option_unnamed", caught_by=["engine_options"])
class RefusedOptionUnnamed(Engine):
    """The error about an option does not name it."""

    def arguments(self, options: Mapping[str, Scalar]) -> Arguments:
        try:
            return super().arguments(options)
        except TypeError as e:
            self.fired += 1
            raise TypeError("the engine cannot be configured") from e


@seeded("driver_needs_a_device", caught_by=["driver_without_a_device"])
class DriverNeedsADevice(Client):
    """The engines' arguments are made with the driver's own device."""

    def arguments(self, engine: Engine, options: Mapping[str, Scalar], *, device: bool) -> Arguments:
        if not device:
            self.fired += 1
            raise RuntimeError("Failed to infer device type")
        return super().arguments(engine, options, device=device)


@seeded("driver_needs_a_device", "other_arguments", caught_by=["driver_without_a_device"])
class DriversDeviceDecides(Client):
    """A driver without a device gives the engines other arguments."""

    def arguments(self, engine: Engine, options: Mapping[str, Scalar], *, device: bool) -> Arguments:
        made = super().arguments(engine, options, device=device)
        self.fired += not device
        return made if device else {**made, LOST: 1}


@seeded("sync_backend_replaced", caught_by=["sync_backend"])
class SyncBackendReplaced(Client):
    """Weights travel by one backend, whatever the configuration names."""

    def sync_backend(self, named: str) -> str:
        self.fired += named != "nccl"
        return "nccl"


@seeded("serving_option_in_letters", caught_by=["serving_options"])
class OptionInLetters(Endpoint):
    """A text for an option that holds several stays a text, of which each letter is one."""

    def several(self, name: str, value: Any) -> Any:
        self.fired += value != super().several(name, value)
        return value


@seeded("serving_option_ignored", "other_name", caught_by=["serving_options"])
class OtherNameOfAnOptionIgnored(Endpoint):
    """An option of the OpenAI address does not reach it under one of its two names."""

    def arguments(self, options: Mapping[str, Scalar]) -> Arguments:
        self.fired += "tool_parser" in options
        return {name: value for name, value in super().arguments(options).items() if name != "tool_parser"}


@seeded("serving_option_ignored", "without_a_word", caught_by=["serving_options"])
class OptionOfTheAddressIgnored(Endpoint):
    """An option that only vLLM's own list names does not reach the OpenAI address."""

    def arguments(self, options: Mapping[str, Scalar]) -> Arguments:
        self.fired += "response_role" in options
        return {**super().arguments(options), **({"response_role": "assistant"} if options else {})}


@seeded("override_read_as_text", caught_by=["overrides"])
class OverrideReadAsText(Client):
    """An override becomes text, which is parsed again."""

    def configuration(self, overrides: Mapping[str, Setting]) -> dict[str, Setting]:
        read: dict[str, Setting] = {}
        for key, value in overrides.items():
            text = str(value)
            read[key] = int(text) if text.isdigit() else text if value is None or isinstance(value, str) else value
        self.fired += read != dict(overrides)
        return super().configuration(read)


@seeded("contradiction_accepted", "one_of_two", caught_by=["contradictions"])
class ContradictionAccepted(Client):
    """Servers of the user's own beside colocated engines are accepted; the proxy in front of them is still refused."""

    def validate(self, configuration: Mapping[str, Setting]) -> None:
        key = "generator.inference_engine.external_server_urls"
        self.fired += bool(configuration[key]) and bool(configuration["trainer.placement.colocate_all"])
        super().validate({**configuration, key: None})


@seeded("contradiction_unnamed", caught_by=["contradictions"])
class ContradictionUnnamed(Client):
    """The error about two settings names neither."""

    def validate(self, configuration: Mapping[str, Setting]) -> None:
        try:
            super().validate(configuration)
        except ValueError as e:
            self.fired += 1
            raise ValueError("the configuration contradicts itself") from e


@seeded("configured_sampling_lost", "one_parameter", caught_by=["configured_sampling"])
class ConfiguredTemperatureLost(Client):
    """Requests do not get the configured temperature."""

    def sampling(self, configuration: Mapping[str, Setting]) -> dict[str, Scalar]:
        made = super().sampling(configuration)
        self.fired += made["temperature"] != 1.0
        return {**made, "temperature": 1.0}


@seeded("recommended_parameter_lost", "another_value", caught_by=["left_out"], corrupts=Fact.CHANCE)
class AnotherDefault(Client):
    """A temperature that a chat or completion leaves out is neither the checkpoint's nor the engine's."""

    def with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        self.fired += "temperature" not in given
        return super().with_defaults({"temperature": 0.5, **given})


@seeded("recommended_parameter_lost", "every_second_time", caught_by=["left_out"], corrupts=Fact.CHANCE)
class DefaultAtTimes(Client):
    """Every second request without a temperature gets the one that the checkpoint recommends, the others vLLM's own."""

    asked = 0

    def with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        left_out = "temperature" not in given
        self.asked += left_out
        lost = left_out and self.asked % 2 == 0
        self.fired += lost
        return super().with_defaults({"temperature": 1.0, **given} if lost else given)


@seeded("length_left_out", caught_by=["left_out"])
class SamplesToTheEnd(Client):
    """A sample without max_tokens goes on to the end of the context, though an answer of generate() ends after 16 tokens."""

    async def sample(self, request: SampleRequest) -> Generation:
        params = request.sampling_params
        if params.get("max_tokens") is not None:
            return await super().sample(request)
        self.fired += 1
        whole = {**params, "max_tokens": MAX_MODEL_LEN - len(request.prompt_token_ids)}
        return await super().sample(msgspec.structs.replace(request, sampling_params=whole))


@seeded("recommended_parameter_lost", "length", caught_by=["left_out"], corrupts=Fact.CHANCE)
class AnotherLength(Client):
    """A chat without max_tokens ends neither at the length that the checkpoint recommends nor at the end of the context."""

    def with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        lost = "max_tokens" in self.recommended and "max_tokens" not in given
        self.fired += lost
        return super().with_defaults({"max_tokens": 16, **given} if lost else given)
