"""Commands that make a dataset again, from the steps of its provenance."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..format.manifest import Manifest, Provenance

_SWITCHES = frozenset({"skip_bad", "local", "in_order", "allow_duplicates", "cast", "trust_pickle", "render"})
_OPTIONS = (
    "episodes", "layout", "final_step", "horizon", "ends", "filter_key", "reward", "episode_key", "images",
    "jpeg", "trust_pickle", "rlds_last", "skip_bad",
)  # fmt: skip
"""Arguments of `convert` and `download` that are options of the same name."""


def reproducing(manifest: Manifest) -> list[tuple[Provenance, str]]:
    """Return each step of the provenance with the command that does it again; "" where no command does.

    Datasets between the steps are `step-1`, `step-2`, …, and the last is `DEST`. The command of a merge names the
    datasets that were merged, whose own steps come before it.
    """
    steps = manifest.provenance
    found, before = [], ""
    for number, step in enumerate(steps, start=1):
        after = "DEST" if number == len(steps) else f"step-{number}"
        command = _command(step, before, after, manifest)
        found.append((step, command))
        before = after
        if step.verb == "download":
            before = f"{step.arguments.get('source')}:{step.arguments.get('id')}"
        elif step.verb == "split":
            before = f"{after}/{step.arguments.get('part')}"
    return found


def _command(step: Provenance, before: str, after: str, manifest: Manifest) -> str:
    given, verb = step.arguments, step.verb
    if verb in {"convert", "download"} and ("path" in given or "id" in given):
        return _of_source(verb, given, after, manifest)
    if verb == "preprocess":
        return _preprocess(given, before or "DATASET", after)
    if verb == "merge" and _are_texts(given.get("datasets")):
        schema = "" if given.get("schema") in (None, "error") else str(given["schema"])
        return _line("merge", *given["datasets"], after, schema=schema, cast=given.get("cast"), **_layout(given))
    if verb == "split" and isinstance(given.get("parts"), Mapping):
        parts = {name: share for name, share in given["parts"].items() if name in {"train", "val", "test"}}
        by = None if given.get("by") == "episode" else given.get("by")
        more = {name: given.get(name) for name in ("seed", "stratify", "in_order", "allow_duplicates")}
        return _line("split", before or str(given.get("dataset")), dest=after, **parts, by=by, **more, **_layout(given))
    if verb == "record" and "policy" in given and (given["policy"] == "random" or ".py:" in str(given["policy"])):
        policy = None if given["policy"] == "random" else given["policy"]
        more = {name: given.get(name) for name in ("episodes", "seed", "max_steps", "render")}
        return _line(verb, str(given.get("env")), after, **more, policy=policy)
    if verb == "checkpoint save" and "form" in given:
        return _line(verb, before or str(given.get("dataset")), after, **{"as": given["form"]})
    if verb == "checkpoint load":
        return _line(verb, before or str(given.get("checkpoint")), after, **_layout(given))
    return ""


def _of_source(verb: str, given: Mapping[str, Any], after: str, manifest: Manifest) -> str:
    options = {name: given.get(name) for name in _OPTIONS if name not in ("layout", "final_step")}
    final = None if given.get("final_step") == "auto" else given.get("final_step")
    options |= {"final_step": final, **_layout(given)}
    if _are_texts(given.get("map")):
        options["map"] = given["map"]
    if verb == "convert":
        return _line(verb, str(given["path"]), after, **options)
    local = given.get("local")
    revision = None if local else manifest.resolved_revision or given.get("revision")
    return _line(verb, str(given.get("source")), str(given["id"]), local=local, revision=revision, **options)


def _layout(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"layout": given.get("layout"), "compress": given.get("compress")}


def _preprocess(given: Mapping[str, Any], before: str, after: str) -> str:
    options = {"chunk_size": given.get("chunk_size"), "num_frames": given.get("num_frames"), "dest": after}
    skip_bad = given.get("skip_bad")
    if isinstance(given.get("operations"), list):
        document = "\n\n".join(_operation(one) for one in given["operations"] if isinstance(one, Mapping))
        command = _line("preprocess", before, pipeline="operations.toml", **options, skip_bad=skip_bad)
        return f"cat > operations.toml <<'END'\n{document}\nEND\n{command}"
    if isinstance(given.get("function"), str):
        unit = None if given.get("unit") == "step" else given.get("unit")
        seed = given.get("seed")
        return _line("preprocess", before, fn=given["function"], unit=unit, seed=seed, **options, skip_bad=skip_bad)
    return ""


def _operation(document: Mapping[str, Any]) -> str:
    """Write an operation as a table of a pipeline file; JSON of these types is TOML as well."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in document.items() if value is not None]
    return "\n".join(["[[operation]]", *lines])


def _line(verb: str, *words: str, **options: Any) -> str:
    return " ".join(["rbtool", verb, *map(shlex.quote, words), *_given(options)])


def _given(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _SWITCHES:
            if value:
                yield flag
        elif isinstance(value, list | tuple):
            yield from (f"{flag} {shlex.quote(str(one))}" for one in value)
        elif value is not None and value is not False and value != "":  # 0 is a seed
            yield f"{flag} {shlex.quote(str(value))}"


def _are_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)
