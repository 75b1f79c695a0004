"""A chat template: messages to text, by transformers' own Jinja environment, as the model's servers do it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardmill.errors import ShardmillError

# A template that prints today's date would make another prompt each day. Every prompt is dated as Llama 3.1's own
# template dates it where it has no clock.
_TODAY = datetime.date(2024, 7, 26)

# The names under which templates know whether to think.
_THINKING_SWITCHES = ("enable_thinking", "thinking")

# What Python raises out of an expression over a message that is not as the template expects it.
_RAISED_BY_EXPRESSIONS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateRefusal(Exception):
    """The template raised for these messages; the message is the template's."""


class ChatTemplate:
    """One template with what it is always given: special tokens, the thinking switch, a fixed date.

    Raises ShardmillError when the source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any], thinking: bool) -> None:
        import jinja2
        from jinja2 import meta, nodes
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            compiled = _compile_jinja_template(source)
            tree = compiled.environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ShardmillError(
                f"The chat template is not valid Jinja, line {error.lineno}: {error.message}."
            ) from None
        variables = meta.find_undeclared_variables(tree)
        self._compiled = compiled
        self._given = dict(special_tokens)
        self._given.update({name: thinking for name in _THINKING_SWITCHES if name in variables})
        if "strftime_now" in source:
            self._given["strftime_now"] = _TODAY.strftime
        self.literals = _strings(tree)
        """The strings in the template's expressions: all that it may look for in a message."""
        comparing = (nodes.Call, nodes.Compare, nodes.Filter, nodes.Test, nodes.Assign)
        self.looked_for = frozenset[str]().union(*(_strings(node) for node in tree.find_all(comparing)))
        """Those of them that are not merely written."""
        self.declares_tools = "tools" in variables
        self.knows_tool_turns = re.search(r"\btool", source) is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, generation_prompt: bool = True
    ) -> str:
        """The text of `messages` and the beginning of the answer to them. Raises TemplateRefusal."""
        import jinja2

        try:
            text: str = self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=generation_prompt, **self._given
            )
        except (jinja2.TemplateError, *_RAISED_BY_EXPRESSIONS) as error:
            raise TemplateRefusal(f"{error}" or type(error).__name__) from error
        return text


def _strings(tree: Any) -> frozenset[str]:
    from jinja2 import nodes

    return frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str) and node.value)
