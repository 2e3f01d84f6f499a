"""Readers, and what they say about broken input."""

from __future__ import annotations

import builtins
import json
import sys
from types import SimpleNamespace

import pytest

from samestep.data import prepare
from samestep.data.files import read_rows
from samestep.errors import DataError
from samestep.recipe.schema import Data, HubData

ROWS = [{"prompt": "a", "completion": " b"}, {"prompt": 'ü\n"x"', "completion": " c"}]


def values(source, limit=None):
    return [row.values for row in read_rows(source, limit=limit)]


def test_the_same_rows_from_every_kind_of_file(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "bom.jsonl").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "lines.json").write_text(lines, encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    (tmp_path / "a.csv").write_text('prompt,completion\na, b\n"ü\n""x""", c\n', encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for file in tmp_path.iterdir():
        assert values(str(file)) == ROWS, file.name


def test_places(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "b.csv").write_text('a\n"x\ny"\nz\n')
    (tmp_path / "c.json").write_text('[{"a": 1}, {"a": 2}]')
    places = [row.where.removeprefix(f"{tmp_path}/") for row in read_rows(str(tmp_path))]
    assert places == ["a.jsonl:1", "a.jsonl:3", "b.csv:3", "b.csv:4", "c.json: row 1", "c.json: row 2"]


def test_a_folder_by_name_without_other_files(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "README.md").write_text("no data")
    assert [row["text"] for row in values(str(tmp_path))] == ["a", "b", "c"]
    assert [row["text"] for row in values(str(tmp_path), limit=2)] == ["a", "b"]


def test_limit_reads_no_further(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{broken\n')
    assert values(str(tmp_path / "a.jsonl"), limit=1) == [{"a": 1}]


def test_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = list(read_rows(HubData(hub="who/what", name="main", split="test")))
    assert [row.where for row in rows] == ["who/what: row 1", "who/what: row 2"]
    assert [row.values["text"] for row in rows] == ["a", "b"]
    assert asked == [(("who/what", "main"), {"split": "test"})]


def test_hub_failures(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network\nmore lines")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"^who/what: cannot be loaded from the hub: no network") as caught:
        list(read_rows(HubData(hub="who/what")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("package", "source"), [("datasets", HubData(hub="who/what")), ("pyarrow", "rows.parquet")])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, package, source):
    real_import = builtins.__import__

    def no_package(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_package)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=rf"{package}.*samestep\[data\]"):
        list(read_rows(source if isinstance(source, HubData) else str(tmp_path / source)))


PAIR = '{"prompt": "a", "completion": " b"}\n'
TURNS = '{"messages": [{"role": "user", "content": "a"}, %s]}\n'
PAIRS: dict[str, object] = {"format": "prompt_completion"}
CHATS: dict[str, object] = {"format": "messages"}

# name of the file, its content, changes of the data section, what the message has to hold
BROKEN: dict[str, tuple[str, str | bytes | None, dict[str, object], str]] = {
    "no file": ("x.jsonl", None, PAIRS, r"x\.jsonl: no such file or folder\. .*hub"),
    "unknown suffix": ("x.txt", "a", PAIRS, r'x\.txt: data files end with .*, not "\.txt"'),
    "empty file": ("x.jsonl", "", PAIRS, r"x\.jsonl: holds no rows"),
    "blank lines": ("x.jsonl", "\n \n", PAIRS, r"x\.jsonl: holds no rows"),
    "empty list": ("x.json", "[]", PAIRS, r"x\.json: holds no rows"),
    "csv header alone": ("x.csv", "prompt,completion\n", PAIRS, r"x\.csv: holds no rows"),
    "broken line": ("x.jsonl", PAIR + '{"prompt": "a",\n', PAIRS, r"x\.jsonl:2: broken JSON: .*character"),
    "line is a list": ("x.jsonl", PAIR + "[1, 2]\n", PAIRS, r"x\.jsonl:2: a row is an object of columns, not a list"),
    "line is nested": ("x.jsonl", "[" * 200_000, PAIRS, r"x\.jsonl:1: JSON nested too deeply"),
    "huge number": ("x.jsonl", '{"a": ' + "1" * 5000 + "}", PAIRS, r"x\.jsonl:1: broken JSON"),
    "broken list": ("x.json", '[{"prompt": "a"},\n{"prompt" 3}]', PAIRS, r"x\.json:2: broken JSON"),
    "nested list": ("x.json", "[" * 200_000, PAIRS, r"x\.json: JSON nested too deeply"),
    "huge number in a list": ("x.json", '[{"a": ' + "1" * 5000 + "}]", PAIRS, r"x\.json: broken JSON"),
    "list of texts": ("x.json", f'[{PAIR}, "a"]', PAIRS, r"x\.json: row 2: a row is an object of columns, not a str"),
    "one indented object": ("x.json", '{\n"data": []}', PAIRS, r"x\.json:1: broken JSON"),
    "not UTF-8": ("x.jsonl", b'{"prompt": "\xff"}', PAIRS, r"x\.jsonl: is not UTF-8"),
    "csv not UTF-8": ("x.csv", b"prompt,completion\na,\xff\n", PAIRS, r"x\.csv: is not UTF-8"),
    "csv too many fields": ("x.csv", "prompt,completion\na,b,c\n", PAIRS, r"x\.csv:2: 3 fields under 2 columns"),
    "csv too few fields": ("x.csv", "prompt,completion\na,b\na\n", PAIRS, r"x\.csv:3: 1 fields under 2 columns"),
    "csv open quote": ("x.csv", 'prompt,completion\n"a,b\n', PAIRS, r"x\.csv:2: broken CSV"),
    "csv column twice": ("x.csv", "prompt,prompt\na,b\n", PAIRS, r'x\.csv:1: column "prompt" occurs twice'),
    "not parquet": ("x.parquet", b"PAR1 no", PAIRS, r"x\.parquet: broken Parquet"),
    "missing column": (
        "x.jsonl",
        '{"prompts": "a", "completion": "b"}',
        PAIRS,
        r'x\.jsonl: there is no column "prompt"; found: prompts, completion\. Did you mean "prompts"\? '
        r"Name it in data\.columns: \{prompt: prompts\}",
    ),
    "missing renamed input": ("x.jsonl", '{"instruction": "a", "output": "b"}', {"columns": {"input": "ctx"}}, '"ctx"'),
    "column of no format": ("x.jsonl", PAIR, PAIRS | {"columns": {"promt": "prompt"}}, r'data\.columns: .*"promt"'),
    "column is a list": ("x.jsonl", PAIR + '{"prompt": ["a"]}', PAIRS, r'x\.jsonl:2: column "prompt" holds a list'),
    "half a surrogate pair": (
        "x.jsonl",
        PAIR + '{"prompt": "a\\ud800", "completion": "b"}',
        PAIRS,
        r"x\.jsonl:2: character '\\ud800' is half of a surrogate pair",
    ),
    "messages are text": ("x.jsonl", '{"messages": "hi"}', CHATS, r"x\.jsonl:1: messages are a list .* not a str"),
    "message is text": ("x.jsonl", TURNS % '"hi"', CHATS, r"x\.jsonl:1: message 2: a message is \{role, content\}"),
    "other keys": (
        "x.jsonl",
        TURNS % '{"from": "a", "value": "b"}',
        CHATS,
        "message 2: the message has no role; it has",
    ),
    "no content": ("x.jsonl", TURNS % '{"role": "assistant"}', CHATS, "message 2: the message has no content"),
    "content in parts": ("x.jsonl", TURNS % '{"role": "user", "content": []}', CHATS, "no content that is text"),
    "open brace": ("x.jsonl", PAIR, {"template": "{prompt", "loss_on": "all"}, r"data\.template: "),
    "attribute": ("x.jsonl", PAIR, {"template": "{prompt.x}", "loss_on": "all"}, r"data\.template: .*prompt\.x"),
    "no column": ("x.jsonl", PAIR, {"template": "prompt", "loss_on": "all"}, r"data\.template: .*column"),
    "unknown column": ("x.jsonl", PAIR, {"template": "{promp}", "loss_on": "all"}, r'no column "promp"; found: prompt'),
    "no marker": ("x.jsonl", PAIR, {"template": "{prompt}"}, r"data\.response_marker: .*data\.loss_on: all"),
    "no template": ("x.jsonl", PAIR, PAIRS | {"response_marker": "A:"}, r"data\.response_marker: .*data\.template"),
    "no held-out file": ("x.jsonl", PAIR, PAIRS | {"held_out": "nowhere.jsonl"}, r"^nowhere\.jsonl: no such file"),
}


@pytest.mark.parametrize(("name", "content", "changes", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_input(tmp_path, tokenizer, name, content, changes, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = Data.model_validate({"path": str(path), **changes})
    with pytest.raises(DataError, match=message) as caught:
        prepare(data, tokenizer, seed=0)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_folder_without_data(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"the folder holds no \.jsonl"):
        prepare(Data(path=str(tmp_path)), tokenizer, seed=0)


def test_a_later_file_of_a_folder_without_the_column(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(PAIR)
    (tmp_path / "b.jsonl").write_text('{"question": "a", "completion": " b"}')
    with pytest.raises(DataError, match=r'b\.jsonl: there is no column "prompt"'):
        prepare(Data(path=str(tmp_path), format="prompt_completion"), tokenizer, seed=0)


def test_template_that_refuses_the_conversation(write, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write({"messages": [{"role": "assistant", "content": "a"}]})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template refuses .*roles must alternate"):
        prepare(Data(path=path, format="messages"), tokenizer, seed=0)
