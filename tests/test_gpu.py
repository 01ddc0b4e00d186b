"""The tutorial on a real GPU with the real Transformer Engine. Skipped elsewhere.

Each test is one process, since importing torch and TE takes 15 s, and looks at everything that process can show.
"""
import fnmatch
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import SCRIPT, Run, changed


def why_not():
    if "FAKE_GPU" in os.environ or not torch.cuda.is_available():
        return "needs a GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return "needs a GPU that computes in FP8"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return f"needs Transformer Engine: {error}"
    return ""


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "runs")

OFF = ["--install", "never", "--benchmark", "off"]
SHORT = [*OFF, "--steps", "20", "--n-layers", "1"]  # the default width, where errors are as large as they get; learns nothing
UNLEARNED = ["* comes near the floor", "all * prompts*", "padded generation*", "FP8 learns as well"]


@pytest.fixture
def run(tmp_path):
    def run(*flags, replace=None, text=None, python_flags=()):
        """The script, or a changed copy, with this environment as it is."""
        script = changed(tmp_path, replace or {}, text)
        done = subprocess.run([sys.executable, *python_flags, str(script), "--out", str(tmp_path / "out"), *flags], capture_output=True, text=True,
                              timeout=300, cwd=tmp_path, stdin=subprocess.DEVNULL)
        return Run(done.returncode, done.stdout, done.stderr, tmp_path / "out")
    return run


def failed(done):
    """The checks that fail, without those that need a model that has learned."""
    assert "stopped" not in done.results, done.err
    return {name for name, passed in done.verdicts.items() if not passed and not any(fnmatch.fnmatch(name, p) for p in UNLEARNED)}


def test_the_whole_tutorial(run):
    done = run(*OFF)
    assert done.code == 0, done.out[-3000:] + done.err
    assert all(done.verdicts.values()) and done.results["backend"] == "te"
    assert done.verdicts["padded generation equals the unpadded reference"]
    assert done.out.count("as a CUDA graph  ") == 2  # both trainings


@pytest.mark.parametrize("recipe, name", [("current", "FP8 current"), ("block", "FP8 block")])
def test_other_recipes(recipe, name, run):
    done = run(*SHORT, "--recipe", recipe, python_flags=["-W", "error::DeprecationWarning:__main__"])  # no warning of our own making
    available = {p["name"]: p["available"] for p in done.results["precisions"]}
    if not available[name]:
        pytest.skip(f"{name} does not run on this GPU")
    assert not failed(done)
    assert f"same seed, same losses ({name})" in done.verdicts and f"the memory ledger adds up ({name})" in done.verdicts
    assert "every scale is fp8_max / amax" not in done.verdicts  # no history, so no such claim


def test_checks_notice_on_a_gpu(run):
    """Breaks that the stand-ins cannot show in full: device memory, real kernels, weights that differ a little."""
    done = run(*OFF, "--steps", "20", replace={
        '"AdamW": 8 *': '"AdamW": 4 *',
        'attn_mask_type="causal")': 'attn_mask_type="no_mask")',
        "torch.Generator(p.device).manual_seed(seed)": "None",
        'self.fc1_bias), approximate="tanh")': 'self.fc1_bias))',
    })
    noticed = failed(done)
    for pattern in ("the memory ledger adds up (BF16)", "the memory ledger adds up (FP8 delayed)", "causal*(BF16)", "causal*(FP8 delayed)",
                    "random tokens*", "same seed*(BF16)", "same seed*(FP8 delayed)", "TE and PyTorch models agree", "TE's gelu*"):
        assert fnmatch.filter(noticed, pattern), f"nobody noticed: {pattern}"
    assert not fnmatch.filter(noticed, "TransformerLayer*")  # it has its own mask, which is as it was


PROBE = '''
def replayed(precision, graph, steps=10):
    """Losses, FP8 scales and amax histories of the first steps, after the three steps that a capture warms up with."""
    trainer, source, losses, states = Trainer(KIT, precision, SETTINGS.batch), batches(SETTINGS.seed, SETTINGS.batch), [], []
    with trainer.untouched():
        assert trainer.capture() == "" if graph else all(trainer.step().isfinite() for _ in range(3))
    for _ in range(steps):
        losses.append(trainer.run(*next(source)).item())
        states.append([torch.cat([s.scale, s.amax_history.flatten()]).tolist() for _, _, s in fp8_states(trainer.model)])
    return {"losses": losses, "states": states, "graph": trainer.graph is not None}

RESULTS["probe"] = {p.name: [replayed(p, graph) for graph in (False, True)] for p in (BASE, PRECISIONS["FP8 delayed"])}

def recording():
    """What record() raises for a function that cannot be recorded, and whether everything works after that."""
    x, said = torch.randn(64, 64, device=DEVICE), ""
    x @ x
    try:
        record(lambda: (x @ torch.randn(64, 64, device=DEVICE)).sum().item())
    except RuntimeError as error:
        said = str(error)
    graph, y = record(lambda: x @ x)
    graph.replay()
    return {"raised": said, "afterwards": torch.equal(y, x @ x) and torch.randn(8, device=DEVICE).isfinite().all().item(),
            "stream": torch.cuda.current_stream() == torch.cuda.default_stream()}

RESULTS["recording"] = recording()
write_results()
'''


def test_graphs(run):
    """A replayed graph trains as Python does, and a graph that cannot be recorded breaks nothing else."""
    text = SCRIPT.read_text()
    end = text.index("# %% [markdown]\n# ## 8.")  # Trainer is there, the benchmark not yet
    done = run(*SHORT, text=text[:end] + PROBE)
    assert done.code == 0, done.err
    recording = done.results["recording"]
    assert "captur" in recording["raised"] and recording["afterwards"] and recording["stream"]
    for name, tolerance in (("BF16", 5e-3), ("FP8 delayed", 5e-3)):
        eager, graph = json.loads((done.folder / "results.json").read_text())["probe"][name]
        assert graph["graph"] and not eager["graph"]
        assert eager["losses"] == pytest.approx(graph["losses"], rel=tolerance)
        assert eager["losses"][-1] < eager["losses"][0]
    states = graph["states"]  # of FP8 delayed under replay
    assert states[0] and all(a != b for a, b in zip(states, states[1:])), "a replay left the amax histories as they were"
    columns = [[state[0] for state in step] for step in states]  # the scale of each module's first tensor
    assert columns[0] != columns[-1], "replays left the scales as they were"
