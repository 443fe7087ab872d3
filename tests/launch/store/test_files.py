"""Only the user can access the folders of runs/."""

import os
import stat

import pytest

from launch.store.files import FolderError, private_folder


@pytest.fixture(autouse=True)
def shared_with_a_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_no_level_below_runs_is_open_to_others_whatever_the_umask(tmp_path):
    (tmp_path / "runs" / "own").mkdir(parents=True)
    (tmp_path / "runs").chmod(0o755)
    private_folder(tmp_path / "runs" / "own" / "jobs" / "one")
    assert mode("runs") == 0o755
    assert [mode(folder) for folder in ("runs/own", "runs/own/jobs", "runs/own/jobs/one")] == [0o700] * 3


def test_where_it_makes_runs_a_group_cannot_write_to_it(tmp_path):
    private_folder(tmp_path / "runs" / "own")
    assert mode("runs") == 0o755


def test_others_must_not_be_able_to_put_other_folders_there(tmp_path):
    (tmp_path / "runs").mkdir(mode=0o775)
    with pytest.raises(FolderError, match=r"runs: other users can put files there .*: chmod go-w runs$"):
        private_folder(tmp_path / "runs" / "own")
    (tmp_path / "runs").chmod(0o1777)  # the mode of /tmp
    private_folder(tmp_path / "runs" / "own")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "runs" / "own").mkdir(parents=True)
    (tmp_path / "runs").chmod(0o755)
    os.chown(tmp_path / "runs" / "own", 65534, 65534)
    with pytest.raises(FolderError, match="belongs to another user"):
        private_folder(tmp_path / "runs" / "own" / "jobs")
