"""The checks of classes and objects of extensions, and errors in the code of extensions."""

from __future__ import annotations

import pytest

from glasu.data.methods import Method
from glasu.data.partition import Partition
from glasu.extension_checks import list_class_faults, list_constructor_faults, list_object_faults
from glasu.model.aggregation import Mean
from glasu.model.backbones import GCN, ConvolutionBackbone
from glasu.model.optimizer import Optimizer, Schedule
from glasu.model.sampler import FullGraph, Sampler
from glasu.model.task import Multiclass, Task
from support.warm_process import run_program


class FewArguments(Sampler):
    def __init__(self, config):
        pass

    def draw(self, targets):
        pass

    def estimate_draw(self, train, counts, num_targets, *, constant_batch):
        pass

    block = 3

    def reads_whole_graph(self):
        return True


class OtherNames(Sampler):
    def draw(self, sources, index, which, purpose="any"):  # needed arguments are passed by position
        pass

    @staticmethod
    def estimate_draw(*args, **kwargs):
        pass

    def own(self):
        pass


class RenamedOption(FullGraph):
    def draw(self, targets, round_index, layer, stream="neighbors"):
        pass


class NoProperty(Mean):
    def widening(self):
        return 1


class NoUpdate(Optimizer):
    def _update(self):
        pass


class Unfinished(Task):
    pass


class WrongPrediction(Multiclass):
    def predict(self, scores):
        pass

    def unknown_labels(self, num_nodes):
        pass


class WrongConvolution(ConvolutionBackbone):
    def convolution(self, width):
        pass


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (
            FewArguments,
            [
                "block is not a method",
                "draw(targets) must accept the parameters (targets, round_index, layer, purpose='neighbors')",
                "estimate_draw must be a class method",
                "reads_whole_graph must be a value, not a method",
            ],
        ),
        (OtherNames, []),
        (
            RenamedOption,
            [
                "draw(targets, round_index, layer, stream='neighbors') must accept the parameters (targets, "
                "round_index, layer, purpose='neighbors')"
            ],
        ),
        (NoProperty, ["widening must be a property or a value, not a method"]),
        (NoUpdate, ["_update() must accept the parameters (parts)"]),
        (
            WrongPrediction,
            [
                "predict(scores) must accept the parameters (scores, classes)",
                "unknown_labels(num_nodes) must accept the parameters (num_nodes, classes)",
            ],
        ),
        (WrongConvolution, ["convolution(width) must accept the parameters (width_in, width_out)"]),
        (GCN, []),
    ],
)
def test_all_faults_of_a_class_are_listed(found, faults):
    assert list_class_faults(found) == faults


def test_missing_methods_and_class_variables_of_a_task_are_listed():
    missing = {"label_form", "loss_and_gradient", "metrics", "predict", "selected_by"}
    assert {f"{name} is missing" for name in missing} <= set(list_class_faults(Unfinished))


def test_a_class_must_accept_the_arguments_with_which_it_is_created():
    assert list_constructor_faults(FewArguments, Sampler) == [
        "__init__(config) must accept the parameters (config, graph, client, private_seed)"
    ]
    assert list_constructor_faults(FullGraph, Sampler) == []


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (Schedule(lambda progress: 1.0), []),
        (Schedule(3), ["factor is not a function"]),
        (Method(prescribe=lambda: {}), ["prescribe() must accept 1 argument"]),
        (Method(), []),
        (
            Partition(columns=lambda features, data: [], graphs=lambda *all: []),
            ["columns(features, data) must accept 3 arguments"],
        ),
    ],
)
def test_the_functions_of_an_object_must_accept_their_arguments(found, faults):
    assert list_object_faults(found) == faults


REFUSED = """
from glasu import ModelConfig, RunConfig, WireConfig, registry
from glasu.errors import ConfigError
from glasu.model.backbones import Backbone
from glasu.model.sampler import FullGraph
from glasu.model.split import ClientModel
from glasu.randomness import Stream
from glasu.wire.encodings import Precision, make_encodings, use_for_all_kinds
from glasu.wire.floats import Plain

class NoColumns(Plain):
    def find_error(self, payload):
        return ""

class PlainModule(Backbone):
    def build_layer(self, layer, width_in):
        from torch import nn
        return nn.Linear(width_in, self.config.hidden)

class FewArguments(FullGraph):
    draw = 3

    def __init__(self, config):
        pass

def attempt(function):
    try:
        function()
    except ConfigError as error:
        print(error)

MAKERS = {
    "none": lambda config: None,
    "strings": lambda config: {"representation": Plain()},
    "no-encodings": lambda config: use_for_all_kinds("fp32"),
    "no-columns": lambda config: use_for_all_kinds(NoColumns()),
}
for name, make in MAKERS.items():
    registry.register("encoding", name, Precision(make))
    attempt(lambda: make_encodings(RunConfig(wire=WireConfig(precision=name))))
registry.register("backbone", "plain-module", PlainModule)
sizes = {"num_clients": 2, "num_features": 3, "num_outputs": 2}
stream = lambda purpose, layer: Stream(0, purpose, layer=layer)
attempt(lambda: ClientModel(ModelConfig(backbone="plain-module"), stream=stream, **sizes))
registry.register("sampler", "few-arguments", FewArguments)
attempt(lambda: registry.load("sampler", "few-arguments"))
"""


def test_what_does_not_fit_is_refused_before_it_is_used(tmp_path):
    keys = (
        "must be a dict with the keys REPRESENTATION, GRADIENT and PROBABILITIES of glasu.wire.tensor_kinds; return an "
        "encoding for each of them."
    )
    end = "Correct the extension."
    assert run_program(REFUSED, tmp_path, []).splitlines() == [
        f"wire.precision='none': the result of make {keys}",
        f"wire.precision='strings': the result of make {keys}",
        "wire.precision='no-encodings': the result of make for a representation must be a "
        f"glasu.wire.encoding.Encoding, got an object of the type str. {end}",
        "wire.precision='no-columns': the result of make for a representation: NoColumns does not fit "
        "glasu.wire.encoding.Encoding: find_error(payload) must accept the parameters (payload, columns=None). " + end,
        "model.backbone='plain-module': the result of build_layer must be a glasu.model.layers.Layer, got an object of "
        f"the type Linear. {end}",
        "sampler 'few-arguments': FewArguments does not fit glasu.model.sampler.Sampler: draw is not a method; "
        f"__init__(config) must accept the parameters (config, graph, client, private_seed). {end}",
    ]


FAILING = """
from glasu import registry
from glasu.model.sampler import FullGraph
class Failing(FullGraph):
    def draw(self, targets, round_index, layer, purpose="neighbors"):
        raise KeyError("not here")
registry.register("sampler", "failing", Failing)
"""
TRAIN = """
import sys
from glasu.cli.main import main
words = ["--extension", "failing_extension", "--set", "train.sampler=failing", "--quiet"]
sys.stderr = sys.stdout
print(main(["train", sys.argv[1], "--out", sys.argv[2], *words]))
"""


def test_an_unexpected_error_in_the_code_of_an_extension_names_the_extension(tmp_path):
    (tmp_path / "failing_extension.py").write_text(FAILING)
    (tmp_path / "run.toml").write_text('[data]\nname = "synthetic"\nnum_nodes = 60\n[train]\nnum_rounds = 1\n')
    printed = run_program(TRAIN, tmp_path, [tmp_path], [str(tmp_path / "run.toml"), str(tmp_path / "out")])
    (line,) = [line for line in printed.splitlines() if "failed" in line]
    assert line.startswith(
        "glasu train: failed: KeyError: 'not here'; the extension 'failing_extension' raised or caused this error: "
    )
    assert "correct the extension" in line
    assert "report this" not in line


def test_another_unexpected_error_names_the_loaded_extensions(tmp_path):
    program = (
        "import sys\n"
        "from glasu import registry\n"
        "from glasu.cli.main import main\n"
        "from support.commands import replace_run\n"
        "def fail(args):\n"
        "    raise KeyError('somewhere')\n"
        "sys.stderr = sys.stdout\n"
        "for step in range(2):\n"
        "    main(['train', 'run.toml', '--out', 'out'], replace_run('train', fail))\n"
        "    registry.load_extension('innocent_extension')\n"
    )
    (tmp_path / "innocent_extension.py").write_text("")
    without, loaded = run_program(program, tmp_path, [tmp_path]).splitlines()
    assert "and please report this" in without
    assert (
        "check the results of the loaded extensions ('innocent_extension'); if they are correct, please report"
        in loaded
    )
