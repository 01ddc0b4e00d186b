"""How the tests run the tutorial: the whole script, in a subprocess, as a user would.

A machine we do not have is stood in for by two folders on PYTHONPATH: `standin/gpu` (a CUDA device whose tensors live on
the CPU) and `standin/te` (Transformer Engine in plain PyTorch, with the real one's rules).
"""
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
SCRIPT = TESTS.parent / "te_tutorial.py"

# Small enough for seconds, legal in FP8. Such a run learns nothing, so its exit code is 1; tests look at single checks.
TINY = ["--d-model", "32", "--n-heads", "2", "--d-ff", "64", "--n-layers", "1", "--seq", "32", "--batch", "4", "--bench-batch", "4",
        "--steps", "20", "--bench-warmup", "1", "--bench-steps", "5", "--gemm-size", "64"]


@dataclasses.dataclass
class Run:
    code: int
    out: str
    err: str
    folder: pathlib.Path  # where results.json is

    @property
    def results(self):
        return json.loads((self.folder / "results.json").read_text())

    @property
    def verdicts(self):
        """{check name: passed}"""
        return {c["name"]: c["passed"] for c in self.results["checks"]}


def environment(gpu=None, te=False, **more):
    """The environment of a run: `gpu` is a capability such as "9.0" to stand in, `te` puts the stand-in TE on the path."""
    path = ([str(TESTS / "standin" / "gpu")] if gpu else []) + ([str(TESTS / "standin" / "te")] if te else [])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FAKE_GPU_COMPILE": "0", "PYTHONPATH": os.pathsep.join(path + more.pop("path", [])),
           "CUDA_VISIBLE_DEVICES": ""}  # a real GPU, if there is one, stays out of it
    if gpu:
        env["FAKE_GPU"] = gpu
    return {**env, **{k: str(v) for k, v in more.items()}}


def changed(folder, replace, text=None):
    """A copy of the script (or of `text`) in a folder, with {old: new} replaced. Each old text must occur once."""
    text = text or SCRIPT.read_text()
    for old, new in replace.items():
        assert text.count(old) == 1, f"{text.count(old)} times in the script: {old}"
        text = text.replace(old, new)
    (script := folder / "te_tutorial.py").write_text(text)
    return script


@pytest.fixture
def tutorial(tmp_path):
    """Run the script: tutorial(*flags, gpu="9.0", te=True, replace={old: new}, env={...}) -> Run.

    `replace` changes a copy of the script before it runs, to break what a check guards.
    """

    def run(*flags, gpu=None, te=False, replace=None, env=None, timeout=300, python_flags=()):
        script = changed(tmp_path, replace) if replace else SCRIPT
        out = tmp_path / "out"
        done = subprocess.run([sys.executable, *python_flags, str(script), "--out", str(out), *flags], env=environment(gpu, te, **(env or {})),
                              capture_output=True, text=True, timeout=timeout, cwd=tmp_path, stdin=subprocess.DEVNULL)
        return Run(done.returncode, done.stdout, done.stderr, out)

    return run
