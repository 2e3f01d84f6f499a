"""Rows: read them from files, folders and the hub, each with the place it came from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import DataError
from samestep.recipe.schema import HubData

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
EXTRA = "Install the extra: pip install 'samestep[data]'."


class Row(NamedTuple):
    """One row of the data."""

    file: str
    place: str
    """The place in the file: ":12" (a line) or ": row 3"."""
    values: dict[str, Any]
    """Column name to value."""

    @property
    def where(self) -> str:
        """What to name in an error, e.g. "data/train.jsonl:12"."""
        return self.file + self.place


def read_rows(source: str | HubData, *, limit: int | None = None) -> Iterator[Row]:
    """Rows of a .jsonl, .json, .csv or .parquet file, of a folder of them (by name), or of a hub data set.

    Rows come in the order of the file, at most `limit` of them. A .json file holds a list of objects, or one
    object a line. Raises DataError, naming file and line, for anything that cannot be read.
    """
    rows = _read_hub(source) if isinstance(source, HubData) else _read_path(Path(source))
    return islice(rows, limit)


def source_name(source: str | HubData) -> str:
    """What to call the source in a message."""
    return source.hub if isinstance(source, HubData) else source


def _read_path(path: Path) -> Iterator[Row]:
    for file in _files(path):
        try:
            yield from _READERS[file.suffix.lower()](file)
        except UnicodeDecodeError:
            raise DataError("is not UTF-8.", where=str(file), remedy="Save the file as UTF-8.") from None
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}.", where=str(file)) from None


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
            if not found:
                raise DataError(f"the folder holds no {', '.join(SUFFIXES)} file.", where=str(path))
            return found
        if not path.exists():
            raise DataError(
                "no such file or folder.",
                where=str(path),
                remedy="Correct the path in the recipe, or write {hub: NAME} for a data set of the hub.",
            )
        if not path.is_file():
            raise DataError(
                "is neither a file nor a folder.", where=str(path), remedy="Correct the path in the recipe."
            )
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}.", where=str(path)) from None
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f'data files end with {", ".join(SUFFIXES)}, not "{path.suffix}".', where=str(path))
    return [path]


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = Row(str(path), f":{number}", {})
                yield row._replace(values=_json_object(_parse_json(line, row.where), row.where))


def _read_json(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        text = file.read()
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(path)
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"broken JSON: {error.msg}.", where=f"{path}:{error.lineno}") from None
    except RecursionError:
        raise DataError("JSON nested too deeply.", where=str(path)) from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise DataError(f"broken JSON: {error}.", where=str(path)) from None
    for number, value in enumerate(values, start=1):
        row = Row(str(path), f": row {number}", {})
        yield row._replace(values=_json_object(value, row.where))


def _parse_json(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"broken JSON: {error.msg} (character {error.colno}).", where=where, remedy="Every line holds one object."
        ) from None
    except RecursionError:
        raise DataError("JSON nested too deeply.", where=where) from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise DataError(f"broken JSON: {error}.", where=where) from None


def _json_object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"a row is an object of columns, not a {type(value).__name__}.",
            where=where,
            remedy='Write {"column": value, ...}.',
        )
    return value


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        try:
            for fields in reader:
                where = f"{path}:{reader.line_num}"
                if not fields:
                    continue
                if header is None:
                    header = _csv_header(fields, where)
                elif len(fields) != len(header):
                    raise DataError(f"{len(fields)} fields under {len(header)} columns.", where=where)
                else:
                    yield Row(str(path), f":{reader.line_num}", dict(zip(header, fields, strict=True)))
        except csv.Error as error:
            raise DataError(f"broken CSV: {error}.", where=f"{path}:{reader.line_num}") from None


def _csv_header(names: list[str], where: str) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f'column "{twice[0]}" occurs twice in the header.', where=where)
    return names


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet needs the package pyarrow.", where=str(path), remedy=EXTRA) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(str(path), f": row {number}", values)
    except pyarrow.ArrowException as error:
        raise DataError(f"broken Parquet: {_first_line(error)}", where=str(path)) from None


def _read_hub(source: HubData) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise DataError("a data set of the hub needs the package datasets.", where=source.hub, remedy=EXTRA) from None
    try:
        rows = datasets.load_dataset(source.hub, source.name, split=source.split)
    except Exception as error:  # the package raises errors of many libraries: all mean that there are no rows
        raise DataError(
            f"cannot be loaded from the hub: {_first_line(error)}",
            where=source.hub,
            remedy="Check data.path.hub, name and split, and the network.",
        ) from None
    for number, values in enumerate(rows, start=1):
        yield Row(source.hub, f": row {number}", dict(values))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_READERS = {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
