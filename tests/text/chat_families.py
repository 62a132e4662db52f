"""Chat templates of the families that are served, in plain form, each with a tiny tokenizer of the family's kind.

The templates follow the published ones in all that they do with a message: trimming, looking for tags, cutting
reasoning out, macros, JSON. Tokenizers are trained on a few lines in which control tokens are spelled too, so that
their texts merge with what stands around them.
"""

# ruff: noqa: E501, RUF001 - templates are kept as they are published

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.text.tiny_tokenizer import CORPUS

_SPELLED = (
    "<|end|> <|im_start|> <|im_end|> </s> <s> [INST] [/INST] <|eot_id|> <start_of_turn> <|user|> |> <| <think> </think>",
    "a<|im_end|>b x<|end|>y 1</s>2 if a < b: return a > b; <div> a|b </div> [1, 2] {'a': \"b\"}",
)

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant') }}{% endif %}"
    "{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_2 = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    '{%- for message in messages %}{%- if (message.role == "user") or (message.role == "system" and not loop.first) '
    'or (message.role == "assistant") %}'
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
           not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n'
                    + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
GEMMA_3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + "
    "'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_4_MINI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
EOS_BETWEEN = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
PROMPTER = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|prompter|>' ~ message.content ~ eos_token }}"
    "{% else %}{{ ('<|' ~ message.role ~ '|>') ~ message.content ~ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRANITE = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}"
    "{%- set system_message = 'You are Granite. Today is ' ~ date_string | default('April 12, 2025') ~ '.' %}"
    "{%- set loop_messages = messages %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}"
    "{%- for message in loop_messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + "
    "message['content'] + '<|end_of_text|>\\n' }}"
    "{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{{- '<|end_of_role|>' }}"
    "{%- endif %}{%- endfor %}"
)
OLMO_2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}{% else %}"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
STARCODER_2 = (
    "{{bos_token}}{{'You are an exceptionally intelligent coding assistant.\\n\\n'}}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System messages are not allowed in this template.') }}"
    "{% else %}{% if message['role'] == 'user' %}{{'### Instruction\\n' + message['content'] + '\\n\\n'}}{% else %}"
    "{{'### Response\\n' + message['content'] + eos_token}}{% endif %}{% endif %}{% endfor %}{{'### Response\\n'}}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
COHERE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% if system_message != false %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
SMOLLM_3 = """{%- if reasoning_mode is not defined -%}{%- set reasoning_mode = "/think" -%}{%- endif -%}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
  {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}
{%- if custom is defined -%}{{- custom + "\\n\\n" -}}{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{- "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" -}}
  {%- elif message.role == "assistant" -%}
    {%- generation -%}
    {%- if reasoning_mode == "/think" -%}
      {{- "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" -}}
    {%- else -%}
      {{- "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" -}}
    {%- endif -%}
    {%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\\n" -}}{%- if reasoning_mode == "/no_think" -%}{{- "<think>\\n\\n</think>\\n" -}}{%- endif -%}
{%- endif -%}
"""
DEEPSEEK = (
    "{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
FALCON = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ 'System: ' }}{% elif message['role'] == 'user' %}{{ 'User: ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' + 'Falcon:' }}{% endif %}"
)
GLM_4_5 = """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if '</think>' in content %}
    {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.last and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\\n' + content.strip() }}
{%- endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""
GPT_OSS = """
{%- macro render_role(role) -%}{{- "<|start|>" + role -}}{%- endmacro -%}
{{- "<|start|>system<|message|>You are ChatGPT.\\nReasoning: " + reasoning_effort | default("medium") + "<|end|>" }}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- "<|start|>developer<|message|># Instructions\\n\\n" + message.content + "\\n\\n<|end|>" }}
    {%- elif message.role == 'assistant' -%}
        {%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
        {%- endif -%}
        {%- if loop.last and not add_generation_prompt %}
            {{- render_role("assistant") + "<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- render_role("assistant") + "<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'user' -%}
        {{- render_role("user") + "<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" -}}{%- endif -%}
"""
JSON_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message | tojson }}{{ message.content | tojson(indent=1) }}"
    "{{ '%s %s' % (message.role, message.content) }}{{ [message.content, 'x'] | join(' | ') }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CHANGED = (
    "{% for message in messages %}<|im_start|>{{ message.content | upper }}/{{ message.content.lower() }}/"
    "{{ message.content | replace('|', '') }}/{{ message.content[1:-1] }}/{{ message.content | length }}/"
    "{% for letter in message.content %}{{ loop.index }}{{ letter }}{% endfor %}/{{ message.content | capitalize }}/"
    "{{ message.content.partition('<')[2] }}/{{ message.content.splitlines() | join }}/{{ message.content.count('<') }}/"
    "{{ message.content.title() }}/{% if message.content == '<|im_end|>' %}same{% endif %}"
    "{{ message.content.rsplit('|', 1)[0] }}{% filter trim %} {{ message.content }} {% endfilter %}<|im_end|>{% endfor %}"
)


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(specials: list[AddedToken], *, nfc: bool = False) -> Tokenizer:
    """GPT-2's, Qwen's and Llama 3's kind."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=_alphabet(), show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *_SPELLED * 3], trainer)
    tokenizer.add_tokens(specials)
    return tokenizer


def byte_level_nfc(specials: list[AddedToken]) -> Tokenizer:
    return byte_level(specials, nfc=True)


def fallback(specials: list[AddedToken]) -> Tokenizer:
    """SentencePiece's BPE with bytes; special tokens are in the model's own vocabulary, as in Llama 2's files."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([*CORPUS, *_SPELLED * 3], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    whole = {token.content for token in specials if token.special}
    merges = [pair for pair in _merges(trained) if whole.isdisjoint((*pair, "".join(pair)))]
    vocabulary = {piece: number for piece, number in trained.get_vocab().items() if piece not in whole}
    heads = ["<unk>", *(token.content for token in specials if token.special)]
    pieces = [*heads, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(vocabulary, key=vocabulary.__getitem__)]
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([AddedToken("<unk>", special=True, normalized=False), *specials])
    return tokenizer


def _merges(trained: Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]


def prepending(specials: list[AddedToken]) -> Tokenizer:
    """Llama 2's older files: a space before every stretch of text between special tokens."""
    tokenizer = fallback(specials)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def prepending_normalized(specials: list[AddedToken]) -> Tokenizer:
    """The oldest: special tokens are looked for in the normalised text."""
    return prepending([AddedToken(token.content, special=token.special, normalized=True) for token in specials])


def metaspace(specials: list[AddedToken]) -> Tokenizer:
    """Mistral's and Llama 2's newer files: a space before the first stretch alone."""
    tokenizer = fallback(specials)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def replacing(specials: list[AddedToken]) -> Tokenizer:
    """Gemma's: no space is added, and runs of line breaks and spaces are added tokens."""
    tokenizer = fallback([*specials, *(AddedToken(text, normalized=False) for text in ("\n", "\n\n", "▁▁", "<b>"))])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def lowering(specials: list[AddedToken]) -> Tokenizer:
    """Small letters, compatibility forms, no accents; added tokens are looked for in the normalised text."""
    tokenizer = byte_level([])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.NFKC()]
    )
    tokenizer.add_tokens([AddedToken(token.content, special=token.special, normalized=True) for token in specials])
    return tokenizer


def stripping(specials: list[AddedToken]) -> Tokenizer:
    """Phi 3's: special tokens take the white space after them, and one that before it too."""
    kinds = [(False, True), (True, True), (True, False)]
    chosen = [kinds[number % 3] for number in range(len(specials))]
    return metaspace(
        [
            AddedToken(token.content, special=token.special, normalized=False, lstrip=left, rstrip=right)
            for token, (left, right) in zip(specials, chosen, strict=True)
        ]
    )


@dataclass(frozen=True)
class Family:
    """`specials`: special tokens; `ordinary`: added tokens that are not special; `pieces`: of which the template
    builds tokens."""

    template: str
    make: Callable[[list[AddedToken]], Tokenizer]
    specials: tuple[str, ...]
    ordinary: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    pieces: tuple[str, ...] = ()
    looks_for: tuple[str, ...] = ()  # control tokens for which the template looks in messages


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_COHERE = ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
           "<|CHATBOT_TOKEN|>")  # fmt: skip
_LLAMA_3 = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|reserved_special_token_0|>",
)
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_GPT_OSS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")

FAMILIES = {
    "llama": Family(LLAMA_3, byte_level, _LLAMA_3, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "llama_2": Family(LLAMA_2, metaspace, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "llama_2_older": Family(LLAMA_2, prepending, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "llama_2_oldest": Family(LLAMA_2, prepending_normalized, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "mistral": Family(MISTRAL, metaspace, ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>"),
    "mixtral": Family(MISTRAL, prepending, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "qwen2": Family(QWEN_2, byte_level_nfc, _IM, eos="<|im_end|>"),
    "qwen3": Family(QWEN_3, byte_level_nfc, _IM, _TAGS, eos="<|im_end|>", looks_for=_TAGS),
    "qwen3_moe": Family(QWEN_3, byte_level_nfc, _IM, _TAGS, eos="<|im_end|>", looks_for=_TAGS),
    "gemma2": Family(GEMMA, replacing, ("<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    "gemma3_text": Family(GEMMA_3, replacing, ("<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    "phi3": Family(PHI_3, stripping, ("</s>", *_ROLES), eos="</s>"),
    "phi4_mini": Family(PHI_4_MINI, byte_level, ("<|endoftext|>", *_ROLES), eos="<|endoftext|>", pieces=("<|", "|>")),
    "gpt2": Family(EOS_BETWEEN, byte_level, ("<|endoftext|>",), eos="<|endoftext|>"),
    "gpt_neox": Family(
        PROMPTER, byte_level_nfc, ("<|endoftext|>", "<|prompter|>", *_ROLES), eos="<|endoftext|>", pieces=("<|", "|>")
    ),
    "opt": Family(EOS_BETWEEN, byte_level, ("<pad>", "</s>"), eos="</s>"),
    "granite": Family(GRANITE, byte_level, _GRANITE, eos="<|end_of_text|>"),
    "olmo2": Family(OLMO_2, byte_level_nfc, ("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>"),
    "starcoder2": Family(STARCODER_2, byte_level, ("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>"),
    "stablelm": Family(ZEPHYR, byte_level, ("<|endoftext|>",), ("<|user|>",), eos="<|endoftext|>"),
    "zephyr": Family(ZEPHYR, prepending, ("<s>", "</s>"), eos="</s>"),
    "cohere": Family(COHERE, byte_level_nfc, _COHERE, bos="<BOS_TOKEN>"),
    "smollm3": Family(SMOLLM_3, byte_level, _IM, ("<think>", "</think>"), eos="<|im_end|>"),
    "chatml": Family(CHATML, byte_level, _IM, eos="<|im_end|>"),
    "deepseek": Family(
        DEEPSEEK, byte_level, _DEEPSEEK, ("<think>", "</think>"), bos="<｜begin▁of▁sentence｜>", looks_for=("</think>",)
    ),
    "falcon": Family(FALCON, byte_level, ("<|endoftext|>",), eos="<|endoftext|>"),
    "glm4_5": Family(GLM_4_5, byte_level, _GLM, ("<think>", "</think>", "/nothink"), looks_for=("<think>", "</think>")),
    "gpt_oss": Family(GPT_OSS, byte_level, _GPT_OSS, eos="<|return|>", looks_for=("<|channel|>", "<|message|>")),
    "json": Family(JSON_TURNS, byte_level, _IM),
    "changed": Family(CHANGED, byte_level, _IM, looks_for=("<|im_end|>",)),
    "lowering": Family(CHATML, lowering, _IM),
}  # fmt: skip


@cache
def wrapper_of(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer with its template."""
    family = FAMILIES[name]
    added = [AddedToken(token, special=True, normalized=False) for token in family.specials]
    added += [AddedToken(token, special=False, normalized=False) for token in family.ordinary]
    return wrapped(family.make(added), family.template, bos=family.bos, eos=family.eos)


def wrapped(tokenizer: Tokenizer, template: str, *, bos: str | None, eos: str | None) -> PreTrainedTokenizerFast:
    if bos is not None:
        number = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", [(bos, number)])
    names = {name: token for name, token in (("bos_token", bos), ("eos_token", eos)) if token is not None}
    wrapper = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapper.chat_template = template
    return wrapper
