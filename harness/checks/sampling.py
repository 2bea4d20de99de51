"""Sampled tokens: from the oracle's distribution, within the requested filters, and independent.

Chance is judged with a stated rate of false alarms. A recording on which the fault would also have passed is `untestable`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import msgspec

from harness.checks import matching
from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, concluded, failed, passed, untestable
from harness.contract.faults import Fact
from harness.records.reference import Query
from harness.records.verdict import Margin

FALSE_ALARM = 1e-6
"""Probability that one check of this module calls a correct stack wrong."""
SMALLEST_CELL = 5.0
"""Expected draws in a cell of the chi-square test; rarer tokens are pooled up to that."""
WEAKEST_FAULT = (0.7, 1 / 0.7)
"""The check must find a temperature wrong by these factors …"""
POWER = 0.9
"""… with at least this probability, or it is untestable."""
FILTERS = ("top_k", "top_p", "min_p")
Array = Any
"""A NumPy array: it is imported where it is needed, since that is slow."""
SUMMED = 1e-3
"""Probability mass: allowed error of a sum over the whole vocabulary, which engines of every dtype compute in float32."""


def _first_tokens(_: Evidence, rows: list[Answer]) -> Iterator[Query]:
    return (group[0].next_after(0) for group in _by_prompt(rows))


def _by_prompt(rows: list[Answer]) -> list[list[Answer]]:
    """The rows of each prompt, prompts in order of their first row."""
    groups: dict[tuple[int, ...], list[Answer]] = {}
    for row in rows:
        groups.setdefault(tuple(row.prompt), []).append(row)
    return list(groups.values())


def goodness_of_fit(*labels: str) -> Check:
    """First tokens of many unseeded rows of a few prompts fit the reference's distributions at their temperature."""
    return of_answers(
        "sampling.distribution",
        fault="a temperature is ignored or applied twice, an unrequested filter applies, or another model's distribution is used",
        reads=Fact.ANSWERS | Fact.CHANCE,
        source="vLLM documentation, SamplingParams.temperature, top_p, top_k, min_p (all off by default)",
        rule=_goodness_of_fit,
        asks=_first_tokens,
        labels=labels,
    )


@final
class _Draws(msgspec.Struct, frozen=True, kw_only=True):
    """The first tokens of one prompt and the reference's distribution."""

    model: list[float]
    """Log-probabilities at temperature 1, by token."""
    temperature: float
    drawn: Counter[int]
    cells: list[list[int]]

    @property
    def count(self) -> int:
        return self.drawn.total()

    @property
    def statistic(self) -> float:
        """Pearson's chi-square."""
        counts = [sum(self.drawn[t] for t in cell) for cell in self.cells]
        both = zip(counts, self.masses(1.0), strict=True)
        return math.fsum((n - self.count * p) ** 2 / (self.count * p) for n, p in both)

    def masses(self, factor: float) -> list[float]:
        """The probability of each cell at `factor` times the temperature."""
        at = tempered(self.model, self.temperature * factor).tolist()
        return [math.fsum(at[t] for t in cell) for cell in self.cells]

    def shift(self, factor: float) -> float:
        """The noncentrality of the statistic if the temperature is wrong by `factor`."""
        both = zip(self.masses(1.0), self.masses(factor), strict=True)
        return self.count * math.fsum((q - p) ** 2 / p for p, q in both)


def _draws(evidence: Evidence, rows: list[Answer]) -> _Draws:
    model, temperature = evidence.reference.next(rows[0].next_after(0)).logprobs, rows[0].params.get("temperature", 1.0)
    return _Draws(
        model=model,
        temperature=temperature,
        drawn=Counter(row.tokens[0] for row in rows),
        cells=_cells(tempered(model, temperature).tolist(), len(rows)),
    )


def _goodness_of_fit(evidence: Evidence, rows: list[Answer]) -> Finding:
    one = rows[0]
    if any((row.params, row.version) != (one.params, one.version) for row in rows):
        return untestable("the draws are not of one set of sampling parameters")
    if one.params.get("seed") is not None or not one.params.get("temperature", 1.0):
        return untestable("the draws are seeded or greedy: they are not independent")
    every = [_draws(evidence, group) for group in _by_prompt(rows)]
    told = [draws for draws in every if len(draws.cells) > 1]
    cells = sum(len(draws.cells) for draws in told)
    if cells - len(told) < 2:
        return untestable("the reference's distribution has too few cells for these draws")
    margin = _margin(told, rms=evidence.noise.rms)
    numbers = {"p_value": 10**-margin.measured, "draws": float(len(rows)), "cells": float(cells)}
    if margin.measured > margin.bound:
        worst = max(told, key=lambda draws: draws.statistic)
        expected = tempered(worst.model, worst.temperature).tolist()
        often = [
            {"token": token, "drawn": count, "expected": round(worst.count * expected[token], 2)}
            for token, count in worst.drawn.most_common(5)
        ]
        shown = {"prompt": _by_prompt(rows)[every.index(worst)][0].prompt, "sampling_params": one.params}
        reason = "sampled tokens do not come from the reference's distribution"
        calls = dict.fromkeys(row.call.id for row in rows)
        return failed(len(rows), reason, [{"call": call, **shown, "most drawn": often} for call in calls], **numbers)
    if min(margin.faults.values()) <= margin.bound:
        return untestable("too few draws to tell a temperature that is off by a third")
    return passed(len(rows), margin=margin, **numbers)


def _margin(every: list[_Draws], *, rms: float) -> Margin:
    """All values are −log10 of a p-value. A fault reaches at least its value with probability `POWER`.

    Statistics of several prompts add up, and so do their degrees of freedom. An engine whose log-probabilities are off by `rms`
    nats draws from its own distribution, so a right engine's statistic has a noncentrality of draws × rms². Twice the `rms` of
    many positions is allowed for these few.
    """
    from scipy import stats  # type: ignore[import-untyped]  # slow to import, and scipy ships no types

    freedom = sum(len(draws.cells) - 1 for draws in every)
    noise = math.fsum(draws.count * (2 * rms / draws.temperature) ** 2 for draws in every)
    critical = stats.ncx2.isf(FALSE_ALARM, freedom, noise)
    faults, powers = {}, []
    for factor in WEAKEST_FAULT:
        shift = math.fsum(draws.shift(factor) for draws in every)
        powers.append(float(stats.ncx2.sf(critical, freedom, shift)))
        faults[f"temperature × {factor:.2f}"] = _minus_log10(stats.ncx2.isf(POWER, freedom, shift), freedom, noise)
    return Margin(
        unit="−log10 p",
        measured=_minus_log10(math.fsum(draws.statistic for draws in every), freedom, noise),
        bound=-math.log10(FALSE_ALARM),
        faults=faults,
        false_alarm_rate=FALSE_ALARM,
        power=min(powers),
    )


def _minus_log10(statistic: float, freedom: int, noise: float) -> float:
    from scipy import stats

    if not noise:
        return max(0.0, -float(stats.chi2.logsf(statistic, freedom)) / math.log(10))
    return _minus_log10_of(float(stats.ncx2.sf(statistic, freedom, noise)))


def _cells(expected: list[float], draws: int) -> list[list[int]]:
    """Tokens by falling probability, pooled until each cell expects `SMALLEST_CELL` draws; the rest joins the last."""
    cells: list[list[int]] = []
    cell: list[int] = []
    mass = 0.0
    for token in sorted(range(len(expected)), key=expected.__getitem__, reverse=True):
        cell.append(token)
        mass += draws * expected[token]
        if mass >= SMALLEST_CELL:
            cells.append(cell)
            cell, mass = [], 0.0
    if cells:
        cells[-1] = cells[-1] + cell
    return cells


def tempered(logprobs: Sequence[float] | Array, temperature: float) -> Array:
    """Probabilities at `temperature`, from log-probabilities at temperature 1."""
    import numpy as np

    scaled = np.asarray(logprobs) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def allowed(probabilities: Array, params: dict[str, Any], tolerance: float = 0.0, summed: float = SUMMED) -> Array:
    """Token by token, whether min_p, top_k and top_p leave it, in this order. Two log-probabilities within `tolerance` (nats) may be
    in either order, and a sum may be off by `summed`, which widens each edge. A negative `summed` narrows that of top_p."""
    import numpy as np

    order = np.argsort(-probabilities, kind="stable")
    falling = probabilities[order]
    slack = math.exp(-tolerance)

    def down_to(floor: float) -> Array:
        return falling[: np.searchsorted(-falling, -floor * slack, side="right")]

    if params.get("min_p"):
        falling = down_to(params["min_p"] * falling[0])
    if 0 < (params.get("top_k") or 0) < len(falling):
        falling = down_to(falling[params["top_k"] - 1])
    if params.get("top_p", 1.0) < 1.0:
        above = np.concatenate([[0.0], np.cumsum(falling / falling.sum())])
        surely = above[np.searchsorted(-falling, -falling / slack, side="left")]
        least = surely * slack / (surely * slack + 1 - surely)
        falling = falling[least < params["top_p"] + summed]
    kept = np.zeros(len(probabilities), dtype=bool)
    kept[order[: len(falling)]] = True
    return kept


def _every_token(_: Evidence, rows: list[Answer]) -> Iterator[Query]:
    for row in rows:
        for at in range(len(row.tokens)):
            yield row.next_after(at)


def within_filters(*labels: str) -> Check:
    """top_k, top_p and min_p allow each sampled token, and it is not always the most probable one."""
    return of_answers(
        "sampling.filters",
        fault="top_k, top_p or min_p is dropped on the way, applied before the temperature, or turned into greedy sampling",
        reads=Fact.ANSWERS | Fact.CHANCE,
        source="vLLM documentation, SamplingParams.top_k, top_p, min_p",
        rule=_within_filters,
        asks=_every_token,
        labels=labels,
    )


def _within_filters(evidence: Evidence, rows: list[Answer]) -> Finding:
    import numpy as np

    facts = 0
    outside, dropped = defaultdict[str, float](float), defaultdict[str, float](float)
    choices = _Choices(evidence)
    tolerance = evidence.noise.near
    wrong: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
    filtered = [row for row in rows if _active(row) and row.params.get("temperature", 1.0)]
    for row in filtered:
        for at, token in enumerate(row.tokens):
            facts += 1
            model = np.asarray(evidence.reference.next(row.next_after(at)).logprobs)
            probabilities = tempered(model, row.params.get("temperature", 1.0))
            near = tolerance / row.params.get("temperature", 1.0)
            kept = allowed(probabilities, row.params, near)
            if not kept[token]:
                rank = int((probabilities > probabilities[token]).sum())
                shown = row.shown(position=at, token=token, rank=rank, left=int(kept.sum()))
                why = f"a sampled token is outside {' and '.join(_active(row))}"
                wrong.setdefault((row.call.id, row.index), (why, shown))
            mass = float(probabilities[kept].sum())
            for name in _active(row):
                others = {key: value for key, value in row.params.items() if key != name}
                inside = mass / float(probabilities[allowed(probabilities, others, near)].sum())
                outside[name] += max(0.0, 1.0 - inside)
                dropped[name] += math.log(min(inside, 1.0))
            behind = model.max() - model
            left = allowed(probabilities, row.params)  # a wide tolerance would keep tokens that sampling never takes
            choices.add(float(behind[token]), float(probabilities[left & (behind > choices.far)].sum()) / mass)
    if wrong:
        return concluded(facts, wrong.values())
    if filtered and not choices.refute_greedy:
        if choices.chance_of_so_few < FALSE_ALARM:
            why = "sampling under a filter always took the most probable token"
            return failed(facts, why, [row.shown() for row in filtered])
        return untestable("the tokens under a filter do not tell sampling from greedy choices")
    if len(filtered) < len(rows):
        return untestable("a call sampled without a filter")
    chance = max(dropped.values())
    if chance > math.log(FALSE_ALARM):
        faults = {f"{name} dropped": -by / math.log(10) for name, by in dropped.items()}
        unit = "−log10 of the probability that every token is inside"
        return passed(facts, margin=Margin(unit=unit, measured=0, bound=-math.log10(FALSE_ALARM), faults=faults))
    margin = Margin(
        unit="tokens outside the filter",
        measured=0,
        bound=0,
        faults={f"{name} dropped": expected for name, expected in outside.items()},
        false_alarm_rate=FALSE_ALARM,
        power=-math.expm1(chance),
    )
    return passed(facts, margin=margin, log10_chance_without_filter=chance / math.log(10))


FAR = 5.0
"""In units of the noise: an error of a distance between two log-probabilities is larger at most once in FAR² tokens (Chebyshev)."""


@final
class _Choices:
    """How far chosen tokens are from the most probable ones: does noise explain it in an engine that always takes those?"""

    def __init__(self, evidence: Evidence) -> None:
        self._surely = evidence.noise.near
        self.far = FAR * math.sqrt(2) * evidence.noise.rms
        """Nats from which a token is far from the most probable one."""
        self._honest: list[float] = []
        self._met = 0
        self._beyond = False

    def add(self, behind: float, honest: float) -> None:
        """A choice, `behind` nats less probable than the most probable token. `honest`: the probability that sampling chooses a far
        one."""
        self._honest.append(min(honest, 1.0))
        self._met += behind > self.far
        self._beyond |= behind > self._surely

    @property
    def refute_greedy(self) -> bool:
        """True if greedy choices would not be so far, or not so often."""
        from scipy import stats

        often = float(stats.binom.sf(self._met - 1, len(self._honest), 1 / FAR**2))
        return self._beyond or often < FALSE_ALARM

    @property
    def chance_of_so_few(self) -> float:
        """The probability that sampling takes so few far tokens (Poisson-binomial distribution)."""
        at = [1.0]
        for p in self._honest:
            at = [a * (1 - p) + b * p for a, b in zip([*at, 0.0], [0.0, *at], strict=True)]
        return math.fsum(at[: self._met + 1])


def _active(row: Answer) -> list[str]:
    """The filters that the row's request set."""
    return [name for name in FILTERS if row.params.get(name)]


def independent(*labels: str, on_every_server: bool = False) -> Check:
    """Samples of one prompt are drawn independently: no two are the same unless the reference makes that likely. `on_every_server`:
    each server must have drawn some of each prompt's."""
    return of_answers(
        "sampling.independent",
        fault="one sample is returned several times: a shared seed, a cached result, servers with equal random numbers",
        reads=Fact.ANSWERS | Fact.CHANCE,
        source='SkyRL API reference, sample: "Generate multiple independent samples from a single prompt."',
        rule=partial(_independent, on_every_server=on_every_server),
        asks=lambda _, rows: (row.score for row in rows),
        labels=labels,
    )


def _independent(evidence: Evidence, rows: list[Answer], *, on_every_server: bool) -> Finding:
    groups: dict[tuple[Any, ...], list[Answer]] = {}
    plain = [row for row in rows if row.params.get("temperature", 1.0) == 1 and not _active(row)]
    wrong: list[tuple[str, dict[str, Any]]] = []
    for row in plain:
        seed = row.call.id if row.params.get("seed") is not None else None
        groups.setdefault((tuple(row.prompt), seed), []).append(row)
    facts = distinct = likely = 0
    for group in groups.values():
        pairs = len(group) * (len(group) - 1) // 2
        facts += pairs
        for tokens, count in Counter(tuple(row.tokens) for row in group).items():
            first = next(row for row in group if tuple(row.tokens) == tokens)
            distinct += 1
            chance = sum(evidence.reference.score(first.score).logprobs)
            if chance + math.log(max(pairs, 1)) > math.log(FALSE_ALARM):
                likely += 1
            elif count > 1:
                which = "all samples" if count == len(group) else "some samples"
                alike = [row for row in group if tuple(row.tokens) == tokens]
                shown = {"times": count, "of": len(group), "reference_logprob": chance}
                wrong += [(f"{which} of a prompt are the same", row.shown(**shown)) for row in alike]
    if wrong:
        return concluded(facts, wrong)
    if len(plain) < len(rows):
        return untestable("independence is judged at temperature 1 without filters")
    if not facts:
        return untestable("no prompt was sampled more than once")
    if likely == distinct:
        return untestable("every sample is so probable that equal ones would prove nothing")
    served = matching.assignment(evidence).served
    drew = [{e.server for row in group for e in served.get((row.call.id, row.index), ())} for group in groups.values()]
    if on_every_server and any(set(evidence.header.servers) - servers for servers in drew):
        return untestable("a server drew none of a prompt's samples")
    margin = Margin(
        unit="improbable samples given twice",
        measured=0,
        bound=0,
        faults={"one sample given twice": 1},
        false_alarm_rate=FALSE_ALARM,
        power=1 - likely / distinct,
    )
    return passed(facts, margin=margin, samples_of_a_prompt=max(map(len, groups.values())), servers=min(map(len, drew)))


FLIPS = 4.0
"""The probability that noise changes a seeded draw is at most this many times its root mean square in nats."""


def draws_repeat(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rms: float) -> Margin:
    """How well seeded draws repeat: −log10 of the probability that noise of `rms` nats changes at least as many pairs.

    Each token up to the first different one is a trial. With another seed about every second token differs.
    """
    from scipy import stats

    trials = partings = 0
    for one, other in pairs:
        alike = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        trials += len(one) if alike is None else alike + 1
        partings += alike is not None
    flip = min(0.5, FLIPS * rms)
    rows = len(pairs)
    return Margin(
        unit="−log10 p",
        measured=_minus_log10_of(float(stats.binom.sf(partings - 1, trials, flip))),
        bound=-math.log10(FALSE_ALARM),
        faults={"another seed": _minus_log10_of(float(stats.binom.sf(rows - 1, 2 * rows, flip)))},
        false_alarm_rate=FALSE_ALARM,
    )


def _minus_log10_of(probability: float) -> float:
    return -math.log10(max(probability, sys.float_info.min))
