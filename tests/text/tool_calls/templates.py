"""Chat templates that write tool calls and reasoning, one of each family, cut down to those parts.

The texts around calls are the published ones, as formats are found by them; the rest of each template is left out.
"""

# ruff: noqa: E501, RUF001 - templates are kept as they are published

from __future__ import annotations

from tests.text import call_templates

HERMES = """{%- if tools %}{{- "For each function call return a json object with function name and arguments within <tool_call></tool_call> XML tags as follows:
<tool_call>
{"name": <function-name>, "arguments": <args-dict>}
</tool_call><|im_end|>" }}{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role }}{%- for tool_call in message.tool_calls %}{{- '\\n<tool_call>\\n' }}{{- '{ ' }}{{- '"arguments": ' }}{{- tool_call.arguments|tojson }}{{- ', "name": "' + tool_call.name + '"}' }}{{- '\\n</tool_call> ' }}{%- endfor %}{%- endfor %}"""
QWEN_2_5 = """{%- if tools %}{{- "\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}{%- endif %}{%- for message in messages %}{%- for tool_call in message.tool_calls %}{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{%- endfor %}"""
QWEN_3_CODER = """{{- '\\n\\nIf you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>' }}"""
GLM_4_5_TOOLS = """{{- '<tool_call>' + tc.name -}}{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"""
LLAMA_3_1 = """{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}{%- for message in messages %}{%- if 'tool_calls' in message %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}{%- endif %}{%- endfor %}"""
LLAMA_3_2_PYTHONIC = """{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- 'Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)] ' }}{%- for message in messages %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n[' -}}{{- tool_call.name + '(' -}}{{- ')' -}}{{- ']<|eot_id|>' -}}{%- endfor %}"""
LLAMA_4 = """{{- '<|header_start|>user<|header_end|>\\n\\n' -}}{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}{{- '<|python_start|>' }}{{- '{"name": "' + tool_call.function.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.function.arguments | tojson }}{{- "}" }}{{- '<|python_end|><|eom|>' }}"""
LLAMA_4_PYTHONIC = """{%- set system_message = "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]\\n" %}{{- "<|header_start|>system<|header_end|>\\n\\n" }}{{- "[" }}{{- tool_call.name + '(' -}}{{- param + '=\\"' -}}{{- ')' -}}{{- "]<|eot|>" }}"""
GEMMA_3_PYTHONIC = """{{ '<start_of_turn>' + role + '\\n' -}}{{ "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\\n" }}"""
MISTRAL_3 = """{{- "[AVAILABLE_TOOLS] [" }}{{- "[/AVAILABLE_TOOLS]" }}{{- '[INST]' + message['content'] + '[/INST]' }}{{- "[TOOL_CALLS] [" }}{%- for tool_call in tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}{{- ', "id": "' + tool_call.id[-9:] + '"}' }}{%- endfor %}{{- "]" + eos_token }}"""
MAGISTRAL = """{{- '[SYSTEM_PROMPT]First draft your thinking process (inner monologue) until you arrive at a response.[THINK]Your thoughts or/and draft[/THINK]Here, provide a self-contained response.[/SYSTEM_PROMPT]' }}{%- for tool_call in message['tool_calls'] %}{{- '[TOOL_CALLS]' + tool_call['function']['name'] + '[ARGS]' + arguments }}{%- endfor %}"""
DEEPSEEK_V3 = """{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}"""
DEEPSEEK_R1 = (
    DEEPSEEK_V3
    + """{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""
)
DEEPSEEK_V3_1 = """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}"""
FUNCTION_GEMMA = """{{- '<start_of_turn>model\\n' }}{%- for tool_call in message['tool_calls'] %}{{- '<start_function_call>call:' + function['name'] + '{' -}}{{- key -}}:{{- '<escape>' + argument + '<escape>' -}}{{- '}<end_function_call>' -}}{%- endfor %}"""
GEMMA_4 = """{{- '<|turn>model\\n' }}{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}{%- for tool_call in message['tool_calls'] %}{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '<|"|>' + argument + '<|"|>' -}}{{- '}<tool_call|>' -}}{%- endfor %}"""
GRANITE_3_2 = """{%- if thinking %}{%- set system_message = system_message + " You should write down your thoughts and reasoning process after 'Here is my thought process:' and write the response after 'Here is my response:' for each user query." %}{%- endif %}"""
GRANITE_3_3 = """{%- elif available_tools %}{%- set system_message = system_message + " When a tool is required to answer the user's query, respond only with <|tool_call|> followed by a JSON list of tools used." %}{%- elif thinking %}{%- set system_message = system_message + " Write your thoughts between <think></think> and write your response between <response></response> for each user query." %}{%- endif %}"""
GRANITE_4 = """{%- set tools_system_message_suffix = '\\n</tools>\\n\\nFor each tool call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>.' %}{{- '<tool_call>\\n{"name": "' }}{{- tc.name }}{{- '", "arguments": ' }}{{- tc.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
HUNYUAN_3 = """{{- '<tool_calls>\\n<tool_call>' + tool['name'] + '<tool_sep>\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n</tool_call>\\n</tool_calls>' }}"""
SEED_OSS = """{%- set toolcall_begin_token = '<seed:tool_call>' -%}{{ toolcall_begin_token + "\\n<function=" + tool_call.name + ">\\n" }}{{ "<parameter=" + arg_name + ">" }}{{ arg_value+"</parameter>\\n" }}{{ "</function>\\n</seed:tool_call>" }}"""

TOOL_CALLS = {
    "HERMES": (HERMES, "hermes"),
    "QWEN_2_5": (QWEN_2_5, "hermes"),
    "QWEN_3_CODER": (QWEN_3_CODER, "qwen3_coder"),
    "QWEN_3_6": (call_templates.QWEN_3_6, "qwen3_coder"),
    "GLM_4_5": (GLM_4_5_TOOLS, "glm45"),
    "GLM_4_6": (call_templates.GLM_4_6, "glm45"),
    "MINIMAX_M2": (call_templates.MINIMAX_M2, "minimax_m2"),
    "KIMI_K2": (call_templates.KIMI_K2, "kimi_k2"),
    "GPT_OSS": (call_templates.GPT_OSS, "openai"),
    "NEMOTRON_NANO_2": (call_templates.NEMOTRON_NANO_2, "nemotron_json"),
    "LLAMA_3_1": (LLAMA_3_1, "llama3_json"),
    "LLAMA_3_2_PYTHONIC": (LLAMA_3_2_PYTHONIC, "pythonic"),
    "LLAMA_4": (LLAMA_4, "llama3_json"),
    "LLAMA_4_PYTHONIC": (LLAMA_4_PYTHONIC, "pythonic"),
    "GEMMA_3_PYTHONIC": (GEMMA_3_PYTHONIC, "pythonic"),
    "MISTRAL_3": (MISTRAL_3, "mistral"),
    "MAGISTRAL": (MAGISTRAL, "mistral"),
    "DEEPSEEK_V3": (DEEPSEEK_V3, "deepseek_v3"),
    "DEEPSEEK_R1": (DEEPSEEK_R1, "deepseek_v3"),
    "DEEPSEEK_V3_1": (DEEPSEEK_V3_1, "deepseek_v31"),
    "FUNCTION_GEMMA": (FUNCTION_GEMMA, "functiongemma"),
    "GEMMA_4": (GEMMA_4, "gemma4"),
    "GRANITE_3_2": (GRANITE_3_2, None),
    "GRANITE_3_3": (GRANITE_3_3, "granite"),
    "GRANITE_4": (GRANITE_4, "hermes"),
    "HUNYUAN_3": (HUNYUAN_3, None),
    "SEED_OSS": (SEED_OSS, None),
}
_THINK = ("DEEPSEEK_R1", "DEEPSEEK_V3_1", "QWEN_3_6", "GLM_4_6", "MINIMAX_M2", "NEMOTRON_NANO_2", "GRANITE_3_3")
REASONING = {
    **dict.fromkeys(_THINK, "deepseek_r1"),
    "GEMMA_4": "gemma4",
    "GPT_OSS": "openai_gptoss",
    "MAGISTRAL": "mistral",
    "GRANITE_3_2": "granite",
}
