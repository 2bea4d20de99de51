"""Log-probabilities that are wrong, missing, or unrequested."""

from __future__ import annotations

import msgspec
import numpy as np

from backends.miniature import model
from backends.miniature.client import Client
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import seeded
from harness.contract.faults import Fact
from harness.contract.messages import Generation, SampleRequest

ASKED = frozenset({"sampling_params.logprobs"})
"""What a request has that asks for them."""
FLOOR = -9999.0


class _Tempered(Engine):
    temperature = 1.0

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        row = self.row(request) / self.temperature
        return min(0.0, float(row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()))


@seeded("logprobs_other_temperature", "a_lot", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS)
class LogprobsTempered(_Tempered):
    """Log-probabilities are those of temperature 2."""

    temperature = 2.0


@seeded("logprobs_other_temperature", "a_little", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS)
class LogprobsSlightlyTempered(_Tempered):
    """Log-probabilities are those of temperature 1.01."""

    temperature = 1.01


@seeded("logprobs_other_version", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS)
class LogprobsOfAnotherVersion(Engine):
    """Log-probabilities are those of another policy version."""

    def logprob(self, request: Request, token: int) -> float:
        if not request.wants_logprobs:
            return super().logprob(request, token)
        self.fired += 1
        other = model.network(model.policy(7))
        node = other.root
        for fed in request.context:
            node = other.feed(node, fed)
        return float(other.row(node)[token])


@seeded("logprobs_cut", caught_by=["logprobs.extremes"], corrupts=Fact.LOGPROBS)
class LogprobsCut(Engine):
    """No log-probability is below -9999."""

    def logprob(self, request: Request, token: int) -> float:
        found = super().logprob(request, token)
        self.fired += found < FLOOR
        return max(found, FLOOR)


class _Off(Engine):
    by = 0.0

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        return super().logprob(request, token) - self.by


@seeded("logprobs_off_by_constant", "a_lot", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS)
class LogprobsOff(_Off):
    """Log-probabilities are a tenth of a nat too small."""

    by = 0.1


@seeded("logprobs_off_by_constant", "a_little", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS)
class LogprobsSlightlyOff(_Off):
    """Log-probabilities are two thousandths of a nat too small."""

    by = 2e-3


@seeded("logprobs_off_by_constant", "a_hair", caught_by=["logprobs.mean"])
class LogprobsOffByAHair(_Off):
    """Log-probabilities are half a thousandth of a nat too small: no single one exceeds its bound."""

    by = 5e-4


@seeded("logprobs_nan", "always", caught_by=["logprobs.numbers", "numbers_are_numbers"], corrupts=Fact.LOGPROBS)
class LogprobsNaN(Engine):
    """Log-probabilities are NaN."""

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        return float("nan")


@seeded("logprobs_nan", "now_and_then", caught_by=["logprobs.numbers", "numbers_are_numbers"], corrupts=Fact.LOGPROBS)
class LogprobsNowAndThenNaN(Engine):
    """The tenth log-probability of a long answer is NaN."""

    def logprob(self, request: Request, token: int) -> float:
        if len(request.tokens) == 9:
            self.fired += request.wants_logprobs
            return float("nan")
        return super().logprob(request, token)


@seeded("logprobs_nan", "positive", caught_by=["logprobs.numbers", "numbers_are_numbers"], corrupts=Fact.LOGPROBS)
class LogprobsPositive(Engine):
    """Log-probabilities have the wrong sign."""

    def logprob(self, request: Request, token: int) -> float:
        self.fired += request.wants_logprobs
        return -super().logprob(request, token)


@seeded("logprobs_nan", "with_a_stand_in", caught_by=["numbers_are_numbers"], corrupts=Fact.LOGPROBS)
class LogprobsStandIn(LogprobsNowAndThenNaN):
    """A log-probability that is NaN becomes a finite number that stands for none."""

    def logprob(self, request: Request, token: int) -> float:
        found = super().logprob(request, token)
        return found if np.isfinite(found) else FLOOR


@seeded("logprobs_before_filters", caught_by=["logprobs.filtered"], corrupts=Fact.LOGPROBS)
class LogprobsBeforeFilters(Engine):
    """Log-probabilities are the model's own, where the engine is configured to give them after temperature and filters."""

    def logprob(self, request: Request, token: int) -> float:
        self.fired += self.processed and request.wants_logprobs
        request.processed = None
        return super().logprob(request, token)


@seeded("logprobs_before_filters", "only_temperature", caught_by=["logprobs.filtered"], corrupts=Fact.LOGPROBS)
class LogprobsOfTheTemperature(Engine):
    """Log-probabilities are those after the temperature, and of a vocabulary from which top_k and top_p took nothing."""

    def logprob(self, request: Request, token: int) -> float:
        temperature = request.params.get("temperature", 1.0)
        if self.processed and temperature and not request.params.get("allowed_token_ids"):
            self.fired += request.wants_logprobs
            row = self.row(request) / temperature
            request.processed = float(row[token] - np.log(np.exp(row - row.max()).sum()) - row.max())
        return super().logprob(request, token)


@seeded("logprobs_shifted", caught_by=["logprobs.reference"], corrupts=Fact.LOGPROBS, changes=ASKED)
class LogprobsShifted(Engine):
    """Each token has the log-probability of the previous token."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        if done.logprobs is not None and len(done.logprobs) > 1:
            self.fired += 1
            done.logprobs = [done.logprobs[0], *done.logprobs[:-1]]
        return done


@seeded("logprobs_missing", caught_by=["logprobs.numbers"], corrupts=Fact.LOGPROBS | Fact.ANSWERS, changes=ASKED)
class LogprobsMissing(Engine):
    """Requested log-probabilities are missing. The results of sample() have other lengths then, and rows cannot be told apart."""

    def output(self, request: Request) -> Output:
        done = super().output(request)
        self.fired += done.logprobs is not None
        done.logprobs = None
        return done


@seeded("logprobs_unasked", caught_by=["logprobs.numbers"])
class LogprobsAlways(Engine):
    """Answers contain log-probabilities that were not requested."""

    def arrive(self, request: Request) -> None:
        self.fired += not request.wants_logprobs
        request.params.setdefault("logprobs", 0)
        super().arrive(request)


@seeded("prompt_logprobs_wrong", "shifted", caught_by=["logprobs.prompt"], corrupts=Fact.LOGPROBS)
class PromptLogprobsShifted(Client):
    """Each prompt token gets the log-probability of its successor, and the last one its own."""

    def prompt_logprobs(self, prompt: list[int], rows: list[model.Array]) -> list[float | None]:
        self.fired += 1
        first, *numbers = super().prompt_logprobs(prompt, rows)
        return [first, *numbers[1:], *numbers[-1:]]


@seeded("prompt_logprobs_wrong", "absent", caught_by=["logprobs.prompt"], corrupts=Fact.LOGPROBS)
class PromptLogprobsLost(Client):
    """Log-probabilities of the prompt are lost."""

    async def sample(self, request: SampleRequest) -> Generation:
        self.fired += request.prompt_logprobs
        return await super().sample(msgspec.structs.replace(request, prompt_logprobs=False))


@seeded("prompt_logprobs_wrong", "one_too_many", caught_by=["logprobs.prompt"], corrupts=Fact.LOGPROBS)
class PromptLogprobsOneTooMany(Client):
    """The most probable tokens are not cut to the number asked for."""

    def most_probable(self, row: model.Array, most: int) -> list[tuple[int, float]]:
        self.fired += 1
        return super().most_probable(row, most + 1)


@seeded("prompt_logprobs_wrong", "unsorted", caught_by=["logprobs.prompt"], corrupts=Fact.LOGPROBS)
class PromptLogprobsUnsorted(Client):
    """The most probable tokens come in the order of their ids."""

    def most_probable(self, row: model.Array, most: int) -> list[tuple[int, float]]:
        self.fired += 1
        return sorted(super().most_probable(row, most))
