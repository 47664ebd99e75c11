"""The card of a dataset on a hub, README.md: what the hub lists it by, and what people look for first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import FormatError
from ..format.documents import dump_json
from ..format.hub_address import HubAddress
from ..format.manifest import Manifest
from ..progress import Progress, clean
from ..stats import FieldStats
from ..ted.schema import key_name
from .check import CheckResult
from .stats import stats

CARD = "README.md"
CARD_BYTES = 1 << 20
"""A card of more bytes is not read."""
_BEGIN = "<!-- rbtool: what follows is made by rbtool upload, and replaced by the next one -->"
_END = "<!-- rbtool: the end of that -->"
_FENCE = "---"
_TASK = "reinforcement-learning"
_TAGS = ("reinforcement-learning", "offline-rl", "rbtool", "ted")
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B")
_LARGER = ("10B<n<100B", "100B<n<1T", "n>1T")
_FINDINGS = 20
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """What the card of a dataset is made of."""

    address: HubAddress
    manifest: Manifest
    checked: CheckResult
    license: str

    def document(self, before: bytes, path: Path, root: str | os.PathLike[str] | None, progress: Progress) -> bytes:
        """Return the card of the dataset at `path`; of the card `before`, what others wrote stays.

        Statistics are computed unless they are cached. Raises FormatError for a card that cannot be understood.
        """
        described: Sequence[FieldStats] = ()
        if self.manifest.steps:
            described = stats(path, root=root, progress=progress).fields
        entries, text = _parts(before)
        made = "\n".join((_BEGIN, *self._body(described), _END))
        return f"{_FENCE}\n{self._front(entries)}{_FENCE}\n{_replaced(text, made)}".encode()

    def _front(self, before: Mapping[str, Any]) -> str:
        """The metadata in YAML: that of others stays, but for the licence and the size."""
        import yaml

        tags = before.get("tags")
        kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        entries = {
            "pretty_name": self.address.repository.partition("/")[2],
            "task_categories": [_TASK],
            "viewer": False,  # the hub's viewer reads tables
            **before,
            "license": before["license"] if _named(before.get("license")) == self.license else self.license,
            "tags": [*kept, *(tag for tag in _TAGS if tag not in kept)],
            "size_categories": [_size_category(self.manifest.steps)],
        }
        return str(yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))

    def _body(self, described: Sequence[FieldStats]) -> Iterator[str]:
        manifest, name = self.manifest, self.address.repository
        yield f"\n# {name}\n"
        yield (
            f"{manifest.steps:,} steps in {manifest.episodes:,} episodes of offline reinforcement learning, in the "
            f"format TED (layout {manifest.layout}). The files are those that `rbtool` wrote, byte for byte; every "
            "download is verified.\n"
        )
        yield f"```bash\npip install rbtool\nrbtool download {self.address}\n```\n"
        yield (
            "```python\nimport rbtool\n\n"
            f'buffer = rbtool.load_dataset("{self.address}", batch_size=256)\nbatch = buffer.sample()\n```\n'
        )
        yield "## Fields\n"
        yield from _table(("field", "type", "shape", "mean", "std", "min", "max"), self._fields(described))
        yield "## Episodes\n"
        yield from _table(("end", "episodes"), self._ends())
        yield "## Check\n"
        yield from self._findings()
        yield "## Origin\n"
        yield from self._origin()

    def _fields(self, described: Sequence[FieldStats]) -> Iterator[Sequence[str]]:
        known = {field.key: field for field in described}
        for leaf in self.manifest.fields:
            shape = " × ".join(map(str, leaf.shape)) or "scalar"
            yield code(key_name(leaf.key)), leaf.dtype, shape, *_numbers(known.get(leaf.key))

    def _ends(self) -> Iterator[Sequence[str]]:
        for name, count in self.manifest.boundary.to_dict().items():
            if count:
                yield name.replace("_", " "), f"{count:,}"

    def _findings(self) -> Iterator[str]:
        found = self.checked
        yield (
            f"`rbtool check` (rbtool {__version__}): {found.errors:,} errors, {found.warnings:,} warnings; "
            f"{found.rules:,} rules.\n"
        )
        for finding in found.findings[:_FINDINGS]:
            yield f"- {finding.severity} {finding.rule} {finding.name}: {code(finding.message)}"
        more = len(found.findings) - _FINDINGS
        if more > 0:
            yield f"- and {more:,} more"
        if found.findings:
            yield ""

    def _origin(self) -> Iterator[str]:
        for step in self.manifest.provenance:
            given = {name: _shortened(value) for name, value in step.arguments.items() if value not in (None, False)}
            arguments = f" {code(dump_json(given))}" if given else ""
            yield f"- {code(step.verb)}{arguments} {code(step.time)}, rbtool {code(step.version)}"
        for note in self.manifest.notes:
            yield f"- note: {code(note)}"
        yield f"- content digest: {code(self.manifest.content_digest)}\n"


def code(text: str) -> str:
    """Write text of data as a span of code: nothing in it is a link, HTML, a cell of a table or the end of the span."""
    plain = (
        clean(text.encode(errors="backslashreplace").decode())
        .replace("`", "'")
        .replace("|", "¦")
        .replace("<!--", "<!- -")
        .strip()
    )
    if len(plain) > _LONGEST:
        plain = f"{plain[:_LONGEST]}…"
    return f"`{plain}`" if plain else "` `"


def _shortened(value: Any) -> Any:
    """Leave out of a path where on this machine it is."""
    return f"…/{value.rstrip('/').rpartition('/')[2]}" if isinstance(value, str) and value.startswith("/") else value


def license_of(card: bytes) -> str | None:
    """Return the licence that a card states, None for none; FormatError for a card that cannot be understood."""
    return _named(_parts(card)[0].get("license"))


def _named(license: object) -> str | None:
    """The text of a licence in metadata, or of several."""
    several = license if isinstance(license, list) else [license]
    return ", ".join(one for one in several if isinstance(one, str) and one) or None


def _parts(card: bytes) -> tuple[dict[str, Any], str]:
    """Split a card into its metadata and its text."""
    try:
        text = card.decode()
    except UnicodeDecodeError as error:
        raise _not_understood("it is no UTF-8 text") from error
    lines = text.replace("\r\n", "\n").removeprefix("\ufeff").split("\n")
    if lines[0].rstrip() != _FENCE or _FENCE not in [line.rstrip() for line in lines[1:]]:
        return {}, "\n".join(lines)
    end = 1 + [line.rstrip() for line in lines[1:]].index(_FENCE)
    return _metadata("\n".join(lines[1:end])), "\n".join(lines[end + 1 :])


_METADATA_BYTES = 64 << 10
_ALIASES, _DEPTH = 10, 40
"""The most references and levels of metadata: each reference can multiply what the text stands for."""
_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9]*)",
    "float": r"[-+]?(?:[0-9]+\.[0-9]*|[0-9]+(?=[eE])|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
    "merge": r"<<",
}
"""What text without quotes means in YAML 1.2, as the hub reads it: anything else is text. In YAML 1.1, `no` is false,
`1:30` is 90, and `012` is 10."""


def _metadata(text: str) -> dict[str, Any]:
    """Read the metadata of a card, which anybody may have written: in bounded time and memory, and no objects."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for name, pattern in _PLAIN.items():
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})\\Z"), None)
    size, aliases, depth = len(text.encode()), 0, 0
    if size > _METADATA_BYTES:
        raise _not_understood(f"its metadata has {size:,} bytes, expected at most {_METADATA_BYTES:,}")
    try:
        for event in yaml.parse(text, loader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > _ALIASES or depth > _DEPTH:
                found = f"{_ALIASES} references" if aliases > _ALIASES else f"{_DEPTH} levels"
                raise _not_understood(f"its metadata has more than {found}")
            if getattr(event, "tag", None) is not None:
                raise _not_understood(f"its metadata has the tag {event.tag!r:.40}, expected plain YAML")
        entries = yaml.load(text, loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, FormatError):
            raise
        raise _not_understood("its metadata is no YAML") from error
    if not isinstance(entries, dict | None):
        raise _not_understood(f"its metadata is a {type(entries).__name__}, expected a mapping")
    return entries or {}


def _not_understood(why: str) -> FormatError:
    return FormatError(f"the {CARD} of the repository cannot be understood: {why}", hint="correct or remove it")


def _replaced(text: str, made: str) -> str:
    """Put what is made into a text: in the place of what was made before, or after it."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return f"{before}{made}{after}"
    return f"{text.rstrip()}\n\n{made}\n" if text.strip() else f"\n{made}\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        yield "none\n"
        return
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in listed:
        yield f"| {' | '.join(row)} |"
    yield ""


def _numbers(field: FieldStats | None) -> Sequence[str]:
    """Mean, deviation and extremes of a leaf: of several dimensions the lowest and the highest of each."""
    if field is None:
        return ("",) * 4
    spread = [_range(values) for values in (field.mean, field.std)]
    low, high = ([one for one in values if one is not None] for values in (field.min, field.max))
    return *spread, _number(min(low)) if low else "", _number(max(high)) if high else ""


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = _number(min(known)), _number(max(known))
    return low if low == high else f"{low} … {high}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _size_category(steps: int) -> str:
    """The hub's name for the size of a dataset of so many steps."""
    sizes = (*_SIZES, *_LARGER)
    place = 0
    while place + 1 < len(sizes) and steps >= 10 ** (place + 3):
        place += 1
    return sizes[place]
