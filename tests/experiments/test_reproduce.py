"""The paper's tables: the runs, the stored results, and the output beside the paper's figures."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import signal
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import glasu
from glasu.cli.main import main
from glasu.config import RunConfig, TrainConfig
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError, DataError, GlasuError, TrainingError
from glasu.experiments import reproduce, results, tables
from glasu.experiments.figures import average_curves
from glasu.experiments.partitions import COLUMNS as PARTITION_COLUMNS
from glasu.experiments.partitions import PARTITION_KEYS, make_settings
from glasu.experiments.partitions import SETTINGS as PARTITION_SETTINGS
from glasu.experiments.plan import (
    DATASETS,
    METHOD_SETTINGS,
    PAPER_TABLES,
    TABLE_NAMES,
    Plan,
    Run,
    find_tuned_file,
    read_settings,
)
from glasu.files import hold_folder
from glasu.report import AloneScores
from support.commands import assert_group_ends, start_in_group
from support.log_lines import on_log

COLUMNS = "dataset,method,setting,seed,test_accuracy,validation_accuracy,rounds,bytes,exchanges,cpu_seconds"
SCORES = "metric,test_score,validation_score"
SMALL = {
    "data": {"num_nodes": 60, "average_degree": 4.0, "num_features": 9, "num_classes": 3, "split": [0.4, 0.3, 0.3]},
    "model": {"hidden": 8},
}


def small(dataset: str, method: str, backbone: str = "gcnii") -> RunConfig:
    """Return settings of four rounds on a graph of sixty nodes."""
    train = {**METHOD_SETTINGS[method], "num_rounds": 4, "evaluate_every": 2, "learning_rate": 0.02}
    sections = {
        "data": {**SMALL["data"], "name": "demo" if dataset == "demo" else "synthetic"},
        "model": SMALL["model"],
        "train": train,
    }
    return RunConfig.from_dict(sections).replace(model={"backbone": backbone, "heads": 2})


def small_divided(dataset: str, partition: str, method: str) -> RunConfig:
    """Return settings of four rounds on a divided graph of sixty nodes."""
    config = small(dataset, "glasu-1").replace(data={"partition": partition, **PARTITION_KEYS.get(partition, {})})
    return config.replace(train={"method": method})


PLAN = Plan(settings=small, divided=small_divided)


def make_row(dataset: str, method: str, setting: str, seed: int, *, score: float = 0.5, bytes: int = 10) -> results.Row:
    return results.Row(dataset, method, setting, seed, score, 0.5, 4, bytes, 2, 1.0, "accuracy", score, 0.5)


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "results.csv").read_text().splitlines()))


def run_all(folder: Path, *names: str, plan: Plan = PLAN, dataset: str = "synthetic", **options):
    lines: list[str] = []
    with on_log(lines.append):
        done = reproduce.reproduce(names, folder, datasets=[dataset], plan=plan, **{"seeds": 1, **options})
    return done, lines


@dataclasses.dataclass(frozen=True)
class Finished:
    """The folder of a finished table, its results and its log lines; not to be changed."""

    folder: Path
    done: reproduce.Reproduction
    lines: list[str]

    def copy(self, folder: Path) -> Path:
        """Copy the folder for a test that changes it."""
        return Path(shutil.copytree(self.folder, folder))


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory) -> Finished:
    """Return the table of all methods with one seed."""
    folder = tmp_path_factory.mktemp("accuracy")
    return Finished(folder, *run_all(folder, "accuracy"))


@pytest.fixture(scope="module")
def partitions(tmp_path_factory) -> Finished:
    """Return the table of partitions with one seed."""
    folder = tmp_path_factory.mktemp("partitions")
    return Finished(folder, *run_all(folder, "partitions"))


def test_a_row_holds_what_training_with_these_settings_gives(accuracy, tmp_path):
    folder = accuracy.copy(tmp_path / "out")
    run_all(folder, "lazy", seeds=2)
    assert (folder / "results.csv").read_text().splitlines()[0] == f"{COLUMNS},{SCORES}"
    found = {(row["method"], row["setting"], row["seed"]): row for row in rows(folder)}
    assert len(found) == len(METHOD_SETTINGS) + 5  # K = 2 of `lazy` with seed 0 is GLASU-4 of `accuracy`
    listed = [*PLAN.list_runs("accuracy", ["synthetic"], [0]), *PLAN.list_runs("lazy", ["synthetic"], [0, 1])]
    for run in listed:
        row = found[run.method, run.setting, str(run.seed)]
        report = glasu.train(load_parties(run.config), run.config)
        assert float(row["test_accuracy"]) == pytest.approx(report.test.accuracy, rel=1e-5)
        assert float(row["validation_accuracy"]) == pytest.approx(report.validation.accuracy, rel=1e-5)
        assert int(row["bytes"]) == report.traffic["bytes_to_server"] + report.traffic["bytes_to_clients"]
        assert int(row["exchanges"]) == report.traffic["exchanges"]
        assert int(row["rounds"]) == 4
        assert float(row["cpu_seconds"]) > 0


def test_what_the_folder_holds_is_not_run_again_unless_its_settings_changed(accuracy, tmp_path):
    assert sum("test accuracy" in line for line in accuracy.lines) == len(METHOD_SETTINGS)
    folder = accuracy.copy(tmp_path / "out")
    (folder / "results.csv").unlink()
    _, second = run_all(folder, "accuracy")
    assert not any("test accuracy" in line for line in second)
    assert len(rows(folder)) == len(METHOD_SETTINGS)
    lost = next((folder / "runs").rglob("glasu-4*/seed-0-*.json"))
    lost.write_text(lost.read_text()[:-40])  # half a file, as another program's crash might leave it
    _, third = run_all(folder, "accuracy")
    assert [line.split(" (")[0] for line in third if "test accuracy" in line] == ["7/7 synthetic glasu-4"]

    def change_learning_rate(dataset: str, method: str, backbone: str = "gcnii") -> RunConfig:
        rate = {"learning_rate": 0.05} if method == "simulated" else {}
        return small(dataset, method, backbone).replace(train=rate)

    _, fourth = run_all(folder, "accuracy", plan=Plan(settings=change_learning_rate))
    assert [line.split(" (")[0] for line in fourth if "test accuracy" in line] == ["7/7 synthetic simulated"]
    _, fifth = run_all(folder, "accuracy")  # the earlier results still exist
    assert not any("test accuracy" in line for line in fifth)
    for path in (folder / "runs").rglob("*.json"):  # as an older version of the program wrote them
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "epoch": stored["epoch"] - 1}))
    _, sixth = run_all(folder, "accuracy")
    assert sum("test accuracy" in line for line in sixth) == len(METHOD_SETTINGS)


def test_a_quick_look_costs_no_finished_run_and_tables_show_all_that_the_folder_holds(tmp_path):
    run_all(tmp_path, "lazy", seeds=2)
    reproduce.reproduce(["lazy"], tmp_path, datasets=["synthetic"], seeds=1, quick=True, plan=PLAN)
    assert {row["rounds"] for row in rows(tmp_path)} == {"1"}
    for page in ("tables.md", "report.html"):
        assert reproduce.QUICK in (tmp_path / page).read_text()
    done, lines = run_all(tmp_path, "accuracy", seeds=1)
    assert reproduce.QUICK not in (tmp_path / "tables.md").read_text()
    assert sum("test accuracy" in line for line in lines) == len(METHOD_SETTINGS) - 1  # GLASU-4 was there
    assert {row["seed"] for row in rows(tmp_path)} == {"0", "1"}
    assert [table.title for table in done.tables] == ["Accuracy", "Lazy aggregation"]


def test_a_second_command_in_the_same_folder_is_refused(tmp_path):
    with hold_folder(tmp_path), pytest.raises(ConfigError, match="another command is using this folder"):
        run_all(tmp_path, "accuracy")


def test_tables_are_written_however_it_ends(tmp_path):
    def stop(line: str) -> None:
        if line.startswith("2/7"):
            raise KeyboardInterrupt

    with on_log(stop), pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(["accuracy"], tmp_path, datasets=["synthetic"], seeds=1, plan=PLAN)
    assert len(rows(tmp_path)) == 2


@pytest.mark.slow
def test_a_quick_look_at_cora_shows_the_papers_order_of_methods(data_root, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLASU_DATA_ROOT", str(data_root))
    words = ["reproduce", "accuracy", "--quick", "--datasets", "cora", "--jobs", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    found = {row["method"]: float(row["test_accuracy"]) for row in rows(tmp_path)}
    assert list(found) == list(METHOD_SETTINGS)
    joint = [found[method] for method in ("centralized", "simulated", "glasu-1", "glasu-4")]
    assert min(joint) >= 0.78  # the paper, after all its rounds: 80.1 to 81.0, 74.6 standalone
    assert min(joint) >= found["standalone"] + 0.02
    assert "| paper" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_command_that_is_stopped_leaves_no_process_behind(sent, code, tmp_path):
    words = ["reproduce", "accuracy", "--datasets", "demo", "--seeds", "2", "--jobs", "2", "--out", tmp_path]
    process = start_in_group(*words)
    assert process.stderr is not None
    while "test accuracy" not in process.stderr.readline():
        assert process.poll() is None
    assert_group_ends(process, sent, code)


def test_processes_change_nothing_but_the_time(accuracy, tmp_path):
    together, _ = run_all(tmp_path, "accuracy", jobs=2)
    assert [dataclasses.replace(result.row, cpu_seconds=0.0) for result in accuracy.done.results] == [
        dataclasses.replace(result.row, cpu_seconds=0.0) for result in together.results
    ]


def test_a_run_that_diverges_is_named_and_the_others_are_kept(tmp_path):
    def wild(dataset: str, method: str, backbone: str = "gcnii") -> RunConfig:
        rate = {"learning_rate": 1e30} if method == "glasu-1" else {}
        return small(dataset, method, backbone).replace(train=rate)

    with pytest.raises(TrainingError, match=r"1 of 7 runs failed; the first was synthetic/glasu-1.*diverged"):
        run_all(tmp_path, "accuracy", plan=Plan(settings=wild))
    assert [row["method"] for row in rows(tmp_path)] == [name for name in METHOD_SETTINGS if name != "glasu-1"]


def test_what_is_written_tells_nothing_about_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path / "secret"))
    run_all(tmp_path / "out", "accuracy")
    for file in (tmp_path / "out").rglob("*.*"):
        assert str(tmp_path) not in file.read_text()


def test_all_tables_come_out_of_one_folder_with_the_papers_figures(tmp_path):
    plan = Plan(settings=small, divided=small_divided, stop_at={"pubmed": 0.1})
    done, _ = run_all(tmp_path, *PAPER_TABLES, seeds=2, plan=plan, dataset="pubmed")
    assert [table.title for table in done.tables] == [
        "Accuracy",
        "Lazy aggregation",
        "Stale updates",
        "Number of clients",
        "Backbones",
    ]
    accuracy, lazy, stale, clients, backbones = done.tables
    ours = [100 * float(row["test_accuracy"]) for row in rows(tmp_path) if row["method"] == "centralized"]
    mean, deviation = statistics.fmean(ours), statistics.stdev(ours)
    assert accuracy.rows[0][:5] == (
        "pubmed",
        "centralized",
        "84.9",
        f"{mean:.1f} ± {deviation:.1f}",
        f"{mean - 84.9:+.1f}",
    )
    assert [row[0] for row in lazy.rows] == ["pubmed K=4", "pubmed K=2", "pubmed K=1"]
    assert [row[4] for row in lazy.rows] == ["130", "96.6", "81.3"]
    assert [row[5] for row in lazy.rows] == ["0.0", "25.7", "37.5"]
    bytes_of = [
        statistics.fmean(int(row["bytes"]) for row in rows(tmp_path) if row["setting"] == f"M=3 K={K} Q=4 gcnii")
        for K in (4, 2, 1)
    ]
    assert [row[7] for row in lazy.rows] == [f"{100 * (1 - moved / bytes_of[0]):.1f}" for moved in bytes_of]
    assert [row[2] for row in stale.rows] == ["66.1", "43.8", "88.9", "> 128"]
    assert [row[6] for row in stale.rows] == ["2 of 2"] * 4
    assert [row[3] for row in stale.rows] == ["1.0 ± 0.0"] * 4  # one class of three is enough
    assert len(clients.rows) == 7
    assert [row[1] for row in backbones.rows] == ["gcn", "gat", "gcnii"]
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "tables.md").read_text()
    for table in done.tables:
        assert f"<h2>{table.title}</h2>" in page
        assert f"## {table.title}" in text
    assert page.count('class="plotly-graph-div"') == 5  # three axes of the methods, two of the backbones
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0] == "dataset,method,setting,seed,round,val_accuracy,bytes,exchanges,seconds"


def test_a_goal_that_no_seed_reaches_is_reported(tmp_path):
    done, _ = run_all(tmp_path, "stale", plan=Plan(settings=small, stop_at={"synthetic": 1.0}))
    assert {cost for row in done.tables[0].rows for cost in row[3:6]} == {"-"}
    assert sorted({row["rounds"] for row in rows(tmp_path)}) == ["1", "2", "4", "8"]  # sixteen steps per setting
    assert {row[6] for row in done.tables[0].rows} == {"0 of 1"}


def test_savings_are_against_every_layer_and_over_the_same_seeds():
    def result(K: int, seed: int, moved: int):
        row = make_row("cora", "glasu-4", f"M=3 K={K} Q=4 gcnii", seed, bytes=moved)
        return results.RunResult(row, (results.CurvePoint(4, 0.5, moved, 2, 1.0),))

    def savings(*found):
        (table,) = [table for table in tables.make_tables(found) if table.title == "Lazy aggregation"]
        return [row[7] for row in table.rows]

    assert savings(result(4, 0, 100), result(2, 0, 40), result(2, 1, 1000)) == ["0.0", "60.0"]
    assert savings(result(2, 0, 40), result(1, 0, 10)) == ["-", "-"]  # nothing to compare with


def test_a_set_that_comes_divided_is_not_divided_among_more(tmp_path):
    assert Plan().list_runs("clients", ["dblp_authors"], [0]) == []
    plan = Plan(settings=lambda *words: small("demo", words[1]).replace(train={"num_rounds": 1}))
    with pytest.raises(ConfigError, match=r"data.num_clients=5: the number of parties in 'demo' is 3"):
        reproduce.reproduce(["clients"], tmp_path, datasets=["demo"], seeds=1, plan=plan)


def test_no_difference_is_shown_where_the_features_are_not_the_papers():
    row = make_row("suzhou", "glasu-4", "M=3 K=2 Q=4 gcnii", 0)
    (table,) = tables.make_tables(
        [results.RunResult(row, (results.CurvePoint(4, 0.5, 10, 2, 1.0),), notes=("replaced",))]
    )
    assert table.rows[0][2:5] == ("-", "50.0", "-")


def test_a_set_with_relations_shows_each_party_alone():
    def result(method: str, setting: str, seed: int, accuracy: float, alone: tuple[float, ...] = ()):
        row = make_row("dblp_authors", method, setting, seed, score=accuracy)
        parties = [AloneScores(name, "model", 0.5, value) for name, value in zip("abc", alone, strict=False)]
        propagation = [AloneScores(each.party, "label propagation", 0.4, 0.3) for each in parties]
        return results.RunResult(row, (results.CurvePoint(4, 0.5, 10, 2, 1.0),), (*parties, *propagation))

    found = [
        result("standalone", "M=3 gcnii", 0, 0.6, (0.5, 0.7, 0.6)),
        result("standalone", "M=3 gcnii", 1, 0.7, (0.6, 0.9, 0.6)),
        result("glasu-4", "M=3 K=2 Q=4 gcnii", 0, 0.9),
    ]
    (table,) = [table for table in tables.make_tables(found) if table.title == "Natural relations"]
    assert [row[1:] for row in table.rows] == [
        ("APA alone", "55.0 ± 7.1", "2"),
        ("APCPA alone", "80.0 ± 14.1", "2"),
        ("APTPA alone", "60.0 ± 0.0", "2"),
        ("mean of the parties alone", "65.0 ± 7.1", "2"),
        ("glasu-4", "90.0", "1"),
    ]


def test_a_mean_curve_ends_where_the_first_seed_stopped():
    def result(curve):
        row = make_row("cora", "glasu-4", "", 0)
        return results.RunResult(row, tuple(results.CurvePoint(*point) for point in curve))

    pair = [result(((2, 0.5, 4_000_000, 2, 1.0), (4, 0.6, 8_000_000, 4, 2.0))), result(((2, 0.7, 6_000_000, 2, 3.0),))]
    assert average_curves(pair, "bytes") == ([5.0], [60.0])
    assert average_curves(pair, "round") == ([2], [60.0])


def test_tables_that_share_a_run_share_its_settings():
    seen: dict[str, Run] = {}
    for table in TABLE_NAMES:
        for run in Plan().list_runs(table, None, [0]):
            assert seen.setdefault(str(run), run) == run


def test_the_tables_compare_what_the_paper_compares():
    def settings_of(table: str, dataset: str) -> list[str]:
        return [f"{run.method} {run.setting}" for run in Plan().list_runs(table, [dataset], [0])]

    assert settings_of("lazy", "pubmed") == [f"glasu-4 M=3 K={K} Q=4 gcnii" for K in (4, 2, 1)]
    assert settings_of("stale", "pubmed") == [f"glasu-4 M=3 K=2 Q={Q} gcnii to 83 %" for Q in (2, 4, 8, 16)]
    assert settings_of("clients", "pubmed")[1:4] == [f"standalone M={M} gcnii" for M in (3, 5, 7)]
    assert settings_of("backbones", "pubmed") == [
        f"glasu-4 M=3 K=2 Q=4 {name}" for name in ("gcn L=2", "gat L=2", "gcnii")
    ]
    layers = [run.config.model.aggregation_layers for run in Plan().list_runs("lazy", ["pubmed"], [0])]
    assert layers == [(0, 1, 2, 3), (1, 3), (3,)]


SEARCHES = Path(__file__).parents[2] / "benchmarks" / "results" / "search"
SETTINGS = sorted(find_tuned_file("any", "any").parent.parent.glob("*/*.toml"))


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_tuned_settings_are_of_their_data_set_and_method_and_say_which_search_found_them(path):
    method = next(name for name in METHOD_SETTINGS if path.stem.startswith(name))
    backbone = path.stem.removeprefix(method).removeprefix("-") or "gcnii"
    config = read_settings(path.parent.name, method, backbone)
    assert config.data.name == path.parent.name
    assert config.data.split == "paper"
    assert config.model.backbone == backbone
    layers = (4, (1, 3)) if backbone == "gcnii" else (2, (0, 1))
    assert (config.model.num_layers, config.model.aggregation_layers) == layers
    assert (config.data.num_clients, config.train.seed, config.wire.precision) == (3, 0, "fp32")
    for key, value in METHOD_SETTINGS[method].items():
        assert getattr(config.train, key) == value
    first = path.read_text().splitlines()[0]
    if first.startswith("# Not searched: "):
        source = re.search("found for ([^,]*),", first)
        assert source is None or (path.parent / f"{source[1]}.toml").read_text().startswith("# Found by glasu")
        return
    assert first.startswith("# Found by glasu")
    trials = csv.DictReader((SEARCHES / f"{path.parent.name}-{path.stem}.csv").read_text().splitlines())
    best = max((row for row in trials if row["state"] == "complete"), key=lambda row: float(row["validation"]))
    for key in [name for name in best if "." in name]:
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == float(best[key])


def test_a_data_set_that_is_not_there_is_left_out_unless_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path / "nothing"))

    def settings(dataset: str, method: str, backbone: str) -> RunConfig:
        return (small if dataset == "synthetic" else read_settings)(dataset, method, backbone)

    plan = Plan(settings=settings, datasets=dict.fromkeys(TABLE_NAMES, ("synthetic", "dblp_authors")))
    lines: list[str] = []
    with on_log(lines.append):
        reproduce.reproduce(["accuracy"], tmp_path / "out", seeds=1, plan=plan)
    assert any(line.startswith("dblp_authors: skipped: ") for line in lines)
    assert {row["dataset"] for row in rows(tmp_path / "out")} == {"synthetic"}
    with pytest.raises(GlasuError, match="dblp_authors"):
        reproduce.reproduce(["accuracy"], tmp_path / "out", datasets=["dblp_authors"], plan=plan)
    with pytest.raises(DataError, match="no data set for these tables is available"):
        reproduce.reproduce(
            ["accuracy"], tmp_path / "none", plan=Plan(datasets=dict.fromkeys(TABLE_NAMES, ("dblp_authors",)))
        )


def test_quick_is_a_quarter_of_the_rounds_and_one_seed(tmp_path, capsys):
    words = ["reproduce", "accuracy", "--quick", "--datasets", "demo", "--methods", "glasu-4", "--jobs", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    quarter = TrainConfig().num_rounds // 4
    assert {(row["rounds"], row["seed"]) for row in rows(tmp_path)} == {(str(quarter), "0")}
    out, errors = capsys.readouterr()
    assert "| demo | glasu-4 | - |" in out
    assert "report.html" in out
    assert "demo: 2400 nodes" in errors
    stored = json.loads(next((tmp_path / "runs").rglob("*.json")).read_text())
    assert stored["config"]["train"]["num_rounds"] == quarter


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "invalid choice"),
        (["accuracy", "--seeds", "0"], "'0' must be an integer from 1 to 10000"),
        (["accuracy", "--jobs", "many"], "'many' must be an integer"),
        (["accuracy", "--datasets", "cora,,pubmed"], "must be a comma-separated list of names"),
        (["accuracy", "--datasets", "coral"], "coral"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path))
    try:
        code = main(["reproduce", *words, "--out", str(tmp_path / "out")])
    except SystemExit as exit_:
        code = exit_.code
    errors = capsys.readouterr().err
    assert code == 2
    assert said in errors
    assert errors.count("\n") == 1


PARTITION_HEADS = ("data set", "partition", "labels", *PARTITION_COLUMNS, "MB", "seeds")


def test_the_table_of_partitions_pairs_every_method_with_glasu(partitions, tmp_path):
    folder = partitions.copy(tmp_path / "out")
    done, _ = run_all(folder, "partitions", seeds=3)
    (table,) = done.tables
    assert (table.title, table.headings) == ("Partitions", PARTITION_HEADS)
    assert [row[1:3] for row in table.rows] == [(way, labels) for way in PARTITION_KEYS for labels in ("all", "a")]
    found = {(row["method"], row["setting"].split(" M=")[0], int(row["seed"])): row for row in rows(folder)}
    assert len(found) == 3 * (
        7 * len(PARTITION_KEYS) + 1
    )  # 4 methods with labels everywhere, 3 at one party, pooled data once
    for row in table.rows:
        _, partition, labels, *_ = row
        cells = dict(zip(table.headings, row, strict=True))

        def scores(method: str, setting: str) -> np.ndarray:
            return np.array([100 * float(found[method, setting, seed]["test_accuracy"]) for seed in range(3)])

        where = f"{partition} labels={labels}"
        ours = scores("glasu-1", where)
        assert cells["GLASU"] == f"{ours.mean():.1f}"
        compared = {"smooth": scores("smooth", where), "pooled": scores("centralized", "undivided gcnii")}
        compared |= {"ensemble": scores("ensemble", where)} if labels == "all" else {}
        for heading, theirs in compared.items():
            low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.9) if (ours != theirs).any() else (0, 0)
            mean, paired = cells[heading].rstrip(")").split(" (")
            assert mean == f"{theirs.mean():.1f}"
            shown = [float(value) for value in paired.replace(" to ", ", ").split(", ")]
            assert shown == pytest.approx([(ours - theirs).mean(), low, high], abs=0.051)
        moved = [int(found["glasu-1", where, seed]["bytes"]) for seed in range(3)]
        assert cells["MB"] == f"{statistics.fmean(moved) / 1e6:,.1f}"
        assert cells["seeds"] == "3"


def test_alone_is_the_best_party_on_validation_and_with_labels_at_one_party_the_owner(partitions):
    shown = {row[1:3]: row[3].split(" (")[0] for row in partitions.done.tables[0].rows}
    for partition in PARTITION_KEYS:
        report = glasu.train(load_parties(config := small_divided("synthetic", partition, "standalone")), config)
        validation = [*report.validation.per_client, *report.validation.per_client_propagation]
        test = [*report.test.per_client, *report.test.per_client_propagation]
        parties = [(here, there) for here, there in zip(validation, test, strict=True) if here is not None]
        _, best = max(parties, key=lambda scores: scores[0])
        assert shown[partition, "all"] == f"{100 * best:.1f}"
        # The owner's training does not depend on the labels of the others.
        owner = [(validation[index], test[index]) for index in (0, 3) if validation[index] is not None]
        assert shown[partition, "a"] == f"{100 * max(owner, key=lambda scores: scores[0])[1]:.1f}"


def test_the_table_names_methods_that_a_partition_makes_impossible(partitions):
    (table,) = partitions.done.tables
    cells = {(row[1], row[2]): dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert {cell["ensemble"] for (_, labels), cell in cells.items() if labels == "a"} == {"impossible"}
    assert "impossible" not in {
        text for (_, labels), cell in cells.items() if labels == "all" for text in cell.values()
    }
    assert "ensemble: train.labels='a': train.method=\"ensemble\" needs labels at every party." in table.note


def test_a_seed_that_failed_is_missing_from_its_column_only(tmp_path):
    def wild(dataset: str, partition: str, method: str) -> RunConfig:
        rate = {"learning_rate": 1e30} if (partition, method) == ("edges", "glasu") else {}
        return small_divided(dataset, partition, method).replace(train=rate)

    with pytest.raises(TrainingError, match=r"2 of 36 runs failed; the first was synthetic/glasu-1-edges.*diverged"):
        run_all(tmp_path, "partitions", plan=Plan(divided=wild))
    (line,) = [line for line in (tmp_path / "tables.md").read_text().splitlines() if "| edges | all |" in line]
    cells = dict(zip(PARTITION_HEADS, line.strip("| ").split(" | "), strict=True))
    assert (cells["GLASU"], cells["MB"], cells["seeds"]) == ("-", "-", "1")
    assert "(" not in cells["pooled"]  # nothing to compare with


def test_a_task_of_two_classes_is_compared_by_the_area_under_the_curve(tmp_path):
    def binary(dataset: str, partition: str, method: str) -> RunConfig:
        config = small_divided(dataset, partition, method).replace(data={"num_classes": 2}, train={"task": "binary"})
        return config.replace(data={"num_clients": 2})

    plan = Plan(divided=binary)
    done, lines = run_all(tmp_path, "partitions", plan=plan)
    assert sum("test ROC AUC 0." in line or "test ROC AUC 1" in line for line in lines) == 36
    config = binary("synthetic", "apart", "glasu")
    report = glasu.train(load_parties(config), config)
    (row,) = [row for row in rows(tmp_path) if (row["method"], row["setting"][:16]) == ("glasu-1", "apart labels=all")]
    assert row["metric"] == "roc_auc"
    assert float(row["test_score"]) == pytest.approx(report.test.roc_auc, rel=1e-5)
    assert float(row["validation_score"]) == pytest.approx(report.validation.roc_auc, rel=1e-5)
    assert float(row["test_accuracy"]) == pytest.approx(report.test.accuracy, rel=1e-5)
    shown = {row[1:3]: row[6] for row in done.tables[0].rows}
    assert shown["apart", "all"] == f"{100 * report.test.roc_auc:.1f}"


@pytest.mark.parametrize("dataset", DATASETS["partitions"])
def test_all_methods_of_a_partition_have_the_same_settings(dataset):
    assert set(DATASETS["partitions"]) == set(PARTITION_SETTINGS)
    for row in Plan().list_partitions(dataset):
        runs = {name: run.config for name, run in row.runs.items() if not isinstance(run, str)}
        pooled = runs.pop("pooled")
        (common,) = {config.replace(train={"method": "glasu", "labels": "all"}) for config in runs.values()}
        assert (common.train.backward, common.train.num_local_steps) == ("joint", 1)
        assert pooled.model == common.model
        same = {"method": "glasu", "learning_rate": common.train.learning_rate}
        assert dataclasses.replace(pooled.train, **same) == common.train


def test_a_data_set_without_settings_of_its_own_has_the_defaults():
    config = make_settings("my_graph", "apart", "glasu")
    assert config == RunConfig().replace(data={"name": "my_graph", "partition": "apart"})


def test_some_methods_of_a_table_can_be_run(tmp_path):
    lines: list[str] = []
    words = {"datasets": ["synthetic"], "seeds": 1, "plan": PLAN}
    with on_log(lines.append):
        reproduce.reproduce(["accuracy"], tmp_path, methods=["Ensemble", "SMOOTH"], **words)
    assert [row["method"] for row in rows(tmp_path)] == ["ensemble", "smooth"]
    with pytest.raises(ConfigError, match=r"--methods: these tables have no glue; they have centralized, standalone"):
        reproduce.reproduce(["accuracy"], tmp_path, methods=["glue"], **words)
