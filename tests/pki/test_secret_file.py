"""secret.hex in a kit."""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from glasu.errors import TransportError
from glasu.pki.kit import open_kit
from glasu.pki.secret_file import SECRET, make_secret, read_secret


def test_a_new_kit_has_no_secret(kits):
    assert {open_kit(kits / name).secret for name in ("a", "b", "c", "server")} == {None}
    assert not list(kits.rglob(SECRET))


def test_a_secret_is_made_once_and_readable_by_its_owner_only(tmp_path):
    first = make_secret(tmp_path)
    assert make_secret(tmp_path) == read_secret(tmp_path) == first
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert re.fullmatch("[0-9a-f]{64}\n", path.read_text())
    assert bytes.fromhex(path.read_text()) == first.value


def test_processes_that_start_at_the_same_time_have_one_secret(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_secret(tmp_path), range(32)))
    assert {secret.value for secret in made} == {read_secret(tmp_path).value}
    assert [path.name for path in tmp_path.iterdir()] == [SECRET]


def test_opening_a_kit_reads_its_secret_and_does_not_show_it(copy):
    secret = make_secret(copy("a"))
    kit = open_kit(copy("b").parent / "a")
    assert kit.secret == secret
    assert secret.value.hex() not in repr(kit)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_other_users_can_read_is_refused(mode, copy):
    folder = copy("a")
    make_secret(folder)
    (folder / SECRET).chmod(mode)
    with pytest.raises(TransportError, match=rf"other users may read it \(mode {mode:o}\); if none did, run: chmod"):
        open_kit(folder)


@pytest.mark.parametrize("content", ["", "ab", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n\n", "x" * 64])
def test_another_content_is_refused_and_not_shown(content, copy):
    folder = copy("a")
    (folder / SECRET).touch(0o600)
    (folder / SECRET).write_text(content)
    with pytest.raises(TransportError, match="does not hold 64 hexadecimal digits; restore it") as caught:
        open_kit(folder)
    assert not content.strip() or content.strip() not in str(caught.value).replace(str(folder), "")
