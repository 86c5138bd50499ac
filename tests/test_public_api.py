from __future__ import annotations

import subprocess
import sys

import pytest

import glasu

PUBLIC = [
    "AlignmentError",
    "ConfigError",
    "DataConfig",
    "DataError",
    "Evaluated",
    "Evaluating",
    "Event",
    "GLASUClassifier",
    "GLASURegressor",
    "GlasuError",
    "Graph",
    "ModelConfig",
    "PartyData",
    "PrivacyConfig",
    "ProtocolError",
    "RoundDone",
    "RunConfig",
    "RunReport",
    "Splits",
    "TrainConfig",
    "TrainedModel",
    "TrainingError",
    "TransportError",
    "WireConfig",
    "align_in_clear",
    "load_parties",
    "read_party",
    "split_vertically",
    "train",
    "write_party",
]


def run(program: str) -> None:
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_the_public_names_are_these_and_no_others():
    assert glasu.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(glasu))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name):
    value = getattr(glasu, name)
    assert value.__name__ == name
    assert value.__doc__


def test_a_name_that_is_not_public_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'glasu' has no attribute 'simulat'"):
        glasu.simulat  # noqa: B018


def test_every_error_is_a_glasu_error():
    errors = [getattr(glasu, name) for name in PUBLIC if name.endswith("Error")]
    assert len(errors) == 7
    assert all(issubclass(error, glasu.GlasuError) for error in errors)


def test_a_run_that_fails_has_another_exit_code_than_bad_input():
    codes = {name: getattr(glasu, name).exit_code for name in PUBLIC if name.endswith("Error")}
    assert codes.pop("TrainingError") == 1
    assert codes.pop("ProtocolError") == 1  # an invalid message is the sender's fault, not the reader's
    assert set(codes.values()) == {2}


def test_importing_the_package_loads_nothing_heavy():
    run(
        "import glasu, sys; heavy = {'torch', 'torch_geometric', 'numpy', 'scipy', 'sklearn', 'plotly'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )


def test_the_config_is_read_without_loading_torch_or_numba():
    run(
        "import glasu, sys; glasu.RunConfig(); glasu.ConfigError;"
        "assert not {'torch', 'numba'} & set(sys.modules), {'torch', 'numba'} & set(sys.modules)"
    )
