"""Routed experts: each token fed to the model goes, in each layer, to the experts that the oracle chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from harness.checks import matching
from harness.checks.answers import Answer, of_answers
from harness.checks.base import Check, Evidence, Finding, Tap, concluded, passed, untestable
from harness.checks.gym import shown_trajectory, with_columns
from harness.checks.staleness import overlap
from harness.checks.trajectories import trajectories
from harness.contract.faults import Fact
from harness.records.reference import WIDER, Experts, ExpertsRequest, Query, Routed
from harness.records.verdict import Margin

SHOWN = 10
"""Fewest places, over all answers, at which experts of the next token would be red. With fewer, nothing is shown."""


class Fed(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that were fed to the model (`request`), and the experts that came back for them."""

    request: ExpertsRequest
    routed: Any
    shown: Callable[..., dict[str, Any]]
    """The evidence, with what is added to it."""


def _request(answer: Answer) -> ExpertsRequest:
    """The question for the experts of all tokens fed to the model: all but the last. In 16 bits it carries the answer's experts,
    which the reference takes at near ties."""
    return ExpertsRequest(
        version=answer.version,
        adapter=answer.adapter,
        quantization=answer.quantization,
        tokens=(answer.prompt + answer.tokens)[:-1],
        routed=answer.routed,
    )


def _judged(evidence: Evidence, answers: list[Answer]) -> list[Answer]:
    """Answers that no weight sync overlaps: during a sync the version behind each token is open."""
    syncs = evidence.calls("sync_weights")
    return [answer for answer in answers if not any(overlap(sync, answer.call) for sync in syncs)]


def _routed(answer: Answer) -> Any:
    rows = (answer.call.result or {}).get("routed_experts")
    return rows[answer.index] if isinstance(rows, list) and answer.index < len(rows) else None


def _wrong_shape(fed: Fed, expected: Experts) -> str | None:
    """Faults that show before any index is compared with the reference's; None if there are none."""
    routed = fed.routed
    if not routed:
        return "routed experts are missing" if routed is None else "routed experts are empty"
    if len(routed) != len(fed.request.tokens):
        return "there are not routed experts for each token that was fed to the model"
    layers, top_k = len(expected.indices[0]), len(expected.indices[0][0])
    for position in routed:
        if len(position) != layers or any(len(chosen) != top_k for chosen in position):
            return "routed experts do not have the model's number of layers or of experts a token"
        if any(not 0 <= index < expected.count for chosen in position for index in chosen):
            return "a routed expert does not exist"
        if any(len(set(chosen)) != top_k for chosen in position):
            return "an expert is listed twice for one token"
    return None


def _near_tie(evidence: Evidence) -> float:
    """Router logits: up to this distance between neighbours, rounding may change the choice or the order."""
    return WIDER * evidence.noise.router


def _distance(expected: Experts, position: int, layer: int) -> float:
    """Router logits between the answer's choice and the reference's; the nearest other choice if the reference got no answer's."""
    return (expected.behind or expected.margins)[position][layer]


def _differences(routed: Routed, expected: Experts, near_tie: float) -> Iterator[tuple[int, int]]:
    """(position, layer) where the experts differ, except near ties."""
    for position, layers in enumerate(routed):
        for layer, chosen in enumerate(layers):
            if chosen != expected.indices[position][layer] and _distance(expected, position, layer) > near_tie:
                yield position, layer


def _shows_a_shift(expected: Experts, near_tie: float) -> int:
    """Number of places that would be red if each token had the experts of the token after it."""
    return sum(
        margin > near_tie and set(here) != set(after)
        for margins, chosen, later in zip(expected.margins, expected.indices, expected.indices[1:], strict=False)
        for margin, here, after in zip(margins, chosen, later, strict=True)
    )


def _shifted(routed: Routed, expected: Experts) -> bool:
    """True if the experts match the reference's when moved by one position."""
    later, earlier = expected.indices[1:], expected.indices[:-1]
    return len(routed) > 1 and (routed[:-1] == later or routed[1:] == earlier)


def _permuted(routed: Routed, expected: Experts) -> bool:
    """True if the experts are the same everywhere, in another order."""
    both = zip(routed, expected.indices, strict=True)
    return all(set(a) == set(b) for one, other in both for a, b in zip(one, other, strict=True))


def _why(routed: Routed, expected: Experts) -> str:
    if _shifted(routed, expected):
        return "routed experts are shifted against the tokens"
    if _permuted(routed, expected):
        return "routed experts are not in the order of their probability"
    return "routed experts are not those that the model routes to"


def _rule(evidence: Evidence, answers: list[Answer]) -> Finding:
    judged = _judged(evidence, answers)
    if not judged:
        return untestable("every answer overlaps a weight sync")
    return _compared(evidence, [Fed(request=_request(a), routed=_routed(a), shown=a.shown) for a in judged])


def _compared(evidence: Evidence, judged: Sequence[Fed]) -> Finding:
    """Each token that was fed to the model has the reference's experts."""
    facts = near_ties = shown = 0
    near_tie = _near_tie(evidence)
    found: list[tuple[str, dict[str, Any]]] = []
    for fed in judged:
        expected, routed = evidence.reference.experts(fed.request), fed.routed
        wrong = _wrong_shape(fed, expected)
        if wrong:
            found.append((wrong, fed.shown(routed_experts=(routed or [])[:2])))
            continue
        facts += sum(map(len, routed))
        near_ties += sum(margin <= near_tie for margins in expected.margins for margin in margins)
        shown += _shows_a_shift(expected, near_tie)
        different = list(_differences(routed, expected, near_tie))
        if different:
            position, layer = different[0]
            at = {"position": position, "layer": layer, "differ": len(different)}
            both = {"routed": routed[position][layer], "reference": expected.indices[position][layer]}
            found.append((_why(routed, expected), fed.shown(**at, **both)))
    if found:
        return concluded(facts + len(found), found)
    if shown < SHOWN:
        return untestable("near ties hide a seeded fault: experts that are shifted by one token")
    return passed(facts, margin=_margin(evidence, judged), near_ties=near_ties)


def _margin(evidence: Evidence, judged: Sequence[Fed]) -> Margin:
    """The largest difference accepted as a near tie, and the closest choice above the bound: a swap there would be red."""
    let_pass, closest = 0.0, []
    near_tie = _near_tie(evidence)
    for fed in judged:
        expected = evidence.reference.experts(fed.request)
        for position, margins in enumerate(expected.margins):
            for layer, size in enumerate(margins):
                if size > near_tie:
                    closest.append(size)
                if fed.routed[position][layer] != expected.indices[position][layer]:
                    let_pass = max(let_pass, _distance(expected, position, layer))
    faults = {"another expert at the closest choice": min(closest)} if closest else {}
    return Margin(unit="router logits between neighbours", measured=let_pass, bound=near_tie, faults=faults)


def routed_experts(*labels: str) -> Check:
    """Each answer returns the reference's experts for its prompt and response without the last token."""
    return of_answers(
        "routed_experts",
        fault="experts are missing or belong to another token, layer or weights: the trainer replays wrong routing",
        next_step="look at `position` and `layer` in the evidence: a shift by one token is in the reading, other "
        "experts are in the weights",
        reads=Fact.ANSWERS | Fact.POLICY | Fact.ADAPTERS,
        source="SkyRL API reference, GeneratorOutput.rollout_expert_indices",
        rule=_rule,
        asks=lambda evidence, answers: (_request(answer) for answer in _judged(evidence, answers)),
        labels=labels,
    )


def _trajectories(evidence: Evidence) -> Iterator[Fed]:
    """What the engines were fed of each whole trajectory. Without a result nothing came back."""
    for trajectory in trajectories(evidence):
        if trajectory.whole:
            column = (trajectory.call.result or {}).get("rollout_expert_indices")
            routed = None if column is None else column[trajectory.index]
            tokens = trajectory.fed
            asked = ExpertsRequest(
                version=evidence.version_at(trajectory.call.started_ns),
                tokens=tokens,
                routed=evidence.followed(routed if routed and len(routed) == len(tokens) else []),
            )
            shown = shown_trajectory(trajectory)
            yield Fed(request=asked, routed=routed, shown=lambda shown=shown, **more: shown | more)


def _judge_trajectories(evidence: Evidence) -> Finding:
    found = with_columns(evidence)
    if isinstance(found, Finding):
        return found
    fed = list(_trajectories(evidence))
    return _compared(evidence, fed) if fed else untestable("engines did not read every prompt of any trajectory")


def _asks(evidence: Evidence) -> Iterator[Query]:
    yield from matching.queries(evidence)
    for fed in _trajectories(evidence):
        yield fed.request


TRAJECTORY_EXPERTS = Check(
    name="gym.routed_experts",
    fault="a trajectory's experts are another turn's, or a token that no engine was fed has some: the trainer replays wrong routing",
    next_step="compare the number of experts with the number of tokens: after the last turn nothing is fed to the model",
    reads=Fact.ANSWERS | Fact.POLICY,
    source="SkyRL API reference, GeneratorOutput.rollout_expert_indices; SkyRL #1908",
    tap=Tap.READ,
    judge=_judge_trajectories,
    queries=_asks,
)
"""The reference's experts for each token of a trajectory but the last, its observations included."""
