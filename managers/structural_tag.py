"""Structural tags: free text in which a trigger opens a tag whose content follows a schema. They become a Lark grammar.

Two forms are read, which SGLang and vLLM share. The older form has `structures` (each with `begin`, `schema` and `end`)
and `triggers`. The newer form has a `format`, an object of one of these types:

    const_string {value}, json_schema {json_schema, style}, regex {pattern}, any_text {excludes}
    sequence {elements}, or {elements}, optional {content}, plus {content}, star {content}, tag {begin, content, end}
    triggered_tags {triggers, tags, at_least_one, stop_after_first}
    tags_with_separator {tags, separator, at_least_one, stop_after_first}

The `style` of JSON is `json` or `qwen_xml`. The `end` of a tag may be a list of texts. Free text ends where a trigger
or the end of its tag is complete, so `any_text` must be the last element of a sequence or the content of a tag. A
`regex` takes as much as it can, so what follows it must not begin like it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..srt.text.answer.constraint import fits_xml
from .json_schema import closed, with_exact_numbers, with_real_days

_ANY = r"(.|\n)*"
_MAX_DEPTH = 32
_KEYS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "regex": {"pattern"},
    "any_text": set[str](),
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags"},
    "tags_with_separator": {"tags", "separator"},
}
_FURTHER = {
    "json_schema": {"style"},
    "any_text": {"excludes"},
    "triggered_tags": {"at_least_one", "stop_after_first"},
    "tags_with_separator": {"at_least_one", "stop_after_first"},
}
"""Fields that a type need not have."""
_REPEATS = {"optional": "?", "plus": "+", "star": "*"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/&~-]")


def lark_of(text: str, special_texts: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """The Lark grammar of a structural tag.

    `special_texts`: text -> id of each special token. `json_options`: how the library writes JSON (`x-guidance`).
    Raises ValueError.
    """
    return _Lark(special_texts, json_options).render(form_of(text))


def form_of(text: str) -> Any:
    """The format of a structural tag. The older form is translated. Raises ValueError."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError(f"a structural tag must be an object, got {type(given).__name__}")
    unknown = given.keys() - {"type", "structures", "triggers", "format"}
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}")
    if ("format" in given) == ("structures" in given):
        raise ValueError("exactly one of format and structures is required")
    return given["format"] if "format" in given else _newer_form(given)


def schemas_in(form: Any, depth: int = 0) -> Iterator[Any]:
    """The JSON schemas in a format. Raises ValueError for a format that is not valid."""
    kind = _kind(form, depth)
    if kind == "json_schema":
        yield form["json_schema"]
    parts = [form["content"]] if "content" in _KEYS[kind] else []
    for name in ("elements", "tags"):
        if name in _KEYS[kind]:
            parts += _list(form, name)
    for part in parts:
        yield from schemas_in(part, depth + 1)


def _newer_form(given: dict[str, Any]) -> dict[str, Any]:
    """The older form as a format."""
    tags = []
    for one in _list(given, "structures"):
        if not isinstance(one, dict) or one.keys() - {"begin", "schema", "end"}:
            raise ValueError(f"a structure must be an object with no fields but begin, schema and end, got {one!r:.80}")
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Lark:
    """Writes the rules of one grammar."""

    def __init__(self, special_texts: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self._special = {text: token for text, token in special_texts.items() if text}
        self._json_options = json_options
        self._rules: list[str] = []

    def render(self, form: Any) -> str:
        start = self._rule(form, is_last=True, depth=0)
        return "\n".join([f"start: {start}", f"TEXT: /{_ANY}/", *self._rules])

    def _add(self, body: str, *, prefix: str = "r", mark: str = "") -> str:
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}{mark}: {body}")
        return name

    def _rule(self, form: Any, *, is_last: bool, depth: int, avoid: Sequence[str] = ()) -> str:
        """An expression for a format. `is_last`: nothing follows it in its tag or output. `avoid`: the beginnings of
        what may stand in its place. Free text must not begin so, because the library would not look at both ways."""
        kind = _kind(form, depth)
        if kind == "const_string":
            return self._literal(_text(form, "value"))
        if kind == "json_schema":
            return self._json(form)
        if kind == "regex":
            return self._add(f"/{_slashed(_text(form, 'pattern'))}/", prefix="P")
        if kind == "any_text":
            if form.get("excludes"):
                raise ValueError("excludes of any_text must be among the ends of its tag")
            if not is_last:
                raise ValueError("any_text must be the last element of a sequence or the content of a tag")
            return "TEXT"
        if kind in _REPEATS:
            content = self._rule(form["content"], is_last=False, depth=depth + 1, avoid=avoid)
            return f"({content}){_REPEATS[kind]}"
        if kind == "sequence":
            parts = _list(form, "elements")
            rules = []
            for i, part in enumerate(parts, start=1):
                others = avoid if i == 1 else ()
                if _kind(part, depth + 1) in ("optional", "star"):
                    others = _beginnings({"type": "sequence", "elements": parts[i:]}, depth + 1)
                last = is_last and i == len(parts)
                rules.append(self._rule(part, is_last=last, depth=depth + 1, avoid=others))
            return " ".join(rules)
        if kind == "or":
            parts = [self._rule(part, is_last=is_last, depth=depth + 1) for part in _list(form, "elements")]
            if not parts:
                raise ValueError("elements of or must not be empty")
            return self._add(" | ".join(parts))
        if kind == "tag":
            return self._tag(form, depth, avoid=avoid)
        if kind == "tags_with_separator":
            return self._separated(form, depth)
        if not is_last:
            raise ValueError("triggered_tags must be the last element of a sequence")
        return self._triggered(form, depth)

    def _tag(self, form: Any, depth: int, *, trigger: str = "", lead: str = "", avoid: Sequence[str] = ()) -> str:
        """A tag after its trigger, which is a beginning of `begin`. `lead`: a text before it, in one piece with it."""
        if _kind(form, depth) != "tag":
            raise ValueError(f"tags must have type tag, got {form['type']!r}")
        begin = self._literal(lead + _text(form, "begin", may_be_empty=True)[len(trigger) :])
        ends = _ends(form)
        content = form["content"]
        kind = _kind(content, depth + 1)
        excludes = _list(content, "excludes") if "excludes" in content else []
        if kind == "any_text" and ends and all(text in ends for text in excludes):
            return self._add(f"{begin} {self._until(ends, () if begin else avoid)}")
        if kind == "regex" and ends and not any(self._pieces(end)[0] in self._special for end in ends):
            # One terminal: a terminal of its own for the pattern would not stop where the end begins.
            end = " | ".join(map(json.dumps, ends))
            terminal = self._add(f"/{_slashed(_text(content, 'pattern'))}/ ({end})", prefix="P")
            return self._add(f"{begin} {terminal}")
        body = self._rule(content, is_last=not ends, depth=depth + 1)
        return self._add(f"{begin} {body} {self._one_of(ends)}")

    def _one_of(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self._literal, texts))})" if texts else ""

    def _until(self, ends: Sequence[str], avoid: Sequence[str] = ()) -> str:
        """Free text up to and with one of `ends`. It does not begin like one of `avoid`."""
        special = [end for end in ends if self._pieces(end)[0] in self._special]
        plain = [end for end in ends if end not in special]
        ways = [f"TEXT {self._literal(end)}" for end in special]
        if any(len(self._pieces(end)) > 1 for end in plain):
            raise ValueError(f"a special token in {plain[0]!r:.40} must be at its beginning")
        if plain:
            text = f"/{_ANY}({'|'.join(map(_pattern_of, plain))})/"
            # A special token is no text, so nothing else can be taken for it.
            other = [one for one in avoid if self._pieces(one)[0] not in self._special]
            if other:
                text = self._add(f"{text} & ~/({'|'.join(map(_pattern_of, other))}){_ANY}/", prefix="U")
            ways.append(self._add(text, prefix="u", mark="[lazy]"))
        return f"({' | '.join(ways)})"

    def _triggered(self, form: Any, depth: int) -> str:
        tags = _list(form, "tags")
        calls = []
        triggers = _list(form, "triggers")
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise ValueError("triggers must be texts that are not empty")
            own = [tag for tag in tags if _trigger_of(tag, triggers) == trigger]
            if own:
                bodies = [self._tag(tag, depth + 1, trigger=trigger) for tag in own]
                calls.append(f"{self._until([trigger])} ({' | '.join(bodies)})")
        for tag in tags:
            if _trigger_of(tag, triggers) is None:
                raise ValueError(f"the tag {_text(tag, 'begin')!r} begins with none of the triggers")
        if not calls:
            return "TEXT"
        call = self._add(" | ".join(calls))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else self._add(f"{call} | TEXT")
        return f"{call}{'+' if form.get('at_least_one') else '*'} TEXT"

    def _separated(self, form: Any, depth: int) -> str:
        tags = _list(form, "tags")
        if not tags:
            raise ValueError("tags must not be empty")
        several = self._add(" | ".join(self._tag(tag, depth + 1) for tag in tags))
        if not form.get("stop_after_first"):
            separator = _text(form, "separator", may_be_empty=True)
            later = self._add(" | ".join(self._tag(tag, depth + 1, lead=separator) for tag in tags))
            several = self._add(f"{several} {later}*")
        return several if form.get("at_least_one") else f"({several})?"

    def _json(self, form: Mapping[str, Any]) -> str:
        schema, style = form["json_schema"], form.get("style", "json")
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a JSON schema must be an object, got {type(schema).__name__}")
        if schema is False:
            raise ValueError("the schema false allows no value")
        given = schema if isinstance(schema, dict) else {}
        schema = closed(given)
        if style == "qwen_xml":
            if not fits_xml(given):
                raise ValueError("style qwen_xml does not enforce all of this schema")
            return self._qwen_xml(schema)
        if style != "json":
            raise ValueError(f"style must be json or qwen_xml, got {style!r:.40}")
        schema = with_exact_numbers(with_real_days(schema))
        return f"%json {json.dumps({**schema, 'x-guidance': dict(self._json_options)})}"

    def _qwen_xml(self, schema: Mapping[str, Any]) -> str:
        """The members of an object as `<parameter=NAME>`, value, `</parameter>`, on lines of their own."""
        properties = schema.get("properties")
        end = "\n</parameter>"
        if properties == {} and schema.get("additionalProperties") is False:
            return '""'
        if not isinstance(properties, dict) or not properties:
            rest = f'/[^<>\\n]+/ ">\\n" {self._until([end])}'
            return self._add(f'"" | "<parameter=" {rest} ("\\n<parameter=" {rest})*')
        first, later = '""', '""'
        for name, value in reversed(properties.items()):
            begin = f"<parameter={name}>\n"
            plain = isinstance(value, dict) and value.get("type") == "string" and not {"enum", "const"} & value.keys()
            texts = value.get("enum", [value.get("const")]) if isinstance(value, dict) else []
            if plain:
                content = self._until([end])
            elif isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
                choices = " | ".join(self._literal(text) or '""' for text in texts)
                content = f"({choices}) {json.dumps(end)}"
            else:
                part = value if isinstance(value, dict) else {}
                inner = {**part, **({"$defs": schema["$defs"]} if "$defs" in schema else {})}
                content = f"{self._json({'json_schema': inner})} {json.dumps(end)}"
            must = name in schema.get("required", ())
            after = later
            # A line break is one piece with what follows it, because the text after the last member has one, too.
            later = self._add(f"{json.dumps(chr(10) + begin)} {content} {after}" + ("" if must else f" | {after}"))
            first = self._add(f"{json.dumps(begin)} {content} {after}" + ("" if must else f" | {first}"))
        return first

    def _literal(self, text: str) -> str:
        """A text as an expression. A special token in it is named by its id."""
        if not text:
            return ""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)
            for piece in self._pieces(text)
        )

    def _pieces(self, text: str) -> list[str]:
        """A text, cut before and after its special tokens."""
        if not self._special:
            return [text]
        names = "|".join(re.escape(name) for name in sorted(self._special, key=len, reverse=True))
        return [piece for piece in re.split(f"({names})", text) if piece]


def _kind(form: Any, depth: int) -> str:
    """The type of a format, after a check of its fields."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"formats must be nested at most {_MAX_DEPTH} deep")
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"a format must have a type of {', '.join(_KEYS)}; got {kind!r}")
    unknown = form.keys() - _KEYS[kind] - {"type"} - _FURTHER.get(kind, set())
    missing = _KEYS[kind] - form.keys()
    if unknown or missing:
        raise ValueError(f"{kind} has {'no' if missing else 'an unknown'} field {min(missing or unknown)!r}")
    return kind


def _beginnings(form: Any, depth: int) -> list[str]:
    """The fixed texts that a format may begin with. It may begin with other texts, too."""
    kind = _kind(form, depth)
    if kind == "const_string":
        return [_text(form, "value")]
    if kind in ("tags_with_separator", "or"):
        parts = _list(form, "elements" if kind == "or" else "tags")
        return [text for part in parts for text in _beginnings(part, depth + 1)]
    if kind == "tag":
        begin = _text(form, "begin", may_be_empty=True)
        return [begin] if begin else _beginnings(form["content"], depth + 1)
    if kind in _REPEATS:
        return _beginnings(form["content"], depth + 1)
    found: list[str] = []
    for part in _list(form, "elements") if kind == "sequence" else ():
        found += _beginnings(part, depth + 1)
        if part["type"] not in ("optional", "star"):
            break
    return found


def _ends(form: Mapping[str, Any]) -> list[str]:
    """The texts that end a tag; none if it ends with its content."""
    end = form.get("end")
    ends = end if isinstance(end, list) else [end]
    if not all(isinstance(one, str) for one in ends) or not ends or ("" in ends and len(ends) > 1):
        raise ValueError(f"end must be a text or a list of texts, got {end!r:.40}")
    return [one for one in ends if one]


def _trigger_of(tag: Any, triggers: Sequence[str]) -> str | None:
    begin = _text(tag, "begin") if isinstance(tag, dict) else ""
    return next((trigger for trigger in triggers if begin.startswith(trigger)), None)


def _text(form: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    value = form.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ValueError(f"{name} must be a text{'' if may_be_empty else ' that is not empty'}, got {value!r:.40}")
    return value


def _list(form: Mapping[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {value!r:.40}")
    return value


def check_last_escape(pattern: str) -> None:
    """Raises ValueError if a regular expression ends within an escape, which llguidance would leave out."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("the regular expression ends with a backslash that escapes nothing")


def _slashed(pattern: str) -> str:
    """A regular expression between slashes: a slash in it is escaped, and so is a line break. Raises ValueError."""
    check_last_escape(pattern)
    plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda match: plain.get(match[0], match[0]), pattern, flags=re.DOTALL)


def _pattern_of(text: str) -> str:
    """A regular expression, between slashes, for a text."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")
