"""Texts as users have them: short, joined, twice, in other encodings, no files at all."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from theodolite.survey.texts import BUILTIN, builtin_text, read_documents, read_text, tokenize


class Words:
    """One token a word; counts what it was given."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, text: str, **more: Any) -> dict[str, list[int]]:
        self.seen = max(self.seen, len(text))
        return {"input_ids": [hash(word) % 2**31 for word in text.split()]}


def words(count: int, name: str = "w") -> str:
    return " ".join(f"{name}{i}" for i in range(count))


class TestReading:
    """What cannot be read is said in one line with the name that was given."""

    def test_a_byte_order_mark_is_no_text(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfCall me \xe8\xae\xba")
        assert read_text(str(tmp_path / "a.txt")) == ("a.txt", "Call me 论")

    @pytest.mark.parametrize("content", ["naïve".encode("latin-1"), "text".encode("utf-16")])
    def test_not_utf8(self, tmp_path, content):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"text: '.*a\.txt' is not UTF-8 \(byte \d+\); convert it first"):
            read_text(str(tmp_path / "a.txt"))

    def test_a_folder_and_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="is a folder; give its files"):
            read_text(str(tmp_path))
        with pytest.raises(ValueError, match=r"no file '.*nowhere'; give a UTF-8 text file, or one of moby-dick"):
            read_text(str(tmp_path / "nowhere"))
        with pytest.raises(ValueError, match="got 'bible'; the package has moby-dick, chinese-classics"):
            builtin_text("bible")

    @pytest.mark.parametrize("name", BUILTIN)
    def test_the_books_of_the_package(self, name):
        assert len(builtin_text(name)) > 400_000
        assert read_text(name)[0] == name


class TestTokens:
    """The first tokens of a text are the same however much of it is tokenized."""

    @pytest.mark.parametrize("count", [1, 100, 5000])
    def test_a_part_gives_the_tokens_of_the_whole(self, count):
        text = "a " * 50 + words(9000, "a-long-word-")
        whole = Words()(text)["input_ids"]
        assert tokenize(Words(), text, at_least=count)[:count].tolist() == whole[:count]

    def test_a_book_is_not_tokenized_to_its_end(self):
        tokenizer = Words()
        tokenize(tokenizer, "ab " * 10**6, at_least=1000)
        assert tokenizer.seen == 8000

    def test_a_short_text_gives_all_it_has(self):
        assert len(tokenize(Words(), words(70), at_least=1000)) == 70


class TestDocuments:
    """Each long enough text once; those too short are named with what they have and what is needed."""

    @pytest.fixture
    def files(self, tmp_path):
        for name, count in (("long", 300), ("longer", 400), ("short", 90), ("shorter", 80)):
            (tmp_path / f"{name}.txt").write_text(words(count, name))
        return lambda *names: [str(tmp_path / f"{name}.txt") for name in names]

    def test_cut_to_the_length_with_a_digest_of_the_tokens(self, files):
        first, second = read_documents(files("long", "longer"), Words(), tokens=200)
        assert (first.name, second.name) == ("long.txt", "longer.txt")
        assert len(first.tokens) == len(second.tokens) == 200
        assert first.sha256 == hashlib.sha256(first.tokens.numpy().tobytes()).hexdigest()
        assert first.sha256 != second.sha256

    def test_all_too_short(self, files):
        message = "200 tokens are needed for this length, and short.txt has 90; shorter.txt has 80; --join makes one"
        with pytest.raises(ValueError, match=message):
            read_documents(files("short", "shorter"), Words(), tokens=200)
        with pytest.raises(ValueError, match=r"1,000 tokens are needed for this length, and short.txt has 90$"):
            read_documents(files("short"), Words(), tokens=1000)

    def test_some_too_short_are_left_out_and_named(self, files):
        told: list[str] = []
        made = read_documents(files("short", "long"), Words(), tokens=200, tell=told.append)
        assert [document.name for document in made] == ["long.txt"]
        assert told == ["left out, since 200 tokens are needed: short.txt has 90"]

    def test_joined(self, files):
        (made,) = read_documents(files("short", "shorter"), Words(), tokens=170, join=True)
        assert made.name == "short.txt + shorter.txt"
        expected = words(90, "short") + " " + words(80, "shorter")
        assert made.tokens.tolist() == Words()(expected)["input_ids"]
        with pytest.raises(ValueError, match=r"171 tokens are needed .* short.txt \+ shorter.txt has 170$"):
            read_documents(files("short", "shorter"), Words(), tokens=171, join=True)
        assert read_documents(files("long"), Words(), tokens=200, join=True)[0].name == "long.txt"

    def test_one_file_by_two_paths_is_one_document_and_the_order_stays(self, files, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        made = read_documents([*files("longer", "long"), "longer.txt", "./long.txt"], Words(), tokens=200)
        assert [document.name for document in made] == ["longer.txt", "long.txt"]

    def test_with_a_real_tokenizer(self, tiny_llama):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
        (made,) = read_documents(["moby-dick"], tokenizer, tokens=500)
        assert made.tokens.tolist() == tokenizer(builtin_text("moby-dick")[:50_000])["input_ids"][:500]
