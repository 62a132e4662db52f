"""Grammars that callers write, in Lark as `llguidance` reads it.

GBNF (llama.cpp's): the parser is the library's; its search for terminals takes a pass over all rules for each rule,
this one takes a pass. Structural tags: free text in which tags begin that hold something structured, in both forms that
vLLM takes: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and xgrammar's newer
`{"type": "structural_tag", "format": {...}}`. What cannot be said in Lark is refused in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance.gbnf_to_lark import ASTNode, GbnfToLarkError, GrammarParser, RuleNode, RuleRefNode

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.grammars import refused

MAX_GROUPS = 1000  # in all rules: they count as much, where a chain leads through them
_GROUP = re.compile(r"[(\[]")
# A string or a regex that does not end is one all the same, so that each character is looked at once.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/?|(?P<json>%json)\b|(?P<name><[^<>\s]+>)')
_BLANKS = re.compile(r"\s*")


def with_schemas(text: str, param: str, rewrite: Callable[[Any], str], max_rules: int | None) -> str:
    """The grammar with the JSON schema behind each `%json` written anew.

    `max_rules`: of a text that a caller wrote; None: the server did, so that its literals are what they seem to be.
    Raises InvalidRequestError.
    """
    parts: list[str] = []
    outside: list[str] = []
    at = 0
    found = _TOKEN.search(text)
    while found is not None:
        if found["json"] is None:
            found = _TOKEN.search(text, found.end())
            continue
        start = _BLANKS.match(text, found.end())
        assert start is not None, "it matches nothing, too"
        try:
            schema, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError):
            line = text.count("\n", 0, found.start()) + 1
            raise refused(param, f"line {line}: no JSON schema stands behind %json") from None
        outside.append(text[at : found.start()])
        parts += [text[at : found.start()], "%json ", rewrite(schema)]
        at = end
        found = _TOKEN.search(text, end)
    outside.append(text[at:])
    if max_rules is not None:
        _check_outside("".join(outside), param, max_rules)
    return "".join(parts) + text[at:]


def with_numbers(text: str, special_ids: Mapping[str, int]) -> str:
    """The grammar with the ids of the special tokens that it names as `<name>`; one that is unknown stays."""

    def numbered(found: re.Match[str]) -> str:
        number = special_ids.get(found["name"] or "")
        return found[0] if number is None else f"<[{number}]>"

    return _TOKEN.sub(numbered, text)


def _check_outside(text: str, param: str, max_rules: int) -> None:
    """Check the grammar without its schemas; each rule has a colon. Raises InvalidRequestError."""
    if "%json" in text:
        raise refused(param, "`%json` stands in a text, a regex or a comment")
    if text.count(":") > max_rules:
        raise refused(param, f"more than {max_rules} rules")
    if len(_GROUP.findall(_TOKEN.sub("", text))) > MAX_GROUPS:
        raise refused(param, f"more than {MAX_GROUPS} groups in brackets")


ROOT = "root"
_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")  # empty lines are looked at once each
_HUMP = re.compile(r"([a-z])([A-Z])")


def is_lark(text: str) -> bool:
    """True if the text is Lark already, as vLLM and `llguidance` tell."""
    return _LARK.search(text) is not None


def to_lark(text: str) -> str:
    """The grammar in Lark. Raises ValueError with the place."""
    try:
        rules = GrammarParser().parse(text)
        _resolve(rules)
        return "%llguidance {}\n\n" + "\n".join(str(rule) for rule in rules.values()) + "\n"
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("the rules are nested too deeply") from None
    except IndexError:
        raise ValueError("the text ends within an escape") from None


def _resolve(rules: Mapping[str, RuleNode]) -> None:
    """Bind references to rules, find which are terminals, and name each as Lark does. Raises ValueError."""
    if ROOT not in rules:
        raise ValueError("there is no rule `root` (GBNF) and no rule `start` (Lark)")
    users: dict[str, list[str]] = {name: [] for name in rules}
    num_open: dict[str, int] = {}  # references of a rule to others that are not known to be terminals
    for name, rule in rules.items():
        rule.alternatives = rule.alternatives.simplify()
        refs = [node for node in _below(rule) if isinstance(node, RuleRefNode)]
        num_open[name] = len(refs)
        for ref in refs:
            if ref.name not in rules:
                raise ValueError(f"there is no rule `{ref.name[:100]}`")
            ref.target = rules[ref.name]
            users[ref.name].append(name)
    ready = [name for name, count in num_open.items() if count == 0]
    while ready:
        name = ready.pop()
        if name == ROOT:
            continue
        rules[name].rule_is_terminal = True
        for user in users[name]:
            num_open[user] -= 1
            if num_open[user] == 0:
                ready.append(user)
    _rename(rules)


def _rename(rules: Mapping[str, RuleNode]) -> None:
    taken = {"start"}
    rules[ROOT].name = "start"
    for name, rule in rules.items():
        if name == ROOT:
            continue
        snake = _HUMP.sub(r"\1_\2", name.replace("-", "_"))
        plain = snake.upper() if rule.rule_is_terminal else snake.lower()
        if not plain[0].isalpha():
            plain = ("R_" if rule.rule_is_terminal else "r_") + plain
        rule.name = plain if plain not in taken else f"{plain}_{len(taken)}"
        taken.add(rule.name)


def _below(node: ASTNode) -> Iterator[ASTNode]:
    left = list(node.children())
    while left:
        found = left.pop()
        yield found
        left.extend(found.children())


MAX_TAGS = 256
MAX_DEPTH = 20  # of formats inside one another
_TEXT = r"/(.|\n)*/"
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")
_INSIDE_SLASHES = re.compile(r"(?:\\.|[^\\/])+", re.DOTALL)  # what a regex of Lark may hold


class TagWriter:
    """Writes one structural tag. `schema`: writes a JSON schema. `special_ids`: of special tokens, by their text.
    `max_regex`: characters of all regexes together, of which the time to compile them goes with the square.
    """

    def __init__(
        self, param: str, schema: Callable[[Any], str], special_ids: Mapping[str, int], max_regex: int
    ) -> None:
        self._param = param
        self._schema = schema
        self._max_regex = max_regex
        self._squared_regexes = 0
        self._special_ids = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)()")
        self._rules: list[str] = []
        self._num_tags = 0

    def write(self, source: Any) -> str:
        """The grammar. Raises InvalidRequestError."""
        if not isinstance(source, dict):
            raise self._wrong("expected an object", "")
        if "format" in source:
            body = self._format(source["format"], "format", 0)
        else:
            body = self._triggered(self._older(source), "", 0)
        return "\n".join(["%llguidance {}", f"start: {body}", *self._rules])

    def _older(self, source: Mapping[str, Any]) -> dict[str, Any]:
        structures = source.get("structures")
        if not isinstance(structures, list) or not all(isinstance(item, dict) for item in structures):
            raise self._wrong("expected a list of objects with begin, schema and end", "structures")
        tags = [
            {
                "begin": item.get("begin"),
                "content": {"type": "json_schema", "json_schema": item.get("schema")},
                "end": item.get("end"),
            }
            for item in structures
        ]
        return {"triggers": source.get("triggers"), "tags": tags}

    def _format(self, value: Any, place: str, depth: int) -> str:
        """One format, as a part of a rule."""
        kind = value.get("type") if isinstance(value, dict) else None
        writers: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": lambda item, where, _: self._literal(item.get("value"), f"{where}.value"),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        if not isinstance(kind, str) or kind not in writers:
            raise self._wrong(f"not supported: a format of the type {str(kind)[:40]!r}", place)
        if depth > MAX_DEPTH:
            raise self._wrong(f"nested more than {MAX_DEPTH} deep", place)
        return writers[kind](value, place, depth)

    def _json_schema(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        if value.get("style", "json") != "json":
            raise self._wrong("not supported: a style other than json", place)
        if not isinstance(value.get("json_schema"), dict | bool):
            raise self._wrong("expected a JSON schema", place)
        return f"%json {self._schema(value['json_schema'])}"

    def _regex(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        pattern = value.get("pattern")
        if not isinstance(pattern, str) or not pattern or value.get("excludes"):
            raise self._wrong("expected a pattern, without excludes", place)
        self._squared_regexes += len(pattern) ** 2
        if self._squared_regexes > self._max_regex**2:
            raise self._wrong(f"regexes of more than {self._max_regex} characters (--max-regex-size)", place)
        inside = _SLASH.sub(r"\1\\/", pattern).replace("\n", "\\n")
        if not _INSIDE_SLASHES.fullmatch(inside):  # it would end elsewhere, and the grammar go on with what follows
            raise self._wrong("the pattern ends within an escape", place)
        return f"/{inside}/"

    def _any_text(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        if value.get("excludes"):
            raise self._wrong("not supported: text that excludes other text", place)
        return _TEXT

    def _sequence(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        elements = self._list(value, "elements", place)
        if any(isinstance(item, dict) and item.get("type") == "any_text" for item in elements[:-1]):
            raise self._wrong("not supported: any_text before something else, unless a tag encloses it", place)
        return " ".join(self._format(item, f"{place}.elements[{i}]", depth + 1) for i, item in enumerate(elements))

    def _or(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        elements = self._list(value, "elements", place)
        parts = [self._format(item, f"{place}.elements[{i}]", depth + 1) for i, item in enumerate(elements)]
        return f"({' | '.join(parts)})"

    def _tag(self, value: Any, place: str, depth: int, trigger: str = "") -> str:
        """A tag, from behind its trigger on."""
        self._num_tags += 1
        if not isinstance(value, dict) or self._num_tags > MAX_TAGS:
            raise self._wrong(f"expected a tag, of which there may be {MAX_TAGS}", place)
        begin, ends, content = value.get("begin"), value.get("end"), value.get("content")
        ends = ends if isinstance(ends, list) and ends else [ends]
        if not isinstance(begin, str):
            raise self._wrong("expected a text", f"{place}.begin")
        end = " | ".join(self._literal(item, f"{place}.end") for item in ends)
        head = self._literal(begin[len(trigger) :], f"{place}.begin")
        if (
            isinstance(content, dict)
            and content.get("type") == "any_text"
            and any(end_text and not self._specials.match(end_text) for end_text in ends)
        ):
            self._any_text(content, place, depth)
            return f"{head} {self._rule(f'{_TEXT} ({end})', '[lazy]')}"
        return f"{head} {self._format(content, f'{place}.content', depth + 1)} ({end})"

    def _triggered(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        triggers, tags = self._list(value, "triggers", place), self._list(value, "tags", place)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers) or value.get("excludes"):
            raise self._wrong("expected texts as triggers, and no excludes", place)
        names = []
        for number, tag in enumerate(tags):
            begin = tag.get("begin") if isinstance(tag, dict) else None
            where = f"{place}.tags[{number}]".lstrip(".")
            trigger = next((item for item in triggers if isinstance(begin, str) and begin.startswith(item)), None)
            if trigger is None:
                raise self._wrong("its begin starts with none of the triggers", where)
            names.append(self._rule(f"{self._until(trigger)} {self._tag(tag, where, depth, trigger)}"))
        any_tag = f"({' | '.join(names)})"
        if value.get("stop_after_first"):
            return any_tag if value.get("at_least_one") else f"({any_tag} | {_TEXT})"
        return f"{any_tag}{'+' if value.get('at_least_one') else '*'} {_TEXT}"

    def _until(self, trigger: str) -> str:
        """Free text up to a trigger, and the trigger."""
        if self._specials.match(trigger):
            return f"{_TEXT} {self._literal(trigger, 'triggers')}"
        return self._rule(f"{_TEXT} {self._literal(trigger, 'triggers')}", "[lazy]")

    def _separated(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        tags = self._list(value, "tags", place)
        names = [self._rule(self._tag(tag, f"{place}.tags[{i}]", depth)) for i, tag in enumerate(tags)]
        any_tag = f"({' | '.join(names)})"
        separator = self._literal(value.get("separator"), f"{place}.separator")
        many = any_tag if value.get("stop_after_first") else f"{any_tag} ({separator} {any_tag})*"
        return many if value.get("at_least_one") else f"({many})?"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _literal(self, text: Any, place: str) -> str:
        """A text, in which the spellings of special tokens are these tokens."""
        if not isinstance(text, str):
            raise self._wrong("expected a text", place)
        parts = [
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part, ensure_ascii=False)
            for part in self._specials.split(text)
            if part
        ]
        return " ".join(parts) or '""'

    def _list(self, value: Mapping[str, Any], name: str, place: str) -> list[Any]:
        found = value.get(name)
        if not isinstance(found, list) or not 0 < len(found) <= MAX_TAGS:
            raise self._wrong(f"expected a list of 1 to {MAX_TAGS} elements", f"{place}.{name}".lstrip("."))
        return found

    def _wrong(self, reason: str, place: str) -> InvalidRequestError:
        return refused(self._param, reason, place)
