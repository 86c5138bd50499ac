"""The line about the first compilation: Python programs and commands show it, quiet commands and workers do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The name of the module makes its loop one of GLASU's.
COMPILE = """
import importlib.util
import multiprocessing
import sys

def compile_a_loop():
    spec = importlib.util.spec_from_file_location("glasu.loop", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.add(1, 2) == 3

if __name__ == "__main__":
"""
LOOP = "from glasu.compiling import compile_loop\n\n@compile_loop\ndef add(one, other):\n    return one + other\n"
PROGRAM = "    compile_a_loop()"
COMMAND = """
    from glasu.cli.log import LineLog
    with LineLog("glasu train: "):
        compile_a_loop()
"""
QUIET_COMMAND = """
    import logging
    from glasu.cli.log import LineLog
    with LineLog("glasu train: ", quiet=True):
        compile_a_loop()
        logging.getLogger("glasu.model").warning("another warning")
"""
WORKER = """
    worker = multiprocessing.get_context("spawn").Process(target=compile_a_loop)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
"""
LINE = "compiling numerical kernels for the first time; this takes about 20 s and is cached\n"


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        pytest.param(PROGRAM, LINE, id="program"),
        pytest.param(COMMAND, f"glasu train: {LINE}", id="command"),
        pytest.param(QUIET_COMMAND, "glasu train: another warning\n", id="quiet command"),
        pytest.param(WORKER, "", id="worker"),
    ],
)
def test_the_first_compilation_is_announced_to_people_and_not_to_quiet_commands(main, expected, tmp_path):
    script, loop = tmp_path / "script.py", tmp_path / "loop.py"
    script.write_text(COMPILE + main)
    loop.write_text(LOOP)  # a new file: numba has no compiled copy of its loop
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(loop)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == expected
