"""Conversations, and texts with their tokens: what they hold, how they grow, and their tokens."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from text_files import tiny_tokenizer

from rbtool import (
    ContentBase,
    History,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    LLMData,
    LLMInput,
    LLMOutput,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from rbtool.core.errors import SchemaError, UsageError

SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"}]
LONG = [{"role": "system", "content": "S"}, *SHORT, {"role": "user", "content": "B"}]


def words(history: History) -> Any:
    """The contents, as nested lists."""
    if history.ndim:
        return [words(one) for one in history.unbind(0)]
    return history.content


def chats(*lengths: int, name: str = "m") -> History:
    return History.from_chats(
        [[{"role": "user", "content": f"{name}{row}{n}"} for n in range(length)] for row, length in enumerate(lengths)]
    )


def message(content: str = "new") -> History:
    return History(role="user", content=content)


def messages(*contents: str) -> History:
    return History(role=["user"] * len(contents), content=list(contents), batch_size=[len(contents)])


# Fields --------------------------------------------------------------------------------------------------


def test_messages_conversations_and_batches_of_them() -> None:
    one = History.from_chats(SHORT)
    assert (one.shape, one.role, one.content) == ((2,), ["user", "assistant"], ["Hi", "Yo!"])
    assert one.is_complete == [True, True]
    assert (one[0].shape, one[0].role, one.tool_calls) == ((), "user", None)
    several = History.from_chats([SHORT, LONG])
    assert several.shape == (2, -1)
    assert several.role == [["user", "assistant"], ["system", "user", "assistant", "user"]]
    assert (several[:, -1].content, several[..., 0].content) == (["Yo!", "B"], ["Hi", "S"])
    assert several.tolist() == [
        [{**one, "is_complete": True} for one in SHORT], [{**one, "is_complete": True} for one in LONG]
    ]  # fmt: skip
    assert History.from_chats([[SHORT]]).shape == (1, 1, 2)


def test_lists_are_spread_over_the_batch() -> None:
    made = History(role=["user", "assistant"], content=["x", "y"], batch_size=2)
    assert (made.shape, made[1].content, made.is_complete) == ((2,), "y", True)
    flags = History(role=["user", "assistant"], content=["x", "y"], is_complete=[True, False], batch_size=2)
    assert flags.is_complete.tolist() == [True, False]
    assert flags.tolist()[1]["is_complete"] is False
    alone = History(role=["user", "assistant"], content=["x", "y"])
    assert (alone.shape, alone.role) == ((), ["user", "assistant"])
    with pytest.raises(RuntimeError):
        History(role=["user", "assistant"], content=["x", "y"], batch_size=3)


def test_contents_of_several_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}]
    found = History.from_chats([{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}])
    assert found.content == [parts, "x"]
    stack = lazy_stack([ContentBase(**part) for part in parts])
    made = History(role="user", content=stack)
    assert (made.shape, made.content.shape, made.content.type) == ((), (2,), ["text", "image"])
    assert made.tolist()["content"] == parts
    assert lazy_stack([made, message("x")]).tolist()[0]["content"] == parts
    with pytest.raises(TypeError):
        ContentBase()
    assert ContentBase(type="zzz").type == "zzz"


def test_calls_of_different_numbers_side_by_side() -> None:
    calls = [[{"name": "f"}], [{"name": "f"}, {"name": "g"}]]
    found = History.from_chats([{"role": "assistant", "content": "", "tool_calls": one} for one in calls] + SHORT)
    assert [one.tool_calls for one in found.unbind(0)] == [*calls, None, None]
    assert [one.get("tool_calls") for one in found.tolist()] == [*calls, None, None]


@pytest.mark.parametrize(
    ("chats", "error", "match"),
    [
        ([], IndexError, "no messages"),
        ([[], SHORT], IndexError, "no messages"),
        ([{"role": "user", "contend": "x"}], AttributeError, "did you mean 'content'"),
        ([{"role": "user"}], TypeError, "no 'content'"),
        ([{"content": "x"}], TypeError, "no 'role'"),
        ([SHORT, SHORT[0]], TypeError, "only messages or only lists"),
        ("abc", TypeError, "dictionary"),
        ([3], TypeError, "dictionary"),
    ],
)
def test_wrong_chats(chats: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        History.from_chats(chats)


# Growth --------------------------------------------------------------------------------------------------


def test_append_and_extend() -> None:
    one = chats(2)[0]
    assert one.append(message()) is one
    assert (one.shape, words(one)) == ((3,), ["m00", "m01", "new"])
    assert words(one.append(message("x"), inplace=False)) == ["m00", "m01", "new", "x"]
    assert one.extend(chats(1)[0]) is one
    assert words(one) == ["m00", "m01", "new", "m00"]
    dense = messages("a", "b")
    assert words(dense.append(message())) == ["a", "b", "new"]


def test_growth_of_several_conversations() -> None:
    assert words(chats(1, 1).append(messages("a", "b"))) == [["m00", "a"], ["m10", "b"]]
    assert chats(2, 2).append(messages("a", "b"), dim=0).shape == (3, 2)
    assert chats(2, 2).extend(chats(2)).shape == (3, 2)
    assert chats(2, 2).extend(chats(2, 2), dim=-1).shape == (2, 4)


def test_conversations_of_different_lengths_grow_each_by_itself() -> None:
    ragged = chats(2, 1)
    assert words(ragged.append(messages("a", "b"))) == [["m00", "m01", "a"], ["m10", "b"]]
    grown = ragged.extend(chats(1, 2, name="n"), dim=1)
    assert words(grown) == [["m00", "m01", "a", "n00"], ["m10", "b", "n10", "n11"]]
    assert ragged.shape == (2, 4)
    assert ragged.append(messages("a"), dim=0).shape == (3, -1)
    assert chats(2, 2).extend(chats(2, 1)).shape == (4, -1)


@pytest.mark.parametrize("inplace", [True, False])
def test_what_does_not_fit_changes_nothing(inplace: bool) -> None:
    one, several = chats(2)[0], chats(2, 2)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: one.append(one, inplace=inplace), RuntimeError, "expected 0"),
        (lambda: one.extend(message(), inplace=inplace), RuntimeError, "expected 1"),
        (lambda: message().append(message(), inplace=inplace), RuntimeError, "unsqueeze"),
        (lambda: message().extend(message(), inplace=inplace), RuntimeError, "unsqueeze"),
        (lambda: several.append(messages("a", "b", "c"), inplace=inplace), ValueError, "3 items for 2"),
        (lambda: several.extend(chats(2, 2, 2), dim=1, inplace=inplace), ValueError, "3 items for 2"),
        (lambda: one.append(message(), dim=1, inplace=inplace), IndexError, "dim is 1"),
        (lambda: one.append("x", inplace=inplace), TypeError, "str"),  # type: ignore[arg-type]
    ]
    for call, error, match in wrong:
        with pytest.raises(error, match=match):
            call()
    assert (words(one), words(several)) == (["m00", "m01"], [["m00", "m01"], ["m10", "m11"]])


def test_only_the_object_itself_grows() -> None:
    several = chats(1, 1)
    several[0].append(message())
    assert (several.shape, words(several)) == ((2, 1), [["m00"], ["m10"]])
    locked = chats(1)[0].lock_()
    with pytest.raises(SchemaError, match="locked"):
        locked.append(message())
    assert len(locked.append(message(), inplace=False)) == 2


def test_what_is_added_moves_to_the_device() -> None:
    here = chats(1)[0].to("cpu")
    assert here.append(message().to("meta")).device == torch.device("cpu")
    assert here[-1].device == torch.device("cpu")


# Storages, files and specs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 1)])
def test_conversations_in_storages(kind: Any, lengths: tuple[int, int], tmp_path: Path) -> None:
    data = chats(*lengths)
    buffer = ReplayBuffer(storage=kind(10), batch_size=20)
    buffer.extend(data)
    assert words(buffer[0]) == words(data[0])
    sample = buffer.sample()
    assert type(sample) is History
    assert {json.dumps(words(one)) for one in sample.unbind(0)} == {json.dumps(one) for one in words(data)}
    loaded = ReplayBuffer(storage=kind(10), batch_size=2)
    loaded.load_state_dict(buffer.state_dict())
    assert words(loaded[1]) == words(data[1])
    buffer.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    assert words(loaded[0]) == words(data[0])
    beside = TensorDictReplayBuffer(storage=kind(10), batch_size=2)
    beside.extend(TensorDict({"history": data, "reward": torch.ones(2, 1)}, [2]))
    assert type(beside.sample()["history"]) is History


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
def test_fields_that_only_some_messages_have_are_saved(kind: Any, tmp_path: Path) -> None:
    data = History.from_chats([[*SHORT, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}], LONG])
    buffer, state, folder = (ReplayBuffer(storage=kind(10), batch_size=2) for _ in range(3))
    buffer.extend(data)
    buffer.dumps(tmp_path / "saved")
    folder.loads(tmp_path / "saved")
    state.load_state_dict(buffer.state_dict())
    for found in (folder, state):
        assert [found[0].tolist(), found[1].tolist()] == data.tolist()


@pytest.mark.parametrize("lengths", [(2, 2), (2, 1)])
def test_pickles_files_and_torch_functions(lengths: tuple[int, int], tmp_path: Path) -> None:
    data = chats(*lengths)
    assert words(pickle.loads(pickle.dumps(data))) == words(data)
    data.memmap(tmp_path)
    assert words(History.load_memmap(tmp_path)) == words(data)
    assert bool((data == data).all())
    assert len(torch.cat([data, data])) == 4
    assert [len(one) for one in data.unbind(0)] == list(lengths)


def test_the_spec() -> None:
    spec = History.default_spec()
    assert (spec.shape, spec["role"].shape, spec.data_cls) == ((), (-1,), History)
    assert type(spec.zero()) is History
    for data in (chats(2, 1), chats(2)[0], message(), History.from_text("<|im_start|>user\nunf")):
        assert spec.is_in(data)
    assert not spec.is_in(TensorDict({"role": "user"}))
    assert History.default_spec((2, 3)).zero().shape == (2,)


# Tokens --------------------------------------------------------------------------------------------------

MARKED = (
    "{% for m in messages %}[{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}]{% endfor %}"
)
UNMARKED = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


class Letters:
    """A tokenizer of letters in a few lines, which knows nothing of templates."""

    name_or_path = "letters"
    places = True

    def __call__(self, text: str, *, return_offsets_mapping: bool = False, **options: Any) -> dict[str, list[Any]]:
        if return_offsets_mapping and not self.places:
            raise NotImplementedError
        found: dict[str, list[Any]] = {"input_ids": [ord(letter) for letter in text], "attention_mask": [1] * len(text)}
        if options.get("padding") == "max_length":
            more = options["max_length"] - len(text)
            found = {name: [0] * more + row for name, row in found.items()}
        if return_offsets_mapping:
            padding = [(0, 0)] * (len(found["input_ids"]) - len(text))
            found["offset_mapping"] = padding + [(at, at + 1) for at in range(len(text))]
        return found


class Counts(Letters):
    """One that cannot tell where tokens are."""

    places = False


class Templates(Letters):
    """One that writes templates, like that of transformers, but marks nothing."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **options: Any) -> Any:
        text = "".join(f"[{one['role']}:{one['content']}]" for one in conversation)
        if not tokenize:
            return text
        found = {name: torch.tensor([row]) for name, row in self(text).items()}
        return found if options["return_dict"] else found["input_ids"]


def letters(ids: torch.Tensor) -> str:
    return "".join(map(chr, ids.tolist()))


@pytest.mark.parametrize("kind", [Letters, Counts, Templates])
@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_tokens_of_any_tokenizer(kind: Any, template: str) -> None:
    ask: dict[str, Any] = {"tokenizer": kind(), "chat_template": template}
    one = History.from_chats(SHORT)
    text = "[user:Hi][assistant:Yo!]"
    assert one.apply_chat_template(**ask) == text
    for more in ({"tokenize": True}, {"return_tensors": "pt"}):
        tokens = one.apply_chat_template(**ask, **more)
        assert (tokens.shape, letters(tokens[0])) == ((1, len(text)), text)
    both = one.apply_chat_template(**ask, tokenize=True, return_dict=True)
    assert (both.batch_size, set(both.keys())) == ((), {"input_ids", "attention_mask"})
    marked = one.apply_chat_template(**ask, return_assistant_tokens_mask=True)
    assert letters(marked["input_ids"][marked["assistant_masks"].bool()]) == "Yo!"
    ragged = History.from_chats([SHORT, LONG])
    found = ragged.apply_chat_template(**ask, return_assistant_tokens_mask=True)
    assert found.batch_size == (2,)
    padded = found.get("input_ids", as_padded_tensor=True)
    assert letters(padded[1]) == "[system:S][user:Hi][assistant:Yo!][user:B]"
    assert ragged.apply_chat_template(**ask) == [letters(padded[0]).rstrip("\0"), letters(padded[1])]
    assert History.from_chats([[SHORT, LONG]]).apply_chat_template(**ask)[0][0] == text


@pytest.mark.parametrize("kind", [Letters, Counts])
def test_masks_with_padding_on_the_left(kind: Any) -> None:
    found = History.from_chats(SHORT).apply_chat_template(
        tokenizer=kind(), chat_template=UNMARKED, return_assistant_tokens_mask=True, padding="max_length", max_length=30
    )
    assert found["input_ids"].shape == (30,)
    assert letters(found["input_ids"][found["assistant_masks"].bool()]) == "Yo!"


@pytest.mark.parametrize(
    ("chat", "template", "expected"),
    [
        (["same", "same"], UNMARKED, "[user:same][assistant:####]"),
        (["a", "a"], UNMARKED, "[user:a][assistant:#]"),
        ([" a ", " a "], UNMARKED, "[user: a ][assistant:###]"),
        ([" a ", " a "], UNMARKED.replace("m.content", "m.content|trim"), "[user:a][assistant:#]"),
        (["x", "", "y", "x"], UNMARKED, "[user:x][assistant:][user:y][assistant:#]"),
    ],
)
def test_an_assistants_text_is_found_where_it_is_said(chat: list[str], template: str, expected: str) -> None:
    said = [{"role": role, "content": text} for role, text in zip(itertools.cycle(["user", "assistant"]), chat)]
    found = History.from_chats(said).apply_chat_template(
        tokenizer=Letters(), chat_template=template, return_assistant_tokens_mask=True
    )
    masked = torch.where(found["assistant_masks"].bool(), ord("#"), found["input_ids"])
    assert letters(masked) == expected


def test_a_text_that_the_template_changes_cannot_be_marked() -> None:
    with pytest.raises(UsageError, match="message 1 of the conversation") as raised:
        History.from_chats(SHORT).apply_chat_template(
            tokenizer=Letters(), chat_template=UNMARKED.replace("m.content", "m.content|upper"),
            return_assistant_tokens_mask=True,
        )  # fmt: skip
    assert "{% generation %}" in raised.value.hint


def test_a_message_by_itself_and_padding() -> None:
    one = message("Hi")
    ask: dict[str, Any] = {"tokenizer": Letters(), "chat_template": UNMARKED}
    assert one.apply_chat_template(**ask) == "[user:Hi]"
    found = one.apply_chat_template(**ask, tokenize=True, return_dict=True)
    assert (found.batch_size, found["input_ids"].shape) == ((1,), (1, 9))
    padded = History.from_chats([*SHORT, {"role": "<none>", "content": ""}])
    assert padded.apply_chat_template(**ask) == "[user:Hi][assistant:Yo!]"


def test_arguments_that_contradict_each_other() -> None:
    one = History.from_chats(SHORT)
    for wrong in ({"return_dict": False}, {"tokenize": False}):
        with pytest.raises(ValueError, match="return_assistant_tokens_mask"):
            one.apply_chat_template(tokenizer=Letters(), return_assistant_tokens_mask=True, **wrong)
    with pytest.raises(RuntimeError, match="no tokenizer"):
        one.apply_chat_template(tokenize=True)
    assert one.apply_chat_template(tokenizer=Letters(), return_dict=True) == one.apply_chat_template()
    assert one.apply_chat_template(return_tensors="pt", tokenize=False) == one.apply_chat_template()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("chatml_format", "Yo!"), ("qwen", "Yo!"), ("dialogpt", "Yo!"), ("llama", "Yo!"), ("falcon", " Yo!"),
     ("deepseek", " Yo!")],
)  # fmt: skip
def test_a_tokenizer_of_transformers(name: str, expected: str) -> None:
    tokenizer = tiny_tokenizer()
    ask: dict[str, Any] = {"tokenizer": tokenizer, "chat_template_name": name, "add_generation_prompt": False}
    several = History.from_chats([SHORT, LONG])
    texts = several.apply_chat_template(**ask)
    assert texts[0] == several[0].apply_chat_template(**ask)
    found = several.apply_chat_template(**ask, return_assistant_tokens_mask=True)
    for row, text in zip(found.unbind(0), texts, strict=True):
        assert tokenizer.decode(row["input_ids"]) == text
        assert tokenizer.decode(row["input_ids"][row["assistant_masks"].bool()]) == expected
    cut = several.apply_chat_template(
        **ask, return_assistant_tokens_mask=True, padding="max_length", max_length=12, truncation=True
    )
    assert cut["assistant_masks"].shape == cut["input_ids"].shape == (2, 12)
    tokens = several[0].apply_chat_template(**ask, tokenize=True)
    assert tokens.tolist() == [found[0]["input_ids"].tolist()]
    opened = several[0].apply_chat_template(**ask, continue_final_message=True)
    assert opened.endswith("Yo!")


def test_the_tokenizers_own_template_is_taken_if_it_marks_what_assistants_say() -> None:
    one = History.from_chats(SHORT)
    assert one.apply_chat_template(tokenizer=tiny_tokenizer(chat_template=MARKED)) == "[user:Hi][assistant:Yo!]"
    other = tiny_tokenizer(chat_template=UNMARKED)
    with pytest.warns(UserWarning, match="chatml_format is used instead"):
        assert one.apply_chat_template(tokenizer=other).startswith("<|im_start|>user")
    assert one.apply_chat_template(tokenizer=other, chat_template=other.chat_template) == "[user:Hi][assistant:Yo!]"


# Texts with their tokens ---------------------------------------------------------------------------------


def test_texts_with_their_tokens() -> None:
    data = LLMData(tokens=torch.ones(2, 3), text=NonTensorStack("a", "b"), batch_size=[2])
    assert (data.text, data[0].text, data[0].tokens.shape, data.logits) == (["a", "b"], "a", (3,), None)
    assert set(data.keys()) == {"tokens", "text"}
    assert LLMData(text=["a", "b"], batch_size=[2])[1].text == "b"
    assert LLMData(text="all", batch_size=[2])[1].text == "all"
    assert all(value is None for value in (getattr(LLMData(batch_size=[2]), name) for name in ("text", "tokens")))
    for kind in (LLMInput, LLMOutput):
        with pytest.raises(TypeError):
            kind()
    with pytest.raises(RuntimeError):
        LLMData(tokens=torch.ones(3, 2), batch_size=[2])
    with pytest.raises(AttributeError):
        data.other = 1
    with pytest.raises(ValueError):
        LLMData.from_tensordict(TensorDict({"other": torch.ones(2)}, [2]))
    with pytest.raises(ValueError):
        data["tokens"]
    with pytest.raises(NotImplementedError):
        LLMOutput.from_vllm_output(None)


@pytest.mark.parametrize("lists", [[[1, 2], [3]], [[1, 2], [3, 4]], [[], [3]]])
def test_lists_of_tokens_stay_lists_a_row_each(lists: list[list[int]]) -> None:
    data = LLMData(token_list=lists, tokens_response_list=lists, batch_size=[2])
    assert (data.token_list, data[0].token_list, data[1].tokens_response_list) == (lists, *lists)
    data.token_list = [[5], [6, 7]]
    assert data[1].token_list == [6, 7]
    assert LLMInput(tokens=torch.ones(3), token_list=[1, 2, 3]).token_list == [1, 2, 3]


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyStackStorage])
def test_tokens_in_storages(kind: Any) -> None:
    buffer = ReplayBuffer(storage=kind(10), batch_size=4)
    buffer.extend(LLMData(tokens=torch.arange(6).reshape(2, 3), text="all", batch_size=[2]))
    found = buffer.sample()
    assert (type(found), found.tokens.shape, type(buffer[0])) == (LLMData, (4, 3), LLMData)


def test_ragged_tokens_are_padded_on_demand() -> None:
    rows = [LLMData(tokens=torch.ones(length), text=name) for length, name in ((3, "a"), (4, "b"))]
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=6)
    buffer.extend(lazy_stack(rows))
    assert buffer[1].text == "b"
    assert buffer.sample().get("tokens", as_padded_tensor=True).shape[0] == 6
    assert lazy_stack(rows).get("tokens", as_padded_tensor=True).shape == (2, 4)


# Beside TorchRL ------------------------------------------------------------------------------------------


@pytest.mark.peer
def test_texts_tokens_and_growth_are_torchrls() -> None:
    pytest.importorskip("torchrl")
    checks = Path(__file__).with_name("history_checks.py")
    done = subprocess.run([sys.executable, checks], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compared"] > 400
    assert found["different"] == []


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALL = ANSWER | {"tool_calls": [{"name": "f"}]}


def one_chat(*messages: dict[str, Any]) -> Any:
    return History.from_chats([list(messages)])


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    "given", [[(USER, ANSWER), (USER, CALL)], [(CALL, CALL), (USER, ANSWER)], [(USER, CALL), (CALL, USER)]]
)
def test_fields_that_are_none_in_some_rows_of_a_storage(kind: Any, given: Any, tmp_path: Path) -> None:
    complete = {"is_complete": True}
    expected = [[message | complete for message in messages] for messages in given]
    storage, other, last = kind(7), kind(7), kind(7)
    for number, messages in enumerate(given):
        storage.set(range(number, number + 1), one_chat(*messages))
    assert storage[:].tolist() == expected
    storage.dumps(tmp_path / "one")
    other.set(range(1), one_chat(USER, USER))
    last.set(range(1), one_chat(CALL, CALL | {"tool_responses": ["x"]}))
    for receiver in (other, last, LazyTensorStorage(7)):
        receiver.loads(tmp_path / "one")
        assert receiver[:].tolist() == expected
        receiver.set(range(2, 3), one_chat(USER, ANSWER | {"tool_responses": ["y"]}))
        assert receiver[2:].tolist() == [[USER | complete, ANSWER | complete | {"tool_responses": ["y"]}]]
