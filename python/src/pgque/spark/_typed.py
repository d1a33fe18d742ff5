"""Turn payloads of JSON into columns, by pyarrow's reader: no Python object for each value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import PgqueBadArgumentError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType

CORRUPT = "_corrupt"

# Rows that are read again one piece after the other, to find those that do not parse
_PIECE = 1024


def check_type(name: str, kind: DataType) -> None:
    """Refuse a type that pyarrow does not read from JSON, or reads differently from Spark."""
    from pyspark.sql import types as t

    if isinstance(kind, t.ArrayType):
        check_type(name, kind.elementType)
    elif isinstance(kind, t.StructType):
        for part in kind.fields:
            if not part.nullable:
                raise PgqueBadArgumentError(
                    f"column {name}.{part.name} of the payload cannot be NOT NULL: it is null where it is"
                    " missing"
                )
            check_type(f"{name}.{part.name}", part.dataType)
    elif not isinstance(
        kind, t.StringType | t.BooleanType | t.NumericType | t.DateType | t.TimestampType | t.TimestampNTZType
    ):
        raise PgqueBadArgumentError(
            f"column {name} of the payload has type {kind.simpleString()}, which the source does not parse."
            " Read the payload, and use from_json"
        )


class Parser:
    """Parse payloads into columns. A JSON object parses if its fields have the types of the columns; a field
    that is missing or null is null, and so is each column of a payload that is null."""

    def __init__(self, columns: list[pa.Field]) -> None:
        import pyarrow as pa
        import pyarrow.json

        self._columns = pa.struct(columns)
        self._read_as = _readable(self._columns)
        self._options = pyarrow.json.ParseOptions(
            explicit_schema=pa.schema([("p", self._read_as), ("i", pa.int64())]),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        )

    def __call__(self, payloads: pa.StringArray) -> tuple[list[pa.Array], dict[int, str]]:
        """Return the columns, and by row the reason why a payload does not parse; its columns are null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # A line is an object with the payload in two places, as a field and as an element: what is right in
        # both is one value. `{}, "x": {}` is right as a field only, `{}, {}` as elements.
        self._rows = pa.array(range(len(payloads)), pa.int64())
        lines = pc.binary_join_element_wise(
            '{"p":', payloads, ',"again":[', payloads, '],"i":', self._rows.cast(pa.string()), "}\n", "",
            null_handling="replace", null_replacement="null",
        )  # fmt: skip
        _, starts, self._text = lines.buffers()
        self._starts = pa.Array.from_buffers(pa.int32(), len(lines) + 1, [None, starts])
        found: list[pa.StructArray] = []
        bad: dict[int, str] = {}
        left = [(0, len(payloads))] if len(payloads) else []
        while left:
            start, stop = left.pop()
            rows = self._read(start, stop)
            if not isinstance(rows, str):
                found.append(rows)
            elif stop - start == 1:
                bad[start] = _reason(rows)
                found.append(pa.nulls(1, self._read_as))
            else:
                left += reversed(_cut(start, stop, rows))
        whole = pa.concat_arrays(found) if found else pa.nulls(0, self._read_as)
        return whole.cast(self._columns).flatten(), bad

    def _read(self, start: int, stop: int) -> pa.StructArray | str:
        """Return the values of the payloads of some rows, or the reason why one of them does not parse."""
        import pyarrow as pa
        import pyarrow.json

        first, end = self._starts[start].as_py(), self._starts[stop].as_py()
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(self._text.slice(first, end - first)),
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=end - first),
                parse_options=self._options,
            )
        except pa.ArrowInvalid as error:
            return str(error)
        if not _in_one(table["i"]).equals(self._rows.slice(start, stop - start)):
            return "It is not one JSON object."
        return _in_one(table["p"])


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    return pa.concat_arrays(column.chunks)


def _readable(kind: pa.DataType) -> pa.DataType:
    """Return the type that pyarrow reads in place of a type: it reads dates as timestamps."""
    import pyarrow as pa

    if pa.types.is_date(kind):
        return pa.timestamp("s")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_readable(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_readable(field.type)) for field in kind])
    return kind


def _cut(start: int, stop: int, problem: str) -> list[tuple[int, int]]:
    """Return the pieces of rows that did not parse. A row that pyarrow names is one of them; it is no more
    than a guess, since its text can hold the payload's."""
    if stop - start > _PIECE:
        return [(first, min(first + _PIECE, stop)) for first in range(start, stop, _PIECE)]
    named = re.search(r" in row (\d{1,9})$", problem)
    at = start + int(named[1]) if named is not None else stop
    if at >= stop:
        at = (start + stop) // 2
    return [piece for piece in ((start, at), (at, at + 1), (at + 1, stop)) if piece[0] < piece[1]]


def _reason(problem: str) -> str:
    text = re.sub(r" in row \d+$", "", problem.removeprefix("JSON parse error: "))
    # PostgreSQL's text cannot hold this character.
    text = text.replace("\0", "\\0")
    return f"payload does not parse: {text.replace('Column(/p/', 'Column(').replace('Column(/p)', 'It')}"


def text(strings: pa.StringArray, raw: pa.BinaryArray) -> pa.StringArray:
    """Return payloads as text: bytes that are no UTF-8 become a text that is no JSON."""
    import pyarrow as pa

    if raw.null_count == len(raw):
        return strings
    both = zip(strings.to_pylist(), raw.to_pylist(), strict=True)
    return pa.array([given if data is None else _decoded(data) for given, data in both], pa.string())


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"no UTF-8: {data.decode(errors='backslashreplace')}"
