"""Documents read once, and questions about them: transformers' own answers, whatever was read, kept or asked before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.survey.conftest import calm, tiny_gemma3, tiny_llama  # noqa: F401
from theodolite.ask.documents import Document
from theodolite.ask.prompt import Turn, build_prompt
from theodolite.ask.session import Session
from theodolite.models import LoadError, load, patched
from theodolite.models.load import LoadedModel
from theodolite.models.patch import current_plan
from theodolite.plan import DynamicNTK, YaRN
from theodolite.positions import SelfExtend
from theodolite.survey.scalings import Candidate
from theodolite.survey.texts import builtin_text

NEW = 12
DOCUMENT = Document(name="moby.txt", text=builtin_text("moby-dick")[3000:4800])
QUESTION, OTHER = "Who is Ishmael?", "Where does he go?"


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: Any) -> LoadedModel:
    folder: Path = request.getfixturevalue(f"tiny_{request.param}")
    return load(str(folder), dtype=torch.float64, device="cpu")


@pytest.fixture
def llama(tiny_llama: Path) -> LoadedModel:  # noqa: F811
    return load(str(tiny_llama), dtype=torch.float64, device="cpu")


def candidates(loaded: LoadedModel) -> list[Candidate]:
    scaled = loaded.plan.with_scaling(YaRN(factor=4, original_max_position_embeddings=128))
    dynamic = loaded.plan.with_scaling(DynamicNTK(factor=2, original_max_position_embeddings=128))
    return [
        Candidate(name="none", plan=loaded.plan),
        Candidate(name="yarn", plan=scaled),
        Candidate(name="dynamic", plan=dynamic),
    ]


def session(loaded: LoadedModel, candidate: Candidate | None = None, *, room: int = 2000, **options: Any) -> Session:
    made = Session(loaded, options.pop("documents", [DOCUMENT]), candidate=candidate, room=room)
    made.reader.chunk = options.pop("chunk", 100)
    return made


def generated(loaded: LoadedModel, candidate: Candidate, turns: list[Turn], room: int = 2000) -> list[int]:
    """What transformers writes on the same tokens and plan."""
    ids = torch.tensor([build_prompt(loaded.tokenizer, [DOCUMENT], turns).tokens])
    with patched(loaded.model, candidate.plan.at_length(room)), torch.inference_mode():
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


class TestAnswers:
    """Token by token those of `generate`, in one question or several."""

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_equal_generate(self, loaded: LoadedModel, which: int) -> None:
        candidate = candidates(loaded)[which]
        true = generated(loaded, candidate, [Turn(QUESTION)])
        for chunk in (33, 5000):
            with session(loaded, candidate, chunk=chunk) as asked:
                assert asked.answer(QUESTION, count=NEW).tokens == true
        assert current_plan(loaded.model) is None

    def test_a_conversation(self, loaded: LoadedModel) -> None:
        candidate = candidates(loaded)[1]
        with session(loaded, candidate) as asked:
            found = [asked.answer(question, count=NEW).tokens for question in (QUESTION, OTHER, QUESTION)]
            turns = list(asked.turns)
            asked.forget_conversation()
            found.append(asked.answer(OTHER, count=NEW).tokens)
        for number, question in enumerate((QUESTION, OTHER, QUESTION)):
            assert found[number] == generated(loaded, candidate, [*turns[:number], Turn(question)])
        assert found[3] == generated(loaded, candidate, [Turn(OTHER)])

    def test_what_is_told_is_the_text(self, llama: LoadedModel) -> None:
        parts: list[str] = []
        with session(llama) as asked:
            answer = asked.answer(QUESTION, count=NEW, told=parts.append)
        assert "".join(parts) == answer.text == llama.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        assert len(parts) > 1

    def test_what_was_thought_is_not_said_again(self, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        for written, kept in (
            ("<think>well\nwell</think>\n\nIshmael.", "Ishmael."),
            ("<think>never done", "…"),
            ("Opened by the template.</think> Ishmael.", "Ishmael."),
            (" Ishmael. ", "Ishmael."),
        ):
            monkeypatch.setattr(llama.tokenizer, "decode", lambda ids, written=written, **more: written)
            with session(llama) as asked:
                assert asked.answer(QUESTION, count=NEW).text == written
                assert asked.turns == [Turn(QUESTION, kept)]

    def test_the_same_question_again(self, llama: LoadedModel) -> None:
        with session(llama) as asked:
            first = asked.answer(QUESTION, count=NEW)
            asked.forget_conversation()
            assert asked.answer(QUESTION, count=NEW).tokens == first.tokens

    def test_broken_off_in_the_middle(self, llama: LoadedModel) -> None:
        def stop(text: str) -> None:
            raise KeyboardInterrupt

        with session(llama) as asked:
            with pytest.raises(KeyboardInterrupt):
                asked.answer(QUESTION, count=NEW, told=stop)
            assert asked.turns == []
            answer = asked.answer(OTHER, count=NEW)
        assert answer.tokens == generated(llama, candidates(llama)[0], [Turn(OTHER)])

    def test_at_mapped_distances(self, llama: LoadedModel) -> None:
        relative = SelfExtend(window=64, group_size=4)
        candidate = Candidate(name="self-extend", plan=llama.plan, relative=relative)
        with session(llama, candidate, chunk=33) as one:
            found = one.answer(QUESTION, count=NEW).tokens
        with session(llama, candidate, chunk=5000) as other:
            assert other.answer(QUESTION, count=NEW).tokens == found
            assert other.reader.relative == relative


class TestTheModel:
    """It is patched while a session is open, and as it was before and after."""

    def test_outside_of_with(self, llama: LoadedModel) -> None:
        asked = session(llama)
        with pytest.raises(RuntimeError, match="read inside of `with` alone"):
            asked.answer(QUESTION, count=NEW)
        with asked:
            first = asked.answer(QUESTION, count=NEW)
            asked.forget_conversation()
        with asked:
            assert asked.answer(QUESTION, count=NEW).tokens == first.tokens

    def test_a_patch_of_the_users_own_is_there_again(self, llama: LoadedModel) -> None:
        yarn = candidates(llama)[1].plan
        with patched(llama.model, yarn):
            before = llama.model.config._attn_implementation
            with session(llama) as asked:
                assert current_plan(llama.model) == llama.plan
                found = asked.answer(QUESTION, count=NEW).tokens
            assert current_plan(llama.model) == yarn
            assert llama.model.config._attn_implementation == before
        assert found == generated(llama, candidates(llama)[0], [Turn(QUESTION)])


class TestReadOnce:
    """A second question reads what is new, and nothing of the documents again."""

    def test_tokens_read(self, loaded: LoadedModel) -> None:
        with session(loaded) as asked:
            read: list[int] = []
            asked.read_documents(read.append)
            assert read[0] == 0
            assert read[-1] == asked.document_tokens == asked.read
            assert read == sorted(set(read))
            for question in (QUESTION, OTHER):
                told: list[int] = []
                asked.answer(question, count=NEW, progress=told.append)
                assert told[0] >= asked.document_tokens

    def test_reading_again_reads_nothing(self, llama: LoadedModel) -> None:
        with session(llama) as asked:
            asked.read_documents()
            asked.answer(QUESTION, count=NEW)
            told: list[int] = []
            asked.read_documents(told.append)
            assert told == []


class TestKept:
    """What was read of the documents, from one run to the next; refused for any other model, plan or text."""

    @pytest.mark.parametrize("which", [0, 1])
    def test_goes_on(self, loaded: LoadedModel, which: int, tmp_path: Path) -> None:
        candidate, path = candidates(loaded)[which], tmp_path / "kept"
        with session(loaded, candidate) as asked:
            asked.read_documents()
            asked.save(path)
            true = asked.answer(QUESTION, count=NEW)
            # What was asked is not in it.
            asked.save(tmp_path / "later")
        for kept in (path, tmp_path / "later"):
            with session(loaded, candidate) as again:
                again.resume(kept)
                assert again.read == again.document_tokens
                told: list[int] = []
                answer = again.answer(QUESTION, count=NEW, progress=told.append)
            assert answer == true
            assert told[0] == again.document_tokens

    def test_interrupted_while_reading(self, loaded: LoadedModel, tmp_path: Path) -> None:
        def stop(read: int) -> None:
            if read >= 300:
                raise KeyboardInterrupt

        path = tmp_path / "kept"
        with session(loaded) as asked:
            with pytest.raises(KeyboardInterrupt):
                asked.read_documents(stop)
            assert asked.read == 300
            asked.save(path)
        with session(loaded) as again:
            again.resume(path)
            told: list[int] = []
            again.read_documents(told.append)
            assert told[0] == 300
            found = again.answer(QUESTION, count=NEW)
        assert found.tokens == generated(loaded, candidates(loaded)[0], [Turn(QUESTION)])

    def test_others_are_refused(self, llama: LoadedModel, tmp_path: Path) -> None:
        path = tmp_path / "kept"
        plain, scaled, _ = candidates(llama)
        mapped = Candidate(name="map", plan=llama.plan, relative=SelfExtend(window=64, group_size=4))
        with session(llama, plain) as asked:
            asked.read_documents()
            asked.save(path)
        other = Document(name="moby.txt", text=DOCUMENT.text + ".")
        for loaded, candidate, document, text in (
            (llama, scaled, DOCUMENT, "it is of another plan$"),
            (llama, mapped, DOCUMENT, "it is of another map of distances: 'None', and"),
            (llama, plain, other, "it is of another text$"),
            (replace(llama, fingerprint="another"), plain, DOCUMENT, "it is of another model$"),
        ):
            with session(loaded, candidate, documents=[document]) as asked:
                with pytest.raises(LoadError, match=text):
                    asked.resume(path)
                assert asked.read == 0
        whole = bytearray(path.read_bytes())
        whole[-1000] ^= 1
        path.write_bytes(whole)
        with session(llama) as asked, pytest.raises(LoadError, match="it is not as it was written; delete it"):
            asked.resume(path)
        assert asked.read == 0
        path.write_bytes(whole[:-100])
        with session(llama) as asked, pytest.raises(LoadError, match="it cannot be read as a saved reading"):
            asked.resume(path)


class TestBesideEachOther:
    """Two sessions on one model: the one that was opened last reads, and the other says so."""

    def test_nested(self, llama: LoadedModel) -> None:
        plain, scaled, _ = candidates(llama)
        with session(llama, plain) as outer:
            outer.read_documents()
            with session(llama, scaled) as inner:
                found = inner.answer(QUESTION, count=NEW).tokens
                with pytest.raises(RuntimeError, match="another reader is open on this model"):
                    outer.answer(QUESTION, count=NEW)
            own = outer.answer(QUESTION, count=NEW).tokens
        assert found == generated(llama, scaled, [Turn(QUESTION)])
        assert own == generated(llama, plain, [Turn(QUESTION)])

    def test_opened_twice(self, llama: LoadedModel) -> None:
        before = llama.model.config._attn_implementation
        with session(llama) as asked, pytest.raises(RuntimeError, match="this reader is open already"):
            asked.__enter__()
        assert llama.model.config._attn_implementation == before
        assert current_plan(llama.model) is None


class TestRefusals:
    """What cannot be asked is said, and is no part of the conversation."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"count": 0}, "count: got 0; give at least 1"),
            ({"passages": -1}, "passages: got -1; give at least 0"),
            ({"temperature": -1.0}, "temperature: got -1.0; give 0"),
            ({"temperature": 1e-40}, "temperature: got 1e-40"),
            ({"temperature": float("inf")}, "temperature: got inf"),
        ],
    )
    def test_options(self, llama: LoadedModel, options: dict[str, Any], words: str) -> None:
        with session(llama) as asked:
            with pytest.raises(ValueError, match=words):
                asked.answer(QUESTION, **{"count": NEW, **options})
            assert asked.turns == []

    def test_what_is_no_candidate_or_document(self, llama: LoadedModel) -> None:
        with pytest.raises(ValueError, match="candidate: got a ModelPlan"):
            Session(llama, [DOCUMENT], candidate=llama.plan, room=2000)
        with pytest.raises(ValueError, match="documents: give Documents"):
            Session(llama, "abc", room=2000)

    def test_weights_that_are_no_numbers(self, tiny_llama: Path) -> None:  # noqa: F811
        loaded = load(str(tiny_llama), dtype=torch.float32, device="cpu")
        loaded.model.model.norm.weight.data.fill_(float("nan"))
        with session(loaded) as asked, pytest.raises(FloatingPointError, match="logits that are no numbers"):
            asked.answer(QUESTION, count=NEW)

    def test_a_tokenizer_without_places_gives_no_passages(
        self, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = Session.prompt
        monkeypatch.setattr(Session, "prompt", lambda self, q: replace(plain(self, q), offsets=(None,)))
        with session(llama) as asked:
            assert asked.answer(QUESTION, count=NEW).passages == []


class TestATemplateThatBeginsOtherwise:
    """For a conversation, say: what is kept is what all beginnings have in common."""

    def test_kept(self, llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = "{% if messages|length > 1 %}<s><s><s>{% endif %}"
        template = first + "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
        monkeypatch.setattr(llama.tokenizer, "chat_template", template)
        with session(llama) as asked:
            asked.answer(QUESTION, count=NEW)
            second = asked.answer(OTHER, count=NEW)
            assert second.passages
            asked.save(tmp_path / "kept")
        with session(llama) as again:
            again.resume(tmp_path / "kept")
            found = again.answer(QUESTION, count=NEW)
        with session(llama) as fresh:
            assert fresh.answer(QUESTION, count=NEW) == found


class TestRoom:
    """What does not fit is said before anything is read."""

    def test_documents(self, llama: LoadedModel) -> None:
        with pytest.raises(ValueError, match=r"room: the documents have [0-9,]+ tokens, and there is room for 100"):
            Session(llama, [DOCUMENT], room=100)

    def test_a_conversation(self, llama: LoadedModel) -> None:
        need = len(build_prompt(llama.tokenizer, [DOCUMENT], [Turn(QUESTION)]).tokens)
        with session(llama, room=need + NEW) as asked:
            assert asked.fits(QUESTION, NEW)
            asked.answer(QUESTION, count=NEW)
            assert not asked.fits(QUESTION, NEW)
            with pytest.raises(ValueError, match="begin a new conversation"):
                asked.answer(QUESTION, count=NEW)
            asked.forget_conversation()
            assert asked.fits(QUESTION, NEW)
