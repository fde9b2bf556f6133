"""Texts as tokens: what is trained on, what is tested on, and that the two are apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from theodolite.compare.texts import TextData
from theodolite.plan import PlanError

WORDS = " ".join(f"word{i}" for i in range(2000))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    return str(path)


class TestParts:
    """Training never sees what is tested."""

    def test_the_last_tenth_is_held_out(self, text):
        data = TextData.read([text])
        (training,), (test,) = data.training, data.test
        assert bytes(torch.cat([training, test]).tolist()).decode() == WORDS
        assert len(WORDS) // 10 - 8 < len(test) <= len(WORDS) // 10
        assert bytes(test[:5].tolist()) == b" word"
        assert (data.name, data.vocab_size, data.tokens) == ("text.txt", 256, "bytes")

    def test_rows_of_training_are_pieces_of_it(self, text):
        data = TextData.read([text])
        whole = bytes(data.training[0].tolist())
        batch = data.training_batch(4, rows=20, length=50, seed=1)
        for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            assert bytes(ids) in whole
            assert ids[1:] == targets[:-1]
            assert bytes([*ids, targets[-1]]) in whole
        assert batch.positions.tolist() == list(range(50))

    def test_rows_begin_anywhere(self, tmp_path):
        path = tmp_path / "short.txt"
        path.write_text("".join(chr(33 + i) for i in range(60)))
        data = TextData.read([str(path)])
        assert len(data.training[0]) == 54
        begins = Counter(data.training_batch(0, rows=4400, length=10, seed=0).ids[:, 0].tolist())
        # 44 places; chi-square with 43 degrees of freedom is above 86 once in 10,000 times.
        assert sorted(begins) == list(range(33, 77))
        assert sum((n - 100) ** 2 / 100 for n in begins.values()) < 86

    def test_rows_are_drawn_by_their_numbers(self, text):
        data = TextData.read([text])
        first = data.training_batch(7, rows=8, length=30, seed=2).ids
        data.training_batch(8, rows=8, length=30, seed=2)
        assert torch.equal(first, TextData.read([text]).training_batch(7, rows=8, length=30, seed=2).ids)
        assert torch.equal(first[:3], data.training_batch(7, rows=3, length=30, seed=2).ids)
        for step, seed in ((8, 2), (7, 3)):
            assert not torch.equal(first, data.training_batch(step, rows=8, length=30, seed=seed).ids)

    def test_windows_of_the_test_do_not_overlap(self, text):
        data = TextData.read([text])
        count = (len(data.test[0]) - 1) // 40
        batch = data.test_batch(0, rows=count, length=40)
        whole = bytes(data.test[0].tolist())
        begins = sorted(whole.index(bytes(ids)) for ids in batch.ids.tolist())
        assert begins == list(range(0, count * 40, 40))
        assert torch.equal(batch.ids[3:5], data.test_batch(3, rows=2, length=40).ids)
        assert batch.ids[:, 1:].tolist() == batch.targets[:, :-1].tolist()

    def test_several_texts(self, text, tmp_path):
        other = tmp_path / "other.txt"
        other.write_text("z" * 3000)
        data = TextData.read([text, str(other), text])
        assert data.name == "text.txt + other.txt"
        shares = (data.training_batch(0, rows=4000, length=10, seed=0).ids == ord("z")).all(dim=1).float().mean()
        assert abs(float(shares) - 2690 / (2690 + len(data.training[0]) - 10)) < 0.03
        rows = data.test_batch(0, rows=40, length=10).ids
        assert 0 < int((rows == ord("z")).all(dim=1).sum()) < 40

    def test_identity_is_of_the_tokens(self, text, tmp_path):
        first = TextData.read([text]).identity
        assert json.loads(json.dumps(first)) == first
        again = tmp_path / "again.txt"
        again.write_text(WORDS)
        assert TextData.read([str(again)]).identity == first
        again.write_text(WORDS[:-1] + "x")
        assert TextData.read([str(again)]).identity != first


class TestVocabularies:
    pytest.importorskip("tokenizers")

    @pytest.mark.parametrize("book", ["moby-dick", "chinese-classics"])
    def test_byte_pairs_cover_everything(self, book, tmp_path):
        from theodolite.survey.texts import builtin_text

        path = tmp_path / "part.txt"
        path.write_text(builtin_text(book)[:60_000] + "\u2603 never seen before \U0001f40b " * 20)
        data = TextData.read([str(path)], tokens="bpe:600")
        assert data.vocab_size == 600
        assert len(data.training[0]) < len(TextData.read([str(path)]).training[0])
        assert TextData.read([str(path)], tokens="bpe:600").identity == data.identity

    def test_a_tokenizer_that_covers(self, text, tmp_path):
        assert TextData.read([text], tokens=_words(tmp_path, [f"word{i}" for i in range(2000)])).vocab_size == 2001

    def test_a_tokenizer_that_does_not(self, text, tmp_path):
        with pytest.raises(ValueError, match=r"lacks [\d,]+ of [\d,]+ characters, such as 'w'; give bytes"):
            TextData.read([text], tokens=_words(tmp_path, [f"word{i}" for i in range(100)]))

    def test_a_tokenizer_that_leaves_out(self, text, tmp_path):
        import tokenizers

        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("word 012345678")}, []))
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        with pytest.raises(ValueError, match="such as '9'"):
            TextData.read([text], tokens=str(path))

    def test_a_tokenizer_with_gaps_in_its_numbers(self, tmp_path):
        import tokenizers

        path, source = tmp_path / "gaps.json", tmp_path / "text.txt"
        source.write_text("ab " * 400)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "ab": 50}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path))
        data = TextData.read([str(source)], tokens=str(path))
        assert int(data.training[0].max()) == 50
        assert data.vocab_size == 51

    @pytest.mark.parametrize("pieces", ["ab", "a"])
    def test_a_tokenizer_of_pieces_with_an_unknown_one(self, tmp_path, pieces):
        import tokenizers

        path, source = tmp_path / "pieces.json", tmp_path / "text.txt"
        source.write_text("ab " * 400)
        scores = [("<unk>", 0.0), *((piece, -1.0) for piece in pieces)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=0))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path))
        if pieces == "ab":
            assert TextData.read([str(source)], tokens=str(path)).vocab_size == 3
        else:
            with pytest.raises(ValueError, match=r"lacks 361 of 1,082 characters, such as 'b'; give bytes"):
                TextData.read([str(source)], tokens=str(path))

    @pytest.mark.parametrize(
        ("tokens", "match"),
        [
            ("bpe", "257 tokens at least"),
            ("bpe:100", "257"),
            ("bpe:x", "257"),
            ("words", "bytes, bpe:4096"),
            ("no.json", "no file"),
        ],
    )
    def test_refuses(self, text, tokens, match):
        with pytest.raises((PlanError, ValueError), match=match):
            TextData.read([text], tokens=tokens)

    def test_a_file_that_is_no_tokenizer(self, text, tmp_path):
        (tmp_path / "t.json").write_text("{}")
        with pytest.raises(ValueError, match="is no tokenizer"):
            TextData.read([text], tokens=str(tmp_path / "t.json"))


class TestRefuses:
    """Too little text is said in one sentence, before any training."""

    def test_training_is_too_short(self, tmp_path):
        path = tmp_path / "short.txt"
        path.write_text("abc " * 30)
        data = TextData.read([str(path)])
        data.require(length=110, longest=4, rows=2)
        with pytest.raises(ValueError, match=r"rows of 111 tokens .* first nine tenths of short.txt have 111"):
            data.require(length=111, longest=4, rows=2)

    def test_the_test_is_too_short(self, text):
        data = TextData.read([text])
        rows = (len(data.test[0]) - 1) // 100
        data.require(length=10, longest=100, rows=rows)
        with pytest.raises(ValueError, match=f"{rows + 1} rows of 100 tokens .* has {rows}; give more text"):
            data.require(length=10, longest=100, rows=rows + 1)

    def test_no_text(self):
        with pytest.raises(ValueError, match="none is given; give UTF-8 files"):
            TextData.read([])

    def test_nothing_to_test_on(self, tmp_path):
        path = tmp_path / "tiny.txt"
        path.write_text("abc")
        with pytest.raises(ValueError, match=r"tiny.txt has 3 characters"):
            TextData.read([str(path)])


def _words(folder: Path, words: list[str]) -> str:
    import tokenizers

    vocabulary = {"[UNK]": 0, **{word: i + 1 for i, word in enumerate(words)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = folder / "words.json"
    tokenizer.save(str(path))
    return str(path)
