"""The demo's base model before any training: its tokenizer, its chat template, its shape; and text as training rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, END, END_OF_TEXT = "<|pad|>", "<|begin|>", "<|end|>", "<|end_of_text|>"
ROLES = ("system", "user", "assistant")
VOCAB_SIZE = 2048
MAX_POSITIONS = 512
ROW_LENGTH = 256  # tokens of a training row
IGNORED = -100  # label of a token that is not learned

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception("This model knows the roles system, user and assistant, not " + message['role'] | tojson) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class TrainingRow:
    """One text: what is read, and what is learned of it."""

    token_ids: list[int]
    labels: list[int]  # the same, or IGNORED


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text has tokens, digits are single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, BOS, END, END_OF_TEXT, *(f"<|{role}|>" for role in ROLES)]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, special.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """About 3.7 million random weights in the shape of a small Llama."""
    stops = [tokenizer.convert_tokens_to_ids(token) for token in (END, END_OF_TEXT)]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.06,  # 1 / sqrt(hidden): with less, so narrow a model is slow to learn to attend
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, turns: Sequence[str]) -> list[int]:
    """Token ids of a chat (the user speaks first) up to where the next turn's text begins."""
    messages = [{"role": ROLES[1 + i % 2], "content": turn} for i, turn in enumerate(turns)]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def chat_row(tokenizer: PreTrainedTokenizerFast, turns: Sequence[str], learn_prompt: bool) -> TrainingRow:
    """The last turn and its end are learned; the rest too if `learn_prompt`."""
    prompt = prompt_ids(tokenizer, turns[:-1])
    answer = tokenizer.encode(turns[-1] + END, add_special_tokens=False)
    hidden = prompt[1:] if learn_prompt else [IGNORED] * (len(prompt) - 1)
    return TrainingRow(prompt + answer, [IGNORED, *hidden, *answer])


def text_row(tokenizer: PreTrainedTokenizerFast, text: str) -> TrainingRow:
    """A plain document with its end."""
    ids = tokenizer.encode(text + END_OF_TEXT)
    return TrainingRow(ids, [IGNORED, *ids[1:]])


def packed(rows: Sequence[TrainingRow], length: int, rng: Random) -> list[TrainingRow]:
    """The same texts in random order, as many as fit into each row of `length`, so that little is padding."""
    lines: list[TrainingRow] = [TrainingRow([], [])]
    for row in rng.sample(rows, len(rows)):
        if len(lines[-1].token_ids) + len(row.token_ids) > length:
            lines.append(TrainingRow([], []))
        lines[-1].token_ids.extend(row.token_ids)
        lines[-1].labels.extend(row.labels)
    return lines


def batches(rows: Sequence[TrainingRow], num_rows: int, rng: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, labels), both [num_rows, length] with padding on the right, in ever new order, without end."""
    while True:
        lines = packed(rows, ROW_LENGTH, rng)
        for start in range(0, len(lines) - num_rows + 1, num_rows):
            yield padded(lines[start : start + num_rows])


def padded(rows: Sequence[TrainingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        token_ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
        labels[i, : len(row.labels)] = torch.tensor(row.labels)
    return token_ids, labels


def loss_of(model: LlamaForCausalLM, token_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the learned tokens; only their logits are computed.

    Positions start anew at each text's first token, from which transformers makes the mask that keeps texts apart.
    """
    at = torch.arange(token_ids.shape[1])
    firsts = torch.where(token_ids == model.config.bos_token_id, at, 0).cummax(dim=1).values
    output = model.model(input_ids=token_ids, position_ids=at - firsts, use_cache=False)
    targets = labels[:, 1:]
    learned = targets != IGNORED
    return cross_entropy(model.lm_head(output.last_hidden_state[:, :-1][learned]), targets[learned])


def fit(
    model: LlamaForCausalLM,
    parts: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    num_steps: int,
    rate: float,
    is_mixed: bool = False,
) -> None:
    """Train whatever in `model` asks for a gradient on batches of (token ids, labels).

    The learning rate makes one cycle; progress is on standard output. `is_mixed`: products in bfloat16, which is
    faster where the processor has them.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=num_steps, pct_start=0.1)
    model.train()
    for step, (token_ids, labels) in enumerate(islice(parts, num_steps), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = loss_of(model, token_ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0 or step == num_steps:
            print(f"    step {step}/{num_steps} loss {loss.item():.4f}", flush=True)
    model.eval()
