"""What MODEL may name besides a file: each is told in one line, soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from theodolite.cli import main


def refused(capsys: pytest.CaptureFixture[str], name: str) -> str:
    """The one line of bad input."""
    assert main(["inspect", name]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.isprintable()
    assert len(line) < 1500
    return line.removeprefix("theodolite inspect: ")


@pytest.mark.skipif(os.name == "nt", reason="names of a Unix system")
class TestNoFiles:
    """A pipe or a device may never end, and a link may lead in a circle."""

    @pytest.mark.parametrize("name", ["/dev/null", "/dev/zero"])
    def test_devices(self, capsys: pytest.CaptureFixture[str], name: str) -> None:
        assert refused(capsys, name) == f"model: {name!r} is no file and no folder"

    @pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such files here")
    @pytest.mark.parametrize("name", ["/proc/self/mem", "/proc/kmsg", "/proc/self/status"])
    def test_files_of_the_system(self, capsys: pytest.CaptureFixture[str], name: str) -> None:
        """They state no size, and reading some of them waits for ever."""
        assert f"config in {name}: got '0 bytes'; it must be JSON" in refused(capsys, name)

    def test_links(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("self").symlink_to("self")
        Path("gone").symlink_to("nowhere")
        Path("loop").mkdir()
        Path("loop/loop").symlink_to("../loop")
        for name in ("self", "gone"):
            assert refused(capsys, name) == f"model: {name!r} is a link that leads nowhere"
        assert "'loop/loop/loop' is a folder without config.json" in refused(capsys, "loop/loop/loop")

    def test_a_folder_for_a_config(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "config.json").mkdir()
        assert "is a folder without config.json" in refused(capsys, str(tmp_path))

    def test_names(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for name in ("a" * 5000, "a/" * 3000, str(tmp_path / ("b" * 300))):
            assert "File name too long" in refused(capsys, name)
        path = tmp_path / "n\x1b[2Jx.json"
        path.write_text("{}")
        assert "\N{REPLACEMENT CHARACTER}[2Jx.json: got None" in refused(capsys, str(path))

    def test_an_error_in_the_midst_of_reading(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "config.json"
        path.write_text("{}")

        def fail(self: Path) -> bytes:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Path, "read_bytes", fail)
        assert refused(capsys, str(path)) == f"model: {str(path)!r} cannot be read (Input/output error)"
