"""Chat templates: how a conversation is written as one text for a language model, and how such a text is read.

A template is Jinja, as with tokenizers of transformers, and has what an assistant says in `{% generation %}` blocks.
Messages are dictionaries with a role and a content, which is text or a list of parts.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import (
    MissingKeyError,
    SchemaError,
    UnsupportedError,
    UsageError,
    WrongKindError,
    did_you_mean,
    suggests_keywords,
    warn_caller,
)

if TYPE_CHECKING:
    import jinja2

Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
GENERATION = "{% generation %}"


@dataclass(frozen=True)
class ChatTemplate:
    """A named template.

    Attributes:
        template: the text in Jinja.
        parse: reads a text that was written with the template; returns messages, or a `History`. None if nothing can.
        keywords: words in the names of the tokenizers whose conversations are written so.
        special: the special tokens of this family of models, for texts that are made without a tokenizer.
        roles: the roles whose messages the template writes; None for any.
        takes_tools: whether the template may write descriptions of tools.
    """

    template: str
    parse: Callable[[str], Any] | None = None
    keywords: tuple[str, ...] = ()
    special: Mapping[str, str] = field(default_factory=dict)
    roles: frozenset[str] | None = None
    takes_tools: bool = True

    def check(self, messages: Sequence[Message], tools: Any) -> None:
        """Raise UsageError (a ValueError) for what the template would leave out without a word."""
        odd = next((one["role"] for one in messages if self.roles is not None and one["role"] not in self.roles), None)
        if odd is not None or (tools and not self.takes_tools):
            what = "descriptions of tools" if odd is None else f"messages of the role {odd!r}"
            raise UsageError(
                f"the chat template has no place for {what}",
                hint="give another: chat_template=… or chat_template_name=…",
            )


@suggests_keywords()
def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Give a chat template a name, for all conversations of this process.

    If the name exists, the template is replaced; its parser and its keywords stay unless new ones are given.

    Args:
        template_name: what `chat_template_name` selects.
        template: the text in Jinja, with what assistants say in `{% generation %}…{% endgeneration %}`.
        inverse_parser: reads a text that was written so, for `History.from_text`: returns a `History`, or a list of
            messages.
        model_family_keywords: the template is chosen for tokenizers with one of these words in `name_or_path`, whatever
            its case. They are looked for before the keywords of rbtool's own templates.

    Raises:
        UsageError: (a ValueError) the template has no `{% generation %}`.

    >>> import rbtool
    >>> said = "{% generation %}{{ m.content }}{% endgeneration %}"
    >>> add_chat_template("short", "{% for m in messages %}" + said + ";{% endfor %}")
    >>> rbtool.History.from_chats([{"role": "user", "content": "Hi"}]).apply_chat_template(chat_template_name="short")
    'Hi;'
    """
    if GENERATION not in template:
        raise UsageError(
            f"the template {template_name!r} has no {GENERATION}, which marks what an assistant says",
            hint="write {% generation %}{{ message.content }}{% endgeneration %}",
        )
    if inverse_parser is not None and not callable(inverse_parser):
        raise UsageError(f"inverse_parser is {inverse_parser!r}, expected a function from a text to a History")
    if isinstance(model_family_keywords, str):
        raise UsageError(f"model_family_keywords is {model_family_keywords!r}, expected a list of words")
    known = _ADDED.get(template_name) or _OWN.get(template_name) or ChatTemplate("")
    _ADDED[template_name] = replace(
        known,
        template=template,
        parse=inverse_parser or known.parse,
        keywords=known.keywords if model_family_keywords is None else tuple(model_family_keywords),
        roles=None,
        takes_tools=True,
    )


def named_template(name: str) -> ChatTemplate:
    """Return the template of a name; MissingKeyError (a KeyError) if there is none."""
    found = _ADDED.get(name) or _OWN.get(name)
    if found is None:
        names = [*_OWN, *_ADDED]
        raise MissingKeyError(
            f"there is no chat template {name!r}{did_you_mean(str(name), names)}",
            hint=f"there are {', '.join(dict.fromkeys(names))}; add_chat_template() adds others",
        )
    return found


def template_of(tokenizer: Any) -> ChatTemplate | None:
    """Return the template for the family of models that a tokenizer's name tells; None if it tells none."""
    called = str(getattr(tokenizer, "name_or_path", None) or "").lower()
    families = (*_ADDED.values(), *(one for name, one in _OWN.items() if name not in _ADDED))
    return next((one for one in families if any(word.lower() in called for word in one.keywords)), None)


def chosen_template(tokenizer: Any, template: str | None, name: str | None) -> ChatTemplate:
    """Return the template to write with: the one given, named, of the family, or the tokenizer's own, else ChatML's."""
    if template is not None:
        return ChatTemplate(template)
    if name is not None:
        return named_template(name)
    if (found := template_of(tokenizer)) is not None:
        return found
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, str) and own:
        if GENERATION in own:
            return ChatTemplate(own)
        warn_caller(
            f"the tokenizer's own chat template has no {GENERATION}, and {DEFAULT} is used instead, as in TorchRL: "
            "choose with chat_template=tokenizer.chat_template or chat_template_name"
        )
    return named_template(DEFAULT)


def parsed(text: str, tokenizer: Any, name: str | None) -> Any:
    """Return the messages of a text in the format of a named template, or of a tokenizer's family, else of ChatML.

    UnsupportedError (a NotImplementedError) if nothing reads the format, SchemaError (a RuntimeError) if the text has
    no messages.
    """
    if not isinstance(text, str):
        raise WrongKindError(f"expected a text, found a {type(text).__name__}")
    found = (
        _ADDED.get(name) or _OWN.get(name) if name is not None else template_of(tokenizer) or named_template(DEFAULT)
    )
    if found is None or found.parse is None:
        raise UnsupportedError(
            f"nothing reads texts of the chat template {name!r}", hint="give add_chat_template() an inverse_parser"
        )
    messages = found.parse(text)
    if isinstance(messages, list) and not messages:
        raise SchemaError(
            f"the text {text[:40]!r} does not contain a single item of a conversation in the expected format",
            hint="keep the special tokens when tokens are decoded, or name the format: chat_template_name",
        )
    return messages


# Writing -----------------------------------------------------------------------------------------------


@dataclass
class _Written:
    """A text that is being written, and the places in it that an assistant says."""

    parts: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def rendered(
    template: str, messages: list[Message], variables: Mapping[str, Any], *, prompt: bool, open_end: bool
) -> tuple[str, list[Span]]:
    """Write messages with a template; return the text, and the places of its `{% generation %}` blocks.

    Args:
        template: the text in Jinja.
        messages: the conversation.
        variables: what else the template may use, such as `eos_token`.
        prompt: whether the text ends with the header of an answer.
        open_end: whether the text ends where the last message does.

    Raises:
        UsageError: (a ValueError) the template is not Jinja, or fails.
    """
    import jinja2

    written = _Written()
    try:
        made = _compiled(template)
        known = {**variables, "messages": messages, "add_generation_prompt": prompt, _NOTES: written}
        for part in made.generate(known):
            written.parts.append(part)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template fails: {error}") from error
    text = "".join(written.parts)
    if not open_end:
        return text, written.spans
    last = text_of(messages[-1].get("content")).lstrip() if messages else ""
    place = text.rfind(last.rstrip()) if last else -1
    if place < 0:
        raise UsageError("the text does not contain the last message, which continue_final_message leaves open")
    end = place + len(last if text.startswith(last, place) else last.rstrip())
    return text[:end], [(start, min(stop, end)) for start, stop in written.spans]


_NOTES = "_written"


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` writes what it contains, and notes where."""

        tags = {"generation"}  # noqa: RUF012  # a list of the base class, too

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            said = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_noted", [jinja2.nodes.ContextReference()])
            return jinja2.nodes.CallBlock(call, [], [], said).set_lineno(line)

        def _noted(self, context: Any, caller: Callable[[], str]) -> str:
            said, written = caller(), context[_NOTES]
            start = sum(map(len, written.parts))
            written.spans.append((start, start + len(said)))
            return said

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _fail, "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }  # fmt: skip
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own escapes what HTML would not hold


def _fail(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def text_of(content: Any) -> str:
    """Return the text of a content: of a list of parts, those that are text."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        return str(content)
    parts = (part if isinstance(part, str) else part.get("text") for part in content)
    return "".join(part or "" for part in parts)


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens of a tokenizer by the names that templates use, such as `eos_token`."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {name: str(token) for name in names if (token := getattr(tokenizer, name, None)) is not None}


def assistant_spans(text: str, messages: list[Message], written: Callable[[list[Message]], str]) -> list[Span]:
    """Return where in a text the messages of assistants are, for templates that do not mark them.

    A message begins where the text changes with its content; so nothing else that reads alike is taken for it.

    Args:
        text: all messages, as the template writes them.
        messages: the conversation.
        written: writes other messages with the same template.

    Raises:
        UsageError: (a ValueError) the text does not contain what a message says.
    """
    spans: list[Span] = []
    for place, message in enumerate(messages):
        said = text_of(message.get("content"))
        if message.get("role") != "assistant" or not said.strip():
            continue
        one, other = (written([*messages[:place], {**message, "content": content}]) for content in "01")
        start = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
        if not text.startswith(one[:start]):
            start = spans[-1][1] if spans else 0
        found = text.find(said, start)
        if found < 0:
            said = said.strip()
            found = text.find(said, start)
        if found < 0:
            raise UsageError(
                f"the template changes what message {place} of the conversation says, so its tokens cannot be marked",
                hint=f"mark the message with {GENERATION} in the template",
            )
        spans.append((found, found + len(said)))
    return spans


# Reading -----------------------------------------------------------------------------------------------

_CHATML_BLOCK = re.compile(
    r"<\|im_start\|>([^\n<]*)\n(.*?)(?:(<\|im_end\|>|<\|endoftext\|>)|(?=<\|im_start\|>)|\Z)", re.DOTALL
)
_LLAMA_BLOCK = re.compile(
    r"<\|(?:header_start|start_header_id)\|>([^<]*)<\|(?:header_end|end_header_id)\|>\n\n(.*?)"
    r"(?:(<\|eot(?:_id)?\|>)|(?=<\|(?:header_start|start_header_id)\|>)|\Z)",
    re.DOTALL,
)
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOKEN = r"(?:<[^<>\s/][^<>\s]*>|</s>)"  # a special token; not the end of an element of HTML
_FIRST_TOKEN, _LAST_TOKEN = re.compile(rf"\A{_TOKEN}"), re.compile(rf"{_TOKEN}\Z")
_TURN = re.compile(rf"(?:^|{_TOKEN})(User|Assistant):", re.MULTILINE)
_LINE = re.compile(r"\s*(User|Assistant):(.*)")
_END = re.compile(r"<\|[^<>|]+\|>|<eos>|</s>")


def _blocks(block: re.Pattern[str], text: str) -> list[Message]:
    """Read messages between markers; a message without an end, before the next one or at the end, is not complete."""
    return [
        {"role": role.strip(), "content": content.strip(), "is_complete": bool(end)}
        for role, content, end in block.findall(text)
    ]


def _parse_chatml(text: str) -> list[Message]:
    messages = _blocks(_CHATML_BLOCK, text)
    for message in messages:
        calls = list(_values(_TOOL_CALL.findall(message["content"])))
        responses = _TOOL_RESPONSE.findall(message["content"])
        message |= {"tool_calls": calls} if calls else {}
        message |= {"tool_responses": responses} if responses else {}
    return messages


def _values(documents: Iterable[str]) -> Iterable[Any]:
    """Yield the values of documents of JSON; others are passed over, they stay in the content of their message."""
    for document in documents:
        try:
            yield json.loads(document)
        except ValueError:
            continue


def _parse_qwen(text: str) -> list[Message]:
    return [message for message in _parse_chatml(text) if message["content"] or message["is_complete"]]


def _parse_llama(text: str) -> list[Message]:
    return [message for message in _blocks(_LLAMA_BLOCK, text) if message["content"]]


def _parse_turns(text: str) -> list[Message]:
    """Read `User:` and `Assistant:` at the start of lines, or behind a special token; before them is the system's."""
    text = _LAST_TOKEN.sub("", _FIRST_TOKEN.sub("", text.strip()).rstrip())
    turns = list(_TURN.finditer(text))
    if not turns:
        return []
    ends = [turn.start() for turn in turns[1:]] + [len(text)]
    said = [("system", text[: turns[0].start()])]
    said += [(turn[1].lower(), text[turn.end() : end]) for turn, end in zip(turns, ends, strict=True)]
    return [{"role": role, "content": content.strip()} for role, content in said if content.strip()]


def _parse_dialogpt(text: str) -> list[Message]:
    """Read turns that end with a special token, of user and assistant by turns, or lines with a role before them."""
    if _END.search(text) and not _LINE.match(text):
        *turns, rest = _END.split(text)
        said = [*((turn, True) for turn in turns), *([(rest, False)] if rest.strip() else [])]
        return [
            {"role": ("user", "assistant")[place % 2], "content": turn.strip(), "is_complete": complete}
            for place, (turn, complete) in enumerate(said)
        ]
    messages = []
    for line in filter(str.strip, text.splitlines()):
        turn = _LINE.match(line)
        role, content = turn.groups() if turn else ("user", line)
        messages.append({"role": role.lower(), "content": content.strip()})
    return messages


# rbtool's own templates -----------------------------------------------------------------------------------

DEFAULT = "chatml_format"

_TEXT = (  # what a message says; not with `generation` inside, which notes the place of what is written right there
    "{% macro text(content) %}{% if content is string or content is number %}{{ content }}{% else %}"
    "{% for part in content or [] %}{{ part if part is string else part.text or '' }}{% endfor %}"
    "{% endif %}{% endmacro %}"
)
_SAY = (
    "{% if message.role == 'assistant' %}{% generation %}{{ text(message.content) }}{% endgeneration %}"
    "{% else %}{{ text(message.content) }}{% endif %}"
)
_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CHATML = (
    _TEXT
    + "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}"
    + _SAY
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    + _CHATML_PROMPT
)
_QWEN = (
    _TEXT
    # Calls and responses that were read from a text are in the content already.
    + "{% macro calls(message) %}{% if '<tool_call>' not in text(message.content) %}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '\n' if text(message.content) or not loop.first }}"
    """{{ '<tool_call>\n{"name": ' ~ call.name|tojson ~ ', "arguments": ' }}"""
    "{{ call.arguments if call.arguments is string else call.arguments|tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% macro responses(message) %}"
    "{% if '<tool_response>' in text(message.content) %}{{ text(message.content) }}{% else %}"
    "{% for response in message.tool_responses or [text(message.content)] %}"
    "{{ '\n' if not loop.first }}{{ '<tool_response>\n' ~ response ~ '\n</tool_response>' }}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% if not messages or messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    # The responses of several tools in a row share a block.
    "{% set tool = message.role == 'tool' %}"
    "{% if tool and loop.previtem and loop.previtem.role == 'tool' %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' ~ message.role ~ '\n' }}{% endif %}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ text(message.content) }}{{ calls(message) }}{% endgeneration %}"
    "{% else %}{{ responses(message) if tool else text(message.content) }}{% endif %}"
    "{% if not (tool and loop.nextitem and loop.nextitem.role == 'tool') %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + _CHATML_PROMPT
)
_DIALOGPT = (
    _TEXT
    + "{% for message in messages %}{% if message.role in ['user', 'assistant'] %}"
    + _SAY
    + "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
)
_TURNS = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ 'User: ' ~ text(message.content) ~ '\n\n' }}"
    "{% elif message.role == 'system' %}{{ text(message.content) ~ '\n\n' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ 'Assistant:' }}{% generation %}{{ ' ' ~ text(message.content) }}{% endgeneration %}"
)
_TURNS_END = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
_FALCON = _TEXT + _TURNS + "{{ '\n' }}" + _TURNS_END
_DEEPSEEK = _TEXT + "{{ bos_token }}" + _TURNS + "{{ eos_token }}" + _TURNS_END
_LLAMA = (
    _TEXT
    + "{{ bos_token }}{% for message in messages %}"
    + "{{ '<|header_start|>' ~ message.role ~ '<|header_end|>\n\n' }}"
    + _SAY
    + "{{ '<|eot|>' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)

_THREE = frozenset({"system", "user", "assistant"})
_OWN: dict[str, ChatTemplate] = {
    DEFAULT: ChatTemplate(_CHATML, _parse_chatml, takes_tools=False),
    "qwen": ChatTemplate(_QWEN, _parse_qwen, ("qwen",), takes_tools=False),
    "dialogpt": ChatTemplate(
        _DIALOGPT, _parse_dialogpt, ("dialogpt", "microsoft/dialo"), {"eos_token": "<|endoftext|>"}, _THREE, False
    ),
    "falcon": ChatTemplate(_FALCON, _parse_turns, ("falcon",), {}, _THREE, False),
    "deepseek": ChatTemplate(
        _DEEPSEEK, _parse_turns, ("deepseek",),
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}, _THREE, False,
    ),
    "llama": ChatTemplate(_LLAMA, _parse_llama, ("llama",), {"bos_token": "<|begin_of_text|>"}, takes_tools=False),
}  # fmt: skip
_ADDED: dict[str, ChatTemplate] = {}
"""What `add_chat_template` added; a name that rbtool has, too, comes before its own."""
