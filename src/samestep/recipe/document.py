"""A recipe's text as plain data that remembers on which line every key stands.

Reads YAML 1.2 (so 1e-4 is a number and `no` is a text) into dicts, lists, texts, numbers, booleans and None, and
nothing else: tags that would build other objects are problems.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from samestep.errors import Problem, RecipeError
from samestep.recipe.suggest import did_you_mean

FieldPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_MAX_BYTES = 1 << 20
# Aliases can make a short file very long ("billion laughs"); no honest recipe comes near this.
_MAX_NODES = 100_000


@dataclass(frozen=True, kw_only=True)
class Document:
    """Plain data with the place each value came from."""

    source: str
    data: dict[str, Any]
    lines: dict[FieldPath, int] = field(default_factory=dict)
    overridden: dict[FieldPath, str] = field(default_factory=dict)
    """The name of the override that set a value, by path; see samestep.recipe.overrides."""
    problems: tuple[Problem, ...] = ()
    """What was wrong in the text itself, such as a key given twice."""

    def problem(self, path: FieldPath, what: str) -> Problem:
        """A problem of the value at `path`, placed where the value, or else the section around it, was given."""
        name = dotted(path)
        for length in range(len(path), -1, -1):
            place = path[:length]
            if place in self.overridden:
                option = self.overridden[place]
                return Problem(field=option if dotted(place) == name else f"{option}: {name}", what=what)
            if place in self.lines:
                return Problem(field=name, what=what, line=self.lines[place])
        return Problem(field=name, what=what)


def dotted(path: FieldPath) -> str:
    """The path as people write it: ("train", "optimizer", "betas", 0) is train.optimizer.betas[0]."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_file(path: Path) -> str:
    """The text of a recipe file; RecipeError when there is none."""

    def refuse(what: str, line: int | None = None) -> RecipeError:
        return RecipeError(str(path), [Problem(field="", what=what, line=line)])

    try:
        # Opening a pipe waits for somebody to write to it. A process substitution, <(...), is one with a writer.
        if path.is_fifo() and not path.resolve().is_relative_to("/proc"):
            raise refuse("is a pipe, not a file")
        with open(path, "rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        folder = path.parent
        known = [entry.name for entry in folder.glob("*.y*ml")] if folder.is_dir() else []
        raise refuse(f"no such file{did_you_mean(path.name, known)}") from None
    except IsADirectoryError:
        raise refuse("is a folder; give the recipe file in it") from None
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > _MAX_BYTES:
        raise refuse("is larger than 1 MiB, so it is not a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse("is not UTF-8 text", line=content.count(b"\n", 0, error.start) + 1) from None


def parse_text(text: str, source: str) -> Document:
    """The recipe in `text`; RecipeError when it is not YAML or not a mapping at all."""
    node = _compose(text, source)
    if node is None:
        what = "is empty; `samestep init` writes a recipe to start from"
        raise RecipeError(source, [Problem(field="", what=what)])
    if not isinstance(node, MappingNode):
        what = f"holds {_kind(node)}, not the `key: value` lines of a recipe"
        raise RecipeError(source, [Problem(field="", what=what, line=_line(node))])
    walk = _Walk()
    data = walk.value(node, ())
    return Document(source=source, data=data, lines=walk.lines, problems=tuple(walk.problems))


def parse_value(text: str) -> Any:
    """The value of an override: a YAML scalar, [list] or {mapping}. ValueError, with a reason, when it is not one."""
    if not text.strip():
        raise ValueError("no value; write null for none, or '' (in quotes) for an empty text")
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        what = f"{text!r} is not valid YAML: {error.problem}; put texts with special signs in quotes"
        raise ValueError(what) from None
    except ReaderError as error:
        raise ValueError(_bad_character(text, error)) from None
    except (YAMLError, ValueError, RecursionError):
        raise ValueError("not valid YAML") from None
    if node is None or node.end_mark.index < len(text.rstrip()):
        raise ValueError(f"{text!r} holds a YAML comment (#); put the text in quotes, inside the shell's own")
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style:
        raise ValueError(f"{text!r} is read as keys and values; put the text in quotes, inside the shell's own")
    walk = _Walk()
    value = walk.value(node, ())
    if walk.problems:
        raise ValueError(walk.problems[0].what)
    return value


def _compose(text: str, source: str) -> Node | None:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"not valid YAML: {error.problem or error.context}"
        if error.problem and "\\t" in error.problem:
            what += "; indent with spaces"
        if error.context and "single document" in error.context:
            what = "holds more than one YAML document (---)"
        raise RecipeError(source, [Problem(field="", what=what, line=mark.line + 1 if mark else None)]) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(source, [Problem(field="", what=_bad_character(text, error), line=line)]) from None
    except YAMLError:
        raise RecipeError(source, [Problem(field="", what="not valid YAML")]) from None
    except RecursionError:
        raise RecipeError(source, [Problem(field="", what="is nested too deeply")]) from None


class _Walk:
    """Turns YAML nodes into plain data, noting lines and problems on the way."""

    def __init__(self) -> None:
        self.lines: dict[FieldPath, int] = {}
        self.problems: list[Problem] = []
        self._construct = SafeConstructor(loader=YAML(typ="safe", pure=True))
        self._open: list[Node] = []
        self._nodes = 0

    def value(self, node: Node, path: FieldPath) -> Any:
        self.lines.setdefault(path, _line(node))
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            if self._nodes == _MAX_NODES + 1:
                self._report(path, "holds more values than a recipe can have")
            return None
        if any(node is parent for parent in self._open):
            self._report(path, "contains itself")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._report(path, f"the tag {_shown_tag(node)} is not allowed in a recipe")
            return None
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag != _TAG + "str":
                shown = key_node.value if isinstance(key_node, ScalarNode) else _kind(key_node)
                problem = f"a key must be a text, got {shown}; put it in quotes if meant"
                if shown == "<<":
                    problem = "merging with << is not part of recipes; write the keys out"
                self._report(path, problem, _line(key_node))
                continue
            key = self._text(key_node, path)
            place = (*path, key)
            if key in mapping:
                self._report(place, f"is given twice, first on line {self.lines[place]}", _line(key_node))
                continue
            self.lines[place] = _line(key_node)
            mapping[key] = self.value(value_node, place)
        return mapping

    def _scalar(self, node: ScalarNode, path: FieldPath) -> Any:
        if node.tag == _TAG + "str":
            return self._text(node, path)
        if node.tag == _TAG + "timestamp":
            self._report(path, f"{node.value} is read as a date; put it in quotes")
            return None
        if node.tag not in (_TAG + "null", _TAG + "bool", _TAG + "int", _TAG + "float"):
            self._report(path, f"the tag {_shown_tag(node)} is not allowed in a recipe")
            return None
        try:
            return self._construct.construct_object(node)
        except (ValueError, KeyError, YAMLError):
            self._report(path, f"{node.value[:40]!r} cannot be read as a value")
            return None

    def _text(self, node: ScalarNode, path: FieldPath) -> str:
        try:
            node.value.encode()
        except UnicodeEncodeError:
            self._report(path, "holds half of a character pair (a lone surrogate), which is no valid text")
            return ascii(node.value)
        return node.value

    def _report(self, path: FieldPath, what: str, line: int | None = None) -> None:
        self.problems.append(Problem(field=dotted(path), what=what, line=line or self.lines[path]))


def _bad_character(text: str, error: ReaderError) -> str:
    return f"not valid YAML: the character {text[error.position : error.position + 1]!a} is not allowed"


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def _kind(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "keys and values"
    return "a list" if isinstance(node, SequenceNode) else "a single value"


def _shown_tag(node: Node) -> str:
    tag = str(node.tag)
    return f"!!{tag.removeprefix(_TAG)}" if tag.startswith(_TAG) else tag
