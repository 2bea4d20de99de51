"""What a stack says of its own weights is wrong: the client's count of syncs, the servers' labels. Salts that keep nothing apart."""

from __future__ import annotations

from typing import Any

from backends.miniature.client import Client
from backends.miniature.engine import CacheKey, Engine, Output, Request
from backends.miniature.faults.registry import ONE, seeded
from backends.miniature.generator import Generator
from harness.contract.faults import Fact
from harness.contract.messages import Layout, SessionId


@seeded("salt_dropped", caught_by=["echo"], corrupts=Fact.POLICY)
class SaltDropped(Client):
    """The client drops the salt of a request."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += more.get("salt") is not None
        return await super().row(session, prompt, params, **{**more, "salt": None})


@seeded("salt_ignored", "every_server", caught_by=["weight_history"], corrupts=Fact.POLICY)
class SaltIgnored(Engine):
    """Requests with different salts share a prefix cache."""

    def salted(self, request: Request, tokens: list[int]) -> CacheKey:
        self.fired += request.salt is not None
        return self.cache_key(request.adapter, tokens)


@seeded("salt_ignored", "one_server", caught_by=["weight_history"], corrupts=Fact.POLICY)
class SaltIgnoredByOne(SaltIgnored):
    """One server shares its prefix cache between requests with different salts."""

    def salted(self, request: Request, tokens: list[int]) -> CacheKey:
        return super().salted(request, tokens) if self.name == ONE else Engine.salted(self, request, tokens)


@seeded("salt_of_earlier_weights", "by_an_earlier_client", caught_by=["salts_of_weights"])
class SaltOfEarlierWeights(Generator):
    """The generator takes the salt of its own client's count, which no sync of another client moves."""

    def salt(self) -> str:
        self.fired += self.client.syncs != self.client.syncs_of_engines()
        return f"sync {self.client.syncs}"


@seeded("sync_uncounted", "repeated", caught_by=["syncs_counted"])
class RepeatedSyncUncounted(Client):
    """A sync of the version that the engines have is not counted."""

    _last: int | None = None
    _same = False

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self._same, self._last = version == self._last, version
        await super().sync_weights(version, chunks, layout)

    def synced(self, label: str | None) -> None:
        super().synced(label)
        self.fired += self._same
        self.syncs -= self._same


@seeded("failed_sync_counted", caught_by=["syncs_counted"])
class FailedSyncCounted(Client):
    """The client counts a sync when it begins, so a failed one counts too."""

    async def give_up(self, version: int, chunks: int, layout: Layout, after: int) -> None:
        self.fired += 1
        self.syncs += 1
        await super().give_up(version, chunks, layout, after)


@seeded("count_lost", "by_a_copy", caught_by=["syncs_counted"])
class CountLostByACopy(Client):
    """A copy of the client counts from zero."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "syncs": 0, "fired": self.fired + bool(self.syncs)}


@seeded("label_missed", "one_server", caught_by=["weight_labels"])
class LabelMissesOne(Engine):
    """One server keeps the label of its first weights."""

    def name_weights(self, label: str | None) -> None:
        self.fired += self.name == ONE
        if self.name != ONE:
            super().name_weights(label)


@seeded("label_missed", "in_chunks", caught_by=["weight_labels"])
class LabelMissedInChunks(Client):
    """The label of a sync in several chunks does not arrive."""

    _chunks = 1

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        self._chunks = chunks
        await super().sync_weights(version, chunks, layout)

    def synced(self, label: str | None) -> None:
        self.fired += self._chunks > 1
        if self._chunks == 1:
            super().synced(label)
        else:
            self.syncs += 1


@seeded("label_outlives", "the_next_sync", caught_by=["weight_labels"])
class LabelOutlives(Engine):
    """A sync without a label leaves the label of the weights that it replaces."""

    def name_weights(self, label: str | None) -> None:
        self.fired += label is None
        if label is not None:
            super().name_weights(label)


@seeded("label_moves", "at_the_start", caught_by=["weight_labels"])
class LabelDroppedAtTheStart(Engine):
    """A server drops its label when a sync begins, so after a failed one it has none."""

    async def start_weight_update(self) -> None:
        self.fired += 1
        self.weight_label = "default"
        await super().start_weight_update()
