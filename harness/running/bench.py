"""`parity bench`: two stacks are up at once and take turns; each turn measures everything once.

An idle stack waits for messages and leaves the processor to the other one; how much it used all the same is measured too. Judging is
in `harness/judging/speed.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fixtures.prompts import Prompts
from harness.contract import devices
from harness.contract.clock import SimulatedLoop, monotonic, now_ns
from harness.contract.errors import StackError, UsageError
from harness.contract.messages import Description, capabilities_of
from harness.contract.runtime import GIB
from harness.contract.topology import Topology
from harness.driving.stack import Stack
from harness.judging import speed
from harness.machine import environments
from harness.machine.memory import available_and_total
from harness.machine.outlook import Start
from harness.machine.progress import Progress
from harness.machine.targets import known
from harness.records.bench import Bench, Block, Metric, Outcome, Pace, Side
from harness.running.session import Options, Seat, Session, hardware

SIDES: tuple[Side, Side] = ("baseline", "candidate")
TOKENS = 16
"""Default tokens of an answer."""
REST = 12
"""Answers of each length that a block asks for at rest."""
LEAST_SHARE = 0.01
"""Share of an answer's time that its further tokens take at least, also in a block in which noise hides them."""
REPEATS = 5
"""Repetitions of a control call in a block."""
SYNCS = 2
"""Repetitions of a weight sync. An even number leaves version 0."""
LEAST_REQUESTS = 32
"""Requests that a block sends at least at each number in flight above 1."""
ENGINE_TAKES = 64
"""Requests that an engine of every target runs at once (SkyRL's max_num_seqs, as the adapters set it)."""
BLOCK_DEADLINE_S = 300.0
PROMPT_TOKENS = 12

Say = Callable[[str], None]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared, and how exactly."""

    options: Options
    topology: Topology
    in_flight: tuple[int, ...] = ()
    """Requests in flight; empty: `usual_loads`."""
    tokens: int = TOKENS
    minutes: float = 10.0
    """Most minutes of measuring. Simulated minutes on an inline stack."""
    most_pairs: int | None = None
    precision: float = speed.DEFAULT_PRECISION
    error: float = speed.DEFAULT_ERROR
    seed: int | None = None
    """None: drawn."""
    slowdown: str | None = None
    """Seeded into the candidate."""
    usual: str | None = None
    """Seeded into both, before the slowdown replaces it in the candidate."""
    simulated: Callable[[], SimulatedLoop] = SimulatedLoop
    """The loop of inline stacks."""

    @property
    def loads(self) -> tuple[int, ...]:
        return self.in_flight or usual_loads(self.topology)


def usual_loads(topology: Topology) -> tuple[int, ...]:
    """1, 8, 64, and more requests than the engines take at once."""
    return (1, 8, 64, topology.engines * topology.data_parallel * ENGINE_TAKES * 5 // 4)


def metrics(loads: tuple[int, ...], tokens: int) -> list[Metric]:
    """All rows, in the order of the report."""
    return [
        Metric(name="first_token", what="first token at rest"),
        Metric(name="next_token", what="each further token"),
        Metric(name="rest", what=f"{tokens} tokens at rest"),
        Metric(name="rest_p99", what=f"{tokens} tokens at rest, p99"),
        *(Metric(name=f"in_flight.{n}", what=f"{n} in flight", per=tokens) for n in loads),
        Metric(name="sync", what="weight sync"),
        Metric(name="pause", what="pause(keep)"),
        Metric(name="resume", what="resume"),
        Metric(name="sleep", what="sleep(1)"),
        Metric(name="wake_up", what="wake_up"),
        Metric(name="reset_prefix_cache", what="reset_prefix_cache"),
        Metric(name="is_paused", what="is_paused"),
        Metric(name="health", what="health"),
        Metric(name="processor", what="processor time of a block"),
        Metric(name="memory", what="memory (PSS)", unit="bytes"),
    ]


def bench(order: Order, progress: Progress, say: Say) -> tuple[Bench, Path]:
    """Start both stacks, let them take turns until every row is decided or the time is up. Returns the result and the run's folder.

    Ctrl-C and a failing stack end it early; finished pairs are kept. Raises UsageError for what cannot work here, and StackError for
    a stack that does not start.
    """
    _check(order)
    return Taking(order, progress, say).turns()


class Taking:
    """The two stacks of one comparison."""

    def __init__(self, order: Order, progress: Progress, say: Say) -> None:
        self.order = order
        self.seed = random.SystemRandom().randrange(2**31) if order.seed is None else order.seed
        self.metrics = metrics(order.loads, order.tokens)
        self.blocks: list[Block] = []
        self.failure = ""
        self.measured_s = 0.0
        self._progress, self._say = progress, say
        self._created_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._session = Session(order.options, progress, simulated=order.simulated)
        self._stacks: dict[Side, Stack] = {}
        self._starts_s: dict[str, float] = {}
        self._order: list[str] = []

    def turns(self) -> tuple[Bench, Path]:
        outcome: Outcome = "failed"
        with ExitStack() as last:
            last.callback(lambda: self._session.close(outcome))
            try:
                self._start(last)
                outcome = self._measure()
            except KeyboardInterrupt:
                if not speed.whole_pairs(self.blocks):
                    raise
                outcome = "interrupted"
            made = self._result(outcome)
        return made, self._session.folder.path

    def _start(self, last: ExitStack) -> None:
        options = self.order.options
        assigned = _devices(self.order)
        for side, target in zip(SIDES, (options.baseline, options.candidate), strict=True):
            began = time.monotonic()
            stack = self._session.launch(Seat(target=target, topology=self.order.topology), assigned)
            self._starts_s[side] = time.monotonic() - began
            self._stacks[side] = stack
            last.callback(self._end, stack)
            slowdown = self.order.slowdown if side == "candidate" else None
            if (seeded := slowdown or self.order.usual) is not None:
                self._session.wait(stack.inject(seeded))

    def _end(self, stack: Stack) -> None:
        self._session.wait(stack.close())

    def _measure(self) -> Outcome:
        order = self.order
        self._say(
            f"seed {self.seed}; up to {order.minutes:.0f} min, precision {order.precision:.0%}, error {order.error:.0%}"
        )
        for side in SIDES:
            with self._progress(f"{side}: a block to warm up"):
                if self._turn(-1, side) is None:
                    return "failed"
        kept, _ = speed.measured(self.metrics, speed.whole_pairs(self.blocks))
        fewest, pair = speed.fewest_pairs(len(kept), order.error), 0
        self.blocks.clear()
        while order.most_pairs is None or pair < order.most_pairs:
            turns = speed.turns(self.seed, pair)
            self._order.append(" ".join(turns))
            for side in turns:
                block = self._turn(pair, side)
                if block is None:
                    return "failed"
                self.measured_s += block.seconds
            pair += 1
            paces = speed.paces(self.metrics, self.blocks, error=order.error, precision=order.precision)
            self._say(self._news(pair, paces, fewest))
            if paces and Pace.INCONCLUSIVE not in paces:
                return "completed"
            if self.measured_s >= 60 * order.minutes:
                break
        return "out of time"

    def _news(self, pair: int, paces: list[Pace], fewest: int) -> str:
        counts = ", ".join(f"{paces.count(pace)} {pace}" for pace in Pace if pace in paces)
        wait = f"; no verdict before pair {fewest}" if pair < fewest else ""
        return f"pair {pair} ({self._order[-1].replace(' ', ', ')}), {self.measured_s:.0f} s: {counts}{wait}"

    def _turn(self, pair: int, side: Side) -> Block | None:
        """Measure one block and keep it. None if the stack failed."""
        stack, other = self._stacks[side], self._stacks["candidate" if side == "baseline" else "baseline"]
        before, began, own = other.usage(), time.monotonic(), stack.usage()
        try:
            values, hops, (started_ns, seconds) = self._session.wait(measure(stack, self.order, self.seed, pair))
        except StackError as e:
            self.failure = f"{side} ({self._target(side)}): {e.message}"
            return None
        after, here = other.usage(), stack.usage()
        if here is not None and own is not None:
            values |= {"memory": float(here.pss_bytes), "processor": here.cpu_s - own.cpu_s}
        idle = None if before is None or after is None else (after.cpu_s - before.cpu_s) / (time.monotonic() - began)
        block = Block(
            pair=pair,
            side=side,
            started_ns=started_ns,
            seconds=seconds,
            values=values,
            hops=hops,
            idle_cores=idle,
        )
        self.blocks.append(block)
        return block

    def _target(self, side: Side) -> str:
        return self.order.options.baseline if side == "baseline" else self.order.options.candidate

    def _result(self, outcome: Outcome) -> Bench:
        order, options = self.order, self.order.options
        rows, left_out = speed.rows(
            self.metrics, self.blocks, seed=self.seed, error=order.error, precision=order.precision
        )
        said: dict[str, Description] = {
            s: d for s, stack in self._stacks.items() if (d := stack.description) is not None
        }
        whole = {block.pair for pair in speed.whole_pairs(self.blocks) for block in pair.values()}
        return Bench(
            run_id=self._session.folder.run_id,
            created_at=self._created_at,
            command=options.command,
            baseline=options.baseline,
            candidate=options.candidate,
            topology=order.topology.name,
            start=next((one.start for one in said.values()), options.start),
            engine=options.engine,
            model=Path(next((stack.model_name for stack in self._stacks.values()), "")).name,
            hardware=hardware(),
            packages={side: one.packages for side, one in said.items()},
            seed=self.seed,
            order=self._order[: len(whole)],
            error=order.error,
            precision=order.precision,
            starts_s=self._starts_s,
            measured_s=self.measured_s,
            rows=rows,
            left_out=left_out,
            blocks=[block for block in self.blocks if block.pair in whole],
            outcome=outcome,
            failure=self.failure,
            fault=order.slowdown,
        )


# --- one block


async def measure(
    stack: Stack, order: Order, seed: int, pair: int
) -> tuple[dict[str, float], dict[str, float], tuple[int, float]]:
    """One block on one stack: the metrics' values but memory, the hops of a request at rest, and when it began and how long it took.

    Both blocks of a pair ask for the same. Raises StackError, also for an answer that is shorter than it has to be: a stack that
    does less work is not faster.
    """
    stack.allow(BLOCK_DEADLINE_S)
    began, started_ns = monotonic(), now_ns()
    prompts = Prompts(f"bench {seed} {pair}", stack.vocabulary)
    await stack.seen()
    values, hops = await _at_rest(stack, prompts, order.tokens)
    for load in order.loads:
        if load > 1:
            values[f"in_flight.{load}"] = await _in_flight(stack, prompts, load, order.tokens)
        else:
            values["in_flight.1"] = values.pop("mean")
    values.pop("mean", None)
    values |= await _control(stack)
    await stack.seen()
    return values, hops, (started_ns, monotonic() - began)


async def _answers(stack: Stack, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of one call. Raises StackError if an answer has another length."""
    began = monotonic()
    made = await stack.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    seconds = monotonic() - began
    if (lengths := [len(row) for row in made.response_ids]) != [tokens] * len(prompts):
        raise StackError(
            f"answers of {tokens} tokens were asked for, the first other one is no {_first_other(lengths, tokens)}"
        )
    return seconds


def _first_other(lengths: list[int], tokens: int) -> str:
    at = next((number for number, length in enumerate(lengths) if length != tokens), len(lengths))
    return f"{at} of {len(lengths)}, with {lengths[at] if at < len(lengths) else 'no'} tokens"


async def _at_rest(stack: Stack, prompts: Prompts, tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """One request at a time: answers of one token and of `tokens` tokens in turn. The second result is what `hops` says of these."""
    first, whole = [], []
    spans: dict[tuple[int, ...], tuple[int, int]] = {}
    for _ in range(REST):
        first.append(await _answers(stack, [prompts.one(PROMPT_TOKENS)], 1))
        prompt = prompts.one(PROMPT_TOKENS)
        started_ns = now_ns()
        whole.append(await _answers(stack, [prompt], tokens))
        spans[tuple(prompt)] = (started_ns, now_ns())
    median = float(np.median(whole))
    values = {
        "first_token": float(np.median(first)),
        "next_token": max(median - float(np.median(first)), median * LEAST_SHARE) / (tokens - 1),
        "rest": median,
        "rest_p99": float(np.quantile(whole, 0.99)),
        "mean": float(np.mean(whole)),
    }
    return values, hops(spans, await stack.seen())


def hops(spans: Mapping[tuple[int, ...], tuple[int, int]], seen: list[dict[str, Any]]) -> dict[str, float]:
    """Part of the way → median seconds. `spans`: prompt → begin and end of its call; `seen`: what the engine taps saw.

    Taps stand in the engine's frontend: "engine" lies between the arrival of a request there and the end of its last token. Empty
    if the taps did not see every request.
    """
    arrived: dict[tuple[str, str], tuple[int, tuple[int, ...]]] = {}
    parts: dict[str, list[float]] = {"there": [], "engine": [], "back": []}
    for one in seen:
        data = one["data"]
        if one["kind"] == "request" and tuple(data["prompt_token_ids"]) in spans:
            arrived[one["server"], data["request_id"]] = one["at_ns"], tuple(data["prompt_token_ids"])
        elif one["kind"] == "finish" and (came := arrived.get((one["server"], data["request_id"]))) is not None:
            at_ns, prompt = came
            began, ended = spans[prompt]
            for part, span in (
                ("there", at_ns - began),
                ("engine", one["at_ns"] - at_ns),
                ("back", ended - one["at_ns"]),
            ):
                parts[part].append(span / 1e9)
    if any(len(found) != len(spans) for found in parts.values()):
        return {}
    return {part: float(np.median(found)) for part, found in parts.items()}


async def _in_flight(stack: Stack, prompts: Prompts, load: int, tokens: int) -> float:
    """Seconds per request with `load` requests in flight: batches of that many, one after the other."""
    batches = -(-LEAST_REQUESTS // load)
    seconds = [await _answers(stack, prompts.unique(load, PROMPT_TOKENS), tokens) for _ in range(batches)]
    return sum(seconds) / (batches * load)


async def _control(stack: Stack) -> dict[str, float]:
    """Median seconds of each control call that the stack offers, while it is idle."""
    found: dict[str, list[float]] = {}

    async def timed(name: str, call: Callable[[], Awaitable[object]]) -> None:
        began = monotonic()
        await call()
        found.setdefault(name, []).append(monotonic() - began)

    def offers(method: str, **arguments: Any) -> bool:
        return capabilities_of(method, arguments) <= stack.capabilities

    for number in range(SYNCS if offers("sync_weights") else 0):
        await timed("sync", partial(stack.sync_weights, 1 - number % 2))
    for _ in range(REPEATS):
        if offers("pause", mode="keep"):
            await timed("pause", stack.pause)
            await timed("resume", stack.resume)
        if offers("sleep"):
            await timed("sleep", partial(stack.sleep, 1))
            await timed("wake_up", stack.wake_up)
        for name in ("reset_prefix_cache", "is_paused", "health"):
            if offers(name):
                await timed(name, getattr(stack, name))
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


# --- what cannot work here


def _check(order: Order) -> None:
    """Raises UsageError, before anything is started or written."""
    options, topology = order.options, order.topology
    if not 0 < order.error < 1 or not order.precision > 0:
        raise UsageError(
            "precision and error are percentages above 0", next_step="for example --precision 10 --error 5"
        )
    if min(order.loads) < 1 or order.tokens < 2 or order.minutes <= 0:
        raise UsageError(
            "requests in flight and minutes must be positive, and an answer needs two tokens",
            next_step="for example --in-flight 8 --tokens 16 --minutes 5",
        )
    if order.slowdown is not None and order.slowdown not in (can := known(options.candidate).slower()):
        raise UsageError(
            f"{options.candidate} has no slowdown {order.slowdown!r}", next_step=f"it has {', '.join(can) or 'none'}"
        )
    starts = [
        Start(
            target=name, topology=topology, scenarios=0, takes=0, kind="inline" if known(name).inline else options.start
        )
        for name in (options.baseline, options.candidate)
    ]
    needed, (free, _) = sum(start.bytes for start in starts), available_and_total()
    if options.engine == "cpu" and needed > free:
        raise UsageError(
            f"both stacks are up at once and need {needed / GIB:.1f} GiB of memory, {free / GIB:.1f} are free",
            next_step="fewer --engines, --start fork, or a machine with more memory",
        )


def _devices(order: Order) -> devices.Devices | None:
    """The GPUs that both stacks share. Raises UsageError if there are too few."""
    if order.options.engine != "cuda" or known(order.options.baseline).inline:
        return None
    gpus, needed = len(environments.list_gpus()), devices.needed(order.topology)
    if gpus < needed:
        raise UsageError(
            f"{order.topology.name} needs {needed} GPUs, there are {gpus}",
            next_step="--topology colocated shares one GPU",
        )
    assigned = devices.assign(order.topology, gpus)
    return msgspec.structs.replace(assigned, workers_per_gpu=2 * assigned.workers_per_gpu)
