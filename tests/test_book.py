"""The book keeps the oracle's answers after the oracle ends, and never makes up a missing answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.contract.errors import RecordingError
from harness.records import reference
from harness.records.book import Book

SCORE = reference.Score(logprobs=[-0.5], ranks=[0], margins=[1.5])
ASKED = [
    (reference.ScoreRequest(version=1, prompt=[1, 2], tokens=[3]), SCORE),
    (reference.NextRequest(version=0, prompt=[1]), reference.Next(logprobs=[-0.1, -2.3])),
    (reference.ExpectedDigestsRequest(version=2), reference.ExpectedDigests(digests={"weight": "ab:2x2:float32"})),
    (reference.RenderRequest(messages=[{"role": "user", "content": "hé"}]), reference.Tokens(tokens=[7, 8])),
    (reference.DecodeRequest(tokens=[7], skip_special_tokens=True), reference.Text(text="h")),
    (reference.EncodeRequest(text="h", add_special_tokens=False), reference.Tokens(tokens=[7])),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "reference.jsonl"
    with Book.create(path, "model-hash") as book:
        for query, answer in ASKED:
            book.add(query, answer)
    return path


def test_every_kind_of_answer_is_read_back_typed(path: Path):
    book = Book.load(path)
    assert book.model_sha256 == "model-hash"
    assert book.score(reference.ScoreRequest(version=1, prompt=[1, 2], tokens=[3])) == SCORE
    assert book.next(reference.NextRequest(version=0, prompt=[1])).logprobs == [-0.1, -2.3]
    assert book.expected_digests(reference.ExpectedDigestsRequest(version=2)) == {"weight": "ab:2x2:float32"}
    assert book.render([{"role": "user", "content": "hé"}]) == [7, 8]
    assert book.decode([7], skip_special_tokens=True) == "h"
    assert book.encode("h", add_special_tokens=False) == [7]


def test_what_was_never_asked_is_no_answer(path: Path):
    book = Book.load(path)
    for ask in (
        lambda: book.score(reference.ScoreRequest(version=0, prompt=[1, 2], tokens=[3])),
        lambda: book.decode([7], skip_special_tokens=False),
        lambda: Book.empty().next(reference.NextRequest(version=0, prompt=[1])),
    ):
        with pytest.raises(reference.UnansweredQuery):
            ask()


def test_only_what_is_missing_is_asked_again_and_each_query_once(path: Path):
    new = reference.NextRequest(version=3, prompt=[9])
    assert Book.load(path).missing([ASKED[0][0], new, new, ASKED[1][0]]) == [new]


def test_a_known_query_is_not_written_twice_and_a_wrong_answer_not_at_all(tmp_path: Path):
    with Book.create(tmp_path / "book.jsonl", "m") as book:
        book.add(*ASKED[0])
        size = (tmp_path / "book.jsonl").stat().st_size
        book.add(*ASKED[0])
        with pytest.raises(TypeError, match="answered by Next"):
            book.add(ASKED[1][0], SCORE)
        assert (tmp_path / "book.jsonl").stat().st_size == size
    with pytest.raises(RecordingError, match="exists already"):
        Book.create(tmp_path / "book.jsonl", "m")


def test_a_book_cut_off_at_any_byte_is_refused_or_lacks_answers_but_never_gives_wrong_ones(path: Path):
    content = path.read_bytes()
    line_ends = {number + 1 for number, byte in enumerate(content) if byte == ord("\n")}
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if length in line_ends:
            book = Book.load(path)
            kept = len(book)
            assert book.missing([query for query, _ in ASKED]) == [query for query, _ in ASKED[kept:]]
        else:
            with pytest.raises(RecordingError, match=r"reference\.jsonl"):
                Book.load(path)


def test_a_line_that_is_no_answer_is_named(path: Path):
    path.write_bytes(path.read_bytes() + b'{"key": 3}\n')
    with pytest.raises(RecordingError, match=":8: not a line of a reference book"):
        Book.load(path)


def test_a_question_that_the_oracle_failed_to_answer_says_why(tmp_path):
    path = tmp_path / "reference.jsonl"
    query = reference.ScoreRequest(version=0, prompt=[1], tokens=[2])
    with Book.create(path, "sha") as book:
        book.add(query, reference.Refusal(reason="ValueError: no such token"))
        assert book.missing([query]) == []
    for one in (book, Book.load(path)):
        with pytest.raises(reference.UnansweredQuery, match="ValueError: no such token"):
            one.score(query)
