"""The oracle's answers about one model, kept beside the recordings in ``reference.jsonl``, so that judging needs no oracle.

JSON Lines: a header with the model's hash, then one line per query. Lines are only appended. Readers refuse a book that
was cut off in the middle of a line. A book that was cut off between lines lacks answers: the verdicts that need them
become `untestable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar, final

import msgspec

from harness.contract.errors import RecordingError, UsageError
from harness.contract.messages import Message
from harness.records import reference
from harness.records.reference import key
from harness.records.run_folder import references_in

FORMAT = 1
"""Version of this file format. A reader refuses any other."""

ROUNDING = 1e-4
"""Nats by which two machines' answers to one query may differ. The checks treat smaller differences as a tie."""

_NOISE = f"{reference.METHOD_OF[reference.NoiseRequest]}:"

_A = TypeVar("_A", bound=Message)


class BookHeader(msgspec.Struct, frozen=True, kw_only=True, tag_field="book", tag="reference"):
    """The first line. `model_sha256` is the hash of the checkpoint that answered."""

    format: int = FORMAT
    model_sha256: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One answered query. Query and answer stay JSON until they are needed."""

    key: str
    query: msgspec.Raw
    answer: msgspec.Raw


_header_decoder = msgspec.json.Decoder(BookHeader)
_entry_decoder = msgspec.json.Decoder(Entry)
_encoder = msgspec.json.Encoder()


def _read(path: Path) -> tuple[BookHeader, Iterator[Entry]]:
    """A book's header and an iterator over its entries. Raises `RecordingError` if the book is not whole."""
    lines = _lines(path)
    header = next(lines, None)
    if not isinstance(header, BookHeader):
        raise RecordingError(f"{path} is empty: not a reference book", next_step="run it again")
    return header, (line for line in lines if isinstance(line, Entry))


def _lines(path: Path) -> Iterator[BookHeader | Entry]:
    """The header, then the entries. Raises `RecordingError` with the line's number."""
    try:
        file = path.open("rb")
    except OSError as e:
        raise RecordingError(f"cannot read {path}: {e.strerror}", next_step="judge a run's own folder") from e
    with file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                raise RecordingError(
                    f"{path}:{number}: reference answers are cut off in the middle of a line",
                    next_step="the run was killed or the disk is full; run it again",
                )
            try:
                line = _header_decoder.decode(raw) if number == 1 else _entry_decoder.decode(raw)
            except msgspec.DecodeError as e:
                raise RecordingError(f"{path}:{number}: not a line of a reference book: {e}") from e
            if isinstance(line, BookHeader) and line.format != FORMAT:
                raise RecordingError(
                    f"{path} has format {line.format}, this harness reads {FORMAT}",
                    next_step="judge it with the harness that recorded it",
                )
            yield line


def _agree(left: Any, right: Any) -> bool:
    """True if two JSON values are equal. Floats may differ by `ROUNDING`."""
    match left, right:
        case dict(), dict():
            return left.keys() == right.keys() and all(_agree(left[name], right[name]) for name in left)
        case list(), list():
            return len(left) == len(right) and all(map(_agree, left, right))
        case float(), float():
            return math.isclose(left, right, rel_tol=0, abs_tol=ROUNDING)
        case _:
            return bool(left == right)


@final
class Book:
    """A `ReferenceBook` in a file: `create` one while driving, `load` it to judge. Leaving the context closes it."""

    def __init__(self, path: Path, model_sha256: str, answers: dict[str, msgspec.Raw], file: IO[bytes] | None) -> None:
        self.path = path
        self.model_sha256 = model_sha256
        self._answers = answers
        self._file = file

    @classmethod
    def create(cls, path: Path, model_sha256: str, known: dict[str, msgspec.Raw] | None = None) -> Self:
        """A new book. Raises `RecordingError` if the file exists: answers of two runs are never mixed.

        `known` holds the same oracle's earlier answers by key. They are not written to the file; `add` extends `known` too.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("xb")
        except FileExistsError as e:
            raise RecordingError(f"{path} exists already", next_step="give another --run-dir") from e
        book = cls(path, model_sha256, {} if known is None else known, file)
        book._write(BookHeader(model_sha256=model_sha256))
        return book

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a whole book. Raises `RecordingError` with the line's number if it is not whole."""
        header, entries = _read(path)
        return cls(path, header.model_sha256, {entry.key: entry.answer.copy() for entry in entries}, None)

    @classmethod
    def model_of(cls, path: Path) -> str:
        """The hash of the model that a book is about. Raises `RecordingError` as `load` does, as far as it reads: the header."""
        return _read(path)[0].model_sha256

    @classmethod
    def united(cls, path: Path, books: Sequence[Path], known: dict[str, msgspec.Raw] | None = None) -> Self:
        """A new book at `path` with the answers of all `books`, open for more. The first answer to each query stands.

        All books must be about one model; `known` as in `create`. Raises `RecordingError` for a book that is not whole, and for two
        answers to one query that differ by more than `ROUNDING`. Answers about noise may differ: each machine rounds in its own way.
        """
        origins: dict[str, Path] = {}
        united = cls.create(path, cls.model_of(books[0]), known)
        try:
            for source in books:
                for entry in _read(source)[1]:
                    name = entry.key
                    if name not in origins:
                        united._write(entry)
                        united._answers[name] = entry.answer.copy()
                        origins[name] = source
                    elif not name.startswith(_NOISE) and not _agree(
                        msgspec.json.decode(united._answers[name]), msgspec.json.decode(entry.answer)
                    ):
                        raise RecordingError(
                            f"{source} and {origins[name]} answer {name} differently",
                            next_step="make the runs with one reference environment",
                        )
        except BaseException:
            united.close()
            raise
        return united

    @classmethod
    def of(cls, model_sha256: str, folder: Path) -> Self:
        """The folder's book about this model; an empty book if the folder has none at all.

        Raises `RecordingError` for a book that is not whole, and UsageError if all books are about other models.
        """
        books = [cls.load(path) for path in references_in(folder)]
        found = next((book for book in books if book.model_sha256 == model_sha256), None)
        if books and found is None:
            raise UsageError(
                f"{folder} answers for another model than was recorded: {', '.join(b.path.name for b in books)}",
                next_step="judge a recording with the reference answers of its own run",
            )
        return found or cls.empty()

    @classmethod
    def empty(cls) -> Self:
        """A book without answers and without a file: checks that need the oracle are untestable."""
        return cls(Path("reference.jsonl"), "", {}, None)

    def add(self, query: reference.Query, answer: reference.Answer | reference.Refusal) -> None:
        """Keep an answer. A known query is not written again.

        Raises TypeError if the answer is not of the query's kind.
        """
        name = key(query)
        _, expected = reference.QUERIES[name.partition(":")[0]]
        if not isinstance(answer, expected | reference.Refusal):
            raise TypeError(f"{name} is answered by {expected.__name__}, not by {type(answer).__name__}")
        if name not in self._answers:
            raw = msgspec.Raw(_encoder.encode(answer))
            self._write(Entry(key=name, query=msgspec.Raw(_encoder.encode(query)), answer=raw))
            self._answers[name] = raw

    def take_over(self, queries: Iterable[reference.Query], source: Book) -> int:
        """Add the answers that `source` has to these queries. Returns how many it had."""
        found = [(key(query), query) for query in queries if key(query) in source._answers]
        for name, query in found:
            answer = source._answers[name]
            self._write(Entry(key=name, query=msgspec.Raw(_encoder.encode(query)), answer=answer))
            self._answers[name] = answer
        return len(found)

    def missing(self, queries: Iterable[reference.Query]) -> list[reference.Query]:
        """The queries without an answer, each once, in order."""
        unknown = {name: query for query in queries if (name := key(query)) not in self._answers}
        return list(unknown.values())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._answers)

    def score(self, request: reference.ScoreRequest) -> reference.Score:
        return self._answer(request, reference.Score)

    def next(self, request: reference.NextRequest) -> reference.Next:
        return self._answer(request, reference.Next)

    def experts(self, request: reference.ExpertsRequest) -> reference.Experts:
        return self._answer(request, reference.Experts)

    def expected_digests(self, request: reference.ExpectedDigestsRequest) -> dict[str, str]:
        return self._answer(request, reference.ExpectedDigests).digests

    def noise(self, request: reference.NoiseRequest) -> reference.Noise:
        return self._answer(request, reference.Noise)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        asked = reference.RenderRequest(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self._answer(asked, reference.Tokens).tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return self._answer(
            reference.DecodeRequest(tokens=tokens, skip_special_tokens=skip_special_tokens), reference.Text
        ).text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._answer(
            reference.EncodeRequest(text=text, add_special_tokens=add_special_tokens), reference.Tokens
        ).tokens

    def _answer(self, query: reference.Query, kind: type[_A]) -> _A:
        name = key(query)
        raw = self._answers.get(name)
        if raw is None:
            raise reference.UnansweredQuery(f"the reference was not asked {name}")
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as e:
            with suppress(msgspec.DecodeError):
                refusal = msgspec.json.decode(raw, type=reference.Refusal)
                raise reference.UnansweredQuery(f"the reference failed at {name}: {refusal.reason}") from None
            raise RecordingError(f"{self.path}: the answer to {name} is not a {kind.__name__}: {e}") from e

    def _write(self, line: BookHeader | Entry) -> None:
        if self._file is None:
            raise RecordingError(f"{self.path} is not open for writing")
        self._file.write(_encoder.encode(line) + b"\n")
        self._file.flush()
