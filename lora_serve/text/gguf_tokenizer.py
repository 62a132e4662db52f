"""The tokenizer that a GGUF file holds, made by transformers, and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PreTrainedTokenizerFast

from lora_serve.core.gguf_file import gguf_of, read_gguf
from lora_serve.text.control_tokens import without_added_tokens

_BESIDE = "lay a tokenizer.json beside the file"
_PREFIX = "tokenizer.ggml."
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Of these a word of the vocabulary is one token whatever the merges say, and BOS is added, as llama.cpp does.
_OF_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_PLAIN = ("default", "gpt-2")  # split as GPT-2 does
_DIGITS = ("smollm",)  # the same, and each digit alone


def tokenizer_of(model: str) -> tuple[str, PreTrainedTokenizerFast | None]:
    """The folder or hub id of a model's tokenizer, and the tokenizer of a GGUF file that has none beside it.

    Raises as `read_tokenizer`.
    """
    file = gguf_of(model)
    if file is None:
        return model, None
    return str(file.parent), None if (file.parent / "tokenizer.json").is_file() else read_tokenizer(file)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Raises ModelError for a file that is none, and ValueError for a tokenizer that cannot be made."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping  # noqa: PLC0415 - of GGUF alone
    except ImportError:
        raise ValueError(f"this transformers makes none of GGUF files: {_BESIDE}") from None
    file = read_gguf(path, texts=True)
    facts = {key.removeprefix(_PREFIX): value for key, value in file.facts.items() if key.startswith(_PREFIX)}
    kind, split, tokens = facts.get("model"), facts.get("pre", "default"), facts.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(one, str) for one in tokens):
        raise ValueError(f"it holds no tokenizer: {_BESIDE}")
    if not isinstance(template := file.facts.get("tokenizer.chat_template"), str | None):
        raise ValueError(f"its chat template is {template!r}")
    if len(known := set(tokens)) != len(tokens):
        raise ValueError(f"it holds {len(tokens)} tokens, of which {len(known)} differ")
    for name in ("scores", "token_type"):
        if name in facts and (not isinstance(facts[name], list) or len(facts[name]) != len(tokens)):
            raise ValueError(f"it holds {len(tokens)} tokens, and another number of their {name}")
    if kind == "gpt2" and split not in (*mapping.GGUF_PRE_TOKENIZER_SPLITS, *_PLAIN, *_DIGITS):
        raise ValueError(f"its texts are split as {split!r}, which is not known: {_BESIDE}")
    named = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    whole, _ = mapping.convert_gguf_tokenizer(
        file.architecture, {named.get(name, name): value for name, value in facts.items()}
    )
    backend = without_added_tokens(whole)  # of which some are the class's own, behind those of the file
    backend.add_tokens([one for _, one in sorted(whole.get_added_tokens_decoder().items()) if one.content in known])
    if split in _OF_LLAMA3:
        backend.model.ignore_merges = True
    if split in _DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    special: dict[str, Any] = {name: _token(tokens, facts.get(f"{key}_token_id")) for name, key in _SPECIAL.items()}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        add_bos_token=facts.get("add_bos_token", kind == "llama" or split in _OF_LLAMA3) is True,
        add_eos_token=facts.get("add_eos_token", False) is True,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def _token(tokens: list[str], number: Any) -> str | None:
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ValueError(f"it names the token {number!r} of {len(tokens)}")
    return tokens[number]
