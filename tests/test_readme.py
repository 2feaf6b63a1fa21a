"""The README's blocks run as they stand, with a tiny model in place of the one from the hub."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dppeft import cli
from tests.tiny import opinions

README = Path(__file__).parent.parent / "README.md"
HUB_NAME = "distilbert/distilroberta-base"


def _blocks(language: str) -> list[str]:
    text = README.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a reviews.csv; runs record their ledgers in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open("reviews.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(zip(*opinions(300), strict=True))
    return tmp_path


def test_python_blocks_run_in_order(folder: Path, base_folder: Path) -> None:
    blocks = _blocks("python")
    assert len(blocks) >= 5
    assert any(HUB_NAME in block for block in blocks)
    code = "\n".join(blocks).replace(HUB_NAME, str(base_folder))
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, str(README), "exec"), names)
    assert 7.5 < names["private"].spent().epsilon <= 8
    assert 7.5 < names["trainer"].spent().epsilon <= 8
    assert (folder / "shared-adapter" / "privacy.json").is_file()


def test_command_lines_run_in_order(
    folder: Path, base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        line for block in _blocks("sh") for line in block.splitlines() if line.startswith("dppeft ")
    ]
    assert {shlex.split(command)[1] for command in commands} == {
        "plan",
        "train",
        "evaluate",
        "predict",
        "methods",
    }
    for command in commands:
        arguments = shlex.split(command.replace(HUB_NAME, str(base_folder)))[1:]
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert not ended.value.code, f"{command}: {capsys.readouterr().err}"


def test_every_make_target_named_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README.read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
