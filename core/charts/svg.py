"""SVG that fits into a page: of what matplotlib writes, the shapes, with the colours and the font of the page.

Text stays text. There are no style attributes, which a strict content security policy forbids, no scripts and nothing
from elsewhere; every colour is a CSS variable `--chart-…`, with the text colour of the page where it is not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from .marks import readable

_SVG = "http://www.w3.org/2000/svg"
_FONT = re.compile(r"(?P<size>[\d.]+)px.*")
_NUMBER = re.compile(r"-?\d+\.\d+")
_INSIDE = re.compile(r"url\(#(?P<id>[^)]+)\)")
_MEASURED = frozenset({"d", "x", "y", "width", "height", "transform", "font-size", "stroke-width", "stroke-dasharray"})
_LONG = 2000  # characters of a line
_LEFT_OUT = frozenset({"metadata", "style"})
_NOT_TURNED = re.compile(r"rotate\(-?0 [^)]*\)")
_DEFAULTS = {"stroke-linejoin": "round", "stroke-dashoffset": "0"}


def page_svg(drawn: bytes, name: str, title: str, description: str, colours: Mapping[str, str]) -> str:
    """Turn a file of matplotlib into an element for a page; `name` begins its ids, `colours` replace those drawn."""
    root = _plain(ElementTree.fromstring(drawn))
    size = root.attrib["viewBox"].split()
    attributes = {
        "xmlns": _SVG,
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "width": size[2],
        "height": size[3],
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-desc",
        "font-family": "var(--chart-font, inherit)",
        "stroke-linejoin": "round",
    }
    page = ElementTree.Element("svg", attributes)
    for tag, text in (("title", title), ("desc", description)):
        ElementTree.SubElement(page, tag, id=f"{name}-{tag}").text = readable(text)
    page.extend(_children(root, colours))
    _rename(page, name)
    return ElementTree.tostring(page, encoding="unicode")


def file_svg(drawn: bytes, title: str, description: str) -> bytes:
    """Turn a file of matplotlib into a file with its own colours, a generic font, and a title."""
    text = page_svg(drawn, "chart", title, description, {}).replace("var(--chart-font, inherit)", "sans-serif")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def _plain(element: ElementTree.Element) -> ElementTree.Element:
    """Take the namespaces away."""
    for one in element.iter():
        one.tag = one.tag.rpartition("}")[2]
        one.attrib = {key.rpartition("}")[2]: value for key, value in one.attrib.items()}
    return element


def _children(element: ElementTree.Element, colours: Mapping[str, str]) -> list[ElementTree.Element]:
    """Return the children, with groups that only hold others dissolved."""
    found: list[ElementTree.Element] = []
    for child in element:
        if child.tag in _LEFT_OUT:
            continue
        inner = _children(child, colours)
        attributes = _attributes(child, colours)
        if child.tag in {"g", "defs"}:
            attributes.pop("id", None)
            if not inner or (child.tag == "g" and not attributes):
                found += inner
                continue
        copy = ElementTree.Element(child.tag, attributes)
        copy.text = readable(child.text) if child.tag == "text" and child.text else None
        copy.extend(inner)
        found.append(copy)
    return found


def _attributes(element: ElementTree.Element, colours: Mapping[str, str]) -> dict[str, str]:
    given = dict(element.attrib)
    for part in filter(None, given.pop("style", "").split(";")):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key == "font" and (font := _FONT.search(value)):
            key, value = "font-size", font["size"]
        if key != "font-family" and _DEFAULTS.get(key) != value:
            given[key] = colours.get(value, value.removesuffix("px") if key == "font-size" else value)
    if "transform" in given and _NOT_TURNED.fullmatch(given["transform"]):
        del given["transform"]
    return {key: _rounded(" ".join(value.split())) if key in _MEASURED else value for key, value in given.items()}


def _rounded(text: str) -> str:
    """Round the numbers of an attribute to hundredths of a pixel, and those of a long line to tenths."""
    places = 2 if len(text) < _LONG else 1
    return _NUMBER.sub(lambda found: f"{round(float(found[0]), places) + 0.0:g}", text)


def _rename(page: ElementTree.Element, name: str) -> None:
    """Number the ids that are referred to, and remove the others; those of `name` stay."""
    refers = [found["id"] for one in page.iter() for value in one.attrib.values() for found in _INSIDE.finditer(value)]
    refers += [one.attrib["href"].removeprefix("#") for one in page.iter() if "href" in one.attrib]
    known = {old: f"{name}-{number}" for number, old in enumerate(dict.fromkeys(refers))}
    for one in page.iter():
        if one.tag in {"title", "desc"}:
            continue
        if "id" in one.attrib:
            old = one.attrib.pop("id")
            one.attrib |= {"id": known[old]} if old in known else {}
        if "href" in one.attrib:
            one.attrib["href"] = f"#{known[one.attrib['href'].removeprefix('#')]}"
        if clip := _INSIDE.fullmatch(one.attrib.get("clip-path", "")):
            one.attrib["clip-path"] = f"url(#{known[clip['id']]})"
