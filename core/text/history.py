"""Conversations, and texts with their tokens, as tensorclasses; and the chat templates that write and read them.

A chat template is written in Jinja, as for the tokenizers of transformers. `{% generation %}` blocks enclose the text
of assistants. The input of a template is a list of messages: dictionaries with a role and a content, which is text or a
list of parts.

    History  ->  chosen_template  ->  _Writer: a tokenizer, or `rendered`  ->  text, tokens, masks
    text     ->  parsed: the parser of a template, by its name             ->  History
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack

from ..errors import (
    MissingKeyError,
    SchemaError,
    UnsupportedError,
    UsageError,
    WrongKindError,
    did_you_mean,
    require_flags,
    suggests_keywords,
    warn_caller,
)

if TYPE_CHECKING:
    import jinja2

    from ..specs.composite import Composite

Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
GENERATION = "{% generation %}"
_LISTS = ("role", "content", "tool_calls", "tool_responses", "token_list", "tokens_response_list")
_PADDING = "<none>"


class NoSuchMessageError(SchemaError, IndexError):
    """There are no messages, or a dimension does not exist."""


class UnknownFieldError(UsageError, AttributeError):
    """A message has a key that is not a field of `History`."""


def _with_whole_lists(self: Any, name: str, value: Any) -> None:
    """Set a field. The outer levels of a list become dimensions of the batch; lists below them remain lists."""
    if isinstance(value, list) and name in _LISTS:
        value = _spread(value, self.batch_dims)
    TensorClass.__setattr__(self, name, value)


def _spread(value: Any, dims: int) -> Any:
    if dims and isinstance(value, list) and value:
        return NonTensorStack(*(_spread(one, dims - 1) for one in value))
    return NonTensorData(value)


class LLMInput(TensorClass, nocast=True):
    """The input of a language model: tokens, and the text that they encode. It has the fields of TorchRL's class.

    - `tokens`, `attention_mask`: int64 `[*batch, L]`.
    - `token_list`: tokens without padding, a list for each row.
    - `text`: a text for each row, or one for all.

    >>> LLMInput(tokens=torch.ones(2, 3), text=["a", "b"], batch_size=[2])[1].text
    'b'
    """

    tokens: torch.Tensor
    attention_mask: torch.Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None

    __setattr__ = _with_whole_lists


class LLMOutput(TensorClass, nocast=True):
    """The output of a language model: tokens and their probabilities. It has the fields of TorchRL's class.

    - `tokens`: int64 `[*batch, L]`; `tokens_response`: the generated tokens, `[*batch, T]`.
    - `token_list`, `tokens_response_list`: the same without padding, a list for each row.
    - `logits`: `[*batch, T, vocabulary]`; `log_probs`: `[*batch, T]`.
    - `text`: a text for each row, or one for all.

    >>> output = LLMOutput(tokens=torch.ones(2, 3), tokens_response_list=[[1], [2, 3]], batch_size=[2])
    >>> output[1].tokens_response_list, output.log_probs
    ([2, 3], None)
    """

    tokens: torch.Tensor
    tokens_response: torch.Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[list[int]] | None = None
    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    text: str | list[str] | None = None

    __setattr__ = _with_whole_lists

    @classmethod
    def from_vllm_output(cls, vllm_output: Any) -> Self:
        """Not supported, as in TorchRL: raises UnsupportedError (a NotImplementedError)."""
        raise UnsupportedError(
            f"{cls.__name__} cannot be made from an output of vLLM", hint=f"pass its fields: {cls.__name__}(tokens=…)"
        )


class LLMData(TensorClass, nocast=True):
    """Prompts and answers of a language model, with their tokens. It has the fields of TorchRL's class.

    Fields that are not set are None.

    - `tokens`, `attention_mask`: int64 `[*batch, L]`.
    - `tokens_response`: the tokens of the answers, without the prompts, int64 `[*batch, T]`.
    - `token_list`, `tokens_response_list`: the same without padding, a list for each row.
    - `logits`: `[*batch, T, vocabulary]`; `log_probs`: `[*batch, T]`.
    - `text`, `text_response`: a text for each row, or one for all.

    >>> data = LLMData(tokens=torch.ones(2, 3), text=["a", "b"], token_list=[[1, 2], [3]], batch_size=[2])
    >>> data[1].text, data[1].token_list, data.logits
    ('b', [3], None)
    """

    tokens: torch.Tensor | None = None
    tokens_response: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[list[int]] | None = None
    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    text: str | list[str] | None = None
    text_response: str | list[str] | None = None

    __setattr__ = _with_whole_lists


class ContentBase(TensorClass, nocast=True, shadow=True):
    """One part of the content of a message: text, an image, a file. It has the fields of TorchRL's class.

    - `type`: text, image, audio, video, file or function_call. It is not checked.
    - `text`: for text.
    - `url`, or `data` in base64, with `mime_type`, `name` and `size`: for images, audio, videos and files.
    - `function_name`, `function_args`: for calls of functions.

    The content of a message with several parts is a stack:

    >>> parts = [ContentBase(type="text", text="Hi"), ContentBase(type="image", url="here.png")]
    >>> History(role="user", content=lazy_stack(parts)).content[1].type
    'image'
    """

    type: str  # type: ignore[assignment]  # `shadow`: the fields hide methods of the base class
    text: str | None = None
    url: str | None = None
    data: str | None = None  # type: ignore[assignment]
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None  # type: ignore[assignment]
    function_name: str | None = None
    function_args: Mapping[str, Any] | None = None


class History(TensorClass, nocast=True):
    """The messages of one or several conversations. It has the fields of TorchRL's class.

    A conversation of T messages has the batch size `[T]`. B conversations have `[B, T]`, or `[B, -1]` if their lengths
    differ.

    - `role`: the speaker, such as user, assistant or system. Messages with the role `<none>` are padding.
    - `content`: a text, a list of parts, or a stack of `ContentBase`.
    - `is_complete`: False for a message that was cut off.
    - `tool_calls`, `tool_responses`: lists, or None.

    >>> chat = History.from_chats([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"}])
    >>> chat.shape, chat[-1].content
    (torch.Size([2]), 'Yo!')
    >>> chat.append(History(role="user", content="Bye")).shape
    torch.Size([3])
    >>> print(chat[1:].apply_chat_template(add_generation_prompt=False))
    <|im_start|>assistant
    Yo!<|im_end|>
    <|im_start|>user
    Bye<|im_end|>
    <BLANKLINE>
    """

    role: str
    content: Any
    is_complete: bool = True
    tool_calls: list[dict[str, Any]] | None = None
    tool_responses: list[str] | None = None

    __setattr__ = _with_whole_lists

    # Dictionaries and texts ----------------------------------------------------------------------------

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> Self:
        """Make one conversation from messages, or several from a list of conversations.

        Args:
            chats: dictionaries with `role`, `content` and optionally the other fields, or a list of such lists.

        Raises:
            SchemaError: (also an IndexError) there are no messages.
            UsageError: (also an AttributeError) a key is not a field.
            WrongKindError: (a TypeError) `chats` has another structure, or a role or content is missing.
        """
        if isinstance(chats, Mapping):
            return cls._from_message(chats)
        if isinstance(chats, str | bytes) or not isinstance(chats, Sequence):
            raise WrongKindError(f"expected a message, a dictionary, or a list of them, found {chats!r:.40}")
        if not chats:
            raise NoSuchMessageError("the conversation has no messages, expected at least one")
        if len({isinstance(chat, Mapping) for chat in chats}) > 1:
            raise WrongKindError("the list holds messages and conversations, expected only messages or only lists")
        made: Self = lazy_stack([cls.from_chats(chat) for chat in chats])
        return made

    @classmethod
    def _from_message(cls, message: Mapping[str, Any]) -> Self:
        known = [one.name for one in fields(cls)]
        for name in message:
            if name not in known:
                raise UnknownFieldError(
                    f"a message has the key {name!r}{did_you_mean(str(name), known)}", hint=f"keys: {', '.join(known)}"
                )
        for name in ("role", "content"):
            if name not in message:
                raise WrongKindError(f"a message has no {name!r}; it has {', '.join(message) or 'nothing'}")
        return cls(**message)

    def tolist(self) -> Any:  # type: ignore[override]  # the base class keeps None
        """Return the messages as dictionaries without the fields that are None, in lists as nested as the batch."""
        if self.ndim:
            return [one.tolist() for one in self.unbind(0)]
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: _plain(value) for name, value in found.items() if value is not None}

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Any = None,
    ) -> Self:
        r"""Parse a text that a chat template has written into a conversation, or a list of texts into several.

        ChatML, Qwen and Llama mark the end of a message: a message without this mark has `is_complete=False`. Tool
        calls and tool responses are parsed in ChatML and Qwen; their text also stays in the content.

        Args:
            text: a text with its special tokens.
            chat_template_name: `chatml_format`, `qwen`, `llama`, `deepseek`, `falcon`, `dialogpt`, or a name that
                `add_chat_template` has registered with an `inverse_parser`. By default the name is chosen by
                `tokenizer.name_or_path`; without a tokenizer it is `chatml_format`.
            chat_template: ignored, and accepted for compatibility with TorchRL: a parser cannot be derived from a
                template.
            tokenizer: the tokenizer of the model that the text is for.

        Raises:
            UnsupportedError: (a NotImplementedError) there is no parser for this format.
            SchemaError: (a RuntimeError) the text has no messages.

        >>> History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo")[1].is_complete
        False
        """
        if isinstance(text, str):
            found = parsed(text, tokenizer, chat_template_name)
            return found if isinstance(found, cls) else cls.from_chats(found)
        if not text:
            raise SchemaError("there are no texts, expected at least one")
        made: Self = lazy_stack([cls.from_text(one, chat_template_name, chat_template, tokenizer) for one in text])
        return made

    # Growth ----------------------------------------------------------------------------------------------

    def append(self, history: History, *, inplace: bool = True, dim: int = -1) -> Self:
        """Append a message to one or several conversations, or a conversation to several.

        Conversations may have different lengths. If this object was taken from another one by an index, the other
        object does not change.

        Args:
            history: the item to append, with one dimension less than this object. It is moved to this object's device.
            inplace: change this object and return it. If False, return a new object that shares the messages.
            dim: the dimension that grows. By default the last one, along which the messages are.

        Raises:
            SchemaError: (a RuntimeError) the dimensions do not fit, or this object is a single message or locked.
            UsageError: (a ValueError) the number of conversations differs.
            IndexError: `dim` does not exist. This object is unchanged after any error.
        """
        return self._grow(history, inplace, dim, 1)

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> Self:
        """Append all items of a history with as many dimensions; for the arguments and errors see `append`."""
        return self._grow(history, inplace, dim, 0)

    def _grow(self, history: History, inplace: bool, dim: int, fewer: int) -> Self:
        require_flags(inplace=inplace)
        if not self.ndim:
            raise SchemaError("a single message cannot be extended", hint="unsqueeze(0) makes a conversation of it")
        if not isinstance(history, History):
            raise WrongKindError(f"expected a History, found a {type(history).__name__}")
        if history.ndim != self.ndim - fewer:
            raise SchemaError(
                f"the history has {history.ndim} dimensions, expected {self.ndim - fewer}, as this one has {self.ndim}"
            )
        if not -self.ndim <= dim < self.ndim:
            raise NoSuchMessageError(f"dim is {dim}, and the history has {self.ndim} dimensions")
        if inplace and self.is_locked:
            raise SchemaError("the history is locked", hint="unlock_() it, or use inplace=False")
        if self.device is not None and history.device != self.device:
            history = history.to(self.device)
        grown: Self = _grown(self, history, dim % self.ndim, bool(fewer))
        if not inplace:
            return grown
        self.__dict__.update(grown.__dict__)
        return self

    # Chat templates --------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        *,
        tokenizer: Any = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        **options: Any,
    ) -> Any:
        """Format conversations as text or as tokens, with a chat template.

        The first available template of these is used:

        1. `chat_template`,
        2. the template with the name `chat_template_name`,
        3. the template for the model family in `tokenizer.name_or_path`: one from `add_chat_template`, else Qwen,
           DialoGPT, Falcon, DeepSeek or Llama,
        4. the tokenizer's own template, if it has `{% generation %}`,
        5. ChatML.

        Of a content with several parts, rbtool's templates write only the text. They do not write tool descriptions.

        Args:
            tokenizer: a tokenizer of transformers, or an object with the same `apply_chat_template` or `__call__`.
                Without a tokenizer, only text can be returned; it has the special tokens of the template's family.
            add_generation_prompt: end the text with the header of an answer.
            chat_template: a template in Jinja.
            chat_template_name: `chatml_format`, `qwen`, `dialogpt`, `falcon`, `deepseek`, `llama`, or a name that
                `add_chat_template` has registered.
            continue_final_message: end the text with the content of the last message, so that a model continues it.
            tokenize: return tokens. Default: True if `return_tensors` or the mask is set.
            return_tensors: the type of the tokens. Default: "pt", torch tensors.
            return_dict: return a tensordict of tokens. Default: True if the mask is set.
            return_assistant_tokens_mask: also return `assistant_masks`, which marks the tokens of assistants.
            **options: further options of the tokenizer, such as `padding`, `truncation` (both off by default) and
                `max_length`, and variables for the template.

        Returns:
            For one conversation a str; with `tokenize`, an int64 tensor `[1, L]`; with `tokenize` and `return_dict`, a
            tensordict of `input_ids`, `attention_mask` and optionally `assistant_masks`, int64 `[L]`. For several
            conversations a list of these, or a lazy stack of tensordicts, which
            `get("input_ids", as_padded_tensor=True)` pads.

        Raises:
            MissingKeyError: (a KeyError) no template has this name.
            UsageError: (a ValueError) arguments contradict each other, or the template fails.
            SchemaError: (a RuntimeError) tokens are requested without a tokenizer.
        """
        mask = return_assistant_tokens_mask
        require_flags(
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            return_assistant_tokens_mask=mask,
        )  # fmt: skip
        if continue_final_message and add_generation_prompt:
            raise UsageError(
                "continue_final_message and add_generation_prompt are both set, expected at most one: a text ends with "
                "the last message or with the header of the next",
                hint="add_generation_prompt=False",
            )
        if mask and (tokenize is False or return_dict is False):
            raise UsageError("return_assistant_tokens_mask marks tokens, expected tokenize and return_dict not False")
        tokenize = (mask or return_tensors is not None) if tokenize is None else tokenize
        if tokenize and tokenizer is None:
            raise SchemaError("tokens are requested, but there is no tokenizer", hint="pass one: tokenizer=…")
        template = chosen_template(tokenizer, chat_template, chat_template_name)
        writer = _Writer(tokenizer, template, add_generation_prompt, continue_final_message, options)
        if not tokenize:
            return writer.each(self, writer.text)
        if mask or return_dict:
            tensors = return_tensors or "pt"
            return writer.each(self, lambda messages: writer.tensordict(messages, tensors, mask), stacked=True)
        return writer.each(self, lambda messages: writer.tokens(messages, return_tensors or "pt"))

    # Specs ------------------------------------------------------------------------------------------------

    @classmethod
    def default_spec(cls, shape: tuple[int, ...] = (-1,)) -> Composite:
        """Return the spec of a history: a `Composite` with a `NonTensor` for each field. Its `zero()` is a `History`.

        Args:
            shape: the shape of the fields. The batch size of the spec is `shape[:-1]`.
        """
        from ..specs.composite import Composite
        from ..specs.non_tensor import NonTensor

        examples = {"is_complete": True}
        made = {one.name: NonTensor(shape, example_data=examples.get(one.name)) for one in fields(cls)}
        return Composite(made, shape=shape[:-1], data_cls=cls)


def _grown(history: Any, more: Any, dim: int, one: bool) -> Any:
    """Append `more` to a history along a dimension: a single item if `one`, else all its items."""
    if not dim:
        return lazy_stack([*history.unbind(0), *([more] if one else more.unbind(0))])
    if len(history) != len(more):
        raise UsageError(f"there are {len(more)} items for {len(history)} conversations, expected one for each")
    pairs = zip(history.unbind(0), more.unbind(0), strict=True)
    return lazy_stack([_grown(*pair, dim - 1, one) for pair in pairs])


def _plain(value: Any) -> Any:
    """Return a field as plain objects; parts of a content become dictionaries without the fields that are None."""
    if isinstance(value, ContentBase):
        if value.ndim:
            return [_plain(part) for part in value.unbind(0)]
        found = {one.name: getattr(value, one.name) for one in fields(value)}
        return {name: one for name, one in found.items() if one is not None}
    if isinstance(value, torch.Tensor | NonTensorStack | NonTensorData):
        return value.tolist()
    return value


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, the parser of its texts, and the models that it is for.

    Attributes:
        template: the template in Jinja.
        parse: parses a text that was written with the template, and returns messages or a `History`. None if there is
            no parser.
        keywords: words in the names of the tokenizers that the template is for.
        special: the special tokens of this family of models, for texts that are written without a tokenizer.
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
        """Raise UsageError (a ValueError) for messages and tools that the template would silently leave out."""
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
    """Register a chat template under a name, for all conversations of this process.

    If the name exists, the template is replaced; its parser and its keywords stay unless new ones are given.

    Args:
        template_name: the name, for `chat_template_name`.
        template: the template in Jinja, in which `{% generation %}…{% endgeneration %}` encloses the text of
            assistants.
        inverse_parser: a function for `History.from_text` that parses a text written with the template. It returns a
            `History`, or a list of messages.
        model_family_keywords: the template is chosen for tokenizers with one of these words in `name_or_path`; case
            does not matter. They take precedence over the keywords of rbtool's own templates.

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
            f"the template {template_name!r} has no {GENERATION}, which marks the text of an assistant",
            hint="write {% generation %}{{ message.content }}{% endgeneration %}",
        )
    if inverse_parser is not None and not callable(inverse_parser):
        raise UsageError(f"inverse_parser is {inverse_parser!r}, expected a function from a text to a History")
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
    """Return the template for the family of models in a tokenizer's name; None if its name contains no known family."""
    path = str(getattr(tokenizer, "name_or_path", None) or "").lower()
    families = (*_ADDED.values(), *(one for name, one in _OWN.items() if name not in _ADDED))
    return next((one for one in families if any(word.lower() in path for word in one.keywords)), None)


def chosen_template(tokenizer: Any, template: str | None, name: str | None) -> ChatTemplate:
    """Return the template to use, in the order of precedence that `History.apply_chat_template` documents."""
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
    """Parse a text in the format of a named template, of a tokenizer's family, or else of ChatML; return its messages.

    UnsupportedError (a NotImplementedError) if the format has no parser, SchemaError (a RuntimeError) if the text has
    no messages.
    """
    if not isinstance(text, str):
        raise WrongKindError(f"expected a text, found a {type(text).__name__}")
    found = (
        _ADDED.get(name) or _OWN.get(name) if name is not None else template_of(tokenizer) or named_template(DEFAULT)
    )
    if found is None or found.parse is None:
        raise UnsupportedError(
            f"there is no parser for texts of the chat template {name!r}", hint="add_chat_template(inverse_parser=…)"
        )
    messages = found.parse(text)
    if isinstance(messages, list) and not messages:
        raise SchemaError(
            f"the text {text[:40]!r} does not contain a single item of a conversation in the expected format",
            hint="keep the special tokens when tokens are decoded, or name the format: chat_template_name",
        )
    return messages


@dataclass
class _Written:
    """The text that a template has written so far, and the positions of the text of assistants in it."""

    parts: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def rendered(
    template: str, messages: list[Message], variables: Mapping[str, Any], *, prompt: bool, open_end: bool
) -> tuple[str, list[Span]]:
    """Render messages with a template; return the text, and the positions of its `{% generation %}` blocks.

    Args:
        template: the template in Jinja.
        messages: the conversation.
        variables: further variables of the template, such as `eos_token`.
        prompt: end the text with the header of an answer.
        open_end: end the text with the content of the last message.

    Raises:
        UsageError: (a ValueError) the template is not Jinja, or fails.
    """
    import jinja2

    written = _Written()
    try:
        made = _compiled(template)
        known = {**variables, "messages": messages, "add_generation_prompt": prompt, _WRITTEN: written}
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
        raise UsageError(
            "the text does not contain the last message as it is, so continue_final_message cannot end the text with it"
        )
    end = place + len(last if text.startswith(last, place) else last.rstrip())
    return text[:end], [(start, min(stop, end)) for start, stop in written.spans]


_WRITTEN = "_written"
"""The variable with which the extension of Jinja reaches the `_Written` of a text."""


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` writes its contents, and records their position in the text."""

        tags = {"generation"}  # noqa: RUF012  # as in the base class

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            said = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_noted", [jinja2.nodes.ContextReference()])
            return jinja2.nodes.CallBlock(call, [], [], said).set_lineno(line)

        def _noted(self, context: Any, caller: Callable[[], str]) -> str:
            said, written = caller(), context[_WRITTEN]
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
    return json.dumps(value, ensure_ascii=False, indent=indent)  # unlike Jinja's own filter, without HTML escapes


def _fail(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def text_of(content: Any) -> str:
    """Return the text of a content; for a list of parts, the joined text of those that have some."""
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
    """Find the messages of assistants in a text, for templates that do not mark them.

    The same words may occur several times in the text. To find a message, the conversation up to it is written twice,
    with the contents "0" and "1": the message begins where the two texts differ.

    Args:
        text: all messages, as the template writes them.
        messages: the conversation.
        written: writes other messages with the same template.

    Raises:
        UsageError: (a ValueError) the text does not contain the content of a message.
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
                f"the template changes message {place} of the conversation, so its tokens cannot be marked",
                hint=f"mark the message with {GENERATION} in the template",
            )
        spans.append((found, found + len(said)))
    return spans


class _Writer:
    """Writes conversations with one template and one tokenizer, or without a tokenizer."""

    def __init__(
        self, tokenizer: Any, template: ChatTemplate, prompt: bool, open_end: bool, options: dict[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.prompt, self.open_end = prompt, open_end
        self.options = {"padding": False, "truncation": False, **options}
        self._has_templates = hasattr(tokenizer, "apply_chat_template")

    def each(self, history: Any, write: Callable[[list[Message]], Any], *, stacked: bool = False) -> Any:
        """Call `write` with the messages of each conversation; return a list, or a lazy stack of tensordicts."""
        if history.ndim > 1:
            made = [self.each(one, write, stacked=stacked) for one in history.unbind(0)]
            return lazy_stack(made) if stacked else made
        messages = history.tolist() if history.ndim else [history.tolist()]
        messages = [message for message in messages if message["role"] != _PADDING]
        self.template.check(messages, self.options.get("tools"))
        found = write(messages)
        return found.unsqueeze(0) if stacked and not history.ndim else found

    def text(self, messages: list[Message]) -> str:
        """Return a conversation as text."""
        text: str = self._applied(messages, tokenize=False) if self._has_templates else self._rendered(messages)[0]
        return text

    def tokens(self, messages: list[Message], tensors: str) -> Any:
        """Return the tokens of a conversation, `[1, L]`."""
        if self._has_templates:
            return self._applied(messages, tokenize=True, return_tensors=tensors)
        return _row(self._encoded(self.text(messages))["input_ids"]).unsqueeze(0)

    def tensordict(self, messages: list[Message], tensors: str, mask: bool) -> TensorDict:
        """Return the tokens of a conversation, `[L]`; with `mask` also which of them are from assistants."""
        found: Any = None
        if self._has_templates and not (mask and GENERATION not in self.template.template):
            returns = {"return_tensors": tensors, "return_dict": True, "return_assistant_tokens_mask": mask}
            found = self._applied(messages, tokenize=True, **returns)
        if found is None or (mask and "assistant_masks" not in found):
            text = self.text(messages)
            found = dict(self._encoded(text))
            if mask:
                found["assistant_masks"] = self._mask(text, self._spans(text, messages), found)
        return TensorDict({name: _row(value) for name, value in found.items()}, batch_size=[])

    def _applied(self, messages: list[Message], **how: Any) -> Any:
        """Call the tokenizer's own `apply_chat_template`."""
        defaults = {"return_tensors": None, "return_dict": False, "return_assistant_tokens_mask": False}
        return self.tokenizer.apply_chat_template(
            conversation=messages, chat_template=self.template.template, add_generation_prompt=self.prompt,
            continue_final_message=self.open_end, **(defaults | how), **self.options,
        )  # fmt: skip

    def _rendered(self, messages: list[Message]) -> tuple[str, list[Span]]:
        tokens = self.template.special if self.tokenizer is None else special_tokens(self.tokenizer)
        variables = {**tokens, **self.options}
        return rendered(self.template.template, messages, variables, prompt=self.prompt, open_end=self.open_end)

    def _encoded(self, text: str, **how: Any) -> Any:
        known = {name: self.options[name] for name in ("padding", "truncation", "max_length") if name in self.options}
        more = self.options.get("tokenizer_kwargs") or {}
        return self.tokenizer(text, add_special_tokens=False, **known, **more, **how)

    def _spans(self, text: str, messages: list[Message]) -> list[Span]:
        """Return the positions of the text of assistants."""
        if GENERATION in self.template.template:
            own, spans = self._rendered(messages)
            if own == text:
                return spans
        writer = _Writer(self.tokenizer, self.template, False, False, self.options)
        return assistant_spans(text, messages, writer.text)

    def _mask(self, text: str, spans: list[Span], encoded: Mapping[str, Any]) -> torch.Tensor:
        """Return which tokens of a text are in one of the spans, int64 `[L]`."""
        mask = torch.zeros_like(_row(encoded["input_ids"]), dtype=torch.int64)
        try:
            offsets = self._encoded(text, return_offsets_mapping=True)["offset_mapping"]
        except (KeyError, NotImplementedError, TypeError):  # no offsets: count the tokens of the text before each end
            padding = _row(encoded.get("attention_mask", [1])).tolist().index(1)
            for span in spans:
                start, stop = (
                    padding + len(_row(self.tokenizer(text[:end], add_special_tokens=False)["input_ids"]))
                    for end in span
                )
                mask[start:stop] = 1
            return mask
        for place, (start, stop) in enumerate(offsets):
            mask[place] = any(start < end and begin < stop for begin, end in spans)
        return mask


def _row(values: Any) -> torch.Tensor:
    """Return tokens as a tensor, without the dimension of a batch of one."""
    tensor = torch.as_tensor(values)
    return tensor[0] if tensor.ndim > 1 else tensor


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
_TOKEN = r"(?:<[^<>\s/][^<>\s]*>|</s>)"  # a special token, but no closing tag of HTML
_FIRST_TOKEN, _LAST_TOKEN = re.compile(rf"\A{_TOKEN}"), re.compile(rf"{_TOKEN}\Z")
_TURN = re.compile(rf"(?:^|{_TOKEN})(User|Assistant):", re.MULTILINE)
_LINE = re.compile(r"\s*(User|Assistant):(.*)")
_END = re.compile(r"<\|[^<>|]+\|>|<eos>|</s>")


def _blocks(block: re.Pattern[str], text: str) -> list[Message]:
    """Parse messages between markers. A message without the mark of its end is not complete."""
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
    """Yield the values of JSON documents; invalid ones are skipped, and remain in the content of the message."""
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
    """Parse `User:` and `Assistant:` at the start of lines or after a special token; the system's text comes first."""
    text = _LAST_TOKEN.sub("", _FIRST_TOKEN.sub("", text.strip()).rstrip())
    turns = list(_TURN.finditer(text))
    if not turns:
        return []
    ends = [turn.start() for turn in turns[1:]] + [len(text)]
    said = [("system", text[: turns[0].start()])]
    said += [(turn[1].lower(), text[turn.end() : end]) for turn, end in zip(turns, ends, strict=True)]
    return [{"role": role, "content": content.strip()} for role, content in said if content.strip()]


def _parse_dialogpt(text: str) -> list[Message]:
    """Parse alternating turns of user and assistant between special tokens, or lines that begin with a role."""
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


DEFAULT = "chatml_format"

_TEXT = (  # The text of a content. It contains no `generation`, which must be outside of macros to record positions.
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
    # If the message was parsed from a text, the content already contains the calls and responses.
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
    # The responses of consecutive tools share a block.
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
"""The templates of `add_chat_template`; they take precedence over rbtool's own templates of the same name."""
