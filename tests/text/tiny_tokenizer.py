"""Tokenizers small enough to be made in a test: byte-level BPE, SentencePiece's kind with byte fallback, and BERT's."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello world! Stop here.",
    "Wie geht es dir? Schöne Grüße aus Köln.",
    "你好世界。今天天气很好。",
    "Emoji: 😀 😃 👩‍👩‍👧‍👦 🏳️‍🌈 done.",
    "def f(x):\n    return x + 1\n",
)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """GPT-2's kind: any bytes can be spelled, a character may be split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: a space is part of the next token, the first space of a text is stripped again."""
    pieces = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted({character for text in CORPUS[:2] for character in text.replace(" ", "▁")})
    merges = [("▁", "w"), ("▁w", "o"), ("▁wo", "r"), ("H", "e"), ("l", "l"), ("He", "ll"), ("▁", "▁")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIALS, "<unk>")])
    return _wrapped(tokenizer)


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece of single letters: [CLS] a [SEP] b [SEP], with types 0 and 1."""
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    letters = sorted({letter for text in CORPUS[:2] for letter in text.lower() if letter != " "} | {"0", "1", "2"})
    pieces = [*specials, *letters, *(f"##{letter}" for letter in letters), "the", "##ox"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), specials, strict=True))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", start)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = TEMPLATE
    return wrapped
