"""Documents of the repository name files and commands that exist."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from glasu import registry
from glasu.cli.main import COMMANDS
from support.warm_process import run_program

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
EXTENSIONS = (ROOT / "docs" / "extensions.md").read_text()
KEYS_OF_SEAMS = {  # seam -> section and key whose value names a choice of the seam
    "aggregation": ("model", "aggregation"),
    "backbone": ("model", "backbone"),
    "data": ("data", "name"),
    "encoding": ("wire", "precision"),
    "method": ("train", "method"),
    "optimizer": ("train", "optimizer"),
    "partition": ("data", "partition"),
    "preset": ("train", "preset"),
    "profile": ("privacy", "profile"),
    "sampler": ("train", "sampler"),
    "schedule": ("train", "schedule"),
    "secure aggregation": ("privacy", "secure_aggregation"),
    "task": ("train", "task"),
}


SAMPLER = """
import numpy as np
import glasu
from glasu import registry
from glasu.model.draw_estimates import EdgeCounts
registry.load_extension("my_sampler")
config = glasu.RunConfig.from_dict({
    "data": {"name": "synthetic", "num_nodes": 60, "average_degree": 6.0, "num_features": 9},
    "train": {"num_rounds": 2, "evaluate_every": 2, "fanout": 2, "sampler": "first-neighbors", "batch_size": 8},
    "model": {"backbone": "gcn", "hidden": 8, "num_layers": 2, "aggregation_layers": [1]},
})
parties = glasu.load_parties(config)
graph, targets = parties[0].graph, np.array([3, 7, 20])
sampler = registry.load("sampler", "first-neighbors")(config, graph, 0, config.train.seed)
draw = sampler.draw(targets, 0, 1)
for row, target in enumerate(targets):
    drawn = graph.indices[draw.edges[draw.starts[row] : draw.starts[row + 1]]]
    neighbors = graph.indices[graph.indptr[target] : graph.indptr[target + 1]]
    assert drawn.tolist() == neighbors[:2].tolist()
    assert {target, *drawn} <= set(draw.nodes)
whole = np.arange(graph.num_nodes)
estimate = sampler.estimate_draw(config.train, EdgeCounts(graph, 2), len(whole), constant_batch=False)
assert estimate.nodes == graph.num_nodes
assert estimate.numbers == 2 * len(whole) + 1 + 2 * len(sampler.draw(whole, 0, 1).edges)
report = glasu.train(parties, config)
print("ok", report.config.train.sampler, len(report.losses))
"""

TRAINED = """
import dataclasses
import numpy as np
import torch
import glasu
from glasu import registry
from glasu.model.task import make_task
from glasu.runtime.simulation import simulate
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.floats import Plain
from glasu.wire.message_key import Key, Phase
for name in ("my_aggregation", "my_encoding", "my_backbone", "my_task", "my_choices"):
    registry.load_extension(name)
base = glasu.RunConfig.from_dict({
    "data": {"name": "synthetic", "num_nodes": 60, "average_degree": 6.0, "num_features": 9},
    "train": {"num_rounds": 2, "evaluate_every": 2},
    "model": {"backbone": "gcn", "hidden": 8, "num_layers": 2, "aggregation_layers": [0, 1]},
})
joint = {"backward": "joint", "num_local_steps": 1}
runs = {
    "none": {},
    "joint gradients": {"train": joint},
    "aggregation": {"model": {"aggregation": "sum"}},
    "aggregation and joint gradients": {"model": {"aggregation": "sum"}, "train": joint},
    "encoding": {"wire": {"precision": "half"}},
    "encoding and joint gradients": {"wire": {"precision": "half"}, "train": joint},
    "backbone": {"model": {"backbone": "max-pool"}},
    "optimizer": {"train": {"optimizer": "sign"}},
    "schedule": {"train": {"schedule": "warm-up"}},
    "partition": {"data": {"partition": "dealt"}},
    "method": {"train": {"method": "late"}},
}
digests = set()
for run, changes in runs.items():
    config = base.replace(**changes)
    digests.add(glasu.train(glasu.load_parties(config), config).weights_sha256)
assert len(digests) == len(runs)  # every choice has an effect
config = glasu.RunConfig.from_dict({
    "data": {"name": "synthetic", "num_nodes": 60, "num_features": 9},
    "train": {"num_rounds": 1, "preset": "wide"},
})
assert glasu.train(glasu.load_parties(config), config).config.model.hidden == 128

parties, counts = glasu.load_parties(base), np.arange(60) % 5 + 0.0
parties = [dataclasses.replace(party, labels=counts, classes=()) for party in parties]
simulation = simulate(parties, base.replace(train={"task": "counts", "num_rounds": 50, "learning_rate": 0.05}))
predicted = TrainedModel.of(simulation.clients).predict([dataclasses.replace(party, labels=None) for party in parties])
assert predicted.shape == counts.shape and (predicted >= 0).all()
assert simulation.report.losses[-1] < simulation.report.losses[0]
task = make_task(simulation.report.config.train)
logits = torch.randn(5, 1, dtype=torch.float64)
labels = torch.arange(5.0)
loss, gradient = task.loss_and_gradient(logits, labels)
for row in range(5):
    moved = logits.clone()
    moved[row] += 1e-6
    assert abs((task.loss_and_gradient(moved, labels)[0] - loss) / 1e-6 - gradient[row].item()) < 1e-4
assert task.find_score_error(np.full((2, 1), np.nan))
assert not task.find_score_error(task.repair_scores(np.array([[-1.0], [1e9]])))

values = [np.random.default_rng(client).standard_normal((4, 3), np.float32) for client in range(3)]
keys = [Key(b"", Phase.TRAINING, 0).to_client(client) for client in range(3)]
encoding = Plain()
for client in range(3):
    own = registry.load("aggregation", "sum")(3, client)
    partial = torch.from_numpy(values[client])
    whole = torch.from_numpy(own.combine_partials(encoding, values, keys[0], 0))
    torch.testing.assert_close(own.merge(own.extract_others(whole, partial), partial), whole)
    torch.testing.assert_close(
        torch.from_numpy(own.combine_gradients(encoding, values, keys, 0)[client]),
        own.own_gradient(torch.from_numpy(sum(values))),
    )
half = next(iter(registry.load("encoding", "half").make(base).values()))
payload = half.encode(values[0], keys[0])
assert not half.find_error(payload, 3) and half.is_finite(payload)
assert np.array_equal(half.decode(payload), values[0].astype(np.float16))
assert not half.is_finite(half.encode(values[0] * 1e9, keys[0]))
print("ok")
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_map_from_the_paper_to_the_code_names_files_that_exist():
    table = README.partition("## From the paper to the code")[2].partition("## Citation")[0]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(names) > 10
    missing = [name for name in names if not (ROOT / "src" / "glasu" / name).exists() and not (ROOT / name).exists()]
    assert not missing


def test_the_map_in_the_architecture_page_names_functions_that_exist():
    rows = re.findall(r"^\|.*`[\w/]+\.py`.*$", ARCHITECTURE.partition("## Where a change goes")[0], re.M)
    cells = [cell for row in rows for cell in row.split("|")[3:]]
    names = {name for cell in cells for name in re.findall(r"`(?:\w*\.)?(?!py`)(\w+)`", cell)}
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "glasu").rglob("*.py"))
    known = set(re.findall(r"^\s*(?:def|class) (\w+)", source, re.M))
    assert len(names) > 40
    assert not names - known


def test_the_readme_lists_every_command():
    table = README.partition("## Commands")[2].partition("## Documentation")[0]
    assert re.findall(r"^\| `glasu (\w+)", table, re.M) == list(COMMANDS)


def test_the_readme_has_a_page_of_documentation_for_every_file_in_docs():
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(
        re.findall(r"\((docs/[\w-]+\.md)\)", README)
    )


@pytest.mark.parametrize("seam", registry.SEAMS)
def test_the_row_of_a_key_lists_every_choice(seam):
    section, key = KEYS_OF_SEAMS[seam]
    text = CONFIGURATION.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
    row = re.search(rf"^\| `{key}`( \\\*)? \|.*$", text, re.M)
    assert row is not None
    # The table of the seam has the choices of GLASU only. `registry.choices` also has those that other tests register.
    choices = registry.import_attribute(registry.SEAMS[seam].table, seam)
    assert set(choices) <= set(registry.choices(seam))
    assert not [choice for choice in choices if not re.search(rf'`"?{re.escape(choice)}"?`', row.group())]


def test_the_table_of_seams_lists_those_that_an_extension_can_add_to_with_their_keys():
    rows = re.findall(r'^\| `"([\w ]+)"` \| `(\w+)\.(\w+)` \|', CONFIGURATION.partition("## Extensions")[2], re.M)
    assert [(seam, (section, key)) for seam, section, key in rows] == [
        (seam, KEYS_OF_SEAMS[seam]) for seam in registry.EXTENSIBLE
    ]


def test_the_page_on_extensions_names_the_class_the_methods_and_an_example_of_every_seam():
    rows = re.findall(r'^\| `"([\w ]+)"` \| `(\w+)` \| (.*) \| (.*) \|$', EXTENSIONS, re.M)
    assert {seam: base for seam, base, _, _ in rows} == {
        seam: registry.SEAMS[seam].base for seam in registry.EXTENSIBLE
    }
    for seam, base, needed, example in rows:
        cls = registry.import_attribute(f"{registry.SEAMS[seam].table.partition(':')[0]}:{base}", seam)
        required = getattr(cls, "__abstractmethods__", None) or {
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        assert required <= set(re.findall(r"`(\w+)`", needed)), seam
        files = re.findall(r"`([\w/]+\.py)`", example)
        source = "".join((ROOT / "src" / "glasu" / file).read_text() for file in files)
        for name in re.findall(r"`(\w+)`", example):
            assert re.search(rf"^(class )?{name}\b", source, re.M), name


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> Path:
    """Return a folder with the modules on the page on extensions."""
    folder = tmp_path_factory.mktemp("modules")
    for name, block in re.findall(r"```python\n# ([\w/]+\.py)\n(.*?)```", EXTENSIONS, re.S):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(block)
    return folder


def test_the_sampler_of_the_page_on_extensions_draws_and_trains(tmp_path, modules):
    assert run_program(SAMPLER, tmp_path, [modules]).split() == ["ok", "first-neighbors", "2"]


def test_the_other_examples_of_the_page_on_extensions_train(tmp_path, modules):
    assert run_program(TRAINED, tmp_path, [modules]).split() == ["ok"]


def test_a_server_without_torch_can_import_the_examples_of_the_page_on_extensions(modules):
    names = sorted(path.stem for path in modules.iterdir() if path.stem.startswith("my_"))  # not __pycache__
    assert len(names) == 6
    loads = "".join(f"; registry.load_extension({name!r})" for name in names)
    program = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, '.'); from glasu import registry{loads}"
    subprocess.run([sys.executable, "-c", program], cwd=modules, check=True)


def test_ci_and_the_workflow_call_make_test():
    for path in (".ci/run", ".github/workflows/test.yml"):
        assert re.search(r"^(.*run: )?make test$", (ROOT / path).read_text(), re.M)


def test_no_file_names_a_folder_of_a_developers_machine_or_a_package_index():
    tracked = [path for path in ROOT.rglob("*") if path.suffix in (".md", ".yml", ".yaml", ".toml", ".txt", ".cff")]
    for path in tracked:
        if not {".venv", "runs", ".git", ".pytest_cache"} & set(path.relative_to(ROOT).parts):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"/(home|Users|root|work)/\w", text), path
            assert not re.search(r"https?://[\w.]*(pypi|whl|download\.pytorch)[\w./]*", text), path
            if path.suffix == ".toml":
                tomllib.loads(text)
