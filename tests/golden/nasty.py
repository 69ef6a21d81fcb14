"""Inputs of the tokenizer and chat-template goldens. make_tokenizer_goldens.py turns them into the JSON beside it."""

from __future__ import annotations

from typing import Any

TEXTS = [
    "", " ", "  ", "   \t  ", "\n", "\n\n\n", " \n \n", "\r\n\r\n", "a", " a", "a ", "  a  b   c    ",
    "Hello, world!", "hello world" * 20, "HELLO It's we'RE i'll DON'T can't o'clock '' ''s",
    "1", "12", "123", "1234567890", "3.14159e-10", "v2.0.1-rc3", "0x7fffffff", "1,234,567.89", " 1 22 333", "1a2b3c",
    "½ ² ³ Ⅷ ① ٣٤٥ 一二三 ௧௨௩ 𝟘𝟙", "x²+y³=z⁴", "½½½", "5٣7",
    "你好，世界！", "日本語のテキストです。漢字とカナ", "한국어 텍스트", "ไทยไม่มีช่องว่าง", "العربية من اليمين", "עברית",
    "हिन्दी में पाठ", "Ελληνικά", "Русский текст", "ď Ð ß ñ é ü Å", "e\u0301 n\u0303 a\u0308\u0323 Z\u0351\u036b\u0343",
    "😀", "😀😃😄", "👨‍👩‍👧‍👦", "🏳️‍🌈 flag 🇩🇪🇯🇵", "👍🏽", "a😀b", " 😀 ", "🫠🪿", "\U0001f9ff\U0001fae8",
    "\u200b\u200d\ufeff", "\ufeffBOM", "\u00a0nbsp\u00a0", "\u2028\u2029", "\u3000全角　空白",
    "\x00\x01\x1f\x7f\x80\x9f",
    "\U0010ffff\ue000\ufffd\ufffe", "\u202eRTL\u202c",
    "<|im_start|>", "<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b",
    " <|im_end|> ", "<|im_end|><|im_end|>", "<|im_end", "<|im_END|>", "< |im_end| >", "<|endoftext|>text",
    "<repo_name>x<file_sep>y<jupyter_code>", "<issue_start>1<empty_output>", "<filename>a/b.py", "<|unknown|>",
    "def f(x):\n    return x ** 2\n\n\tif a[0]['k'] != \"v\\n\":\n        pass  # comment\n",
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 42); return 0; }\n", "SELECT * FROM t WHERE a >= 10;",
    "{\"a\": [1, 2.5, null], \"b\": {\"c\": \"d\"}}", "https://example.org/path?q=1&r=%20#frag", "user@example.com",
    "```python\nprint('hi')\n```", "| a | b |\n|---|---|\n| 1 | 2 |", "--------", "========", "!!!???...",
    "$100.00 €5 £3 ¥7",
    "camelCaseAndPascalCase snake_case kebab-case SCREAMING_SNAKE", "supercalifragilisticexpialidocious",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "    four\n        eight\n\ttab", "line\rold mac\rline", "\t\t\tx",
    "Line one.\nLine two.\n\nParagraph.  Two spaces.", "“quotes” ‘single’ — dash – en … ellipsis", "naïve café résumé",
    "ﬁ ligature ﬀ", "Å Å", "ｆｕｌｌｗｉｄｔｈ", "mixed 中文 and English 123 和 数字", "ᚠᛇᚻ ᛫ ᛒᛦᚦ", "𝓗𝓮𝓵𝓵𝓸", "a\u0000b",
]

# Texts with the added tokens of the SentencePiece vocabulary inside.
SPECIAL_TEXTS = [
    "text", "<s>text", "<s> text", "<s>", "<s><s>a b", "a<s>text", "a <s> b", "</s>b c", "a</s>  b", "<s>\ntext",
    "<think>hello</think> x", "x <think> y<think>", "<unk>x", "x<unk> <think>y", "<s>Hello, world!</s><s> Hi </s>",
]

LLAMA3_LIKE = (
    "{{- bos_token }}{%- if tools is not none %}{{- 'tools: ' }}{%- for t in tools %}{{- t | tojson(indent=4) }}\n"
    "{%- endfor %}{%- endif %}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
QWEN_LIKE = (
    "{%- set ns = namespace(last=-1) %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' %}\n        {%- set ns.last = loop.index0 %}\n    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'tool' %}\n        {%- continue %}\n    {%- endif %}\n"
    "    {%- if message.content is defined %}\n"
    "        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}\n"
    "    {%- else %}\n        {{- '<|im_start|>' ~ message.role }}\n    {%- endif %}\n"
    "    {%- if message.tool_calls %}\n"
    "        {%- for call in message.tool_calls %}\n"
    "            {{- '\\n<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}\n"
    "        {%- endfor %}\n    {%- endif %}\n"
    "    {{- '<|im_end|>' ~ (' last' if loop.index0 == ns.last else '') }}\n"
    "    {%- generation %}{{ loop.index ~ '/' ~ loop.length ~ loop.last }}{%- endgeneration %}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n")
PARTS = (
    "{% for message in messages %}{{ message.role }}:\n  {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message['content'] %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{{ dict(a=1, b='ü<&>') | tojson }} {{ messages | length }} {{ (messages | last).role }}")
STRICT = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}")
TEMPLATES = {"llama3-like": LLAMA3_LIKE, "qwen-like": QWEN_LIKE, "parts": PARTS, "strict": STRICT}

_TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Wetter in <Köln> & \"Umgebung\"", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\n there "}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                  {"role": "user", "content": "  <|im_end|> {{ 7*7 }} {% raw %} 😀 é  "}]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]},
    {"messages": [{"role": "user", "content": "weather?"}], "tools": [_TOOL]},
]
CONVERSATIONS_OF = {    # further ones that only some templates take
    "qwen-like": [
        {"messages": [{"role": "user", "content": "weather?"},
                      {"role": "assistant", "content": None, "tool_calls": [
                          {"id": "1", "type": "function",
                           "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}]},
                      {"role": "tool", "content": "12 °C"}, {"role": "assistant", "content": "Cold."}]}],
    "parts": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}],
}
