"""Chat templates of 2025 and 2026 that write calls as tags, ids or marked lists, true to their families in what they do
with tools, calls and results; system texts are left out.
"""

# ruff: noqa: E501 - templates are kept as they are published

from __future__ import annotations

from lora_serve.text import harmony

# Qwen3-Coder, Qwen 3.5 and Nemotron 3 write `True` and `None`, as Python does; Qwen 3.6 writes JSON.
QWEN_3_5 = r"""
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = (message.content or '')|trim %}
    {%- if message.role in ("system", "user") %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n<think>\n' + (message.reasoning_content or '')|trim + '\n</think>\n\n' + content }}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function is defined %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {%- if loop.first %}
                    {%- if content|trim %}
                        {{- '\n\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
                    {%- else %}
                        {{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}
                    {%- endif %}
                {%- else %}
                    {{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
                {%- endif %}
                {%- if tool_call.arguments is defined %}
                    {%- for args_name, args_value in tool_call.arguments|items %}
                        {{- '<parameter=' + args_name + '>\n' }}
                        {%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}
                        {{- args_value }}
                        {{- '\n</parameter>\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %}
"""

QWEN_3_6 = QWEN_3_5.replace(
    "args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string",
    "args_value | string if args_value is string else args_value | tojson | safe",
)

GLM_4_6 = r"""[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
...
</tool_call>{%- endif -%}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{{ '\n<think>' + (m.reasoning_content or '').strip() +  '</think>'}}
{%- if m.content and m.content.strip() -%}
{{ '\n' + m.content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}
    {%- set tc = tc.function %}
{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
<|observation|>
{{- '\n<tool_response>\n' }}
{{- m.content }}
{{- '\n</tool_response>' }}
{%- elif m.role == 'system' -%}
<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>
{%- endif -%}
"""

_GLM_4_6_CALLS = GLM_4_6[GLM_4_6.index("{{ '\\n<tool_call>'") : GLM_4_6.index("</tool_call>{% endfor %}")]
GLM_4_7 = GLM_4_6.replace(
    _GLM_4_6_CALLS,
    r"""{{- '<tool_call>' + tc.name -}}
{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}""",
)

MINIMAX_M2 = r"""
{%- set toolcall_begin_token   = '<minimax:tool_call>'         -%}
{%- set toolcall_end_token     = '</minimax:tool_call>'        -%}
{{- ']~!b[]~b]system\n' }}
{%- if tools -%}
    {{- '\n\n# Tools\n\n<tools>\n' }}
{%- for tool in tools -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}
{{- '</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n' }}
{{- '\n' ~ toolcall_begin_token }}
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
...
</invoke>
{{- '\n' ~ toolcall_end_token }}
{%- endif -%}
{{- '[e~[\n' }}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- ']~b]ai' ~ '\n' }}
        {%- if message.reasoning_content -%}
            {{- '<think>' ~ '\n' ~ message.reasoning_content ~ '\n' ~ '</think>' ~ '\n\n' }}
        {%- endif -%}
        {{- message.content or '' }}
        {%- if message.tool_calls -%}
            {{- '\n' ~ toolcall_begin_token ~ '\n' }}

            {%- for tool_call in message.tool_calls -%}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<invoke name="' + tool_call.name + '">' }}
                {% set _args = tool_call.arguments %}
                {%- for k, v in _args.items() %}
                {{- '<parameter name="' + k + '">' }}
                {{- v | tojson(ensure_ascii=False) if v is not string else v }}
                {{- '</parameter>' }}
                {% endfor %}
                {{- '</invoke>' ~ '\n' }}
            {%- endfor -%}

            {{- toolcall_end_token}}
        {%- endif -%}
        {{- '[e~[' ~ '\n' }}
    {%- elif message.role == 'tool' -%}
        {{- ']~b]tool\n<response>' ~ message.content ~ '</response>[e~[\n' }}
    {%- else -%}
        {{- ']~b]' ~ message.role ~ '\n' ~ message.content ~ '[e~[\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}
{%- endif -%}
"""

KIMI_K2 = r"""
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- set role_name =  message.get('name') or  message['role'] -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>{{role_name}}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>{{role_name}}<|im_middle|>
  {%- else -%}
    <|im_system|>{{role_name}}<|im_middle|>
  {%- endif -%}
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {%- if message['content'] -%}{{ message['content'] }}{%- endif -%}
    <|tool_calls_section_begin|>
    {%- for tool_call in message['tool_calls'] -%}
      {%- set formatted_id = tool_call['id'] -%}
      <|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>{% if tool_call['function']['arguments'] is string %}{{ tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- elif message['role'] == 'tool' -%}
    ## Return of {{ message.tool_call_id }}
{{ message['content'] }}
  {%- elif message['content'] is string -%}
    {{ message['content'] }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""

NEMOTRON_NANO_2 = r"""
{%- if tools -%}
  {{- '<SPECIAL_10>System\n<AVAILABLE_TOOLS>[' -}}
  {%- for tool in tools -%}
    {{- (tool.function if tool.function is defined else tool) | tojson -}}
    {{- ', ' if not loop.last else '' -}}
  {%- endfor -%}
  {{- ']</AVAILABLE_TOOLS>\n\nIf you decide to call any tool(s), use the following format:\n' -}}
  {{- '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}, {{"name": "tool_name2", "arguments": "tool_args2"}}]</TOOLCALL>\n\n' -}}
{%- endif -%}
{%- for message in messages %}
  {%- set content = message['content'] or '' %}
  {%- if message['role'] == 'tool' -%}
    {{- '<SPECIAL_11>User\n<TOOL_RESPONSE>[' + content + ']</TOOL_RESPONSE>\n\n' -}}
  {%- elif message['role'] == 'assistant' -%}
    {%- if content and '</think>' in content -%}
      {%- set content = (content.split('</think>')[1] | default('', true)).strip() %}
    {%- endif -%}
    {{- '<SPECIAL_11>Assistant\n' + content.strip() }}
    {%- if message.tool_calls -%}
      {{- '<TOOLCALL>[' -}}
      {%- for call in message.tool_calls -%}
        {%- set fn = call.function if call.function is defined else call -%}
        {{- '{"name": "' + fn.name + '", "arguments": ' -}}
        {%- if fn.arguments is string -%}
          {{- fn.arguments -}}
        {%- else -%}
          {{- fn.arguments | tojson -}}
        {%- endif -%}
        {{- '}' + (', ' if not loop.last else '') -}}
      {%- endfor -%}
      {{- ']</TOOLCALL>' -}}
    {%- endif -%}
    {{- '\n<SPECIAL_12>\n\n' -}}
  {%- else -%}
    {{- '<SPECIAL_11>User\n' + content.strip() + '\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<SPECIAL_11>Assistant\n<think>\n\n' -}}
{%- endif -%}
"""

# template, special tokens, ordinary added tokens, bos, eos
# A message has one call: the first of a turn's. Results go by the name of the call before them.
GPT_OSS = r"""
{{- "<|start|>system<|message|>You are ChatGPT.\nReasoning: " + reasoning_effort | default("medium") }}
{{- "\n\n# Valid channels: analysis, commentary, final." }}
{%- if tools %}{{- "\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- "<|end|>" }}
{%- set has_first = messages[0].role in ("developer", "system") %}
{%- set turns = messages[1:] if has_first else messages %}
{%- if has_first or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if has_first %}{{- "# Instructions\n\n" + messages[0].content + "\n\n" }}{%- endif %}
    {%- if tools %}
        {{- "# Tools\n\n## functions\n\nnamespace functions {\n\n" }}
        {%- for tool in tools %}
            {{- "// " + tool.function.description + "\ntype " + tool.function.name + " = (_: {\n" }}
            {%- for name, schema in (tool.function.parameters.properties or {}).items() %}
                {%- if schema.description %}{{- "// " + schema.description + "\n" }}{%- endif %}
                {{- name + ("" if name in (tool.function.parameters.required or []) else "?") + ": " }}
                {{- ('"' + schema.enum | join('" | "') + '"' if schema.enum else schema.type | default("any")) + ",\n" }}
            {%- endfor %}
            {{- "}) => any;\n\n" }}
        {%- endfor %}
        {{- "} // namespace functions" }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set later = namespace(is_answered=false) %}
        {%- for other in turns[loop.index:] if other.role == "assistant" and "tool_calls" not in other %}
            {%- set later.is_answered = true %}
        {%- endfor %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
        {%- elif (message.content or message.thinking) and not later.is_answered %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
        {%- set last.name = none %}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("Message has tool role, but no call stands before it!") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

_CALL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
_GLM = (
    ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"],
    [*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    None,
    "<|endoftext|>",
)
_KIMI = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]
_KIMI += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
TEMPLATES: dict[str, tuple[str, list[str], list[str], str | None, str]] = {
    "qwen3_5": (QWEN_3_5, ["<|im_start|>", "<|im_end|>"], _CALL, None, "<|im_end|>"),
    "qwen3_6": (QWEN_3_6, ["<|im_start|>", "<|im_end|>"], _CALL, None, "<|im_end|>"),
    "glm4_6": (GLM_4_6, *_GLM),
    "glm4_7": (GLM_4_7, *_GLM),
    "minimax_m2": (
        MINIMAX_M2,
        ["]~!b[", "]~b]", "[e~["],
        ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
        None,
        "[e~[",
    ),
    "kimi_k2": (KIMI_K2, [*_KIMI, "<|tool_call_argument_begin|>"], [], None, "<|im_end|>"),
    "gpt_oss": (GPT_OSS, [*harmony.MARKERS, "<|return|>"], [], None, "<|return|>"),
    "nemotron_nano_2": (
        NEMOTRON_NANO_2,
        ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"],
        ["<TOOLCALL>", "</TOOLCALL>"],
        None,
        "<SPECIAL_12>",
    ),
}
