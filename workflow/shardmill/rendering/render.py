"""Messages to the token ids of a prompt: rendered once, here, and never again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shardmill.errors import ShardmillError
from shardmill.rendering.guard import Guard, Veil
from shardmill.rendering.template import ChatTemplate, TemplateRefusal

# {"role": …, "content": …} with, for tools, "tool_calls" and "name".
ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. ids: the model's token ids, generation prompt included. merged_users: the template takes no two user
    turns in a row, so such were joined by a blank line."""

    ids: list[int]
    merged_users: bool


class RenderError(Exception):
    """These messages make no prompt. reason: a reading.RejectReason's value; detail: the template's message."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Renderer:
    """Renders with the tokenizer in `folder` and its chat template, or the one in the file `chat_template`.

    Raises ShardmillError when there is no usable tokenizer or template.
    """

    stop_ids: frozenset[int]
    """The ids that end an answer: the generation config's and the tokenizer's EOS."""
    special_ids: frozenset[int]
    """The ids that text inside a message never becomes."""
    vocab_size: int
    """The model's vocabulary: an id at or over it is none."""
    think_close_ids: list[int]
    """The id of </think>; nothing where the tokenizer has no token of its own for it."""

    def __init__(self, folder: Path, chat_template: Path | None, thinking: bool) -> None:
        tokenizer = _load(folder)
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config, generation = _config(folder, "config.json"), _config(folder, "generation_config.json")
        self.stop_ids = frozenset([*_ids(generation.get("eos_token_id")), *_ids(tokenizer.eos_token_id)])
        self.vocab_size = _vocab_size(config) or 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.think_close_ids = _ids(self._tokenizer.token_to_id("</think>"))
        given = tokenizer.special_tokens_map
        self._plain, self._with_tools = (
            ChatTemplate(source, given, thinking) for source in _templates(tokenizer, folder, chat_template)
        )
        markers = _turn_markers(self._plain)
        special = {
            token.content: index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
            or index in self.stop_ids
            or index in tokenizer.all_special_ids
            or (token.content in markers and _is_marker(token.content, self._plain))
        }
        self.special_ids = frozenset(special.values())
        self._guard = Guard(self._tokenizer, special, self._plain.literals | self._with_tools.literals)

    def render(self, messages: Sequence[ChatMessage], tools: str | None = None) -> Rendered:
        """The ids that ask for the answer to `messages`.

        tools: the JSON of a list of tool declarations. Raises RenderError, with the reason template_error,
        system_not_supported or tools_not_supported.
        """
        declared = _declared(tools)
        template = self._with_tools if declared else self._plain
        _refuse_tools(template, messages, declared)
        chat = [_with_arguments(message) for message in messages]
        try:
            return Rendered(self._ids(template, chat, declared), merged_users=False)
        except TemplateRefusal as refusal:
            merged = _merged(chat)
            if len(merged) < len(chat):
                try:
                    return Rendered(self._ids(template, merged, declared), merged_users=True)
                except TemplateRefusal:
                    pass
            raise RenderError(_reason(template, merged, declared), str(refusal)) from None

    def _ids(self, template: ChatTemplate, chat: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
        text = template.render(chat, tools)
        guard = self._guard
        if not guard.always and not guard.is_risky(chat) and not guard.is_risky(tools):
            return self._encode(text)
        veil = Veil(guard, text + orjson.dumps([chat, tools]).decode())
        veiled = template.render(veil.over(chat), veil.over(tools))
        is_clean = _texts(text, guard.spans(text)) == _texts(veiled, guard.spans(veiled))
        if is_clean and not guard.always:
            return self._encode(text)
        if veil.is_torn(veiled):
            raise TemplateRefusal("special tokens in the messages can't be told from the template's own")
        ids = guard.encode(veiled, veil)
        if ids is None and is_clean:
            return self._encode(text)
        if ids is None:
            raise TemplateRefusal("the tokenizer does not take the template's special tokens as such")
        return ids

    def _encode(self, text: str) -> list[int]:
        # As the servers do: what the template wrote is all there is, so BOS is there once if the template writes it.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _texts(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in spans]


def _load(folder: Path) -> Any:
    """The tokenizer as the servers load it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ShardmillError(f"The tokenizer in {folder} can't be loaded: {_sentence(error)}.") from None
    if not tokenizer.is_fast:
        raise ShardmillError(f"The tokenizer in {folder} has no fast form (tokenizer.json), which rendering needs.")
    return tokenizer


def _templates(tokenizer: Any, folder: Path, chat_template: Path | None) -> tuple[str, str]:
    """The template for chats without tools and the one for chats with them; most tokenizers have one for both."""
    if chat_template is not None:
        try:
            source = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ShardmillError(f"The chat template {chat_template} can't be read: {_sentence(error)}.") from None
        return source, source
    if tokenizer.chat_template is None:
        raise ShardmillError(f"The tokenizer in {folder} has no chat template: name one in model.chat_template.")
    try:
        return tokenizer.get_chat_template(tools=None), tokenizer.get_chat_template(tools=[{}])
    except ValueError as error:
        raise ShardmillError(f"The tokenizer in {folder} has several chat templates: {_sentence(error)}.") from None


def _turn_markers(template: ChatTemplate) -> str:
    """A small conversation's text, with all that the template writes around turns.

    Some tokenizers have turn markers that are not special by name (DeepSeek's <｜User｜>); a message must not hold
    these either.
    """
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = ""
    for chat in (turns, [{"role": "system", "content": "d"}, *turns]):
        try:
            text += template.render(chat, None, generation_prompt=False)
        except TemplateRefusal:
            continue  # a template without system turns, or with rules of its own: it has said nothing
    return text


def _is_marker(token: str, template: ChatTemplate) -> bool:
    """Not a piece of plain text (Gemma has a token for a line's end), nor what the template itself reads (</think>)."""
    ends = token[0] + token[-1]
    plain = any(char.isalnum() or char.isspace() for char in ends)
    return len(token) > 2 and not plain and token not in template.looked_for


def _config(folder: Path, name: str) -> dict[str, Any]:
    try:
        loaded = orjson.loads((folder / name).read_bytes())
    except FileNotFoundError:
        return {}
    except orjson.JSONDecodeError as error:
        raise ShardmillError(f"{folder / name} is not valid JSON: {_sentence(error)}.") from None
    return loaded if isinstance(loaded, dict) else {}


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    """Models that also see keep the language model's part under text_config."""
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def _ids(value: Any) -> list[int]:
    """None, one id or a list of them, as the configs write it."""
    return [] if value is None else list(value) if isinstance(value, list) else [int(value)]


def _declared(tools: str | None) -> list[Any] | None:
    """The declarations as a list; None where there are none. One alone may stand without its list."""
    if tools is None:
        return None
    try:
        declared = orjson.loads(tools)
    except orjson.JSONDecodeError as error:
        raise RenderError("tools_not_supported", f"the tool declarations are not JSON: {_sentence(error)}") from None
    listed = [declared] if isinstance(declared, dict) else declared or []
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise RenderError("tools_not_supported", "the tool declarations are no list of objects")
    return listed or None


def _refuse_tools(template: ChatTemplate, messages: Sequence[ChatMessage], declared: list[Any] | None) -> None:
    if declared and not template.declares_tools:
        raise RenderError("tools_not_supported", "the chat template takes no tool declarations")
    if not template.knows_tool_turns and any(
        message.get("tool_calls") or message["role"] == "tool" for message in messages
    ):
        raise RenderError("tools_not_supported", "the chat template knows no tool turns")


def _with_arguments(message: ChatMessage) -> dict[str, Any]:
    """Tool calls with their arguments as a mapping where they are the JSON of one, as the servers hand them over."""
    chat = dict(message)
    if chat.get("tool_calls"):
        chat["tool_calls"] = [_parsed_call(call) for call in chat["tool_calls"]]
    return chat


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    parsed = dict(call)
    if isinstance(parsed.get("function"), Mapping):
        parsed["function"] = _parsed_call(parsed["function"])
    arguments = parsed.get("arguments")
    if isinstance(arguments, str):
        try:
            loaded = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return parsed  # not JSON: the template gets it as the text that it is
        if isinstance(loaded, dict):
            parsed["arguments"] = loaded
    return parsed


def _merged(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """User turns in a row as one, joined by a blank line."""
    merged: list[dict[str, Any]] = []
    for message in chat:
        if merged and message["role"] == "user" == merged[-1]["role"]:
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _reason(template: ChatTemplate, chat: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
    """Why these messages are refused: for their system turns when they would do without."""
    others = [message for message in chat if message["role"] not in ("system", "developer")]
    if others and len(others) < len(chat):
        try:
            template.render(others, tools)
        except TemplateRefusal:
            return "template_error"
        return "system_not_supported"
    return "template_error"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
