"""Chat: conversations through the tokenizer's chat template; the assistant's turns count in the loss."""

from __future__ import annotations

from typing import Any

from samestep.data.formats import Segment
from samestep.errors import DataError


def require_chat_template(tokenizer: Any) -> None:
    """Raise DataError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template.",
            where="data.format: messages",
            remedy="Use a tokenizer with a chat template, or another format or template.",
        )


def chat_segments(messages: Any, where: str, *, tokenizer: Any) -> list[Segment]:
    """The segments of a conversation, a list of {role, content}.

    What an assistant's turn adds to the text behind the template's generation prompt counts, with the end of the
    turn. That text is found by rendering the conversation up to and without the turn, so every such rendering has
    to be a prefix of the whole. Raises DataError for a template that rewrites earlier turns.
    """
    turns = _turns(messages, where)
    whole = _render(turns, where, tokenizer)
    segments, begin = [], 0
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            # A conversation that the assistant opens has nothing in front of its first turn to render.
            before = _render(turns[:index], where, tokenizer, generation_prompt=True) if index else ""
            after = _render(turns[: index + 1], where, tokenizer) if index + 1 < len(turns) else whole
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"message {index + 1}: the chat template changes what it wrote for the messages before, so the "
                    "assistant's turns cannot be told from the rest.",
                    where=where,
                    remedy="Use another chat template, one turn a row, or data.loss_on: all.",
                )
            segments += [Segment(whole[begin : len(before)], False), Segment(whole[len(before) : len(after)], True)]
            begin = len(after)
    return [*segments, Segment(whole[begin:], False)]


def chat_text(messages: Any, where: str, *, tokenizer: Any) -> list[Segment]:
    """The whole conversation as one segment that counts."""
    return [Segment(_render(_turns(messages, where), where, tokenizer), True)]


def _turns(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise DataError(
            f"messages are a list of {{role, content}}, not a {type(messages).__name__}.",
            where=where,
            remedy="Correct the row, or data.columns.",
        )
    return [_turn(message, f"{where}: message {number}") for number, message in enumerate(messages, start=1)]


def _turn(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"a message is {{role, content}}, not a {type(message).__name__}.", where=where)
    if not isinstance(message.get("role"), str):
        raise DataError(f"the message has no role; it has {', '.join(map(str, message)) or 'nothing'}.", where=where)
    # Columnar files give every message all keys of all messages; templates ask whether a key is there.
    given = {key: value for key, value in message.items() if value is not None}
    content = given.setdefault("content", None)
    if not isinstance(content, str) and not (content is None and len(given) > 2):
        raise DataError(
            "the message has no content that is text.", where=where, remedy='Write {"role": ..., "content": "..."}.'
        )
    return given


def _render(turns: list[dict[str, Any]], where: str, tokenizer: Any, *, generation_prompt: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
    except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}.", where=where) from None
