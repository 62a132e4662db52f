"""llama.cpp's GBNF -> Lark as `llguidance` reads it.

The parser is the library's; its search for terminals takes a pass over all rules for each rule, this one takes a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import ASTNode, GbnfToLarkError, GrammarParser, RuleNode, RuleRefNode

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
