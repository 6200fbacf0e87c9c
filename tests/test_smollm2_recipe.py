"""Where the recipe writes: never over what is there. Nothing is downloaded."""

from pathlib import Path

import pytest

from mlx_spec_models import smollm2


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scratch: Path) -> Path:
        raise smollm2.BuildError("downloading")

    monkeypatch.setattr(smollm2, "_download", refuse)


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "thesis.tex"
    file.write_text("years of work")
    with pytest.raises(smollm2.BuildError) as caught:
        smollm2.build(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "is not empty and is no finished checkpoint" in str(caught.value)
    assert "name another folder" in str(caught.value)
    assert file.read_text() == "years of work"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model"
    file.write_text("mine")
    with pytest.raises(smollm2.BuildError, match="model is a file: name a folder"):
        smollm2.build(file)
    assert file.read_text() == "mine"


def test_a_finished_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.build(tmp_path) == tmp_path


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_is_built(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if exists:
        folder.mkdir()
    with pytest.raises(smollm2.BuildError, match=r"^downloading$"):
        smollm2.build(folder)
    assert not any(tmp_path.glob("model/*"))


@pytest.mark.parametrize("exists", [False, True])
def test_what_is_finished_takes_the_place_of_an_empty_folder(
    exists: bool, tmp_path: Path
) -> None:
    finished, folder = tmp_path / "finished", tmp_path / "model"
    finished.mkdir()
    (finished / "config.json").write_text("new")
    if exists:
        folder.mkdir()
    smollm2._put_in_place(finished, folder)
    assert (folder / "config.json").read_text() == "new"
    assert not finished.exists()


def test_a_folder_filled_while_building_is_kept(tmp_path: Path) -> None:
    finished, folder = tmp_path / "finished", tmp_path / "model"
    for path in (finished, folder):
        path.mkdir()
    (finished / "config.json").write_text("new")
    (folder / "mine").write_text("mine")
    with pytest.raises(smollm2.BuildError, match="is not empty"):
        smollm2._put_in_place(finished, folder)
    (folder / "config.json").write_text("theirs")
    smollm2._put_in_place(finished, folder)
    assert (folder / "config.json").read_text() == "theirs"


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert smollm2.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {tmp_path} is not empty")
    assert err.count("\n") == 1
