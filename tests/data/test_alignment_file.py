"""alignment.parquet: the rules for ids, how a folder uses the file, and when it no longer fits the tables."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.cli.main import build_parser
from glasu.config import DataConfig, RunConfig
from glasu.data.alignment_file import ALIGNMENT_FILE, CommonIds, read_alignment
from glasu.data.cache.store import Cache
from glasu.data.folders import read_normalized_ids, read_party, read_party_once
from glasu.data.id_rules import IdRules, normalize_ids
from glasu.data.sources.catalog import load_parties
from glasu.errors import AlignmentError, ConfigError, DataError, GlasuError
from glasu.files import hold_folder
from glasu.protocol.alignment import DEFAULT_MAX_IDS
from glasu.runtime.local_alignment import AlignmentOptions, align_folders
from support.commands import assert_refused, glasu
from support.messy_ids import SECRETS, list_common, list_people, name_person, spell, write_messy_folders
from support.tiny import tiny_parties

PEOPLE, KEY = 40, bytes(range(32))
CANARY = "P-canary-17"


@pytest.fixture
def folders(tmp_path):
    return write_messy_folders(tmp_path, tiny_parties(num_nodes=PEOPLE))


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        ({}, " e\u0301 A ", "\u00e9 A"),
        ({"unicode": "none"}, "e\u0301", "e\u0301"),
        ({"unicode": "nfkc"}, "\u2460\ufb01", "1fi"),
        ({"case": "fold"}, "Stra\u00dfe", "strasse"),
        ({"whitespace": "keep"}, " a  b\t", " a  b\t"),
        ({"whitespace": "collapse"}, " a \u00a0 b\t", "a b"),
        ({"whitespace": "remove"}, " a  b\t", "ab"),
    ],
)
def test_each_rule_has_its_stated_effect(rules, text, expected):
    assert IdRules(**rules).normalize(text) == expected


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([CANARY, f" {CANARY}", "x", CANARY], "2 of 4 ids are the same as an earlier id"),
        ([" ", "\t", "x"], "2 of 3 ids are empty"),
        ([" ", CANARY, CANARY], "1 of 3 ids are empty and 1 of 3 ids are the same as an earlier id"),
    ],
)
def test_empty_and_repeated_ids_are_refused_with_counts_and_never_quoted(ids, words):
    with pytest.raises(DataError, match=words) as refusal:
        normalize_ids(ids, IdRules(), "nodes.csv")
    assert "canary" not in str(refusal.value)


def test_a_folder_with_the_file_has_the_common_nodes_in_the_common_order(folders):
    before = [read_party(folder) for folder in folders]
    align_folders(folders)
    for index, (folder, whole) in enumerate(zip(folders, before, strict=True)):
        party = read_party(folder)
        assert set(party.ids.tolist()) == list_common(PEOPLE)
        own = whole.ids.tolist()
        rows = [own.index(spell(int(each[-3:]), index)) for each in party.ids.tolist()]
        assert np.array_equal(party.features, whole.features[rows])
        assert party.labels.tolist() == whole.labels[rows].tolist()
        expected = {(own[s], own[t]) for s, t in whole.graph.edge_index().T if s in rows and t in rows}
        assert {tuple(own[rows[at]] for at in edge) for edge in party.graph.edge_index().T} == expected


def test_numbers_and_strings_align_by_their_text(tmp_path):
    for name, ids in (("a", ["3", "1", "2"]), ("b", ["x", "2", "3"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nodes.csv").write_text("id,x\n" + "".join(f"{each},1\n" for each in ids))
        (tmp_path / name / "edges.csv").write_text("source,target\n2,3\n")
        (tmp_path / name / "party.toml").write_text("")
    align_folders([tmp_path / "a", tmp_path / "b"])
    first, second = (read_party(tmp_path / name).ids.tolist() for name in "ab")
    assert first == second
    assert set(first) == {"2", "3"}


def test_training_uses_the_common_order_and_the_converted_data_too(folders, tmp_path):
    align_folders(folders)
    parties = load_parties(RunConfig(data=DataConfig(parties=tuple(map(str, folders)))))
    common = read_alignment(folders[0]).ids.tolist()
    assert [party.ids.tolist() for party in parties] == [common] * 3
    cache = Cache(tmp_path / "cache", min_bytes=0)
    for _ in range(2):
        party = read_party_once(folders[0], "refuse", cache)
        assert party.ids.tolist() == common
        assert party.alignment_key == read_alignment(folders[0]).key
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.is_file() or party.alignment_key.hex().encode() not in path.read_bytes()
    (folders[0] / ALIGNMENT_FILE).unlink()
    assert read_party_once(folders[0], "refuse", cache).num_nodes == len(list_people(0, PEOPLE))


def test_an_alignment_that_is_refused_leaves_no_lock_and_names_the_fault(folders, tmp_path):
    (tmp_path / "link").symlink_to(folders[0])
    (tmp_path / "no party").mkdir()
    for given, words in (
        ([folders[0], folders[0]], "two or more parties with different names"),
        ([folders[0], tmp_path / "link"], "two or more parties with different names"),
        ([folders[0], tmp_path / "no party"], r"party\.toml"),
    ):
        with pytest.raises(GlasuError, match=words):
            align_folders(given)
        assert not any((folder / ".lock").exists() for folder in given)
    with hold_folder(folders[1]), pytest.raises(ConfigError, match="another command is using this folder"):
        align_folders(folders)
    align_folders(folders)  # the locks of the first folder were released


def test_folders_of_which_only_some_are_aligned_are_refused(folders):
    config = RunConfig(data=DataConfig(parties=tuple(map(str, folders))))
    align_folders(folders)
    kept = (folders[1] / ALIGNMENT_FILE).read_bytes()
    (folders[1] / ALIGNMENT_FILE).unlink()
    with pytest.raises(
        AlignmentError, match=rf"is in {folders[0]}, {folders[2]}, but not in {folders[1]}; run glasu al"
    ):
        load_parties(config)
    align_folders(folders)
    load_parties(config)
    (folders[1] / ALIGNMENT_FILE).write_bytes(kept)
    with pytest.raises(AlignmentError, match="comes from different alignments; run glasu align with all"):
        load_parties(config)


def test_the_key_is_not_shown(folders):
    align_folders(folders)
    party = read_party(folders[0])
    assert party.alignment_key.hex() not in repr(party)
    assert repr(party.alignment_key) not in repr(party)


def write_nodes(folder, ids):
    folder.mkdir(exist_ok=True)
    (folder / "nodes.csv").write_text("id,x\n" + "".join(f"{each},1\n" for each in ids))
    (folder / "edges.csv").write_text("source,target\n")
    (folder / "party.toml").write_text('id_type = "string"\n')


@pytest.mark.parametrize("ids", [["a", "b"], ["a", "b", "c", "d"], ["a", "b", "x"]], ids=str)
def test_a_file_for_other_ids_than_the_table_has_is_refused(ids, tmp_path):
    write_nodes(tmp_path / "p", ["c", "a", "b"])
    ids_then = np.array(["c", "a", "b"])
    CommonIds.of(ids_then, np.array([1, 0]), KEY, "ab", IdRules()).write(tmp_path / "p")
    assert read_party(tmp_path / "p").ids.tolist() == ["a", "c"]
    write_nodes(tmp_path / "p", ["a", "b", "c"])  # another order of the rows makes no difference
    assert read_party(tmp_path / "p").ids.tolist() == ["a", "c"]
    write_nodes(tmp_path / "p", ids)
    with pytest.raises(DataError, match=r"alignment\.parquet: the ids of the nodes have changed .*; align again"):
        read_party(tmp_path / "p")


def test_a_file_of_other_rules_is_refused(folders):
    align_folders(folders)
    manifest = folders[0] / "party.toml"
    manifest.write_text(manifest.read_text().replace("collapse", "remove"))
    with pytest.raises(DataError, match=r"alignment\.parquet: was made with different rules for ids"):
        read_party(folders[0])


@pytest.mark.parametrize("content", [b"", b"PAR1", b"nonsense"])
def test_a_damaged_file_is_refused(content, folders):
    (folders[0] / ALIGNMENT_FILE).write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        read_party(folders[0])


def test_only_the_id_column_decides_about_an_alignment(folders):
    manifest, ids = read_normalized_ids(folders[1])
    assert manifest.name == "b"
    assert set(ids.tolist()) == {name_person(number) for number in list_people(1, PEOPLE)}


def test_folders_with_other_rules_or_equal_names_are_refused(folders):
    with pytest.raises(ConfigError, match="two or more parties with different names"):
        align_folders([folders[0], folders[0]])
    (folders[1] / "party.toml").write_text("")
    with pytest.raises(AlignmentError, match="the rules for ids differ"):
        align_folders(folders, AlignmentOptions(secrets=SECRETS))


def test_the_command_aligns_folders_and_refuses_in_one_line(folders, tmp_path):
    done = glasu("align", *folders)
    assert done.returncode == 0, done.stderr
    assert f"{len(list_common(PEOPLE))} of {len(list_people(0, PEOPLE))} ids are common" in done.stdout
    assert_refused(glasu("align", folders[0]), "two or more parties", "--server HOST:PORT --kit KIT")
    assert_refused(glasu("align", *folders, "--server", "localhost:1"), "--server and --kit must be given together")
    assert_refused(
        glasu("align", *folders, "--max-ids", "3", "--quiet"), "the limit here is 3 (--max-ids", "raise the limit at"
    )
    assert_refused(glasu("align", *folders, "--max-ids", "0"), "must be an integer of 1 or more")
    assert build_parser().parse_args(["align", "a", "b"]).max_ids == DEFAULT_MAX_IDS
