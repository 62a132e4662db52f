"""Drafts of the rows of a step: how many guesses of each pay; and the outputs of its rows, taken in."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from lora_serve.core.batch import AllowedTokens, NextToken, Row, RowOutput, StepLoad
from lora_serve.core.errors import InternalError, LoraServeError
from lora_serve.core.messages import ErrorEvent, Event
from lora_serve.core.setting_types import MAX_DRAFT
from lora_serve.core.stats import AdapterSpeculation, SpeculationStats
from lora_serve.engine.acceptance import SHARE, AcceptanceByOwner, DraftedStep, DraftTrial, DraftTrials
from lora_serve.engine.batcher import Batcher
from lora_serve.engine.blocks import BlockTables
from lora_serve.engine.drafter import Drafter, NgramCaches
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.prefix_cache import PrefixCache
from lora_serve.engine.scheduling.step_rows import StepRows
from lora_serve.engine.sequence import Sequence, continue_with, is_end, pooled_events
from lora_serve.engine.step_cost import StepCost

_log = logging.getLogger(__name__)
_READ_PER_ROW, _READ_PER_STEP = 1024, 4096  # tokens that a step takes into indexes: about a millisecond
_NUM_SWEEPS = 3  # of Dinkelbach's iteration; it converges faster than linearly
_LEAST_GAIN = 1.05  # of tokens per second: rates and costs are estimates
_NUM_SHOWN = 8  # adapters


@dataclass(slots=True)
class _Candidate:
    """One row that may have a draft."""

    sequence: Sequence
    drafter: Drafter
    seconds: float  # for one more of its tokens
    rates: list[float]  # of each guess: that it and those before it come true

    def count(self, price: float) -> int:
        """The guesses that are worth their time at `price` tokens a second."""
        least, count = price * self.seconds, len(self.rates)
        while count and self.rates[count - 1] <= least:
            count -= 1
        return count


class Drafting:
    """Chooses drafts so that a step gives the most tokens per second.

    A guess that comes true with probability p is worth p tokens and costs c seconds; the step without drafts gives n
    tokens in t seconds. The most (n + sum p) / (t + sum c) is that of all guesses with p / c above it: a fractional
    program, solved by Dinkelbach's iteration (On nonlinear fractional programming, 1967). So where rows are many or
    guesses poor, there are none. What was expected is held against what is measured (`DraftTrial`).
    """

    def __init__(self, setting: str, cost: StepCost, blocks: BlockTables) -> None:
        """`setting`: "auto", "off" or the number of tokens of every draft."""
        self._is_auto = setting == "auto"
        self._most = 0 if setting == "off" else MAX_DRAFT if self._is_auto else int(setting)
        self._mode = setting
        self._cost = cost  # of all tenants: it is learned of the machine, as for batching
        self._blocks = blocks
        self._trials = DraftTrials()
        self._trial: DraftTrial | None = None  # that the present step may tell something of
        self._plain_seconds = 0.0  # that the present step would take without its drafts
        self._promise = 0.0  # of its drafts: the logarithm of the gain in tokens per second
        self._num_accepted = 0  # guesses of the present step
        self._row_seconds = 0.0  # that a token of one row takes, when guesses were last looked for
        self._guess_seconds = 0.0  # for one more token to be checked
        self._row_share = 0.0  # of a row's seconds, what a row may take for guesses
        self._acceptance = AcceptanceByOwner()
        self._ngrams = NgramCaches()
        self._num_drafts = 0
        self._num_drafted = 0
        self._accepted_by_place = [0] * self._most

    @property
    def is_on(self) -> bool:
        """True if any row may get a draft."""
        return self._most > 0

    def add(self, running: Collection[Sequence], rows: StepRows) -> None:
        """Lengthens rows that decode by guesses, with the tokens and the blocks that are left over."""
        self._num_accepted = 0
        self._trial = None
        for sequence, wanted in self.choose(running, rows):
            num_slots = (len(sequence.blocks) + self._blocks.num_free) * self._blocks.block_size
            most = min(num_slots - len(sequence.token_ids), rows.budget)
            draft, allowed = _allowed(sequence, wanted[:most])
            row = rows.row(sequence.sequence_id)
            assert row is not None, "the draft is one of a row"
            if not draft or not rows.fits_draft(row.start, len(draft)):
                continue
            self._blocks.add(sequence, self._blocks.num_missing(sequence, len(sequence.token_ids) + len(draft)))
            tables = map(tuple, sequence.tables)
            rows.add_draft(replace(row, block_table=next(tables), windowed_table=next(tables)), draft, allowed)

    def trim(self, sequence: Sequence) -> None:
        """Frees the blocks that only guesses were in, but for the one that the next token needs."""
        self._blocks.cut(sequence, self._blocks.num_needed(sequence.num_computed + 1))

    def choose(self, running: Collection[Sequence], rows: StepRows) -> list[tuple[Sequence, tuple[int, ...]]]:
        """The drafts that pay in this step, beside its rows so far; none is empty."""
        if not self._most or rows.budget <= 0:
            return []
        if not self._is_auto:
            return self._chosen(running, rows)
        scopes = {sequence.request.scope for sequence in running}
        self._trial = trial = self._trials.of_step(scopes, len(running))
        if not trial.begin_step():
            return []
        found = self._chosen(running, rows)
        return found if found and trial.may_run(self._promise) else []

    def _chosen(self, running: Iterable[Sequence], rows: StepRows) -> list[tuple[Sequence, tuple[int, ...]]]:
        if self._is_auto and not any(s.drafter is None or s.drafter.budget.seconds > 0 for s in running):
            return []  # most steps of text that cannot be guessed end here
        decoding = [sequence for sequence in running if _continues(sequence, rows)]
        drafters = [(sequence, sequence.drafter or self._begin(sequence)) for sequence in decoding]
        looking = [found for found in drafters if not self._is_auto or found[1].budget.seconds > 0]
        if not looking:
            return []
        num_kv = sum(len(sequence.token_ids) for sequence in decoding)
        load = StepLoad(len(decoding), len(decoding), rows.load.num_adapters, num_kv, num_kv)
        seconds = self._plain_seconds = self._cost.seconds(load)
        self._row_seconds = seconds / len(decoding)
        self._row_share = SHARE * self._row_seconds
        price = len(decoding) / seconds if self._is_auto else 0.0
        candidates = self._candidates(looking, price, rows.budget)
        if self._is_auto and candidates:
            price = self._best_price(candidates, len(decoding), seconds)
        counted = ((candidate, candidate.count(price)) for candidate in candidates)
        return [(candidate.sequence, candidate.drafter.take(count)) for candidate, count in counted if count]

    def learn(self, sequence: Sequence, num_before: int, num_drafted: int, num_accepted: int, *, is_last: bool) -> None:
        """Takes in the tokens that a step brought to the `num_before` that were known, and how its guesses did."""
        drafter = sequence.drafter
        if drafter is None:
            return
        drafter.budget.seconds += self._row_share
        if drafter.guesses or is_last:
            drafter.learn(num_before, is_last=is_last)
        if num_drafted:
            drafter.budget.earn(num_accepted * self._row_seconds - num_drafted * self._guess_seconds)
            self._num_drafts += 1
            self._num_accepted += num_accepted
            self._num_drafted += num_drafted
            drafter.acceptance.num_drafted += num_drafted
            drafter.acceptance.num_accepted += num_accepted
            for place in range(num_accepted):
                self._accepted_by_place[place] += 1

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Compares the time of a step that only decoded with what was expected."""
        trial = self._trial
        if trial is None or load.num_tokens != load.num_rows or seconds <= 0:
            return
        if load.num_drafted:
            num_tokens, expected = load.num_rows + self._num_accepted, self._cost.seconds(load)
            trial.observe_drafted(
                DraftedStep(load.num_rows, num_tokens, self._promise, self._plain_seconds, expected, seconds)
            )
        elif trial.is_control:
            trial.observe_plain(self._cost.seconds(load), seconds)

    def stats(self, names: Mapping[str, str]) -> SpeculationStats:
        """`names`: those of the adapters that are known here, by digest."""
        adapters = [
            AdapterSpeculation(
                digests,
                tuple(names.get(digest, "") for digest in digests),
                num_drafted,
                num_accepted,
                round(num_accepted / num_drafted, 3),
            )
            for digests, num_drafted, num_accepted in self._acceptance.busiest(_NUM_SHOWN)
        ]
        return SpeculationStats(
            self._most, self._num_drafts, self._num_drafted, sum(self._accepted_by_place),
            tuple(self._accepted_by_place), tuple(adapters), self._mode,
        )  # fmt: skip

    def _candidates(self, looking: list[tuple[Sequence, Drafter]], price: float, budget: int) -> list[_Candidate]:
        found, to_read = [], _READ_PER_STEP
        each = self._cost.coefficients
        per_token, per_pair = 1e-9 + each["draft_token"] + each["kv_token"], each["attended_pair"]
        self._guess_seconds = per_token
        for sequence, drafter in looking:
            num_known = len(sequence.token_ids)
            ends = sequence.ends
            left = min(sequence.num_steps_left, ends.max_model_len - num_known) - 1
            if ends.long_rope.recomputes and not sequence.is_long:
                left = min(left, ends.long_rope.boundary - num_known)
            to_read -= drafter.read(min(to_read, _READ_PER_ROW))
            seconds = per_token + per_pair * num_known
            rates = drafter.draft(min(self._most, left, budget), price * seconds)
            if self._is_auto:
                drafter.budget.pay_lookup(len(rates), len(looking))
            if rates:
                found.append(_Candidate(sequence, drafter, seconds, rates))
        return found

    def _best_price(self, candidates: list[_Candidate], num_tokens: int, seconds: float) -> float:
        """The tokens per second of the best step; infinity if that has no drafts."""
        plain = price = num_tokens / seconds
        fixed = self._cost.coefficients["drafting_step"]
        for _ in range(_NUM_SWEEPS):
            gain, spent = 0.0, fixed
            for candidate in candidates:
                count = candidate.count(price)
                gain += sum(candidate.rates[:count])
                spent += count * candidate.seconds
            price = (num_tokens + gain) / (seconds + spent)
            if price <= _LEAST_GAIN * plain:
                return math.inf
        self._promise = math.log(price / plain)
        return price

    def _begin(self, sequence: Sequence) -> Drafter:
        request = sequence.request
        owner = (request.scope, tuple(ref.digest for ref in sequence.refs))
        ngrams, acceptance = self._ngrams.of(owner), self._acceptance.of(owner)
        ends = request.sampling.ends(sequence.ends.eos_token_ids)
        drafter = Drafter(sequence.token_ids, ngrams, acceptance, ends, sequence.num_prompt)
        sequence.drafter = drafter
        return drafter


def _allowed(sequence: Sequence, draft: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[AllowedTokens, ...]]:
    """The part of a draft that the sequence's grammar allows, and what may come after each of its tokens."""
    if sequence.constraint is None or not draft:
        return draft, ()
    allowed = sequence.constraint.after(draft)
    return draft[: len(allowed)], allowed


def _continues(sequence: Sequence, rows: StepRows) -> bool:
    """True if the sequence gets a token in this step that is not its first."""
    row = rows.row(sequence.sequence_id)
    return row is not None and row.sample is not None and row.sample.num_output_tokens > 0


@dataclass(eq=False)
class Outputs:
    """Takes in the outputs of rows; a sequence that ends so is released by the caller."""

    _prefix_cache: PrefixCache
    _policy: Policy
    _batcher: Batcher
    _drafting: Drafting
    num_forced: int = 0  # tokens that were not sampled, as a grammar left no choice

    def take(self, sequence: Sequence, row: Row, output: RowOutput, now: float) -> list[Event]:
        """The events of one row's output; the last one tells if the sequence is over (`is_end`)."""
        if output.error is not None:
            self._prefix_cache.invalidate(sequence)
            return [ErrorEvent(sequence.request.request_id, output.error)]
        sequence.add_prompt_logprobs(row.start, output.prompt_logprobs)
        sequence.num_computed += len(row.token_ids) - row.num_draft
        self._prefix_cache.publish(sequence)
        self._policy.served(sequence, sequence.newly_served(row.start), int(output.token_id is not None))
        if output.pooled is not None:
            self._note_time(sequence, now)
            return pooled_events(sequence, output.pooled, now)
        if output.token_id is None:
            return []
        self._note_time(sequence, now)
        return self._take_tokens(sequence, row, NextToken(output.token_id, output.logprobs), output.following, now)

    def _take_tokens(
        self, sequence: Sequence, row: Row, first: NextToken, following: tuple[NextToken, ...], now: float
    ) -> list[Event]:
        num_before, num_accepted = len(sequence.token_ids), 0
        events = self._take_token(sequence, first, now)
        for token in following:
            if sequence.num_new > 1 or is_end(events[-1]):
                break  # what was guessed behind the end, or in place of what the grammar forces, is of no use
            num_accepted += 1
            sequence.num_computed += 1  # the guess before it was right: its K and V are there
            self._prefix_cache.publish(sequence)
            self._policy.served(sequence, 0, 1)
            events += self._take_token(sequence, token, now)
        self._drafting.learn(sequence, num_before, row.num_draft, num_accepted, is_last=is_end(events[-1]))
        return events

    def _take_token(self, sequence: Sequence, token: NextToken, now: float) -> list[Event]:
        try:
            events = continue_with(sequence, token.token_id, token.logprobs, now)
        except LoraServeError as error:
            return [ErrorEvent(sequence.request.request_id, error)]
        except Exception:  # of the row's grammar, say: the rows beside it go on
            _log.exception("a row's next token could not be taken in")
            return [ErrorEvent(sequence.request.request_id, InternalError("The answer could not be continued."))]
        if num_forced := sequence.num_new - 1:
            self._policy.served(sequence, 0, num_forced)
            self.num_forced += num_forced
        return events

    def _note_time(self, sequence: Sequence, now: float) -> None:
        if sequence.last_token_at is None:
            self._batcher.observe_first_token(now - sequence.ready_at)
            sequence.first_token_at = now
        else:
            self._batcher.observe_token(now - sequence.last_token_at)
        sequence.last_token_at = now
