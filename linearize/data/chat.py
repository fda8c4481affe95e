"""A chat template: a conversation as the tokens that an instruct model was trained on, and what ends an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from ..errors import MALFORMED, IncompatibleError, LinearizeError

Message = dict[str, Any]
MARK = "0 message 0"  # no template changes it, as some do with spaces around


def template_of(tokenizer: Any) -> str | None:
    """The tokenizer's own chat template, None where it has none."""
    template = tokenizer.chat_template
    found: str | None = template.get("default") if isinstance(template, dict) else template
    return found or None


def marks_answers(tokenizer: Any) -> bool:
    """Whether its template says which tokens the assistant writes."""
    return tokenizer.is_fast and bool(re.search(r"\{%-?\s*generation\s*-?%\}", template_of(tokenizer) or ""))


def rendered(tokenizer: Any, messages: Sequence[Message], *, answer: bool = False) -> list[int]:
    """Token ids of messages; with `answer` the assistant's turn is opened behind them."""
    found: Any = tokenizer.apply_chat_template(list(messages), add_generation_prompt=answer, return_dict=False)
    return list(found)


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Within: what a template raises becomes an error about a conversation."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, *MALFORMED) as error:
        raise LinearizeError(f"{where}: the chat template refuses this conversation: {error}") from error


def prompt_ids(tokenizer: Any, messages: Sequence[Message], where: str) -> list[int]:
    """What a model reads before it answers. Raises LinearizeError: 2 for messages that the template refuses, 3 where
    the tokenizer has no template."""
    if template_of(tokenizer) is None:
        raise IncompatibleError(
            f"{where}: the tokenizer has no chat template. Take an instruct model, or put the source's "
            "chat_template.jinja into the model's folder"
        )
    with refusing(where):
        return rendered(tokenizer, messages, answer=True)


def asked_of(messages: Sequence[Message]) -> list[Message]:
    """What comes before the assistant's first message."""
    return [*takewhile(lambda message: message["role"] != "assistant", messages)]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """What ends an answer: what generation_config.json and the tokenizer say, and the first special token that the
    template puts behind an assistant's message."""
    known = model.generation_config.eos_token_id
    found = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
    if template_of(tokenizer) is not None:
        with refusing("end of a turn"):
            question = [{"role": "user", "content": "a"}]
            before = rendered(tokenizer, question, answer=True)
            whole = rendered(tokenizer, [*question, {"role": "assistant", "content": "b"}])
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        if whole[: len(before)] == before:
            found |= {next((token for token in whole[len(before) :] if token in special), tokenizer.eos_token_id)}
    return sorted(found - {None})


def opened_turn(tokenizer: Any, where: str) -> list[int]:
    """What the template puts in front of a user's message, so that a model goes on with one."""
    prompt_ids(tokenizer, [{"role": "user", "content": MARK}], where)  # raises where there is no template
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, found, _ = text.partition(MARK)
    if not found or not before:
        raise LinearizeError(f"{where}: the chat template puts nothing in front of a user's message")
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])
