"""The positions of a row at which tokens are drawn: the one that follows all that is decided, and one after each guess
of the row's draft.

The token drawn at a position is the one that the row would have had there without a draft: its uniform number is a hash
of the row's seed and of its number of tokens, its penalties and bad words count the guesses before it, and its grammar
has taken these in. A guess that is drawn decides its position, and the next one counts too; at the first that differs
the row's step ends. That is rejection sampling (Leviathan et al., Fast Inference from Transformers via Speculative
Decoding, 2023; Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023) for a proposal
q that gives all its probability to the guess x: x is accepted with probability min(1, p(x) / q(x)) = p(x), and what is
drawn instead has the distribution max(0, p - q) normalised, which is p given that it is not x. Drawing from p and
comparing does both at once, and needs no second random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from lora_serve.core.batch import NextToken, Row, RowOutput, SampleInput
from lora_serve.core.errors import NumericalError
from lora_serve.model.runner.sampler import Choice, choose, is_cheap
from lora_serve.model.system.transfer import to_device


def draw_rows(logits: Tensor, rows: Sequence[tuple[Row, int]], *, all_at_once: bool) -> dict[int, RowOutput]:
    """One output by id for each row that samples, given with the index of its first position's logits.

    `all_at_once`: the device is waited for once. Else a row whose tokens take more than a look at the logits has a
    position drawn when the guess before it is known to be right: all else would be work for nothing.
    """
    left = drawn = [_DrawnRow(row, first) for row, first in rows]
    while left:
        positions = [one.positions(all_at_once=all_at_once) for one in left]
        indices = [one.first + i for one, own in zip(left, positions, strict=True) for i in own]
        inputs = [sample_input(one.row, i) for one, own in zip(left, positions, strict=True) for i in own]
        are_all = indices == list(range(len(logits)))
        choices = iter(choose(logits if are_all else logits[to_device(indices, torch.int64, logits.device)], inputs))
        for one, own in zip(left, positions, strict=True):
            one.take(list(islice(choices, len(own))))
        left = [one for one in left if not one.is_done]
    return {one.row.sequence_id: one.output() for one in drawn}


@dataclass(slots=True)
class _DrawnRow:
    """A row whose tokens are being drawn, and those that it has of this step."""

    row: Row
    first: int  # the index of its first position's logits among all of the step
    choices: list[Choice] = field(default_factory=list)
    is_done: bool = False  # the last choice decides no further position

    def positions(self, *, all_at_once: bool) -> range:
        """The positions to draw next, 0 for the first."""
        num_done = len(self.choices)
        end = self.row.num_sampled if all_at_once or is_cheap(sample_input(self.row, 0)) else num_done + 1
        return range(num_done, end)

    def take(self, choices: Sequence[Choice]) -> None:
        """Takes in what was drawn at `positions`, up to the first that is not the guess.

        A position after the first that cannot be used is left to the next step, where it is the first.
        """
        draft = self.row.token_ids[len(self.row.token_ids) - self.row.num_draft :]
        for choice in choices:
            if self.choices and not choice.is_usable:
                break
            self.choices.append(choice)
            num_drawn = len(self.choices)
            if not choice.is_usable or num_drawn > len(draft) or choice.token_id != draft[num_drawn - 1]:
                break
        else:
            return
        self.is_done = True

    def output(self) -> RowOutput:
        """The row's output, once it is done."""
        choice, *following = self.choices
        if choice.error is not None:
            return RowOutput(self.row.sequence_id, None, error=choice.error)
        if not choice.is_number:
            return without_numbers(self.row.sequence_id)
        return RowOutput(
            self.row.sequence_id,
            choice.token_id,
            choice.logprobs,
            following=tuple(NextToken(later.token_id, later.logprobs) for later in following),
        )


def without_numbers(sequence_id: int) -> RowOutput:
    """The output of a row whose logits mean nothing."""
    return RowOutput(sequence_id, None, error=NumericalError("the model's logits for this request are not numbers"))


def sample_input(row: Row, position: int) -> SampleInput:
    """The sampler's input of a row that samples, after the first `position` guesses of its draft."""
    sample = row.sample
    assert sample is not None
    if position == 0 or _counts_nothing(sample):
        return sample
    wants_output = sample.params.has_penalties or bool(sample.params.bad_words)
    end = len(row.token_ids) - row.num_draft + position
    return replace(
        sample,
        num_output_tokens=sample.num_output_tokens + position,
        output_token_ids=sample.output_token_ids + row.token_ids[end - position : end] if wants_output else (),
        allowed=None if sample.allowed is None else sample.allowed_after[position - 1],
    )


def _counts_nothing(sample: SampleInput) -> bool:
    """True if the tokens before a position change nothing but the logits."""
    params = sample.params
    return is_cheap(sample) and not (params.bad_words or params.min_tokens or sample.allowed)
