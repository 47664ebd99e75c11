"""Progress of long operations, which the command line draws, and text that is safe to show to users.

Safe text has its control characters made visible, and contains no tokens, passwords or proxy addresses.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)
"""Control characters, line ends, and characters that change the text direction or are invisible."""


class Progress(Protocol):
    """Receives the progress of an operation in stages.

    A stage has a label (`converting`), a total (None if unknown) and a unit (`steps`, `bytes`).
    """

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage and end the previous one."""

    def advance(self, amount: int) -> None:
        """Report that `amount` more units are done."""

    def done(self, remark: str = "") -> None:
        """End the stage."""

    def note(self, text: str) -> None:
        """Show the user a message that is not an error."""


class Silent:
    """A `Progress` that shows nothing."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def done(self, remark: str = "") -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 step`, `6,704 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some_of(items: Sequence[object], most: int) -> str:
    """List the first items: `3, 4, …`."""
    return ", ".join(map(str, items[:most])) + (", …" if len(items) > most else "")


def readable_size(count: float) -> str:
    """Format a number of bytes in decimal units: `5.4 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop always returns")


def clean(text: str) -> str:
    """Make control characters visible, so that names and messages from data cannot control a terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


_STARS = "***"
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_SHORTEST = 4  # shorter values are not secrets, and hiding them would garble words

_QUERY = r"[?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|(?:access_)?token|sig(?:nature)?|policy)="
# A pattern is only tried if the lower-case text contains its key. The first group of a match is kept.
_PATTERNS = {
    needle: re.compile(pattern, re.IGNORECASE)
    for needle, pattern in (
        ("hf_", r"()\bhf_[a-z0-9]{8,}"),
        ("bearer", r"(\bbearer\s+)[^\s'\",;]{4,}"),
        ("authorization", r"(authorization\W{1,8}(?:b\W{0,2})?(?:basic|digest|negotiate)\s+)[^\s'\"]+"),
        # A secret key of S3 may contain slashes; a number and a slash after the colon are a port.
        ("://", r"(\b[a-z][a-z0-9+.-]{0,15}://)(?:[^\s/'\"<>]*|[^\s/'\"<>@:\[]*:(?!\d{1,5}/)[^\s'\"<>@]*)(?=@)"),
        ("=", rf"({_QUERY})[^&\s'\"]+"),
    )
}


def redact(text: str) -> str:
    """Replace every secret in a text by `***`, before the text is shown or written to a file.

    Secrets are Hugging Face tokens (from the environment and the token file), anything that looks like a token or an
    authorisation header, user names, passwords and signatures in URLs, and the proxies in the environment, as whole
    addresses and as host names.
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
    """Return the secrets in the environment, longest first, so that an address is replaced before its host."""
    found = {environment.get(name, "").strip() for name in _TOKENS}
    found.add(_token_in(_token_file(environment)))
    for name in _PROXIES:
        if value := environment.get(name, "").strip():
            found.update(_forms_of(value))
    return sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)


def _token_file(environment: Mapping[str, str]) -> str:
    """Return the file in which huggingface_hub keeps the user's token."""
    if named := environment.get("HF_TOKEN_PATH"):
        return named
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return f"{environment.get('HF_HOME') or f'{cache}/huggingface'}/token"


@functools.lru_cache(maxsize=8)
def _token_in(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError, ValueError):  # no such file, no home folder, not text
        return ""


@functools.lru_cache(maxsize=16)
def _forms_of(proxy: str) -> tuple[str, ...]:
    """Return a proxy's address in every form in which a log may show it."""
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
        # The forms in addresses, in logs of httpcore, and in socket errors.
        found += [f"{shown}:{port}", f"host={host!r} port={port}", f"({host!r}, {port})"]
    if host != "localhost" and not host.startswith("127.") and host != "::1":
        found.append(host)  # not for this machine: its name is not secret, and occurs in other addresses
    return tuple(found)
