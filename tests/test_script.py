"""The script as a user runs it, from the first line to the last: on a CPU, on a stand-in GPU, and where something goes wrong on the way."""
import json
import re
import signal
import socket
import subprocess
import sys

import pytest

from conftest import SCRIPT, TINY, environment

QUICK = [*TINY, "--steps", "1", "--benchmark", "off"]  # the fastest run that has every section
LAST_LINE = re.compile(r"^\d+ of \d+ checks passed(; FAILED: .+)?$")


def strict_json(path):
    """Parse as other programs do: NaN and Infinity are no JSON."""
    def refuse(constant):
        raise AssertionError(f"{constant} in {path}")
    return json.loads(path.read_text(), parse_constant=refuse)


def reached_the_end(run):
    return any(map(LAST_LINE.match, run.out.splitlines()[-1:]))


def start(tmp_path, *flags, **env):
    """The script as a running process whose output can be read."""
    return subprocess.Popen([sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), *flags], env=environment(**env), cwd=tmp_path, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# --------------------------------------------------------------------------- the contract with other programs

def assert_contract(results):
    """results.json as other programs rely on it."""
    number = (int, float)
    assert isinstance(results["versions"]["torch"], str) and isinstance(results["versions"]["python"], str)
    assert results["machine"].keys() == {"gpu", "capability", "memory_gb"}
    assert results["backend"] in ("te", "torch")
    assert [p["name"] for p in results["precisions"]] == ["FP32", "FP16", "BF16", "FP8 delayed", "FP8 current", "FP8 block", "MXFP8", "NVFP4"]
    assert all(p["available"] is (p["reason"] == "") for p in results["precisions"])
    assert {"Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"} <= {row["module"] for row in results["tour"]}
    assert results["training"]
    for run in results["training"].values():
        assert all(isinstance(run[key], number) and run[key] > 0 for key in ("loss", "floor", "ms_per_step"))
    assert results["benchmark"]
    for row in results["benchmark"]:
        assert isinstance(row["row"], str) and row["precision"] in [p["name"] for p in results["precisions"]]
        assert all(isinstance(row[key], number) and row[key] >= 0 for key in ("ms_median", "ms_iqr", "cpu_launch_ms", "tokens_per_s", "tflops"))
        assert all(row[key] is None or isinstance(row[key], number) and row[key] > 0 for key in ("share_of_gemm", "peak_memory_gb"))
    assert isinstance(results["fp8_state"], list)
    assert results["generation"]["prompts"] == 96 * 6 and 0 <= results["generation"]["exact_match"] <= 1
    assert results["checks"]
    for check in results["checks"]:
        assert isinstance(check["name"], str) and isinstance(check["passed"], bool) and isinstance(check["detail"], str)


def test_default_run_on_a_cpu(tutorial):
    """The one long run: everything a machine without a GPU shows, with every check passed."""
    run = tutorial()
    assert run.code == 0, run.out[-3000:] + run.err[-3000:]
    assert reached_the_end(run) and "FAIL" not in run.out and "Traceback" not in run.err
    assert re.search(r"^Settings: the small preset \(no GPU", run.out)
    marks = ["Settings", "No GPU", "Going on without Transformer Engine", "The model will be built from plain PyTorch", "fp8_max / amax", "SQNR dB at step",
             "LayerNormMLP", "MiniGPT from PyTorch blocks", "Floor:", "loss over all sequences", "Full training step", "prompt ", "Checks:", "Not shown on this machine:",
             "Try next:", "Written:"]
    rest = run.out
    for mark in marks:  # all sections, in their order
        assert mark in rest, f"not there, or not in its place: {mark}"
        rest = rest.partition(mark)[2]
    results = strict_json(run.folder / "results.json")
    assert_contract(results)
    assert results["machine"] == {"gpu": None, "capability": None, "memory_gb": None} and results["backend"] == "torch"
    assert [p["name"] for p in results["precisions"] if p["available"]] == ["FP32"]
    assert results["generation"]["exact_match"] == 1.0 and set(results["generation"]["by_length"].values()) == {1.0}
    assert len(results["checks"]) > 10 and all(run.verdicts.values())
    assert (run.folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_run_through_the_stand_in_te_without_a_warning(tutorial):
    run = tutorial(*TINY, gpu="9.0", te=True, python_flags=["-W", "error"])
    assert reached_the_end(run), run.err[-3000:]
    assert "Warning" not in run.err
    results = strict_json(run.folder / "results.json")
    assert_contract(results)
    assert results["backend"] == "te" and results["machine"]["capability"] == [9, 0] and results["versions"]["transformer_engine"]
    assert set(results["training"]) == {"BF16", "FP8 delayed"} and len(results["fp8_state"]) == 12
    assert {row["kit"] for row in results["benchmark"]} == {"PyTorch", "TE"}
    assert not [name for name, passed in run.verdicts.items() if not passed and not re.search("floor|continued exactly|padded generation", name)]


def test_a_failed_check_is_exit_1_with_the_results_kept(tutorial):
    """20 steps on a tiny model learn nothing, and the run says so. No warning on the way."""
    run = tutorial(*TINY, python_flags=["-W", "error"])
    assert run.code == 1 and reached_the_end(run)
    assert "Traceback" not in run.err and "Warning" not in run.err
    failed = [name for name, passed in run.verdicts.items() if not passed]
    assert "FP32 comes near the floor" in failed
    assert all(name in run.out.splitlines()[-1] for name in failed)
    assert_contract(strict_json(run.folder / "results.json"))
    assert (run.folder / "figure.png").exists()


# --------------------------------------------------------------------------- runs that end early

def test_a_loss_that_is_not_finite_stops_loudly(tutorial):
    run = tutorial(*TINY, "--lr", "1e6")
    assert run.code == 1 and "Traceback" not in run.err
    last = run.err.splitlines()[-1]
    assert re.match(r"Stopped: training in FP32: the loss was (nan|inf) at step \d+\. .*--lr", last), last
    assert "checks passed" not in run.out and "comes near the floor" not in run.out
    assert last.endswith(run.results["stopped"]) and run.results["checks"]


def test_ctrl_c_in_the_middle(tmp_path):
    process = start(tmp_path, *TINY, "--steps", "100000")
    for line in process.stdout:
        if "Floor:" in line:  # training comes next
            break
    process.stderr.read(1)  # its progress bar
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and err.splitlines()[-1] == "Stopped: interrupted"
    assert strict_json(tmp_path / "out" / "results.json")["stopped"] == "interrupted"


def test_a_closed_pipe_is_no_drama(tmp_path):
    """As in `python te_tutorial.py | head -5`."""
    process = start(tmp_path, *QUICK)
    for _ in range(5):
        assert process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) != 0  # the reader asked for less than everything
    assert "Traceback" not in err and "BrokenPipe" not in err and "Exception ignored" not in err


# --------------------------------------------------------------------------- surroundings

def test_a_folder_that_cannot_be_written_is_replaced(tutorial, tmp_path):
    (tmp_path / "a file").touch()
    run = tutorial(*QUICK, "--out", "a file/below", env={"TMPDIR": tmp_path})
    said = [line for line in run.out.splitlines() if line.startswith("cannot write to")]
    assert len(said) == 1 and "cannot write to a file/below (" in said[0]
    folder = tmp_path / said[0].rpartition("using ")[2]
    assert reached_the_end(run) and strict_json(folder / "results.json")["checks"] and str(folder) in run.out.splitlines()[-2]
    assert "Traceback" not in run.err


def test_a_bare_terminal(tutorial):
    """ASCII only, no locale, no display, a plotting backend that would need one, and an output folder whose name no ASCII can print."""
    bare = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": 0, "PYTHONCOERCECLOCALE": 0, "TERM": "dumb", "DISPLAY": "", "MPLBACKEND": "TkAgg"}
    run = tutorial(*QUICK, "--out", "ergebnis-\u00fc", env=bare)
    assert reached_the_end(run) and "Traceback" not in run.err, run.err[-2000:]
    folder = run.folder.with_name("ergebnis-\u00fc")
    assert strict_json(folder / "results.json")["checks"] and (folder / "figure.png").exists()


def test_without_matplotlib_and_tqdm(tutorial, tmp_path):
    for package in ("matplotlib", "tqdm"):
        (tmp_path / "stubs" / package).mkdir(parents=True)
        (tmp_path / "stubs" / package / "__init__.py").write_text("raise ImportError('blocked by a test')")
    run = tutorial(*QUICK, env={"path": [str(tmp_path / "stubs")]})
    assert reached_the_end(run) and "Traceback" not in run.err, run.err[-2000:]
    assert "the figure: matplotlib is not installed" in run.out and not (run.folder / "figure.png").exists()
    assert "it/s" not in run.err


# --------------------------------------------------------------------------- the same again

def test_the_seed_decides_the_losses(tutorial):
    one, again, other = (tutorial(*QUICK, "--steps", "5", "--seed", seed).results["training"]["FP32"]["loss"] for seed in ("7", "7", "8"))
    assert one == again != other


def test_two_processes_train_as_one_does_with_twice_the_batch(tutorial, tmp_path):
    """torchrun on a CPU: each process takes half of the rows, and only the first one speaks. It also draws, which must not cost it the last word:
    a process that ends with exit code 1 makes torchrun end all others."""
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "matplotlib.py").write_text("import time\ntime.sleep(3)\nraise ImportError")  # a slow drawing
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    both = subprocess.run([*torchrun, str(SCRIPT), *QUICK, "--steps", "20", "--out", "both"], env=environment(path=[str(tmp_path / "stubs")]), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert any(map(LAST_LINE.match, both.stdout.splitlines()[-1:])), both.stdout[-500:] + both.stderr[-3000:]
    assert both.stdout.count("Settings") == 1 and both.stdout.count("MiniGPT from") == 1
    together, alone = strict_json(tmp_path / "both" / "results.json"), tutorial(*QUICK, "--steps", "20", "--batch", "8").results
    assert together["training"]["FP32"]["loss"] == pytest.approx(alone["training"]["FP32"]["loss"], rel=1e-4)
    assert "stopped" not in together
