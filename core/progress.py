"""What people see of long operations: progress, which the command line draws, and text that is safe to show.

Safe text has visible control characters, and no tokens, passwords and proxy addresses.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)
"""Control characters, ends of lines, and what changes the direction of text or is not seen at all."""


class Progress(Protocol):
    """Receives stages: each has a label (`converting`), a total (None if unknown) and a unit (`steps`, `bytes`)."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage; the one before it is over."""

    def advance(self, amount: int) -> None:
        """Report so many more units done."""

    def done(self, remark: str = "") -> None:
        """End the stage."""

    def note(self, text: str) -> None:
        """Show the user a message that is not an error."""


class Silent:
    """Progress that is not shown."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def done(self, remark: str = "") -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: `1 step`, `6,704 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def readable_size(count: float) -> str:
    """Write bytes in decimal units: `5.4 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop always returns")


def clean(text: str) -> str:
    """Make control characters visible: names and messages of data must not steer a terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


_STARS = "***"
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_SHORTEST = 4  # a value of fewer characters is no secret, and would black out words

_QUERY = r"[?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|(?:access_)?token|sig(?:nature)?|policy)="
# What a text must hold, in lower case, for its pattern to be looked for; the first group stays.
_PATTERNS = {
    needle: re.compile(pattern, re.IGNORECASE)
    for needle, pattern in (
        ("hf_", r"()\bhf_[a-z0-9]{8,}"),
        ("bearer", r"(\bbearer\s+)[^\s'\",;]{4,}"),
        ("authorization", r"(authorization\W{1,8}(?:b\W{0,2})?(?:basic|digest|negotiate)\s+)[^\s'\"]+"),
        ("://", r"(\b[a-z][a-z0-9+.-]{0,15}://)[^\s/'\"<>]*(?=@)"),
        ("=", rf"({_QUERY})[^&\s'\"]+"),
    )
}


def redact(text: str) -> str:
    """Put `***` for every secret in a text that people or files will see.

    Secrets are the values of the variables that hold Hugging Face tokens and of the file that does, whatever looks
    like a token or an authorisation, the user part and the signature of an address, and the proxies that the
    environment names, whole and by their host.
    """
    for secret in _secrets(os.environ):
        if secret in text:
            text = text.replace(secret, _STARS)
    lowered = text.lower()
    for needle, pattern in _PATTERNS.items():
        if needle in lowered:
            text = pattern.sub(rf"\1{_STARS}", text)
    return text


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Secrets of the environment, longest first: an address goes before the host in it."""
    found = {environment.get(name, "").strip() for name in _TOKENS}
    found.add(_token_in(_token_file(environment)))
    for name in _PROXIES:
        if value := environment.get(name, "").strip():
            found.update(_forms_of(value))
    return sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)


def _token_file(environment: Mapping[str, str]) -> str:
    """Where huggingface_hub keeps the token of who logged in."""
    if named := environment.get("HF_TOKEN_PATH"):
        return named
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return f"{environment.get('HF_HOME') or f'{cache}/huggingface'}/token"


@functools.lru_cache(maxsize=8)
def _token_in(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError, ValueError):  # not there, no home folder, not text
        return ""


@functools.lru_cache(maxsize=16)
def _forms_of(proxy: str) -> tuple[str, ...]:
    """A proxy's address in every form in which a log may show it."""
    found = [proxy, proxy.rstrip("/")]
    try:
        parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return tuple(found)
    found.append(parts.netloc)
    for secret in (parts.username, parts.password):
        if secret:
            found += [secret, unquote(secret)]
    if port is not None:
        shown = f"[{host}]" if ":" in host else host
        # As in an address, as httpcore logs it, and as errors of sockets show it.
        found += [f"{shown}:{port}", f"host={host!r} port={port}", f"({host!r}, {port})"]
    if host != "localhost" and not host.startswith("127.") and host != "::1":
        found.append(host)  # the name of this machine is no secret, and is part of other addresses
    return tuple(found)
