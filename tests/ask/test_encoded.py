"""Bytes as text."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from theodolite.ask.documents import read_document


class TestEncodings:
    """Bytes read by the wrong table give words that nobody wrote."""

    TEXT = "Zürich, 東京, \N{GRINNING FACE}\nend"

    @pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
    def test_known_by_itself(self, read, codec):
        assert read("a.txt", self.TEXT.encode(codec)).text == self.TEXT

    @pytest.mark.parametrize("codec", ["utf-16-be", "utf-16-le", "utf-32-be", "utf-32-le"])
    def test_either_byte_order(self, read, codec):
        assert read("a.txt", f"\ufeff{self.TEXT}".encode(codec)).text == self.TEXT
        assert read("a.txt", self.TEXT.encode(codec), encoding=codec).text == self.TEXT
        assert read("a.txt", f"\ufeff{self.TEXT}".encode(codec), encoding=codec).text == self.TEXT

    def test_given(self, read):
        assert read("a.txt", "Zürich – 5 €".encode("cp1252"), encoding="cp1252").text == "Zürich – 5 €"
        assert read("a.txt", "東京".encode("shift_jis"), encoding="Shift-JIS").text == "東京"

    @pytest.mark.parametrize("codec", ["utf-9", "rot13", "zlib", "a\0b", ""])
    def test_no_encoding(self, read, codec):
        if codec == "":
            assert read("a.txt", "abc", encoding=codec).text == "abc"
        else:
            with pytest.raises(ValueError, match=f"^encoding: got {re.escape(repr(codec))}, which is no encoding"):
                read("a.txt", "abc", encoding=codec)

    def test_not_utf_8(self, read):
        with pytest.raises(ValueError, match=r"'a.txt' is not utf-8 \(byte 1\); give its encoding \(encoding="):
            read("a.txt", "Zürich".encode("cp1252"))
        with pytest.raises(ValueError, match=r"'a.txt' is not ascii \(byte 1\); give another encoding"):
            read("a.txt", "Zürich", encoding="ascii")

    def test_halves_of_characters(self, read):
        with pytest.raises(ValueError, match=r"'a.txt' is not raw_unicode_escape; give another encoding"):
            read("a.txt", b"a\\ud83d", encoding="raw_unicode_escape")

    def test_nul(self, read):
        for content in (b"a\0b", "no mark".encode("utf-16-le")):
            with pytest.raises(ValueError, match=r"'a.txt' has NUL characters, as a binary file has, or UTF-16"):
                read("a.txt", content)

    def test_a_name_in_no_encoding(self, tmp_path):
        path = os.path.join(os.fsencode(tmp_path), b"Z\xfcrich\n.txt")
        try:
            Path(os.fsdecode(path)).write_text("abc", encoding="utf-8")
        except OSError:
            pytest.skip("this file system takes names of Unicode only")
        assert read_document(os.fsdecode(path)).name == "Z\ufffdrich .txt"
