"""What people who install and run Transformer Engine run into: 32 field reports, and some of their relatives.

Each test sets the situation up as a user meets it: a capability, environment variables, a pip that fails, a TE that does
not import, an odd shape. It then runs the script and looks at what it says and does. Identical runs happen once. A run
of which only the beginning matters is ended as soon as the line `until` has been printed.

Questions about a whole run that a test cannot ask from outside are asked inside of it at its end: see PROBES.
"""
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import SCRIPT, TESTS, TINY, changed, environment
from test_install import FAKE_PIP, all_ended

QUICK = [*TINY, "--benchmark", "off", "--vocab", "56", "--steps", "10"]
LEARNS = ["--d-model", "32", "--n-heads", "2", "--d-ff", "64", "--n-layers", "1", "--seq", "16", "--batch", "64", "--steps", "300", "--lr", "2e-2",
          "--margin", "2", "--vocab", "56", "--prompt", "4", "--gen", "4", "--benchmark", "off"]  # enough for every check to pass
SMALL_PRESET = ["--benchmark", "off", "--steps", "5", "--batch", "16", "--vocab", "56", "--n-layers", "1", "--gen", "2"]  # the width is left to the preset
BUILT = r"^The model will be built"  # the last line of section 2
GOING_ON = r"^Going on without Transformer Engine: (.*)"

# --------------------------------------------------------------------------- running the script

SITECUSTOMIZE = """
import importlib.util, sys
gpu = {gpu!r}
exec(compile(open(gpu).read(), gpu, "exec"))

class After:
    # runs some code as soon as a module has been imported
    def __init__(self, name, code):
        self.name, self.code = name, code

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                exec(self.code, {{"module": module, "sys": sys}})

            spec.loader.exec_module = exec_module
        return spec

for name, code in {after!r}.items():
    sys.meta_path.insert(0, After(name, code))
"""
NO_NETWORK = """
import urllib.request
def urlopen(*args, **kwargs):
    raise OSError("no network")
urllib.request.urlopen = urlopen
"""
PYTHON_H = """
import sysconfig
sysconfig.get_path = lambda *args, real=sysconfig.get_path: {folder!r} if args == ("include",) else real(*args)
"""
AT_THE_END = """
import atexit
def ask():
    main = sys.modules["__main__"].__dict__
    exec(open({probes!r}).read(), main)
atexit.register(ask)
"""
NO_FIGURE = "sys.modules['matplotlib'] = None\n"  # saves two seconds a run


@dataclasses.dataclass
class Seen:
    code: int  # None where the run was ended early
    out: str
    err: str
    folder: pathlib.Path

    @property
    def results(self):
        return json.loads((self.folder / "out" / "results.json").read_text())

    @property
    def verdicts(self):
        return {c["name"]: c["passed"] for c in self.results["checks"]}

    @property
    def failed(self):
        return [name for name, passed in self.verdicts.items() if not passed]

    @property
    def pip_calls(self):
        path = self.folder / "pip_calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def precisions(self):
        """{name: reason} as printed in section 2; the reason is "" for a precision that runs."""
        table = self.out[self.out.index("runs here?"):].splitlines()[2:]
        cells = [[cell.strip() for cell in line.split("|")] for line in table[:8]]
        return {name: "" if runs == "yes" else reason for name, runs, reason in cells}

    @property
    def reason(self):
        """Why the run goes on without TE."""
        return re.search(GOING_ON, self.out, re.MULTILINE)[1]

    def reached_its_end(self):
        """The script did all it does; its exit code follows from the checks alone."""
        assert "Traceback" not in self.err and "Stopped" not in self.err, self.err[-2000:]
        assert "stopped" not in self.results and "Checks:" in self.out
        assert self.code == (1 if self.failed else 0), (self.code, self.failed)
        return True


class Machine:
    """A folder with a stand-in pip, compiler and CUDA headers, and the script started in it."""

    def __init__(self, folder, flags, gpu=None, te=False, pip="fail", pip_output="error: nothing works", te_files=None, after=None, probes=None, figure=False,
                 env=None, replace=None, python=(), compiler=True, command=None):
        self.folder = folder
        self.write("site/pip/__init__.py", "")
        self.write("site/pip/__main__.py", FAKE_PIP)
        self.write("site/nvidia/cu13/include/cuda_runtime.h", "")
        self.write("site/nvidia/nccl/include/nccl.h", "")
        self.write("include/Python.h", "")
        self.write("pip_output", pip_output)
        self.write("te_files", json.dumps(te_files or {}))
        (folder / "bin").mkdir()
        if compiler:
            self.write("bin/g++", "#!/bin/sh\n").chmod(0o755)
        after = dict(after or {})
        after["torch"] = NO_NETWORK + PYTHON_H.format(folder=str(folder / "include")) + (NO_FIGURE if not figure else "") + after.get("torch", "")
        if probes:
            after["torch"] += AT_THE_END.format(probes=str(self.write("probes.py", probes)))
        self.write("hooks/sitecustomize.py", SITECUSTOMIZE.format(gpu=str(TESTS / "standin" / "gpu" / "sitecustomize.py"), after=after))
        script = changed(folder, replace) if replace else SCRIPT
        settings = environment(gpu, te, path=[str(folder / "site")])
        settings["PYTHONPATH"] = os.pathsep.join([str(folder / "hooks"), settings["PYTHONPATH"]])
        for name in ("CUDA_HOME", "CPATH", "MAX_JOBS", "CXX", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            settings.pop(name, None)
        path = [folder / "bin", os.environ["PATH"]] if compiler else [folder / "bin"]
        settings.update(STAND_IN=folder, PIP_MODE=pip, PATH=os.pathsep.join(map(str, path)), PYTHONUNBUFFERED="1", **(env or {}))
        command = command or [sys.executable, *python, str(script), "--out", str(folder / "out"), *flags]
        self.out, self.err = open(folder / "stdout", "w+"), open(folder / "stderr", "w+")
        self.process = subprocess.Popen(command, env={k: str(v) for k, v in settings.items()}, cwd=folder, stdin=subprocess.DEVNULL,
                                        stdout=self.out, stderr=self.err)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def wait_for(self, pattern, timeout=120):
        """Wait until a line matches, or until the script has ended."""
        end = time.monotonic() + timeout
        while self.process.poll() is None and not re.search(pattern, (self.folder / "stdout").read_text(errors="replace"), re.MULTILINE):
            assert time.monotonic() < end, f"never printed: {pattern}"
            time.sleep(0.05)

    def children(self):
        """The processes of a hanging pip, as soon as it has them."""
        end = time.monotonic() + 60
        while not (self.folder / "pids").exists():
            assert time.monotonic() < end and self.process.poll() is None, "pip was never started"
            time.sleep(0.05)
        return json.loads((self.folder / "pids").read_text())

    def seen(self, until=None, timeout=200):
        try:
            if until:
                self.wait_for(until, timeout)
                early = self.process.poll() is None
            else:
                early = self.process.wait(timeout) is None
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        texts = [(self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        if until:
            early = early or bool(re.search(until, texts[0], re.MULTILINE))
            assert early or self.process.returncode == 2, texts[1][-2000:]
        return Seen(None if early else self.process.returncode, *texts, self.folder)


CACHE = {}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(flags, gpu="9.0", ...) -> a Machine that runs the script."""
    machines = []

    def begin(*flags, size=QUICK, **situation):
        machines.append(Machine(tmp_path_factory.mktemp("machine"), [*size, *flags], **situation))
        return machines[-1]

    yield begin
    for machine in machines:
        if machine.process.poll() is None:
            machine.process.kill()
            machine.process.wait()
        machine.out.close()
        machine.err.close()


@pytest.fixture(scope="module")
def play(start):
    """play(flags, gpu="9.0", until=pattern, ...) -> Seen. The same arguments run the script once."""

    def run(*flags, until=None, **situation):
        key = repr((flags, until, sorted(situation.items())))
        if key not in CACHE:
            CACHE[key] = start(*flags, **situation).seen(until)
        return CACHE[key]

    return run


def standin_files(**changes):
    """What a pip that works puts into site-packages: the stand-in TE."""
    root = TESTS / "standin" / "te"
    files = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.suffix in (".py", "") and path.is_file()}
    return {**files, **changes}


def mends(reason):
    """The command that a diagnosis advises, split as a shell would."""
    assert "\n" not in reason
    return shlex.split(reason.split("This mends it: ")[1])


# --------------------------------------------------------------------------- one whole run that many rows look at

WATCH_AUTOCAST = """
import contextlib, torch
from torch.nn.modules.module import register_module_forward_pre_hook
AUTOCAST, inside = sys.autocast_log, []
def autocast(*args, real=module.autocast, **kwargs):
    @contextlib.contextmanager
    def context():
        AUTOCAST["entries"] += 1
        AUTOCAST["nested"] += bool(inside)
        inside.append([])
        try:
            with real(*args, **kwargs):
                yield
        finally:
            called = inside.pop()
            AUTOCAST["without a module"] += not called
            AUTOCAST["more than one forward"] += len(called) != len(set(called))
    return context()
module.autocast = autocast
def note(m, x):
    if inside and type(m).__module__.startswith("transformer_engine"):
        inside[-1].append(id(m))
register_module_forward_pre_hook(note)
def backward(self, *args, real=torch.Tensor.backward, **kwargs):
    AUTOCAST["backwards"] += 1
    AUTOCAST["backward inside"] += bool(inside)
    return real(self, *args, **kwargs)
torch.Tensor.backward = backward
"""
AUTOCAST_LOG = 'import collections\nsys.autocast_log = collections.Counter({"nested": 0})\n'

PROBES = '''
import collections, copy, json, traceback, warnings

def autocast_log():
    return dict(sys.autocast_log)

def odd_prompts():
    """One prompt at a time, odd lengths, in FP8: as in a batch of 32 others and with another padding."""
    rows, equal = EVERY[:32], []
    for length in (2, 3, 5, 7, 13):
        together = generate(TRAINED.model, FP8, rows[:, :length].to(DEVICE), 9)
        for i in (0, 17):
            equal.append(torch.equal(generate(TRAINED.model, FP8, rows[i:i + 1, :length].to(DEVICE), 5)[0], together[i, :length + 5]))
    return equal

def capability_table():
    capabilities = [(6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (13, 0)]
    return [[list(c), {name: why_not(name, c) for name in FORMATS}] for c in capabilities]

def sentences():
    """findings() of a ladder whose numbers we choose: FP8 k times slower than BF16, launch-bound or not."""
    def row(name, kit, precision, graph, ms, launch):
        return {"row": name, "changes": "", "kit": kit, "precision": precision, "graph": graph, "ms_median": ms, "ms_iqr": 0.01, "steps": 30, "cpu_launch_ms": launch,
                "tokens_per_s": 1, "tflops": 1, "share_of_gemm": None, "peak_memory_gb": 1}
    said = {}
    for name, eager, graph, launch in (("slow", 30.0, 12.0, 29.0), ("fast", 5.0, 4.0, 1.0), ("equal", 10.0, 10.0, 1.0)):
        said[name] = findings([row("PyTorch BF16", "PyTorch", "BF16", False, 9.0, 1.0), row("TE BF16", "TE", "BF16", False, 10.0, 1.0),
                               row("TE BF16 + graph", "TE", "BF16", True, 10.0, 0.1), row("TE FP8 delayed", "TE", "FP8 delayed", False, eager, launch),
                               row("TE FP8 delayed + graph", "TE", "FP8 delayed", True, graph, 0.1)], "BF16", "FP8 delayed")
    said["widths"] = [answer("t", points) for points in ([(256, 0.5), (512, 0.8)], [(256, 0.5), (512, 1.5)], [(256, 1.2), (512, 1.5)])]
    said["memory"] = [compare_memory(a, b, 0.01) for a, b in ((2.0, 1.0), (1.0, 2.0), (1.0, 1.001))]
    return said

def ladder_rows():
    """Weights, batch and dropout of each row of the benchmark, compared with those of the first row."""
    seen, begin, run = {}, Trainer.__init__, Trainer.run
    def init(self, kit, precision, rows, *args, **kwargs):
        begin(self, kit, precision, rows, *args, **kwargs)
        masters = {id(p): master for p, master in self.optimizer.quantized}  # of weights in FP8
        self.fresh = {short(n): masters.get(id(p), p).detach().float().clone() for n, p in self.model.named_parameters()}
    def first(self, *args):
        result = run(self, *args)
        if id(self) not in seen:
            drops = [m.p for m in self.model.modules() if isinstance(m, nn.Dropout)]
            drops += [getattr(m, name) for m in self.model.modules() for name in ("attention_dropout", "hidden_dropout") if isinstance(getattr(m, name, None), float)]
            seen[id(self)] = (self, self.fresh, self.tokens.clone(), self.targets.clone(), drops, self.model.training)
        return result
    Trainer.__init__, Trainer.run = init, first
    try:
        done = run_ladder(ladder())
    finally:
        Trainer.__init__, Trainer.run = begin, run
    one = next(iter(seen.values()))
    return {"rows": [r["row"] for r in done], "trainers": len(seen), "precisions": sorted({t.precision.name for t, *_ in seen.values()}),
            "same weights": all(w.keys() == one[1].keys() and all(torch.equal(w[n], one[1][n]) for n in w) for _, w, *_ in seen.values()),
            "same batch": all(torch.equal(tokens, one[2]) and torch.equal(targets, one[3]) for _, _, tokens, targets, *_ in seen.values()),
            "dropout": [p for *_, drops, _ in seen.values() for p in drops if p], "training": all(training for *_, training in seen.values()),
            "FP32 masters": all(w.dtype == torch.float32 for t, *_ in seen.values() for w in t.optimizer.weights)}

def stalls():
    """The first step of each round takes half a second more; none of that may be counted."""
    made, fresh, run, begin = [], [], Trainer.run, Row.run
    class Event(torch.cuda.Event):
        def __init__(self, enable_timing=False, **kwargs):
            made.append(enable_timing)
            super().__init__(enable_timing=enable_timing, **kwargs)
    def stall(self, *args):
        if fresh:
            fresh.clear()
            time.sleep(0.5)
        return run(self, *args)
    def start(self, steps):
        fresh.append(True)
        return begin(self, steps)
    event, torch.cuda.Event, Trainer.run, Row.run = torch.cuda.Event, Event, stall, start
    row = Row("stalls", TORCH_KIT, BASE)
    try:
        run_ladder([row])
    finally:
        torch.cuda.Event, Trainer.run, Row.run = event, run, begin
    return {"events": len(made), "timed": all(made), "times": row.times}

def inputs():
    """Each module of the tour on FP32 and on 16-bit input, in each precision, forward and backward; warnings are errors."""
    done = []
    for name, (make, n_gemms) in TOUR.items():
        for precision in [PRECISIONS["FP32"], BASE, *FP8S]:
            for dtype in [torch.float32] + [BASE.dtype] * (precision.name != "FP32"):
                x = torch.randn(2, 32, D, device=DEVICE, dtype=dtype, requires_grad=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", DeprecationWarning)
                    module = make(TE_KIT)
                    with precision.context():
                        y = module(x)
                    y.float().sum().backward()
                done.append([name, precision.name, str(dtype), x.grad.dtype == x.dtype and bool(x.grad.isfinite().all())])
    return done

def undisturbed():
    """Losses of an FP8 training, alone and with an evaluation and a generation after each step."""
    def disturb(step, trainer):
        exam(trainer.model, FP8)
        generate(trainer.model, FP8, EVERY[:3, :3].to(DEVICE), 4)
        modes.append(trainer.model.training)
    modes = []
    alone, with_evaluation = train(FP8, 5, 6)[1], train(FP8, 5, 6, disturb)[1]
    return {"alone": alone, "with evaluation": with_evaluation, "training mode": all(modes), "evaluations": len(modes)}

def state_dicts():
    ours, twin = new_model(TE_KIT), new_model(TORCH_KIT)
    theirs = {n: v for n, v in ours.state_dict().items() if not n.endswith("_extra_state")}
    extra = len(ours.state_dict()) - len(theirs)
    for p in twin.parameters():
        p.data.add_(torch.randn_like(p))
    there = weights_of(load_weights(ours, weights_of(twin)))
    back = weights_of(load_weights(new_model(TORCH_KIT), there))
    missing = ours.load_state_dict(twin.state_dict(), strict=False)
    plain = new_model(TORCH_KIT).load_state_dict(theirs, strict=True)
    equal = all(torch.equal(there[n], w) and torch.equal(back[n], w) for n, w in weights_of(twin).items())
    return {"equal": equal, "tensors": len(there), "extra": extra, "missing": list(missing.missing_keys), "unexpected": list(missing.unexpected_keys), "plain": str(plain)}

def nan_gradient():
    """Is a NaN in one of several gradients taken for a small error?"""
    one = torch.ones(2)
    exact = {name: one for name in ("output", "a", "b", "c")}
    return errors(exact, {**exact, "b": one * math.nan})[1] <= 1e9

ANSWERS = {}
for ask in (nan_gradient, autocast_log, odd_prompts, capability_table, sentences, ladder_rows, stalls, inputs, undisturbed, state_dicts):
    try:
        ANSWERS[ask.__name__] = ask()
    except BaseException:
        ANSWERS[ask.__name__] = traceback.format_exc()
open(FILE, "w").write(json.dumps(ANSWERS))
'''


@pytest.fixture(scope="module")
def hopper(play):
    """An H200 with TE: a whole run with the benchmark, watched."""
    return play(size=[*TINY, "--vocab", "56"], gpu="9.0", te=True, figure=True, after={"torch": AUTOCAST_LOG, "transformer_engine.pytorch": WATCH_AUTOCAST},
                probes=PROBES.replace("open(FILE", 'open("answers.json"'))


@pytest.fixture(scope="module")
def answers(hopper):
    found = json.loads((hopper.folder / "answers.json").read_text())
    assert not [text for text in found.values() if isinstance(text, str)], "\n".join(text for text in found.values() if isinstance(text, str))
    return found


# --------------------------------------------------------------------------- 1 to 6: before and during the install

def test_01_a_free_T4(play):
    seen = play(size=LEARNS, gpu="7.5")
    assert seen.reached_its_end() and seen.code == 0 and not seen.failed
    assert seen.pip_calls == []
    assert "T4" in seen.reason and "7.5" in seen.reason and "8.0" in seen.reason
    assert seen.precisions["FP16"] == "" and all(seen.precisions[name] for name in seen.precisions if name not in ("FP16", "FP32"))
    assert "trained in FP16" in seen.out and "FP8 does not run here" in seen.out
    assert list(seen.results["training"]) == ["FP16"] and seen.results["backend"] == "torch"
    assert not [name for name in seen.verdicts if re.search(r"in FP8|\(FP8|FP8 learns", name)]
    assert seen.results["generation"]["precision"] == "FP16"


def test_01_FP16_is_trained_with_a_GradScaler_and_says_so(play):
    assert "GradScaler" in play(size=LEARNS, gpu="7.5").out


def test_02_te_without_its_pytorch_part(play):
    seen = play(gpu="9.0", te=True, env={"STANDIN_TE_IMPORT_ERROR": "empty metapackage"}, size=[*QUICK, "--n-layers", "1"])
    assert "[pytorch]" in seen.reason and "transformer_engine" in mends(seen.reason)
    assert seen.pip_calls == [] and seen.reached_its_end()
    assert seen.results["backend"] == "torch" and "trained in BF16" in seen.out


IMPORTS = {  # key of the stand-in: (words of the cause, words of the command)
    "empty metapackage": ("[pytorch]", "transformer_engine"), "no cudnn": ("cuDNN", "nvidia-cudnn-cu13"), "old cudnn": ("9.5.1", "nvidia-cudnn-cu13"),
    "no extension": ("compiled extension", "transformer_engine_torch"), "version mismatch": ("version", "transformer_engine"),
    "libcublas": ("libcublas", "transformer_engine"), "libcudnn": ("cuDNN", "nvidia-cudnn-cu13"),
    "undefined symbol": ("another torch", "transformer_engine"), "StopIteration": ("old", "transformer_engine"),
    "ImportError: libcublasLt.so.12: cannot open shared object file: No such file or directory": ("CUDA 12", "transformer_engine"),
    "ModuleNotFoundError: No module named 'onnxscript'": ("onnxscript", "onnxscript"),
}


def test_03_present_is_not_importable(start):
    """Every kind of exception gives one line with cause and command, and nothing is reinstalled."""
    def look(kind):
        return start(gpu="9.0", te=True, env={"STANDIN_TE_IMPORT_ERROR": kind}).seen(until=GOING_ON)

    with ThreadPoolExecutor(2) as pool:
        for (kind, (cause, command)), seen in zip(IMPORTS.items(), pool.map(look, IMPORTS)):
            assert cause in seen.reason, (kind, seen.reason)
            assert any(command in word for word in mends(seen.reason)), (kind, seen.reason)
            assert seen.pip_calls == []


def test_03_an_unknown_exception_is_shown_as_it_is(play):
    seen = play(gpu="9.0", te=True, env={"STANDIN_TE_IMPORT_ERROR": "KeyError: nobody has seen this"}, until=BUILT)
    assert "KeyError" in seen.reason and "nobody has seen this" in seen.reason and seen.pip_calls == []


def test_04_no_precompiled_wheel_and_300_lines_of_compiler(play):
    noise = "".join(f"  /usr/include/c++/13/x{i}.h:7: warning: unused\n" for i in range(300))
    log = f"Precompiled wheel not found. Building from source...\n{noise}  csrc/a.cpp:3:10: fatal error: nccl.h: No such file or directory\n{noise}ERROR: Failed building wheel"
    seen = play(gpu="9.0", pip="fail", pip_output=log)
    assert seen.reached_its_end() and seen.results["backend"] == "torch"
    assert "fatal error: nccl.h" in seen.out and "nvidia-nccl-cu13" in seen.reason and "warning: unused" not in seen.out
    kept = seen.folder / "out" / "te_install.log"
    assert str(kept) in seen.out and kept.read_text().count("warning: unused") == 600


def test_05_a_build_that_hangs_ends_with_its_whole_tree(start):
    machine = start(gpu="9.0", pip="hang", replace={"60 * SETTINGS.install_minutes": "3", "HEARTBEAT_S = 30": "HEARTBEAT_S = 0.3"})
    pids = machine.children()
    seen = machine.seen(until=BUILT)
    assert all_ended(pids)
    assert "time limit" in seen.reason and "--install-minutes" in seen.reason
    assert re.search(r"^  0:0\d 3 of 33 files compiled$", seen.out, re.MULTILINE)
    assert "plain PyTorch" in seen.out
    assert 1 <= int(seen.pip_calls[-1]["env"]["MAX_JOBS"]) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_05_stopping_the_script_ends_the_build(start, number, code):
    machine = start(gpu="9.0", pip="hang")
    pids = machine.children()
    machine.process.send_signal(number)
    seen = machine.seen(timeout=30)
    assert all_ended(pids) and seen.code == code and "checks passed" not in seen.out


def test_06_header_folders_of_pip_reach_the_build(play):
    """pip works and brings TE: the build saw the headers, the running torch was pinned, and the run goes on in FP8."""
    seen = play(gpu="9.0", pip="install", te_files=standin_files(), until=BUILT)
    assert "Transformer Engine modules and trained in BF16 and in FP8 delayed" in seen.out and seen.precisions["FP8 delayed"] == ""
    call = seen.pip_calls[-1]
    folders = call["env"]["CPATH"].split(os.pathsep)
    assert {str(seen.folder / "site" / "nvidia" / part / "include") for part in ("cu13", "nccl")} <= set(folders)
    import torch
    pins = pathlib.Path(call["argv"][call["argv"].index("--constraint") + 1]).read_text()
    assert pins.startswith(f"torch=={torch.__version__.split('+')[0]}")
    assert f"$ {sys.executable} -m pip install" in seen.out


def test_06_a_build_that_cannot_work_is_not_started(play):
    seen = play(gpu="9.0", compiler=False, until=BUILT)
    assert seen.pip_calls == [] and "compiler" in seen.reason and "g++" in mends(seen.reason)[-1]


# --------------------------------------------------------------------------- 7 to 13: where it runs, what it is given

def test_07_inside_a_notebook_kernel(play):
    """A kernel's argv is not ours, and a cell has no __file__."""
    cell = (f"import sys; sys.argv = ['ipykernel_launcher.py', '-f', '/run/kernel-1.json', '--HistoryManager.hist_file=:memory:', '--seq', '7']\n"
            f"exec(compile(open({str(SCRIPT)!r}).read(), 'cell', 'exec'))")
    seen = play(command=[sys.executable, "-c", f"{cell}"], until=BUILT)
    assert "--d-model 64" in seen.out and "--seq 32" in seen.out and "usage" not in seen.err


def test_08_no_gpu(play):
    seen = play(size=SMALL_PRESET, env={"CUDA_VISIBLE_DEVICES": ""})
    assert seen.reached_its_end() and seen.pip_calls == []
    assert "small preset" in seen.out and seen.results["settings"]["d_model"] == 64 and "No GPU:" in seen.out
    assert list(seen.results["training"]) == ["FP32"] and seen.results["machine"]["gpu"] is None


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_08_gpus_that_are_hidden(play, hidden):
    seen = play(gpu="9.0", te=True, env={"FAKE_GPU_COUNT": "0", "CUDA_VISIBLE_DEVICES": hidden}, until=BUILT)
    assert "No GPU: CUDA_VISIBLE_DEVICES hides every GPU" in seen.out and seen.pip_calls == []


def test_09_generation_of_one_row_and_odd_lengths(hopper, answers):
    assert len(answers["odd_prompts"]) == 10 and all(answers["odd_prompts"])
    assert hopper.results["generation"]["precision"] == "FP8 delayed"


def test_10_backward_would_fail_at_24_rows(play):
    seen = play("--batch", "3", "--seq", "8")
    assert seen.code == 2 and seen.out == "" and seen.err.count("\n") == 1
    assert "24" in seen.err and "multiple of 16" in seen.err and "--batch 2 or --batch 4" in seen.err


@pytest.mark.parametrize("flags", [["--batch", "3", "--seq", "8"], ["--seq", "10"], ["--bench-batch", "1", "--seq", "24"], ["--d-model", "100"],
                                   ["--d-ff", "100"], ["--n-heads", "7"], ["--prompt", "30", "--gen", "30"], ["--d-model", "24"]])
def test_10_whoever_follows_the_hints_gets_a_run(play, flags):
    size = ["--benchmark", "off", "--preset", "small"]
    for _ in range(6):
        seen = play(*flags, size=size, until=r"^  --vocab \d+")
        if seen.code is None:
            return
        assert seen.code == 2 and seen.err.count("\n") == 1, seen.err
        hint = re.search(r"try ((?:--[a-z-]+ \d+ ?)+)", seen.err)  # the first of several, "or" between them
        assert hint, seen.err
        flags = [*flags, *hint[1].split()]
    raise AssertionError(f"still refused: {seen.err}")


@pytest.mark.parametrize("capability, card", [("8.0", "A100"), ("8.6", "3090")])
def test_11_FP8_on_an_A100_or_RTX_3090(play, capability, card):
    seen = play("--recipe", "delayed", gpu=capability, te=True, until=BUILT)
    assert card in seen.out and "Going on without" not in seen.out
    assert "Transformer Engine modules and trained in BF16. FP8 does not run here" in seen.out
    assert seen.precisions["BF16"] == "" and f"8.9, this GPU has {capability}" in seen.precisions["FP8 delayed"]


def test_11_an_A100_runs_to_the_end_in_BF16(play):
    seen = play(gpu="8.0", te=True)
    assert seen.reached_its_end() and seen.results["backend"] == "te" and list(seen.results["training"]) == ["BF16"]
    assert any("8.9" in line for line in seen.out[seen.out.index("Not shown"):].splitlines())


RUNS = {  # the published table: what runs from which capability
    (6, 0): [], (7, 0): [], (7, 5): [], (8, 0): ["BF16"], (8, 6): ["BF16"], (8, 7): ["BF16"], (8, 9): ["BF16", "FP8 delayed", "FP8 current"],
    (9, 0): ["BF16", "FP8 delayed", "FP8 current", "FP8 block"], (10, 0): ["BF16", "FP8 delayed", "FP8 current", "FP8 block", "MXFP8", "NVFP4"],
    (10, 3): ["BF16", "FP8 delayed", "FP8 current", "FP8 block", "MXFP8", "NVFP4"], (12, 0): ["BF16", "FP8 delayed", "FP8 current", "FP8 block", "NVFP4"],
    (13, 0): ["BF16", "FP8 delayed", "FP8 current", "FP8 block", "NVFP4"],
}


def test_12_the_capability_table_is_right_in_every_row(answers):
    for capability, reasons in answers["capability_table"]:
        assert {name for name, reason in reasons.items() if not reason} == {"FP32", "FP16", *RUNS[tuple(capability)]}, capability
        assert all("\n" not in reason and re.search(r"\d+\.[\dx]", reason) for reason in reasons.values() if reason)


@pytest.mark.parametrize("capability, name", [("7.0", "NVIDIA V100"), ("7.5", "NVIDIA GeForce RTX 2080 Ti"), ("6.0", "Tesla P100")])
def test_12_a_card_too_old_for_te(play, capability, name):
    seen = play(gpu=capability, te=True, env={"FAKE_GPU_NAME": name}, until=BUILT)  # TE may be there: it is not used
    assert seen.pip_calls == [] and name in seen.reason and "plain PyTorch modules and trained in FP16" in seen.out


def test_13_no_deprecated_name(play):
    seen = play(gpu="9.0", te=True, python=["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"])
    assert seen.reached_its_end() and seen.results["backend"] == "te"


def test_13_warnings_that_are_errors(play):
    """TE itself warns, for one when a module changes its recipe. Under -W error such a warning must not end the tour."""
    seen = play(gpu="9.0", te=True, python=["-W", "error"], until=r"^MiniGPT from TE blocks")
    assert "TE's modules beside" not in seen.out


# --------------------------------------------------------------------------- 14 to 22: what is measured and shown

def test_14_no_zeros_where_the_newest_amax_belongs(hopper):
    state = hopper.results["fp8_state"]
    assert len(state) == 12 and all(0 < r["amax"] <= r["window"] for r in state)
    table = hopper.out[hopper.out.index("newest amax"):].splitlines()[2:14]
    assert [f"{r['amax']:.4g}" for r in state] == [line.split("|")[3].strip() for line in table]


def test_15_slower_is_called_slower(answers):
    slow, fast, equal = (answers["sentences"][name] for name in ("slow", "fast", "equal"))
    assert "3.00x slower than BF16" in slow[0] and "the GPU waits" in slow[0] and "29.0" in slow[0]
    assert "1.20x slower than BF16" in slow[1] and "GPU waits" not in slow[1]
    assert "2.00x faster than BF16" in fast[0] and "GPU waits" not in fast[0] and "slower" not in " ".join(fast[:3])
    assert "as fast as BF16" in equal[0]
    never, from_there, always = answers["sentences"]["widths"]
    assert "does not pay" in never and "512" in never
    assert "pays from a width between 256 and 512" in from_there
    assert "from width 256 at the latest" in always


def test_16_more_memory_is_called_more(hopper, answers):
    assert answers["sentences"]["memory"] == ["100% more memory than", "50% less memory than", "as much memory as"]
    a, b = hopper.results["memory"]
    line = next(line for line in hopper.out.splitlines() if line.startswith("At its peak, FP8"))
    word = "as much" if abs(b["peak"] - a["peak"]) <= 0.005 * a["peak"] else "more" if b["peak"] > a["peak"] else "less"
    assert f"{word} memory" in line and "activations" in line


def test_17_rows_of_the_ladder_differ_in_one_thing(hopper, answers):
    rows = answers["ladder_rows"]
    assert rows["same weights"] and rows["same batch"] and rows["FP32 masters"] and rows["training"] and rows["dropout"] == []
    assert rows["trainers"] >= 4 and {"FP32", "BF16", "FP8 delayed"} <= set(rows["precisions"])
    assert rows["rows"] == [r["row"] for r in hopper.results["benchmark"]]


def test_18_the_first_step_is_not_counted(answers):
    stalls = answers["stalls"]
    assert stalls["events"] > len(stalls["times"]) >= 5 and stalls["timed"]
    assert max(stalls["times"]) < 450  # each round began with a stall of 500 ms


@pytest.mark.parametrize("te", [True, False])
def test_19_causality_is_checked_on_both_paths(hopper, play, te):
    seen = hopper if te else play(size=SMALL_PRESET, env={"CUDA_VISIBLE_DEVICES": ""})
    found = {name: passed for name, passed in seen.verdicts.items() if name.startswith("causal, rows independent")}
    assert len(found) == (4 if te else 1) and all(found.values())


def test_19_sequence_first_would_be_noticed(play):
    seen = play(gpu="9.0", te=True, replace={'qkv_format="bshd"': 'qkv_format="sbhd"'}, until=r"^  stride 1")
    assert "[FAIL] causal, rows independent (BF16)" in seen.out and "[FAIL] causal, rows independent (FP8 delayed)" in seen.out


def test_20_a_mask_that_is_not_causal_would_be_noticed(play, hopper):
    seen = play(replace={"q, k, v, is_causal=True": "q, k, v, is_causal=False"}, until=r"^  stride 1")
    assert "[FAIL] causal, rows independent (FP32)" in seen.out
    assert hopper.verdicts["random tokens teach nothing"]


def test_21_weights_move(hopper):
    assert hopper.verdicts["weights moved"] and hopper.verdicts["master weights are FP32"]
    details = {c["name"]: c["detail"] for c in hopper.results["checks"]}
    assert float(re.match(r"([\d.]+)%", details["weights moved"])[1]) > 99


def test_22_every_module_takes_its_input(hopper, answers):
    assert len(answers["inputs"]) == 7 * (1 + 2 * 4) and all(ok for *_, ok in answers["inputs"]), answers["inputs"]
    assert all(row["input"] and "te_error" in row for row in hopper.results["tour"])


# --------------------------------------------------------------------------- 23 to 32: state, failures, other machines

def test_23_pip_changed_the_running_torch(play):
    files = standin_files(**{"torch-9.9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n"})
    seen = play(gpu="9.0", pip="install", te_files=files, until=BUILT)
    assert "9.9.9" in seen.reason and "restart" in seen.reason and "plain PyTorch" in seen.out
    assert all("--constraint" in call["argv"] for call in seen.pip_calls)


def test_24_one_autocast_per_forward_and_none_around_backward(answers):
    log = answers["autocast_log"]
    assert log["entries"] > 100 and log["backwards"] > 100
    assert not any(log.get(name) for name in ("nested", "without a module", "more than one forward", "backward inside")), log


def test_25_evaluation_does_not_disturb_training(hopper, answers):
    found = answers["undisturbed"]
    assert found["evaluations"] == 6 and found["alone"] == found["with evaluation"] and found["training mode"]
    assert hopper.verdicts["generation leaves no trace"]


def test_26_divergence_stops_loudly(play):
    seen = play("--lr", "1e30")
    assert seen.code == 1 and "Traceback" not in seen.err
    assert re.search(r"Stopped: (Stop: )?training in FP32: the loss was (nan|inf) at step \d+", seen.err)
    assert "checks passed" not in seen.out and "Checks:" not in seen.out and "the loss was" in seen.results["stopped"]


def test_26_a_NaN_among_the_gradients_is_not_overlooked(answers):
    assert not answers["nan_gradient"]


NAN_IN_FP8 = """
import torch.nn.functional as F
seen = []
def cross_entropy(*args, real=F.cross_entropy, **kwargs):
    te = sys.modules.get("transformer_engine.pytorch.quantization")
    if te and te.FP8GlobalStateManager.is_fp8_enabled():
        seen.append(1)
    return real(*args, **kwargs) * (float("nan") if len(seen) > 9 else 1)
F.cross_entropy = cross_entropy
"""


def test_26_divergence_in_FP8_alone(play):
    seen = play(gpu="9.0", te=True, after={"torch": NAN_IN_FP8})
    assert seen.code == 1 and "Traceback" not in seen.err
    assert re.search(r"Stopped: (Stop: )?training in FP8 delayed: the loss was nan at step \d+", seen.err) and "checks passed" not in seen.out


def test_27_an_old_cublas_on_ada(play):
    seen = play(gpu="8.9", te=True, env={"STANDIN_TE_CUBLASLT": "110000"}, until=BUILT)
    assert "expected here" in seen.out and re.search(r"FP8 delayed +\| yes", seen.out)  # the capability alone says yes
    assert "TE says: CublasLt version 12.1.3" in seen.precisions["FP8 delayed"] and seen.precisions["BF16"] == ""
    assert "Transformer Engine modules and trained in BF16" in seen.out


def test_27_any_other_no_of_te_is_shown(play):
    seen = play(gpu="9.0", te=True, env={"STANDIN_TE_UNAVAILABLE": "fp8_block=not on a Monday"}, until=BUILT)
    assert "not on a Monday" in seen.precisions["FP8 block"] and seen.precisions["FP8 delayed"] == ""


def test_28_a_recipe_whose_backward_fails(play):
    """RTX 5090: the wanted recipe breaks in backward. It alone is out; another recipe takes its place to the end."""
    seen = play(gpu="12.0", te=True, env={"STANDIN_TE_FAIL": "DelayedScaling.backward"})
    assert seen.reached_its_end()
    assert "cublas" in seen.precisions["FP8 delayed"].lower() and seen.precisions["FP8 current"] == ""
    assert "takes its place" in seen.out and "FP8 current" in seen.results["training"]
    assert seen.precisions["MXFP8"]


def test_28_no_recipe_works(play):
    fails = ",".join(f"{name}.backward" for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "NVFP4BlockScaling"))
    seen = play(gpu="12.0", te=True, env={"STANDIN_TE_FAIL": fails}, until=BUILT)
    assert "Transformer Engine modules and trained in BF16. FP8 does not run here" in seen.out


WINDOWS = """
import os, signal, sysconfig
sysconfig.get_config_vars()  # looks for the platform's own file once
sys.platform = "win32"
for owner, names in ((signal, ["SIGHUP"]), (os, ["killpg", "sched_getaffinity", "uname"])):
    for name in names:
        delattr(owner, name)
"""


def test_29_windows(play):
    seen = play(gpu="9.0", after={"torch": WINDOWS})
    assert seen.pip_calls == [] and "Linux" in seen.reason and "WSL" in seen.reason
    assert seen.reached_its_end() and "trained in BF16" in seen.out and seen.results["backend"] == "torch"


def test_30_more_than_one_gpu(play):
    seen = play(gpu="9.0", te=True, env={"FAKE_GPU_COUNT": "4"}, until=BUILT)
    assert "1 of 4 used" in seen.out


def test_30_torchrun(play, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), "--out", str(tmp_path / "out"), *QUICK]
    seen = play(command=command)
    assert seen.out.count("Checks:") == 1, seen.err[-3000:]  # one of the two processes speaks
    verdicts = {c["name"]: c["passed"] for c in json.loads((tmp_path / "out" / "results.json").read_text())["checks"]}
    assert verdicts["same seed, same losses (FP32)"] and verdicts["weights moved"]


def test_31_weights_travel_both_ways_without_extra_state(hopper, answers):
    found = answers["state_dicts"]
    assert found["equal"] and found["tensors"] == 17 and found["unexpected"] == []
    assert found["extra"] > 0 and all(name.endswith("_extra_state") for name in found["missing"]) and "All keys matched" in found["plain"]
    assert hopper.verdicts["weights survive the way there and back"]


def try_next(seen):
    """The commands below "Try next:", without the explanation beside them."""
    lines = seen.out[seen.out.index("Try next:"):].splitlines()[1:]
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in lines if line.strip().startswith("python te_tutorial.py")]
    return [shlex.split(line)[2:] for line in lines]


def test_32_each_advertised_command_runs(hopper, start):
    commands = try_next(hopper)
    assert len(commands) >= 3

    def run(flags):
        as_it_is = start(*flags, size=[], gpu="9.0", te=True).seen(until=BUILT)
        small = [f for pair in zip(flags[::2], flags[1::2]) if pair[0] not in ("--d-model", "--n-layers") for f in pair]
        if "--benchmark" in small:  # the rows of TE are measured elsewhere
            return as_it_is, start(*small, size=[*QUICK, "--bench-steps", "1"], gpu="8.0").seen()
        return as_it_is, start(*small, gpu="9.0", te=True).seen() if small else None

    with ThreadPoolExecutor(2) as pool:
        for flags, (as_it_is, whole) in zip(commands, pool.map(run, commands)):
            assert as_it_is.code is None and as_it_is.precisions["FP8 delayed"] == "", (flags, as_it_is.err)
            assert whole is None or whole.reached_its_end(), flags


# --------------------------------------------------------------------------- relatives

def test_a_gpu_newer_than_the_script(play):
    seen = play(gpu="13.0", te=True, until=BUILT)
    assert "compute capability 13.0" in seen.out and seen.precisions["BF16"] == "" and seen.precisions["FP8 current"] == ""


NO_KERNEL = """
real = module.ones
def ones(*args, **kwargs):
    if str(kwargs.get("device")) == "cuda":
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\\nCUDA kernel errors might be asynchronous")
    return real(*args, **kwargs)
module.ones = ones
"""


def test_a_gpu_that_torch_sees_but_cannot_run(play):
    seen = play(size=SMALL_PRESET, gpu="9.0", te=True, after={"torch": NO_KERNEL})
    assert "no kernel image" in seen.out and "small preset" in seen.out and seen.pip_calls == []
    assert seen.reached_its_end() and seen.results["machine"]["gpu"] is None
    assert seen.results["settings"]["d_model"] == 64 and seen.results["settings"]["steps"] == 5  # what really ran


def test_settings_are_checked_again_when_the_gpu_does_not_run(play):
    seen = play("--n-heads", "12", size=["--benchmark", "off", "--steps", "5"], gpu="9.0", te=True, after={"torch": NO_KERNEL}, until=r"^MiniGPT from")
    assert "Traceback" not in seen.err and seen.code in (None, 2), seen.err


def test_a_te_that_is_too_old(play):
    seen = play(gpu="9.0", te=True, after={"transformer_engine.pytorch": "del module.autocast"}, until=BUILT)
    assert "too old" in seen.reason and "transformer_engine" in mends(seen.reason) and seen.pip_calls == []


def test_a_te_that_does_not_know_the_newest_recipes(play):
    """A missing recipe takes out that recipe alone."""
    older = ("del module.is_nvfp4_available, module.is_bf16_available\n"
             "import transformer_engine.common.recipe as recipe\ndel recipe.NVFP4BlockScaling, recipe.Float8BlockScaling")
    seen = play(gpu="10.0", te=True, after={"transformer_engine.pytorch": older}, until=BUILT)
    assert seen.precisions["NVFP4"] and seen.precisions["FP8 block"] and seen.precisions["FP8 delayed"] == "" and seen.precisions["BF16"] == ""


def test_pip_brings_a_te_that_does_not_import(play):
    files = standin_files(**{"transformer_engine/pytorch/__init__.py": "raise ImportError('/x/te.so: undefined symbol: _ZN3c10')\n"})
    seen = play(gpu="9.0", pip="install", te_files=files, until=BUILT)
    assert "another torch" in seen.reason and len(seen.pip_calls) == 2 and "plain PyTorch" in seen.out


def test_half_an_installation_left_behind(play):
    """An interrupted uninstall leaves an empty folder; pip is asked once and the run goes on whatever it says."""
    seen = play(gpu="9.0", pip="fail", after={"torch": "import os\nos.makedirs(os.environ['STAND_IN'] + '/site/transformer_engine')\n"}, until=BUILT)
    assert seen.pip_calls and "nothing works" in seen.reason


def test_install_never(play):
    seen = play("--install", "never", gpu="9.0", until=BUILT)
    assert seen.pip_calls == [] and "--install never" in seen.reason and "trained in BF16" in seen.out


@pytest.mark.parametrize("flags", [["--vocab", "8"], ["--seq", "8", "--prompt", "4", "--gen", "4"], ["--seq", "4", "--prompt", "2", "--gen", "2"]])
def test_settings_run_to_the_end_or_are_refused_at_once(play, flags):
    seen = play(*flags)
    if seen.code == 2:
        assert seen.out == "" and seen.err.count("\n") == 1 and flags[0] in seen.err
    else:
        assert seen.reached_its_end()


BARE = "sys.modules['tqdm'] = None\n"


def test_a_bare_machine(play):
    """No matplotlib, no tqdm, a terminal that knows ASCII only, an output folder that cannot be made."""
    seen = play("--out", "/dev/null/out", after={"torch": BARE}, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert "Traceback" not in seen.err and "Checks:" in seen.out and "matplotlib is not installed" in seen.out
    folder = pathlib.Path(re.search(r"using (\S+)", seen.out)[1])
    assert json.loads((folder / "results.json").read_text())["checks"]


def test_the_reader_of_the_output_leaves(start, tmp_path):
    line = f"{shlex.quote(sys.executable)} {shlex.quote(str(SCRIPT))} --out {tmp_path / 'out'} {' '.join(QUICK)} | head -n 3"
    seen = start(command=["sh", "-c", line]).seen()
    assert seen.out.count("\n") == 3 and "Traceback" not in seen.err and "Exception ignored" not in seen.err


def test_ctrl_c_in_training(start):
    machine = start("--steps", "100000")
    machine.wait_for(r"sequences exist")
    time.sleep(0.5)
    machine.process.send_signal(signal.SIGINT)
    seen = machine.seen(timeout=30)
    assert seen.code == 130 and "interrupted" in seen.err and "Traceback" not in seen.err
    assert seen.results["stopped"] and seen.results["checks"]
