"""From logits to one token per row, on tensors: no Python loop over the vocabulary and none over rows' tokens.

Sampling inverts the cumulative distribution at one uniform number per row, which is a hash of the row's seed and of how
many tokens it has: a seeded request draws the same numbers alone or in any batch, and after a recomputation. The step
waits for the device once: everything that the host wants to know of it comes in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.core.batch import SampleInput
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.messages import TokenLogprobs
from lora_serve.model.runner.draws import (
    COLDEST,
    NUM_CANDIDATES,
    Cuts,
    are_numbers,
    draw_truncated,
    draw_whole,
    uniform,
    warmed,
)
from lora_serve.model.system.device_memory import to_device, to_host


def draw_again(logits: Tensor, rows: Sequence[SampleInput], tokens: Tensor, is_final: Tensor) -> Tensor:
    """`tokens`, with those of rows that are not final drawn among all of the vocabulary.

    A final row keeps its own: among more candidates, tokens of equal probability may stand in another order, and a
    row's token must not depend on its neighbours.
    """
    return torch.where(is_final, tokens, draw(logits, rows, logits.shape[1])[0])


def draw(logits: Tensor, rows: Sequence[SampleInput], num_candidates: int = NUM_CANDIDATES) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] float32 -> token ids [rows], and which of them are final, [rows] bool; does not wait.

    Order of the steps as in vLLM: forbidden tokens, bias, penalties, temperature, min-p, top-k, top-p. A row that is
    not final may keep more than its `num_candidates` best tokens, and has to be drawn again among more.
    """
    logits = _adjusted(logits, rows)
    tokens = _best(logits)
    is_final = torch.ones_like(tokens, dtype=torch.bool)
    warm = [i for i, row in enumerate(rows) if row.params.temperature >= COLDEST]
    for chosen in ([i for i in warm if not is_truncated(rows[i])], [i for i in warm if is_truncated(rows[i])]):
        if chosen:
            index = to_device(chosen, torch.int64, logits.device)
            members = [rows[i] for i in chosen]
            temperature = _column([row.params.temperature for row in members], logits)
            probabilities = warmed(logits[index], temperature)
            numbers = uniform([row.seed for row in members], [row.num_output_tokens for row in members])
            numbers = to_device(numbers, torch.float64, logits.device)[:, None]
            if is_truncated(members[0]):
                cuts = _cuts(members, logits)
                tokens[index], is_final[index] = draw_truncated(probabilities, numbers, cuts, num_candidates)
            else:
                tokens[index] = draw_whole(probabilities, numbers)
    return tokens, is_final


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens [rows] under logits [rows, vocab] float32, and of each row's `num_top`
    best.
    """
    return logprobs_from(to_host(*logprob_columns(logits, tokens, num_top)), num_top)


def logprob_columns(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> tuple[Tensor, ...]:
    """The five tensors [rows, ...] of which `logprobs_from` makes its records once they are in host memory."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best = logprobs.topk(min(max([*num_top, 1]), logits.shape[1]), dim=-1)
    return tokens, chosen[:, 0], ranks, best.indices, best.values


def logprobs_from(columns: Sequence[Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Records, one per row of `logprob_columns`; tokens that could not come are not among the best."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(_possible(ids[:count], values[:count])))
        for (token, logprob, rank, ids, values), count in zip(rows, num_top, strict=True)
    ]


def _possible(ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf]


def is_cheap(row: SampleInput) -> bool:
    """True if the row's token is the largest logit, and nothing else of the vocabulary counts."""
    return row.params.temperature < COLDEST and row.params.logprobs is None and not row.params.has_penalties


def _best(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row [rows]; torch's own search on CPUs takes tens of times as long."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def is_truncated(row: SampleInput) -> bool:
    """True if some tokens may not come for their rank or their probability."""
    params = row.params
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _cuts(rows: Sequence[SampleInput], like: Tensor) -> Cuts:
    top_k = to_device([row.params.top_k for row in rows], torch.int64, like.device)[:, None]
    top_p = _column([row.params.top_p for row in rows], like)
    return Cuts(top_k, top_p, _column([row.params.min_p for row in rows], like))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return to_device(values, like.dtype, like.device)[:, None]


def _adjusted(logits: Tensor, rows: Sequence[SampleInput]) -> Tensor:
    """Logits with forbidden tokens, bias and penalties applied; the argument itself stays as it is.

    Where these leave nothing of what a grammar allows, the grammar alone counts: its row may have to end.
    """
    forbidden = [(i, token) for i, row in enumerate(rows) for token in _forbidden(row)]
    allowed = [(i, token) for i, row in enumerate(rows) for token in row.params.allowed_token_ids]
    bias = [(i, token, value) for i, row in enumerate(rows) for token, value in row.params.logit_bias]
    penalised = [i for i, row in enumerate(rows) if row.params.has_penalties]
    if not (forbidden or allowed or bias or penalised):
        return logits
    given, logits = logits, logits.clone()
    device = logits.device
    if forbidden:
        index = to_device(forbidden, torch.int64, device)
        logits[index[:, 0], index[:, 1]] = float("-inf")
    if allowed:
        _keep_only(logits, to_device(allowed, torch.int64, device))
    if bias:
        where = to_device([(i, token) for i, token, _ in bias], torch.int64, device)
        values = to_device([value for *_, value in bias], logits.dtype, device)
        logits.index_put_((where[:, 0], where[:, 1]), values, accumulate=True)
    if penalised:
        index = to_device(penalised, torch.int64, device)
        logits[index] = _penalised(logits[index], [rows[i] for i in penalised])
    if any(row.allowed is not None for row in rows):
        has_grammar = to_device([[row.allowed is not None] for row in rows], torch.bool, device)
        logits = logits.masked_fill_(has_grammar & given.isneginf(), float("-inf"))
        logits = torch.where(has_grammar & logits.amax(dim=-1, keepdim=True).isneginf(), given, logits)
    return logits


def _forbidden(row: SampleInput) -> list[int]:
    """The tokens that may not come now. An end that is ignored would end the row of a grammar all the same."""
    params, found = row.params, _ends_of_bad_words(row) if row.params.bad_words else []
    if row.num_output_tokens < params.min_tokens:
        return [*found, *row.eos_token_ids, *params.stop_token_ids]
    return [*found, *row.eos_token_ids] if row.allowed is not None and params.ignore_eos else found


def _ends_of_bad_words(row: SampleInput) -> list[int]:
    """The tokens that would complete a bad word now; a word counts within the answer only, as in vLLM."""
    output = row.output_token_ids
    return [word[-1] for word in row.params.bad_words if output[len(output) - len(word) + 1 :] == word[:-1]]


def _keep_only(logits: Tensor, allowed: Tensor) -> None:
    """Forbid all but the `allowed` (row, token) [n, 2] in the rows that have some. If all of these are forbidden for
    other reasons, one of them comes all the same.
    """
    rows, tokens = allowed[:, 0], allowed[:, 1]
    kept = logits[rows, tokens].clamp(min=torch.finfo(logits.dtype).min)
    logits[rows] = float("-inf")
    logits[rows, tokens] = kept


def _penalised(logits: Tensor, rows: Sequence[SampleInput]) -> Tensor:
    """Repetition (Keskar et al., 2019: prompt and output), frequency and presence (OpenAI: output) penalties."""
    prompts = _counts([row.prompt_token_ids for row in rows], logits)
    outputs = _counts([row.output_token_ids for row in rows], logits)
    repetition = _column([row.params.repetition_penalty for row in rows], logits)
    seen = (prompts > 0) | (outputs > 0)
    factor = torch.where(logits > 0, 1.0 / repetition, repetition)
    largest = torch.finfo(logits.dtype).max  # a penalty near 0 rewards: not with infinity
    logits = torch.where(seen, (logits * factor).clamp(max=largest), logits)
    logits = logits - _column([row.params.frequency_penalty for row in rows], logits) * outputs
    return logits - _column([row.params.presence_penalty for row in rows], logits) * (outputs > 0)


def _counts(tokens: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """The occurrences of each token of the vocabulary per row: [rows, vocab]."""
    row_of = to_device([i for i, ids in enumerate(tokens) for _ in ids], torch.int64, like.device)
    flat = to_device([token for ids in tokens for token in ids], torch.int64, like.device)
    counts = torch.zeros_like(like)
    return counts.index_put_(
        (row_of, flat), torch.ones(len(flat), dtype=like.dtype, device=like.device), accumulate=True
    )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one row."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: not asked for
    is_number: bool  # False: the logits are NaN or infinite, and the token means nothing
    error: LoraServeError | None = None  # of the row's grammar; then the token means nothing either

    @property
    def is_usable(self) -> bool:
        """True if the token means something."""
        return self.is_number and self.error is None


def choose(logits: Tensor, rows: Sequence[SampleInput]) -> list[SampledToken]:
    """Chooses one token per row of logits [rows, vocab] float32, once the masks of rows with a grammar are there.

    Waits for the device twice if a row keeps more than the sampler's candidates, which only flat distributions do.
    """
    is_number = are_numbers(logits)
    logits, errors = only_allowed(logits, rows)
    tokens, is_final = draw(logits, rows)
    choices, settled = _read(logits, rows, tokens, is_final, is_number)
    if not settled:
        tokens = draw_again(logits, rows, tokens, is_final)
        choices = _read(logits, rows, tokens, is_final, is_number)[0]
    for i, error in errors.items():
        choices[i] = replace(choices[i], error=error)
    return choices


def _read(
    logits: Tensor, rows: Sequence[SampleInput], tokens: Tensor, is_final: Tensor, is_number: Tensor
) -> tuple[list[SampledToken], bool]:
    """The choices, and whether all rows are final."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    num_top = [rows[i].params.logprobs or 0 for i in wanted]
    columns: tuple[Tensor, ...] = ()
    if wanted:
        index = to_device(wanted, torch.int64, logits.device)
        columns = logprob_columns(logits[index], tokens[index], num_top)
    ids, settled, fine, *found = to_host(tokens, is_final, is_number, *columns)
    logprobs = dict(zip(wanted, logprobs_from(found, num_top), strict=True)) if wanted else {}
    choices = [
        SampledToken(token, logprobs.get(i), good)
        for i, (token, good) in enumerate(zip(ids.tolist(), fine.tolist(), strict=True))
    ]
    return choices, bool((settled | ~fine).all())


def only_allowed(logits: Tensor, rows: Sequence[SampleInput]) -> tuple[Tensor, dict[int, LoraServeError]]:
    """logits [rows, vocab], with -inf for tokens that a row's grammar excludes; and the errors of rows that cannot go
    on, whose logits stay as they are. The argument itself is not changed.

    Done before anything else, so that log-probabilities are those of tokens that were really allowed, as in vLLM. Waits
    for the masks, which were begun before the forward pass; the device has its work by now.
    """
    masks: dict[int, bytes] = {}
    errors: dict[int, LoraServeError] = {}
    for i, row in enumerate(rows):
        if row.allowed is not None:
            try:
                masks[i] = row.allowed.wait()
            except LoraServeError as error:
                errors[i] = error
    if not masks:
        return logits, errors
    packed = _packed(list(masks.values()), logits.shape[1])
    for line, i in zip(packed, masks, strict=True):
        _allow_own_ends(line, rows[i])
        if not line.any():
            errors[i] = InvalidRequestError("The grammar allows no token of this model's vocabulary at this place.")
            line.fill(255)
    bits = np.unpackbits(~packed, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    excluded = to_device(torch.from_numpy(bits), torch.bool, logits.device)
    if len(masks) == len(rows):
        return logits.masked_fill(excluded, float("-inf")), errors
    index = to_device(list(masks), torch.int64, logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill_(excluded, float("-inf"))), errors


def _allow_own_ends(line: npt.NDArray[np.uint8], row: SampleInput) -> None:
    """Where the grammar allows the model's end, the ends that only this row's adapter or the tokenizer has may come."""
    own = row.params.eos_token_ids
    models = [token for token in row.eos_token_ids if token not in own] or row.eos_token_ids
    if own and any(line[token // 8] >> token % 8 & 1 for token in models):
        for token in own:
            line[token // 8] |= 1 << token % 8


def _packed(masks: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    """[rows, width / 8] of masks that may be of other lengths, as adapters have vocabularies of their own."""
    packed = np.zeros((len(masks), -(-width // 8)), dtype=np.uint8)
    for line, mask in zip(packed, masks, strict=True):
        known = np.frombuffer(mask, dtype=np.uint8)[: len(line)]
        line[: len(known)] = known
    if width % 8:
        packed[:, -1] &= (1 << width % 8) - 1
    return packed
