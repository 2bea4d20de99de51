"""Results that are lost, swapped, doubled, cut short or miscounted."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature.client import Client
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import MANY, seeded
from backends.miniature.router import Router
from harness.contract.faults import Fact
from harness.contract.messages import Generation, SessionId


@seeded("results_swapped", "in_a_batch", caught_by=["ordering"], corrupts=Fact.ANSWERS)
class FirstTwoSwapped(Client):
    """The first two results of every batch are swapped."""

    async def gather(self, calls: Any) -> list[Output]:
        rows = await super().gather(calls)
        if len(rows) > 1:
            self.fired += 1
            rows[0], rows[1] = rows[1], rows[0]
        return rows


@seeded("results_swapped", "under_load", caught_by=["ordering"], corrupts=Fact.ANSWERS)
class SwappedInLargeBatches(Client):
    """In batches of more than sixteen, the last two results are swapped."""

    async def gather(self, calls: Any) -> list[Output]:
        rows = await super().gather(calls)
        if len(rows) > 16:
            self.fired += 1
            rows[-2], rows[-1] = rows[-1], rows[-2]
        return rows


@seeded("results_swapped", "between_servers", caught_by=["ordering"], corrupts=Fact.ANSWERS | Fact.ROUTES)
class SwappedBetweenServers(Router):
    """Two responses that come from different servers at the same time are swapped."""

    _partner: tuple[Engine, asyncio.Future[Output], Output] | None = None

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        mine = await super().forward(engine, prompt, params, **more)
        if self._partner is not None and self._partner[0] is not engine:
            _, waiting, theirs = self._partner
            self._partner = None
            self.fired += 1
            waiting.set_result(mine)
            return theirs
        if self._partner is None:
            waiting = asyncio.get_running_loop().create_future()
            self._partner = (engine, waiting, mine)
            done, _ = await asyncio.wait({waiting}, timeout=0.002)
            if done:
                return waiting.result()
            self._partner = None
        return mine


@seeded(
    "choice_index_wrong",
    "off_by_one",
    caught_by=["chat_completion.envelope", "completion.envelope"],
    corrupts=Fact.ANSWERS,
)
class IndexFromOne(Client):
    """Choices are numbered from one."""

    def choice(self, index: int, row: Output, kind: str) -> dict[str, Any]:
        self.fired += 1
        return super().choice(index + 1, row, kind)


@seeded("choice_index_wrong", "all_zero", caught_by=["completion.envelope"], corrupts=Fact.ANSWERS)
class IndexAlwaysZero(Client):
    """Every choice of a batch is number zero, as a sub-request numbers its own."""

    def choice(self, index: int, row: Output, kind: str) -> dict[str, Any]:
        self.fired += index > 0
        return super().choice(0, row, kind)


@seeded("choice_index_wrong", "reversed", caught_by=["conservation", "tokens.greedy"], corrupts=Fact.ANSWERS)
class ChoicesReversed(Client):
    """The choices of a batch are listed and numbered from the last prompt to the first."""

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await super().completion(body)
        if len(answer.get("choices", ())) > 1:
            self.fired += 1
            answer["choices"] = [c | {"index": i} for i, c in enumerate(reversed(answer["choices"]))]
        return answer


@seeded("usage_wrong", "first_prompt_only", caught_by=["completion.usage"])
class UsageOfTheFirst(Client):
    """The usage of a batch counts only the prompt of its first row."""

    def usage(self, rows: list[Output], copies: int = 1) -> dict[str, int]:
        self.fired += len(rows) > 1
        return super().usage(rows, copies) | {"prompt_tokens": len(rows[0].prompt)}


@seeded("usage_wrong", "counted_twice", caught_by=["completion.usage", "chat_completion.usage"])
class UsageTwice(Client):
    """The usage counts generated tokens twice."""

    def usage(self, rows: list[Output], copies: int = 1) -> dict[str, int]:
        self.fired += 1
        honest = super().usage(rows, copies)
        made = 2 * honest["completion_tokens"]
        return honest | {"completion_tokens": made, "total_tokens": honest["prompt_tokens"] + made}


@seeded("envelope_incomplete", caught_by=["chat_completion.envelope", "completion.envelope"], corrupts=Fact.ANSWERS)
class NoModelInTheBody(Client):
    """OpenAI bodies lack the model's name."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        answer = await super()._answered(body, prompts, kind)
        if answer.pop("model", None):
            self.fired += 1
        return answer


@seeded("result_lost", "last_row", caught_by=["conservation"], corrupts=Fact.ANSWERS)
class LastRowLost(Client):
    """A batch of several rows comes back without its last row."""

    def generation(self, rows: list[Output]) -> Generation:
        if len(rows) > 1:
            self.fired += 1
            rows = rows[:-1]
        return super().generation(rows)


@seeded("result_lost", "empty_row", caught_by=["conservation"], corrupts=Fact.ANSWERS)
class RowEmptied(Client):
    """Under load, one row comes back without its tokens."""

    def generation(self, rows: list[Output]) -> Generation:
        if len(rows) > MANY:
            self.fired += 1
            rows[MANY].tokens, rows[MANY].text = [], ""
        return super().generation(rows)


@seeded("executed_twice", "always", caught_by=["conservation"], corrupts=Fact.POLICY)
class ExecutedTwice(Router):
    """Every request is sent to a server twice, and one answer is discarded."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        self.fired += 1
        once, _ = await asyncio.gather(
            super().forward(engine, prompt, params, **more), super().forward(engine, prompt, params, **more)
        )
        return once


@seeded("executed_twice", "under_load", caught_by=["conservation"])
class ExecutedTwiceUnderLoad(Router):
    """A request that finds its server busy is sent again."""

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        busy = len(engine.running) >= MANY
        answer = await super().forward(engine, prompt, params, **more)
        if busy:
            self.fired += 1
            await super().forward(engine, prompt, params, **more)
        return answer


@seeded("output_cut_short", "last_token", caught_by=["conservation"], corrupts=Fact.ANSWERS)
class LastTokenCut(Client):
    """Answers of more than eight tokens come back without the last one."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        if len(done.tokens) > 8:
            self.fired += 1
            done.tokens = done.tokens[:-1]
        return done


@seeded("output_cut_short", "under_load", caught_by=["stopping"], corrupts=Fact.ANSWERS)
class CutShortUnderLoad(Engine):
    """A busy engine ends requests one token before max_tokens."""

    def ended(self, request: Request) -> Any:
        reason = super().ended(request)
        if (
            reason is None
            and len(self.running) > MANY
            and len(request.tokens) == request.params.get("max_tokens", 16) - 1
        ):
            self.fired += 1
            return "length"
        return reason
