"""Chat templates: the texts that they write, and the conversations that are read from texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rbtool import History, add_chat_template
from rbtool.core.errors import MissingKeyError, SchemaError, UnsupportedError, UsageError
from rbtool.core.text import history

SHORT = [("user", "Hi"), ("assistant", "Yo!")]
LONG = [("system", "S"), *SHORT, ("user", "B")]
DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
SAID = "{% generation %}{{ m.content }}{% endgeneration %}"
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def chat(messages: list[tuple[str, Any]]) -> History:
    return History.from_chats([{"role": role, "content": content} for role, content in messages])


def said(history: History) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in history.tolist()]


def written(messages: list[tuple[str, Any]], name: str, **options: Any) -> str:
    options = {"add_generation_prompt": False, "bos_token": "<bos>", "eos_token": "<eos>", **options}
    text: str = chat(messages).apply_chat_template(chat_template_name=name, **options)
    return text


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(history, "_ADDED", {})
    return


# Writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short", "long", "prompt"),
    [
        (
            "chatml_format",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo!<|im_end|>\n",
            ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo!<|im_end|>\n"
            "<|im_start|>user\nB<|im_end|>\n"),
            "<|im_start|>assistant\n",
        ),
        (
            "qwen",
            f"{DEFAULT_SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo!<|im_end|>\n",
            ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo!<|im_end|>\n"
            "<|im_start|>user\nB<|im_end|>\n"),
            "<|im_start|>assistant\n",
        ),
        ("dialogpt", "Hi<eos>Yo!<eos>", "Hi<eos>Yo!<eos>B<eos>", " "),
        (
            "falcon", "User: Hi\n\nAssistant: Yo!\n", "S\n\nUser: Hi\n\nAssistant: Yo!\nUser: B\n\n", "Assistant:",
        ),
        (
            "deepseek", "<bos>User: Hi\n\nAssistant: Yo!<eos>",
            "<bos>S\n\nUser: Hi\n\nAssistant: Yo!<eos>User: B\n\n", "Assistant:",
        ),
        (
            "llama",
            "<bos><|header_start|>user<|header_end|>\n\nHi<|eot|><|header_start|>assistant<|header_end|>\n\nYo!<|eot|>",
            ("<bos><|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\nHi<|eot|>"
            "<|header_start|>assistant<|header_end|>\n\nYo!<|eot|><|header_start|>user<|header_end|>\n\nB<|eot|>"),
            "<|header_start|>assistant<|header_end|>\n\n",
        ),
    ],
)  # fmt: skip
def test_the_templates_of_the_families(name: str, short: str, long: str, prompt: str) -> None:
    assert written(SHORT, name) == short
    assert written(LONG, name) == long
    assert written(SHORT, name, add_generation_prompt=True) == short + prompt
    kept = [part for part in LONG if name != "dialogpt" or part[0] != "system"]
    assert said(History.from_text(long, name)) == kept


@pytest.mark.parametrize("name", ["chatml_format", "qwen", "llama", "deepseek", "falcon", "dialogpt"])
def test_without_a_tokenizer_a_text_has_the_familys_special_tokens_and_is_read_back(name: str) -> None:
    messages = [*SHORT, ("user", "B"), ("assistant", "C\nD" if name != "dialogpt" else "C")]
    text = chat(messages).apply_chat_template(chat_template_name=name)
    found = said(History.from_text(text, name))
    system = [("system", "You are a helpful assistant.")] if name == "qwen" else []
    opened = [("assistant", "")] if name == "chatml_format" else []
    assert found == [*system, *messages, *opened]


def test_an_open_end() -> None:
    for name in ("chatml_format", "qwen", "deepseek"):
        text = written([*SHORT[:1], ("assistant", " so: ")], name, continue_final_message=True)
        assert text.endswith((" so: ", "\n so: "))
    with pytest.raises(UsageError, match="add_generation_prompt"):
        written(SHORT, "qwen", continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(UsageError, match="last message"):
        written([("user", "Hi"), ("system", "left out")], "dialogpt", continue_final_message=True)


def test_the_text_of_parts_is_written() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}, "b"]
    for name in ("chatml_format", "qwen", "llama", "falcon", "deepseek", "dialogpt"):
        assert "ab" in written([("user", parts)], name)


def test_what_has_no_place_in_a_format_is_refused() -> None:
    for name in ("dialogpt", "falcon", "deepseek"):
        with pytest.raises(UsageError, match="no place for messages of the role 'tool'"):
            written([*SHORT, ("tool", "4")], name)
    with pytest.raises(UsageError, match="no place for descriptions of tools"):
        written(SHORT, "qwen", tools=[{"name": "f"}])


CALL = {"function": {"name": "f", "arguments": {"a": "é<"}}}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>'


def test_qwen_writes_calls_and_the_responses_of_tools() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "so", "tool_calls": [CALL, {"name": "g", "arguments": '{"b": 1}'}]},
        {"role": "tool", "content": "R1"},
        {"role": "tool", "content": "", "tool_responses": ["R2", "R3"]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    text = History.from_chats(messages).apply_chat_template(chat_template_name="qwen", add_generation_prompt=False)
    assert text == (
        f"{DEFAULT_SYSTEM}<|im_start|>user\nHi<|im_end|>\n"
        f'<|im_start|>assistant\nso\n{CALL_TEXT}\n<tool_call>\n{{"name": "g", "arguments": {{"b": 1}}}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response>\n"
        "<tool_response>\nR3\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n"
    )
    found = History.from_text(text, "qwen")
    assert found[2].tool_calls == [CALL["function"], {"name": "g", "arguments": {"b": 1}}]
    assert found[3].tool_responses == ["R1", "R2", "R3"]
    # what was read from a text is not written twice
    assert found.apply_chat_template(chat_template_name="qwen", add_generation_prompt=False) == text


def test_a_template_of_ones_own() -> None:
    assert chat(SHORT).apply_chat_template(chat_template=PLAIN) == "[user:Hi][assistant:Yo!]"
    with pytest.raises(UsageError, match="fails"):
        chat(SHORT).apply_chat_template(chat_template="{% for %}")
    with pytest.raises(UsageError, match="no way"):
        chat(SHORT).apply_chat_template(chat_template="{{ raise_exception('no way') }}")
    with pytest.raises(UsageError, match="unsafe"):
        chat(SHORT).apply_chat_template(chat_template="{{ messages.append.__globals__ }}")
    with pytest.raises(MissingKeyError, match="did you mean 'qwen'"):
        chat(SHORT).apply_chat_template(chat_template_name="quen")


# Names ---------------------------------------------------------------------------------------------------


def test_a_template_gets_a_name_a_parser_and_keywords() -> None:
    template = f"{{% for m in messages %}}{{{{ m.role }}}}={SAID};{{% endfor %}}"
    add_chat_template("mine", template, lambda text: [{"role": "x", "content": text}], ["My-Model"])
    tokenizer = type("Tokenizer", (), {"name_or_path": "me/my-model-7b"})()
    assert chat(SHORT).apply_chat_template(tokenizer=tokenizer) == "user=Hi;assistant=Yo!;"
    assert said(History.from_text("abc", tokenizer=tokenizer)) == [("x", "abc")]
    # again: the template is replaced, the rest stays
    add_chat_template("mine", SAID.replace("m.", "messages[0]."))
    assert chat(SHORT).apply_chat_template(tokenizer=tokenizer) == "Hi"
    assert said(History.from_text("abc", tokenizer=tokenizer)) == [("x", "abc")]
    add_chat_template("mine", SAID, lambda text: chat([("y", text)]))
    assert said(History.from_text("abc", "mine")) == [("y", "abc")]


def test_a_name_of_rbtools_own_can_be_taken() -> None:
    add_chat_template("qwen", f"Q{{% for m in messages %}}{SAID}{{% endfor %}}", lambda text: chat([("z", text)]))
    tokenizer = type("Tokenizer", (), {"name_or_path": "Qwen/Qwen2.5"})()
    assert chat(SHORT).apply_chat_template(tokenizer=tokenizer) == "QHiYo!"
    assert said(History.from_text("abc", tokenizer=tokenizer)) == [("z", "abc")]


def test_wrong_templates_are_refused() -> None:
    with pytest.raises(UsageError, match="generation"):
        add_chat_template("mine", PLAIN)
    with pytest.raises(UsageError, match="inverse_parser"):
        add_chat_template("mine", SAID, "parser")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="model_family_keywords is 'word'"):
        add_chat_template("mine", SAID, None, "word")
    add_chat_template("mine", SAID)
    for name in ("mine", "unknown"):
        with pytest.raises(UnsupportedError, match=name):
            History.from_text("abc", name)


# Reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "chatml_format",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\njunk\n<|im_start|>assistant\nunfin",
            [("system", "S", True), ("user", "Hi", True), ("assistant", "unfin", False)],
        ),
        ("chatml_format", "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
         [("user", "", True), ("assistant", "", False)]),
        ("qwen", "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", [("user", "", True)]),
        ("qwen", "<|im_start|>assistant\n  sp  <|endoftext|>", [("assistant", "sp", True)]),
        # an unclosed message in the middle ends where the next begins
        ("qwen", "<|im_start|>user\nopen <|im_start|>assistant\nA<|im_end|>",
         [("user", "open", False), ("assistant", "A", True)]),
        (
            "llama",
            ("<|begin_of_text|><|header_start|>user<|header_end|>\n\n<|eot|><|header_start|>user<|header_end|>\n\nHi"
            "<|eot|><|header_start|>assistant<|header_end|>\n\nunf"),
            [("user", "Hi", True), ("assistant", "unf", False)],
        ),
        ("llama", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", [("user", "Hi", True)]),
        ("deepseek", "<｜begin▁of▁sentence｜>User: Hi\n\nAssistant: Yo!<｜end▁of▁sentence｜>",
         [("user", "Hi", True), ("assistant", "Yo!", True)]),
        # neither the system's text nor words in the middle of a line are lost, and special tokens are no text
        ("deepseek", "<bos>S\n\nUser: a\n\nAssistant: see User: b<eos>User: <p>c</p>\n\nAssistant:",
         [("system", "S", True), ("user", "a", True), ("assistant", "see User: b", True), ("user", "<p>c</p>", True)]),
        ("falcon", "User: Hi\nho\n\nAssistant: Yo!\n", [("user", "Hi\nho", True), ("assistant", "Yo!", True)]),
        ("dialogpt", "User: Hi\nAssistant: Yo!\n\nline",
         [("user", "Hi", True), ("assistant", "Yo!", True), ("user", "line", True)]),
        ("dialogpt", "Hi<|endoftext|>Yo!<|endoftext|>B", [("user", "Hi", True), ("assistant", "Yo!", True),
                                                            ("user", "B", False)]),
    ],
)  # fmt: skip
def test_texts_are_read(name: str, text: str, expected: list[tuple[str, str, bool]]) -> None:
    found = History.from_text(text, name)
    assert [(one["role"], one["content"], one["is_complete"]) for one in found.tolist()] == expected


def test_calls_of_tools_are_read_and_bad_ones_stay_in_the_content() -> None:
    text = f"<|im_start|>assistant\nhey\n{CALL_TEXT}\n<tool_call>\nbad\n</tool_call><|im_end|>"
    found = History.from_text(text)
    assert found[0].tool_calls == [CALL["function"]]
    assert found[0].content == f"hey\n{CALL_TEXT}\n<tool_call>\nbad\n</tool_call>"


@pytest.mark.parametrize("name", ["chatml_format", "qwen", "llama", "deepseek", "falcon"])
@pytest.mark.parametrize("text", ["", "abc", "<|im_start|>user"])
def test_a_text_without_messages_is_refused(name: str, text: str) -> None:
    with pytest.raises(SchemaError, match="single item"):
        History.from_text(text, name)


def test_the_format_is_guessed_from_the_tokenizers_name() -> None:
    def named(name: str) -> Any:
        return type("Tokenizer", (), {"name_or_path": name})()

    llama = "<|header_start|>user<|header_end|>\n\nHi<|eot|>"
    assert said(History.from_text(llama, tokenizer=named("meta/LLaMA-4"))) == [("user", "Hi")]
    assert said(History.from_text("Hi<eos>", tokenizer=named("microsoft/DialoGPT"))) == [("user", "Hi")]
    chatml = "<|im_start|>user\nHi<|im_end|>"
    assert said(History.from_text(chatml, tokenizer=named("gpt2"))) == [("user", "Hi")]


def test_several_texts() -> None:
    texts = [written(SHORT, "qwen"), written(LONG, "qwen")]
    found = History.from_text(texts, "qwen")
    assert [len(one) for one in found.unbind(0)] == [3, 4]
    with pytest.raises(SchemaError):
        History.from_text([])
    with pytest.raises(TypeError):
        History.from_text(3)  # type: ignore[arg-type]
