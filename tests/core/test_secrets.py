"""What may not be seen, in every form in which it may turn up."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest

from rbtool.core.progress import redact

PROXY = "http://alice:s3cr3t%21x@proxy.corp.example:3128"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("token hf_abcdefgh12 refused", "token *** refused"),
        ("Authorization: Bearer abc.def-ghi, then", "Authorization: Bearer ***, then"),
        ("(b'Authorization', b'Bearer abcdefgh')", "(b'Authorization', b'Bearer ***')"),
        ("[(b'Proxy-Authorization', b'Basic YTpi')]", "[(b'Proxy-Authorization', b'Basic ***')]"),
        ("GET https://alice:pw@host.example/a@b", "GET https://***@host.example/a@b"),
        ("https://user@host.example", "https://***@host.example"),
        ("s3://AKIA1:ab/cd+e/f@bucket/walks", "s3://***@bucket/walks"),
        ("https://cdn.example/x?a=1&X-Amz-Signature=abc&b=2", "https://cdn.example/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://cdn.example/x?token=abc", "https://cdn.example/x?token=***"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, redacted: str) -> None:
    assert redact(text) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf://farama-minari/D4RL@9f31c2e/door/human-v2",
        "hf_hub and hf_home are names; bad tokens=3",
        "https://host.example/a?b=c, mail bob@host.example",
        "http://127.0.0.1:8080/me/swing@9f31c2e and http://[::1]:80/me/swing@9f31c2e",
        "the bearer of news",
    ],
)
def test_texts_without_secrets_are_not_changed(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_the_token_of_the_environment_in_any_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "my-own.token")
    assert redact("'my-own.token' was sent") == "'***' was sent"


@pytest.mark.parametrize("named", [True, False])
def test_the_token_of_the_file(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ("elsewhere" if named else "token")
    file.write_text("from-the-file\n")
    if named:
        monkeypatch.setenv("HF_TOKEN_PATH", str(file))
    assert redact("from-the-file!") == "***!"


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize(
    "shown",
    [
        PROXY,
        "proxy.corp.example:3128",
        "connect_tcp.started host='proxy.corp.example' port=3128",
        "proxy.corp.example",
        "s3cr3t%21x",
        "s3cr3t!x",
        "alice",
    ],
)
def test_a_proxy_is_not_shown_in_any_form(name: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PROXY)
    redacted = redact(f"before {shown} after")
    assert not any(part in redacted for part in ("alice", "s3cr3t", "corp", "3128"))
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")


def test_credentials_sent_to_a_proxy_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    sent = base64.b64encode(b"alice:s3cr3t!x").decode()
    assert sent not in redact(f"headers=[(b'Proxy-Authorization', b'Basic {sent}')]")


@pytest.mark.parametrize("value", ["127.0.0.1:8080", "http://127.0.0.1:8080/", "http://localhost:8080"])
def test_a_proxy_on_this_machine_hides_no_other_address(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", value)
    host = "localhost" if "localhost" in value else "127.0.0.1"
    assert redact(f"{host}:8080") == "***"
    assert redact(f"http://{host}:9999/x") == f"http://{host}:9999/x"


def test_a_proxy_that_is_no_address_is_not_shown_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://[broken:port")
    assert redact("proxy http://[broken:port") == "proxy ***"


@pytest.mark.parametrize(
    "text", ["a line of log, nothing in it\n" * 40_000, "a.b-" * 250_000 + "://", "x" * 10**6 + "="]
)
def test_long_texts_take_no_long_time(text: str) -> None:
    began = time.thread_time()
    assert redact(text) == text
    assert time.thread_time() - began < 5
