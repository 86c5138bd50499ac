"""The registry: built-in choices, choices of extensions, and refused ones."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glasu import registry
from glasu.config import ModelConfig, PrivacyConfig, RunConfig, TrainConfig, WireConfig
from glasu.errors import ConfigError
from glasu.model.sampler import FullGraph
from support.warm_process import run_program

SEAM_MODULES = sorted({seam.table.partition(":")[0] for seam in registry.SEAMS.values()})
FIELDS = {
    "aggregation": (ModelConfig, "model", "aggregation"),
    "backbone": (ModelConfig, "model", "backbone"),
    "encoding": (WireConfig, "wire", "precision"),
    "method": (TrainConfig, "train", "method"),
    "secure aggregation": (PrivacyConfig, "privacy", "secure_aggregation"),
    "sampler": (TrainConfig, "train", "sampler"),
    "task": (TrainConfig, "train", "task"),
}


def run(program: str, *paths: Path) -> str:
    path = os.pathsep.join([*map(str, paths), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seam", FIELDS)
def test_the_config_accepts_every_choice_of_a_seam_and_lists_them_when_it_refuses_another(seam):
    kind, section, key = FIELDS[seam]
    for name in registry.choices(seam):
        assert getattr(kind(**{key: name}), key) == name
    with pytest.raises(ConfigError, match=rf"{section}.{key}='nothing': must be ") as caught:
        kind(**{key: "nothing"})
    assert all(f'"{name}"' in str(caught.value) for name in registry.choices(seam))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"model": {"backbone": "gcniii"}},
            r'must be .*"sage".* \(did you mean "gcnii"\?\); if an extension registers',
        ),
        ({"train": {"method": "ensembl"}}, r'\(did you mean "ensemble"\?\)'),
        ({"train": {"sampler": "neighbour"}}, r'\(did you mean "neighbor"\?\)'),
        ({"train": {"backward": "locl"}}, r'\(did you mean "local"\?\)\.$'),
        (
            {"model": {"backbone": "mine"}},
            r'must be .*"sage".*; if an extension .*, load that extension with --extension',
        ),
        ({"privacy": {"profile": "mine"}}, r"must be [^;]*\.$"),
        ({"model": {"backbone": 3}}, r'must be [^;]*"sage"[^;]*\.$'),
        ({"data": {"split": "publc"}}, r'\(did you mean "public"\?\)'),
    ],
)
def test_a_value_that_is_similar_to_a_choice_gets_a_suggestion(sections, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig.from_dict(sections)


@pytest.mark.parametrize("module", SEAM_MODULES)
def test_a_module_of_a_seam_loads_where_torch_numba_and_tenseal_cannot_be_imported(module):
    run(
        "import sys\n"
        "for name in ('torch', 'torch_geometric', 'numba', 'tenseal'): sys.modules[name] = None\n"
        f"import {module}\n"
        "import glasu\n"
        "glasu.RunConfig()\n"
    )


def test_a_registered_choice_is_loaded_on_first_use(tmp_path):
    (tmp_path / "my_samplers.py").write_text(
        "from glasu.model.sampler import FullGraph\nclass Hubs(FullGraph):\n    reads_whole_graph = True\n"
    )
    printed = run(
        "import sys\n"
        "from glasu import registry, TrainConfig\n"
        "registry.register('sampler', 'hubs', 'my_samplers:Hubs')\n"
        "assert registry.is_choice('sampler', 'hubs')\n"
        "assert 'my_samplers' not in sys.modules\n"
        "TrainConfig(sampler='hubs')\n"
        "print(registry.load('sampler', 'hubs').__name__, registry.choices('sampler')[-1])\n",
        tmp_path,
    )
    assert printed.split() == ["Hubs", "hubs"]


@pytest.mark.parametrize(
    ("seam", "name", "target", "said"),
    [
        ("sampler", "full", FullGraph, "registered already"),
        ("backbone", "gcn", "anywhere:Anything", "registered already"),
        ("flavour", "sweet", FullGraph, "no seam 'flavour'; the seams are aggregation, "),
        ("profile", "mine", FullGraph, "extensions cannot add a profile; they can add to aggregation, "),
        ("secure aggregation", "mine", FullGraph, "extensions cannot add a secure aggregation; they can add to "),
        ("sampler", "Upper Case", FullGraph, "lower-case letters"),
        ("sampler", "", FullGraph, "lower-case letters"),
    ],
)
def test_what_cannot_be_registered_is_refused(seam, name, target, said):
    with pytest.raises(ConfigError, match=said):
        registry.register(seam, name, target)


def test_a_name_can_be_registered_twice_for_one_target_only():
    registry.register("sampler", "twice", FullGraph)
    registry.register("sampler", "twice", FullGraph)
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("sampler", "twice", Path)
    assert registry.load("sampler", "twice") is FullGraph


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("absent", "no_such_module_anywhere:Thing", "cannot import 'no_such_module_anywhere'"),
        ("no-attribute", "json:Thing", "'json:Thing' names no attribute"),
        ("no-colon", "json", "write 'module:attribute'"),
    ],
)
def test_a_target_that_does_not_exist_is_named_when_it_is_used(name, target, said):
    registry.register("task", name, target)
    with pytest.raises(ConfigError, match=said):
        registry.load("task", name)


def test_an_extension_that_exits_is_refused(tmp_path, monkeypatch):
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing 'exits_on_import' failed"):
        registry.load_extension("exits_on_import")


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        (
            "fails_here",
            "import json\n\ndef f():\n    json.loads('x')\n\nf()\n",
            r"fails_here\.py, line 4\); correct the",
        ),
        ("needs_more", "import no_such.part\n", r"needs_more\.py, line 1\); install 'no_such', or put its folder on"),
        ("is_no_python", "def f(:\n", r"SyntaxError: .*is_no_python\.py, line 1\)\); correct the"),
        ("is_too_old", "\nfrom glasu import no_such\n", r"ImportError: .*is_too_old\.py, line 2\); correct the"),
    ],
)
def test_an_extension_that_fails_on_import_is_refused_with_the_line_and_the_remedy(
    name, source, said, tmp_path, monkeypatch
):
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"importing '{name}' failed .*{said}"):
        registry.load_extension(name)


@pytest.mark.parametrize("name", ["mine.py", "./mine.py", "folder/mine.py"])
def test_a_file_instead_of_a_module_is_refused_with_the_name_of_the_module(name):
    with pytest.raises(ConfigError, match=r"is not the name of a module; .* and give --extension mine\.$"):
        registry.load_extension(name)


def test_an_unknown_choice_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="sampler 'nowhere' is not known; known are full, neighbor, shared"):
        registry.load("sampler", "nowhere")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('register("backbone", "gcn", int)', "backbone 'gcn' is registered already"),
        ('register("flavour", "sweet", int)', "there is no seam 'flavour'"),
        ('register("sampler", "Upper Case", int)', "sampler 'Upper Case': a name has"),
    ],
)
def test_the_error_of_a_refused_choice_names_the_extension(tmp_path, monkeypatch, source, said):
    name = f"refused_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(f"from glasu.registry import register\n{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"^extension '{name}': {said}"):
        registry.load_extension(name)


WRONG_EXTENSION = """
from glasu.model.sampler import Sampler
from glasu.registry import register
class Draws(Sampler):
    pass
register("backbone", "wrong-base", int)
register("sampler", "no-draw", Draws)
register("task", "wrong-function", len)
register("partition", "wrong-type", "wrong_extension:Draws")
"""


def test_a_choice_of_another_class_is_refused_with_its_extension_and_the_base_class(tmp_path, monkeypatch):
    (tmp_path / "wrong_extension.py").write_text(WRONG_EXTENSION)
    (tmp_path / "run.toml").write_text('[data]\nname = "synthetic"\n[model]\nbackbone = "wrong-base"\n')
    printed = run_program(
        "import sys\n"
        "from glasu import registry\n"
        "from glasu.cli.main import main\n"
        "print(main(['train', sys.argv[1], '--out', 'out', '--extension', 'wrong_extension']))\n"
        "for seam, name in (('backbone', 'wrong-base'), ('sampler', 'no-draw'), ('task', 'wrong-function'),\n"
        "        ('partition', 'wrong-type')):\n"
        "    try:\n"
        "        registry.load(seam, name)\n"
        "    except registry.ConfigError as error:\n"
        "        print(error)\n",
        tmp_path,
        [tmp_path],
        [str(tmp_path / "run.toml")],
    )
    start = "extension 'wrong_extension': "
    assert printed.splitlines() == [
        "2",
        f"{start}backbone 'wrong-base': must be a subclass of glasu.model.backbones.Backbone, got the class "
        "builtins.int; register a subclass.",
        f"{start}sampler 'no-draw': Draws does not fit glasu.model.sampler.Sampler: draw is missing. Correct the "
        "extension.",
        f"{start}task 'wrong-function': must be a subclass of glasu.model.task.Task, got an object of the type "
        "builtin_function_or_method; register a subclass.",
        f"{start}partition 'wrong-type': must be an instance of glasu.data.partition.Partition, got the class "
        "wrong_extension.Draws; register an instance.",
    ]


def test_every_built_in_choice_is_of_the_base_class_of_its_seam():
    printed = run(
        "from glasu import registry\n"
        "for seam in registry.EXTENSIBLE:\n"
        "    for name in registry.import_attribute(registry.SEAMS[seam].table, seam):\n"
        "        registry.register(seam, f'another-{name}'[:40], registry.load(seam, name))\n"
        "        assert registry.load(seam, f'another-{name}'[:40]) is registry.load(seam, name)\n"
        "    print(seam)\n"
    )
    assert printed.split() == list(registry.EXTENSIBLE)


EXTENSION = """
__version__ = "1.2"
from glasu import registry
registry.register("backbone", "gatv2", "my_extension:GATv2")
from glasu.model.backbones import ConvolutionBackbone
class GATv2(ConvolutionBackbone):
    def convolution(self, width_in, width_out):
        from torch_geometric.nn import GATv2Conv
        return GATv2Conv(width_in, width_out, add_self_loops=False)
"""
LOAD = """
import dataclasses, json
from glasu import registry
registry.load_extension("my_extension")
print(json.dumps([dataclasses.asdict(found) for found in registry.extensions()]))
"""


def test_an_extension_is_recorded_with_its_version_and_the_digest_of_its_source(tmp_path):
    (tmp_path / "my_extension.py").write_text(EXTENSION)
    ((first,), (again,)) = (json.loads(run(LOAD, tmp_path)) for _ in range(2))
    assert first == again
    assert (first["name"], first["version"], len(first["digest"])) == ("my_extension", "1.2", 64)
    (tmp_path / "my_extension.py").write_text(EXTENSION + "# changed\n")
    (changed,) = json.loads(run(LOAD, tmp_path))
    assert changed["digest"] != first["digest"]


def test_the_digest_of_a_package_covers_all_its_files(tmp_path):
    (tmp_path / "my_extension").mkdir()
    (tmp_path / "my_extension" / "__init__.py").write_text("")
    (tmp_path / "my_extension" / "part.py").write_text("VALUE = 1\n")
    (first,) = json.loads(run(LOAD, tmp_path))
    (tmp_path / "my_extension" / "part.py").write_text("VALUE = 2\n")
    (changed,) = json.loads(run(LOAD, tmp_path))
    assert first["digest"] != changed["digest"]


def test_a_registered_convolution_trains_under_its_own_name(tmp_path):
    (tmp_path / "my_extension.py").write_text(EXTENSION)
    printed = run_program(
        "import glasu\n"
        "from glasu import registry\n"
        "registry.load_extension('my_extension')\n"
        "sections = {'data': {'name': 'synthetic', 'num_nodes': 60, 'average_degree': 4.0, 'num_features': 9},\n"
        "    'train': {'num_rounds': 2, 'evaluate_every': 2, 'fanout': 2},\n"
        "    'model': {'backbone': 'gatv2', 'hidden': 8, 'num_layers': 2, 'aggregation_layers': [1]}}\n"
        "config = glasu.RunConfig.from_dict(sections)\n"
        "report = glasu.train(glasu.load_parties(config), config)\n"
        "print(report.config.model.backbone, len(report.losses))\n",
        tmp_path,
        [tmp_path],
    )
    assert printed.split() == ["gatv2", "2"]


CELL = """
from glasu import registry
from glasu.model.backbones import GCN
class Mine(GCN):
    has_encoder = {}
registry.register("backbone", "mine", Mine)
"""


def test_a_cell_of_a_notebook_can_be_run_again(tmp_path):
    last = "print(registry.load('backbone', 'mine').has_encoder)"
    assert run_program(CELL.format(False) + CELL.format(True) + last, tmp_path, []).split() == ["True"]


PLAIN_EXTENSION = """
__version__ = "1.2"
from glasu import registry
registry.register("backbone", "mine", "my_extension:Mine")
from glasu.model.backbones import GCN
class Mine(GCN):
    pass
"""
RECORD = """
import sys
from pathlib import Path
from glasu import RunConfig, TrainedModel, load_parties, registry
from glasu.errors import ConfigError
from glasu.runtime.simulation import SimulationOptions, simulate
registry.load_extension("other_extension")
out = Path(sys.argv[1])

def resume():
    config = RunConfig.from_dict({
        "data": {"name": "synthetic", "num_nodes": 60},
        "train": {"num_rounds": 2, "evaluate_every": 2, "checkpoint_every": 1, "fanout": 2},
        "model": {"backbone": "mine", "hidden": 8, "num_layers": 2, "aggregation_layers": [1]},
    })
    return simulate(load_parties(config), config, SimulationOptions(checkpoints=out))

def attempt(action):
    try:
        action()
    except ConfigError as error:
        print(error)

if out.exists():
    attempt(lambda: TrainedModel.load(out / "model"))
    registry.load_extension("my_extension")
    attempt(lambda: TrainedModel.load(out / "model"))
    attempt(resume)
else:
    out.mkdir()
    registry.load_extension("my_extension")
    done = resume()
    TrainedModel.of(done.clients).save(out / "model")
    print([text for name, text in done.report.versions.items() if "extension" in name])
"""


def test_reports_models_and_checkpoints_record_the_extension_that_the_settings_use(tmp_path):
    (tmp_path / "other_extension.py").write_text("")  # loaded, but not used
    (tmp_path / "my_extension.py").write_text(PLAIN_EXTENSION)

    def record() -> str:
        return run_program(RECORD, tmp_path, [tmp_path], [str(tmp_path / "run")])

    (written,) = ast.literal_eval(record())
    digest = written.removeprefix("1.2 sha256:")
    (missing,) = record().splitlines()  # the unchanged source resumes and loads the model
    assert f"model.toml: was written with the extension my_extension 1.2 ({digest[:16]}..)" in missing
    assert "load it with --extension my_extension" in missing
    (tmp_path / "my_extension.py").write_text(PLAIN_EXTENSION + "# changed\n")
    _, model, checkpoint = record().splitlines()
    for line, file in ((model, "model.toml"), (checkpoint, "round-00000001.checkpoint")):
        assert f"{file}: was written with the extension my_extension 1.2 ({digest[:16]}..), but" in line
        assert "train again with --fresh" in line


def test_an_installed_extension_is_found_by_its_entry_point_when_a_name_is_unknown(tmp_path):
    (tmp_path / "my_extension.py").write_text(EXTENSION)
    info = tmp_path / "mine-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 3.0\n")
    (info / "entry_points.txt").write_text("[glasu.extensions]\nmine = my_extension\n")
    printed = run(
        "import sys\n"
        "from glasu import ModelConfig, registry\n"
        "ModelConfig()\n"
        "assert 'my_extension' not in sys.modules\n"  # a run without extensions imports none
        "ModelConfig(backbone='gatv2')\n"
        "print(registry.extensions()[0].version)\n",
        tmp_path,
    )
    assert printed.strip() == "3.0"


@pytest.mark.parametrize("name", ["no_such_extension", "", ".relative", "a:b"])
def test_an_extension_that_cannot_be_imported_is_refused(name):
    with pytest.raises(ConfigError, match="extension "):
        registry.load_extension(name)


def test_settings_with_a_choice_from_the_registry_survive_a_round_trip():
    config = RunConfig(model=ModelConfig(backbone="sage"), train=TrainConfig(sampler="shared"))
    assert RunConfig.from_dict(config.to_dict()) == config
