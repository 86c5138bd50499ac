"""The folders of data sets and of converted data."""

from __future__ import annotations

from pathlib import Path

from glasu.data.cache.store import find_cache_folder
from glasu.data.sources import find_data_root


def test_the_cache_is_where_the_environment_says_or_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GLASU_CACHE", str(tmp_path / "own"))
    assert find_cache_folder() == tmp_path / "own"
    monkeypatch.setenv("GLASU_CACHE", "")
    assert find_cache_folder() == tmp_path / "xdg" / "glasu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert find_cache_folder() == tmp_path / ".cache" / "glasu"


def test_the_data_root_of_the_run_file_beats_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("GLASU_DATA_ROOT", "there")
    assert find_data_root("here") == Path("here")
    assert find_data_root(None) == Path("there")
    monkeypatch.delenv("GLASU_DATA_ROOT")
    assert find_data_root(None) == Path("data")
