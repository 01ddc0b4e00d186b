"""The install cells of section 2 on their own: deciding, installing and diagnosing, with a stand-in pip, torch and Transformer Engine.

Only these cells are run. What they take from above (imports, SETTINGS, OUT, MACHINE, torch) is made here, so no GPU, no network and no CUDA torch
are needed.
"""

import importlib.machinery
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "te_tutorial.py"
PREAMBLE = """
import contextlib, importlib, importlib.machinery, importlib.metadata, importlib.util, os, platform, re, shlex, shutil, signal, site, subprocess
import sys, sysconfig, tempfile, time, urllib.request, warnings
from pathlib import Path
"""
MENDS = "This mends it: "


def section_2():
    """The cells from the heading "## 2." to the next heading."""
    headings = re.split(r"^(?=# %% \[markdown\]\n# ##)", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next(cells for cells in headings if cells.startswith("# %% [markdown]\n# ## 2."))


def fake_torch(version="2.13.0+cu130", cuda="13.0"):
    return types.SimpleNamespace(__version__=version, version=types.SimpleNamespace(cuda=cuda), compiled_with_cxx11_abi=lambda: True)


# --------------------------------------------------------------------------- stand-ins

FAKE_PIP = '''
import json, os, subprocess, sys, time
from pathlib import Path

here = Path(os.environ["STAND_IN"])
watched = ("CPATH", "CUDA_HOME", "MAX_JOBS", "CXX", "PATH", "NVTE_BUILD_USE_NVIDIA_WHEELS")
with open(here / "pip_calls", "a") as calls:
    calls.write(json.dumps({"argv": sys.argv[1:], "env": {name: os.environ.get(name) for name in watched}}) + "\\n")
if not any(word.startswith("transformer_engine") for word in sys.argv):
    sys.exit(0)
mode = os.environ["PIP_MODE"]
if mode in ("install", "swap"):
    for name, text in json.loads((here / "te_files").read_text()).items():
        (here / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "site" / name).write_text(text)
if mode == "swap":
    (here / "site" / "torch-2.13.0.dist-info").rename(here / "site" / "torch-2.13.1.dist-info")
    (here / "site" / "torch-2.13.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\\nName: torch\\nVersion: 2.13.1\\n")
if mode == "fail":
    print((here / "pip_output").read_text())
    sys.exit(1)
if mode == "kill":
    os.kill(os.getpid(), 9)
if mode == "hang":  # a child that ends on Ctrl-C, and one with a child of its own that does not
    stubborn = "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    stubborn += "child = subprocess.Popen(['sleep', '300']); print(child.pid, flush=True); time.sleep(300)"
    deaf = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True)
    plain = subprocess.Popen(["sleep", "300"])
    (here / "pids.new").write_text(json.dumps([os.getpid(), plain.pid, deaf.pid, int(deaf.stdout.readline())]))
    (here / "pids.new").rename(here / "pids")
    print("  [3/33] c++ -c cast.cpp", flush=True)
    print("  warning: something long", flush=True)
    time.sleep(300)
'''

TE_FILES = {
    "transformer_engine/__init__.py": "__version__ = '2.20.2'\n",
    "transformer_engine/common/__init__.py": "",
    "transformer_engine/common/recipe/__init__.py": "class DelayedScaling: pass\n",
    "transformer_engine/pytorch/__init__.py": "import warnings\nwarnings.warn('old', DeprecationWarning)\ndef autocast(): pass\n",
}

RUNNER = PREAMBLE + '''
import json, types
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
    signal.signal(number, handler)  # also where the tests themselves run under nohup
given = json.loads(os.environ["GIVEN"])
torch = types.SimpleNamespace(__version__=given["torch"], version=types.SimpleNamespace(cuda=given["cuda"]), compiled_with_cxx11_abi=lambda: True)
SETTINGS = types.SimpleNamespace(install="auto", install_minutes=given["minutes"])
OUT = Path(given["out"])
MACHINE = types.SimpleNamespace(capability=(9, 0), gpu="NVIDIA H200", device="cuda")
sys.stdout.reconfigure(line_buffering=True)
in_a_line = lambda error: f"{type(error).__name__}: {error}"
find_spec = importlib.machinery.PathFinder.find_spec
if given["no_pip"]:
    importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name == "pip" else find_spec(name, *rest)
cells = given["cells"].replace("HEARTBEAT_S = 30", "HEARTBEAT_S = 0.2")
exec(compile(cells, "section 2", "exec"))
print("RESULT " + json.dumps({"te": te and te.__name__, "recipe": recipe and recipe.__name__, "version": TE_VERSION, "reason": TE_REASON}))
'''


class Box:
    """A machine to install on: its folder of packages, its pip, and the section run in a Python of its own."""

    def __init__(self, folder):
        self.folder, self.site, self.out = folder, folder / "site", folder / "out"
        self.write("site/pip/__init__.py", "")
        self.write("site/pip/__main__.py", FAKE_PIP)
        self.write("te_files", json.dumps(TE_FILES))
        self.write("site/nvidia/cu13/include/cuda_runtime.h", "")
        self.write("site/nvidia/nccl/include/nccl.h", "")
        self.write("bin/g++", "#!/bin/sh\n").chmod(0o755)
        self.out.mkdir()
        self.torch()

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def torch(self, version="2.13.0"):
        self.write(f"site/torch-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")

    def start(self, mode="install", minutes=5, torch="2.13.0+cu130", no_pip=False, python=(), **environment):
        given = {"cells": section_2(), "out": str(self.out), "minutes": minutes, "torch": torch, "cuda": "13.0", "no_pip": no_pip}
        clean = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CPATH", "MAX_JOBS", "CXX", "WORLD_SIZE")}
        environment = {**clean, "PYTHONPATH": str(self.site), "STAND_IN": str(self.folder), "PIP_MODE": mode, "GIVEN": json.dumps(given),
                       "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **environment}
        return subprocess.Popen([sys.executable, *python, "-c", RUNNER], env=environment, cwd=self.folder, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        shown = process.communicate(timeout=60)[0]
        assert process.returncode == 0, shown
        return types.SimpleNamespace(**json.loads(shown.split("RESULT ")[1]), shown=shown)

    @property
    def calls(self):
        path = self.folder / "pip_calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def children(self):
        """The processes of a hanging pip, as soon as it has them."""
        for _ in range(300):
            if (self.folder / "pids").exists():
                return json.loads((self.folder / "pids").read_text())
            time.sleep(0.1)
        raise AssertionError("pip was never started")


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def all_ended(pids):
    for _ in range(50):
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def cells(tmp_path, monkeypatch):
    """The names that section 2 defines, on a machine without a GPU (so that running it starts nothing)."""
    if importlib.machinery.PathFinder.find_spec("pip") is None:  # an environment of uv
        (tmp_path / "with_pip" / "pip").mkdir(parents=True)
        (tmp_path / "with_pip" / "pip" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "with_pip")
    names = {"torch": fake_torch(), "OUT": tmp_path}
    exec(PREAMBLE, names)
    names["SETTINGS"] = types.SimpleNamespace(install="auto", install_minutes=5)
    names["MACHINE"] = types.SimpleNamespace(capability=None, gpu=None, device="cpu")
    for name in ("CUDA_HOME", "CPATH", "MAX_JOBS", "CXX", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    exec(compile(section_2(), "section 2", "exec"), names)
    return types.SimpleNamespace(names=names, **{name: value for name, value in names.items() if callable(value) or name.isupper()})


@pytest.fixture
def fit(cells, monkeypatch):
    """The same on a machine where nothing stands against installing; `fit.installed` counts the tries."""
    names, cells.installed = cells.names, []
    names["MACHINE"] = types.SimpleNamespace(capability=(9, 0), gpu="NVIDIA H200", device="cuda")
    names["import_te"] = lambda: ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine")
    names["install_te"] = lambda: cells.installed.append(True) or "tried"
    names["torch_on_disk"] = lambda: "2.13.0"
    names["compiler"] = lambda: "g++"
    names["ready_made"] = lambda: False
    names["pip_headers"] = lambda wanted="": ["/headers"]
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(names, "sysconfig", types.SimpleNamespace(get_path=lambda _: make_python_h(names)))
    return cells


def make_python_h(names):
    folder = names["OUT"] / "include"
    folder.mkdir(exist_ok=True)
    (folder / "Python.h").touch()
    return str(folder)


# --------------------------------------------------------------------------- before pip

@pytest.mark.parametrize("capability, installs", [(None, False), ((6, 0), False), ((6, 1), False), ((7, 0), False), ((7, 5), False), ((8, 0), True),
                                                  ((8, 6), True), ((8, 7), True), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((10, 3), True),
                                                  ((12, 0), True), ((15, 0), True)])
def test_capability_decides(fit, capability, installs):
    fit.names["MACHINE"] = types.SimpleNamespace(capability=capability, gpu="Some GPU", device="cuda")
    module, reason = fit.load_te()
    assert module is None
    assert bool(fit.installed) == installs
    if capability and not installs:
        assert "Some GPU" in reason and f"{capability[0]}.{capability[1]}" in reason and "8.0" in reason


OBSTACLES = {
    "never": (lambda n, m: setattr(n["SETTINGS"], "install", "never"), "--install never", "--install auto"),
    "windows": (lambda n, m: m.setattr(sys, "platform", "win32"), "Linux only", "wsl"),
    "mac": (lambda n, m: m.setattr(sys, "platform", "darwin"), "Linux only", ""),
    "python 3.9": (lambda n, m: m.setattr(sys, "version_info", (3, 9, 18, "final", 0)), "Python 3.10", "3.12"),
    "cpu torch": (lambda n, m: setattr(n["torch"].version, "cuda", None), "no CUDA", "install --upgrade torch"),
    "cuda 11": (lambda n, m: n.update(CUDA_MAJOR="11") or setattr(n["torch"].version, "cuda", "11.8"), "11.8", "install --upgrade torch"),
    "torchrun": (lambda n, m: m.setenv("WORLD_SIZE", "2"), "one process", "te_tutorial.py"),
    "torch changed since": (lambda n, m: n.update(torch_on_disk=lambda: "2.14.1"), "2.14.1", "restart"),
    "torch is no package": (lambda n, m: n.update(torch_on_disk=lambda: None), "None is installed", ""),
    "no compiler": (lambda n, m: n.update(compiler=lambda: ""), "C++ compiler", "apt-get install g++"),
    "no Python.h": (lambda n, m: m.setitem(n, "sysconfig", types.SimpleNamespace(get_path=lambda _: "/nowhere")), "header files of Python", "python3-dev"),
    "no CUDA headers": (lambda n, m: n.update(pip_headers=lambda wanted="": [], toolkit=lambda: ""), "CUDA", "cuda-toolkit["),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_are_found_before_pip(fit, monkeypatch, name):
    assert fit.why_not_install() == ""  # so the reason below comes from this obstacle alone
    disturb, cause, mend = OBSTACLES[name]
    disturb(fit.names, monkeypatch)
    module, reason = fit.load_te()
    assert module is None and not fit.installed
    assert cause in reason and mend in reason and MENDS in reason and "\n" not in reason


@pytest.mark.parametrize("name", ["no compiler", "no Python.h", "no CUDA headers"])
def test_a_ready_made_extension_needs_no_compilation(fit, monkeypatch, name):
    OBSTACLES[name][0](fit.names, monkeypatch)
    fit.names["ready_made"] = lambda: True
    fit.load_te()
    assert fit.installed


def test_neither_pip_nor_uv(fit, monkeypatch):
    names = fit.names
    find_spec = names["importlib"].machinery.PathFinder.find_spec
    monkeypatch.setattr(names["importlib"].machinery.PathFinder, "find_spec", lambda name, *rest: None if name == "pip" else find_spec(name, *rest))
    monkeypatch.setattr(names["shutil"], "which", lambda name, *rest, **more: None)
    assert "neither pip nor uv" in fit.why_not_install() and "ensurepip" in fit.why_not_install()
    monkeypatch.setattr(names["shutil"], "which", lambda name, *rest, **more: "/usr/bin/uv" if name == "uv" else None)
    assert fit.why_not_install() == ""


def test_asking_for_pip_leaves_setuptools_as_it_is():
    """setuptools hooks into find_spec("pip") and then refuses to be imported, which torch.compile does on a CPU."""
    pytest.importorskip("setuptools")
    has_pip = re.search(r"def has_pip\(\):.*?\n\n\n", section_2(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", f"{PREAMBLE}\n{has_pip}\nprint(has_pip())\nimport setuptools"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() in ("True", "False"), done.stderr


def test_address_of_the_ready_made_extension(cells, monkeypatch):
    """As TE 2.20.2's own setup.py forms it: tag, CUDA major, whole torch version, C++ ABI, Python, platform."""
    asked = []

    def urlopen(request, timeout):
        asked.append((request.full_url, request.get_method()))
        return types.SimpleNamespace(status=200)

    monkeypatch.setattr(cells.names["urllib"].request, "urlopen", urlopen)
    assert cells.ready_made() is True
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert asked == [(f"https://github.com/NVIDIA/TransformerEngine/releases/download/v2.20.2/transformer_engine_torch-2.20.2+cu13torch2.13.0+cu130"
                      f"cxx11abiTRUE-{python}-{python}-linux_{os.uname().machine}.whl", "HEAD")]

    def no_network(request, timeout):
        raise OSError("no network")

    monkeypatch.setattr(cells.names["urllib"].request, "urlopen", no_network)
    assert cells.ready_made() is False


# --------------------------------------------------------------------------- TE is there

def test_an_importable_te_is_used_as_it_is(box):
    for name, text in TE_FILES.items():
        box.write(f"site/{name}", text)
    result = box.run(python=("-W", "error"))
    assert (result.te, result.recipe) == ("transformer_engine.pytorch", "transformer_engine.common.recipe")
    assert result.version == "2.20.2" and result.reason == "" and box.calls == []


IMPORT_ERRORS = [
    ("raise RuntimeError('Found empty `transformer-engine` meta package installed. Install `transformer-engine` with framework extensions via')",
     "[pytorch]", "uninstall"),
    ("raise RuntimeError('cudnn shared object not found.')", "cuDNN", "nvidia-cudnn-cu13"),
    ("raise RuntimeError('nvrtc shared object not found.')", "nvrtc", "cuda-toolkit["),
    ("raise RuntimeError('Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0.')", "cuDNN 9.1.0 is too old", "cudnn-cu13>=9.12"),
    ("raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')", "compiled extension", "uninstall"),
    ("raise AssertionError('Transformer Engine package version mismatch. Found transformer_engine_torch v2.5.0')", "different versions", "uninstall"),
    ("raise AssertionError('Could not find TE core package `transformer-engine-cu*`.')", "missing", "uninstall"),
    ("raise OSError('libcublas.so.13: cannot open shared object file: No such file or directory')", "CUDA 13", "uninstall"),
    ("raise OSError('libnccl.so.2: cannot open shared object file: No such file or directory')", "NCCL", "nvidia-nccl-cu13"),
    ("raise OSError('libcudnn.so.9: cannot open shared object file: No such file or directory')", "cuDNN", "nvidia-cudnn-cu13"),
    ("raise ImportError('/x/te.so: undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_jRKSs')", "another torch than 2.13.0", "uninstall"),
    ("raise ImportError(\"/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found\")", "newer C or C++ library", "libstdcxx"),
    ("raise StopIteration", "old TE", "uninstall"),
    ("import einops_that_nobody_has", "einops_that_nobody_has", "install einops_that_nobody_has"),
    ("def fp8_autocast(): pass", "too old for the tutorial", "uninstall"),
    ("raise RuntimeError('something new')", "RuntimeError: something new", ""),
]


@pytest.mark.parametrize("code, cause, mend", IMPORT_ERRORS)
def test_a_broken_te_is_diagnosed_and_left_alone(box, code, cause, mend):
    box.write("site/transformer_engine/__init__.py", "__version__ = '1.0'\n")
    box.write("site/transformer_engine/pytorch/__init__.py", code + "\n")
    result = box.run()
    assert result.te is None and result.version is None and box.calls == []
    assert cause in result.reason and mend in result.reason and "\n" not in result.reason
    if mend:
        command = shlex.split(result.reason.split(MENDS)[1])
        assert command[:3] in ([sys.executable, "-m", "pip"], ["conda", "install", "-c"])
    if mend == "uninstall":
        assert command[4:] == ["-y", "transformer_engine", "transformer_engine_torch", "transformer_engine_cu12", "transformer_engine_cu13"]


def test_te_without_its_pytorch_part(box):
    box.write("site/transformer_engine/__init__.py", "")
    result = box.run()
    assert result.te is None and "[pytorch]" in result.reason and box.calls == []


def test_an_empty_cuda_home_is_taken_away_before_the_import(box):
    """TE 2.20.2 searches f"{CUDA_HOME}/**" for its libraries: with an empty string, the whole disk."""
    for name, text in TE_FILES.items():
        box.write(f"site/{name}", text)
    box.write("site/transformer_engine/__init__.py", "import os\n__version__ = '2.20.2'\nassert 'CUDA_HOME' not in os.environ\n")
    assert box.run(CUDA_HOME="").te


def test_an_empty_folder_left_behind_is_not_a_te(box):
    (box.site / "transformer_engine").mkdir()
    assert box.run().te and len(box.calls) == 2


# --------------------------------------------------------------------------- installing

def test_installs_with_the_running_torch_pinned(box):
    result = box.run(MAX_JOBS="3", CPATH="/mine")
    assert result.te == "transformer_engine.pytorch" and result.version == "2.20.2" and result.reason == ""
    helpers, te = box.calls
    assert helpers["argv"][0] == "install"
    assert {"setuptools", "wheel", "packaging", "ninja", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*"} <= set(helpers["argv"])
    assert te["argv"][-1] == "transformer_engine[pytorch]==2.20.2"
    assert {"--no-build-isolation", "--no-cache-dir"} <= set(te["argv"])
    for call in box.calls:
        pins = Path(call["argv"][call["argv"].index("--constraint") + 1])
        assert pins.read_text() == "torch==2.13.0\n"
        assert "--break-system-packages" not in call["argv"] and "-U" not in call["argv"] and "--upgrade" not in call["argv"]
        announced = [shlex.split(line[2:]) for line in result.shown.splitlines() if line.startswith("$ ")]
        assert [sys.executable, "-m", "pip", *call["argv"]] in announced
    folders = te["env"]["CPATH"].split(os.pathsep)
    assert folders[-1] == "/mine" and {str(box.site / "nvidia" / part / "include") for part in ("cu13", "nccl")} <= set(folders)
    assert te["env"]["MAX_JOBS"] == "3" and te["env"]["CXX"] == "g++" and te["env"]["NVTE_BUILD_USE_NVIDIA_WHEELS"] == "1"
    assert te["env"]["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert str(box.out / "te_install.log") in result.shown


def test_the_pin_keeps_a_local_version(box):
    (box.site / "torch-2.13.0.dist-info").rename(box.site / "torch-2.13.0+cu130.dist-info")
    box.torch("2.13.0+cu130")
    assert box.run().te
    assert (box.out / "te_pins.txt").read_text() == "torch==2.13.0+cu130\n"


def test_uv_installs_where_pip_is_missing(box):
    box.write("bin/uv", f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pip \"$@\"\n").chmod(0o755)
    assert box.run(no_pip=True).te
    for call in box.calls:
        assert call["argv"][:4] == ["pip", "install", "--python", sys.executable] and "--constraint" in call["argv"]


def test_a_changed_torch_asks_for_a_restart(box):
    result = box.run("swap")
    assert result.te is None and "2.13.1" in result.reason and "restart" in result.reason


BUILD_LOGS = [
    ("Precompiled wheel not found. Building from source...\ncsrc/extensions.h:10: fatal error: nccl.h: No such file or directory", "nccl", "nvidia-nccl-cu13"),
    ("csrc/common.h:1:10: fatal error: cudnn.h: No such file or directory", "cudnn", "nvidia-cudnn-cu13"),
    ("fatal error: crt/host_config.h: No such file or directory", "CUDA toolkit", "cuda-toolkit["),
    ("cuda_fp16.h:4492:10: fatal error: nv/target: No such file or directory", "CUDA toolkit", "cuda-toolkit["),
    ("fatal error: cusparse.h: No such file or directory", "CUDA toolkit", "cuda-toolkit["),
    ("OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.", "CUDA toolkit", "cuda-toolkit["),
    ("RuntimeError: Could neither find NVCC executable nor CUDA runtime Python package for [...].", "CUDA toolkit", "cuda-toolkit["),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", "CUDA toolkit", "cuda-toolkit["),
    ("fatal error: Python.h: No such file or directory", "header files of Python", "python3-dev"),
    ("error: command 'x86_64-linux-gnu-g++' failed: No such file or directory", "C++ compiler", "g++"),
    ("/bin/sh: 1: c++: not found\nninja: build stopped", "C++ compiler", "g++"),
    ("gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory", "C++ compiler", "g++"),
    ("gcc: error trying to exec 'cc1plus': execvp: No such file or directory", "C++ compiler", "g++"),
    ("cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes", "memory", "MAX_JOBS=1"),
    ("torch/c10.h:4:2: error: #error You need C++20 to compile PyTorch", "too old", "g++-12"),
    ("c++: fatal error: Killed signal terminated program cc1plus", "memory", "MAX_JOBS=1"),
    ("c++: internal compiler error: Killed (program cc1plus)", "memory", "MAX_JOBS=1"),
    ("/tmp/ccX.s: fatal error: error writing to /tmp/ccX.s: No space left on device", "disk is full", "TMPDIR"),
    ("FileNotFoundError: Could not find CMake executable", "CMake", "install cmake"),
    ("error: externally-managed-environment\n\nx This environment is externally managed", "operating system", "python3 -m venv --system-site-packages"),
    ("error: The interpreter at /usr is externally managed, and indicates the following", "operating system", "python3 -m venv"),
    ("packaging.version.InvalidVersion: Invalid version: 'None'", "this torch", "--force-reinstall torch"),
    ("AssertionError: Unsupported cuda version 11.8.", "this torch", "--force-reinstall torch"),
    ("RuntimeError: This package needs Torch to build.", "this torch", "--force-reinstall torch"),
    ("RuntimeError: Transformer Engine requires CUDA 12.0 or newer", "older than 12", "CUDA_HOME="),
    ("ModuleNotFoundError: No module named 'wheel'", "module wheel", "install wheel"),
    ("WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(<x>: Failed to establish a new connection: [Errno -3] "
     "Temporary failure in name resolution')'\nERROR: No matching distribution found for transformer_engine", "package server", "PIP_INDEX_URL"),
    ("error: Failed to fetch: `https://example.org`\n  Caused by: error sending request for url", "package server", "PIP_INDEX_URL"),
    ("ERROR: No matching distribution found for transformer_engine_cu13==2.20.2", "transformer_engine_cu13==2.20.2", "conda"),
    ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", "contradicts", "python3 -m venv"),
    ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/usr/lib/python3'", "may not write", "python3 -m venv"),
    ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'))\nMax retries exceeded", "certificate", "PIP_CERT"),
    ("Precompiled wheel not found. Building from source...\ncast.cpp:7:3: error: 'Window' was not declared in this scope", "no ready-made", "conda"),
]


@pytest.mark.parametrize("text, cause, mend", BUILD_LOGS)
def test_known_build_failures(cells, text, cause, mend):
    noise = "  Using cached nvidia_cudnn_cu13.whl\n" + "  warning: in c++ -c x.cpp -I/usr/local/cuda/bin/nvcc.d\n" * 200
    answer = cells.diagnose(noise + text + "\nERROR: Failed building wheel for transformer_engine_torch\n", "the.log")
    assert MENDS in answer and "\n" not in answer
    found, command = answer.split(MENDS)
    assert cause in found and mend in command


def test_a_healthy_log_matches_no_failure(cells):
    text = "Collecting torch\n  Downloading nvidia_cudnn_cu13-9.24-py3-none.whl\n  [1/33] c++ -I/usr/local/cuda/include -std=c++20 -c nccl.cpp\n"
    assert [pattern for pattern, _, _ in cells.BUILD_FAILURES if re.search(pattern, text)] == []


def test_an_unknown_failure_shows_its_last_line_and_the_log(cells):
    answer = cells.diagnose("fine\nerror: first\nweird error: the reactor is cold\n  note: This error originates from a subprocess\n"
                            "error: subprocess-exited-with-error\n", "the.log")
    assert "the reactor is cold" in answer and "the.log" in answer
    assert "OSError: odd" in cells.diagnose(OSError("odd"))
    assert cells.diagnose("")


def test_a_failed_build_shows_the_telling_lines_and_keeps_all(box):
    noise = "  /usr/include/c++: warning: unused\n" * 300
    box.write("pip_output", f"Precompiled wheel not found. Building from source...\n  urllib.error.URLError: <urlopen error>\n{noise}"
                            f"  x.h:1: fatal error: nccl.h: No such file or directory\n{noise}"
                            + "".join(f"  y.cpp:{line // 2}: error: and more\n" for line in range(9)) +
                            "  error: subprocess-exited-with-error\n  ERROR: Failed building wheel for transformer_engine_torch")
    result = box.run("fail")
    assert result.te is None and "nvidia-nccl-cu13" in result.reason
    assert "fatal error: nccl.h" in result.shown and "unused" not in result.shown and "subprocess-exited" not in result.shown
    assert result.shown.count("y.cpp:0: error: and more") == 1 and result.shown.count("and more") == 2  # three lines, none twice
    assert (box.out / "te_install.log").read_text().count("unused") == 600


def test_a_pip_that_is_killed(box):
    result = box.run("kill")
    assert result.te is None and "memory" in result.reason and "MAX_JOBS=1" in result.reason


# --------------------------------------------------------------------------- the process tree

def test_the_time_limit_ends_the_whole_tree(box):
    process = box.start("hang", minutes=0.05)
    pids = box.children()
    assert all(alive(pid) for pid in pids)
    shown = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and all_ended(pids)
    reason = json.loads(shown.split("RESULT ")[1])["reason"]
    assert "time limit" in reason and "--install-minutes" in reason
    assert re.search(r"^  0:0\d 3 of 33 files compiled$", shown, re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_the_tutorial_ends_the_whole_tree(box, number):
    process = box.start("hang")
    pids = box.children()
    process.send_signal(number)
    shown = process.communicate(timeout=60)[0]
    assert all_ended(pids) and "RESULT" not in shown
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in shown  # for whoever runs the cells to handle
    else:
        assert process.returncode == 128 + number


def test_a_closed_pipe_ends_the_whole_tree(box):
    process = box.start("hang")
    pids = box.children()
    process.stdout.close()
    process.wait(timeout=60)
    assert process.returncode != 0 and all_ended(pids)


# --------------------------------------------------------------------------- what the build is told

@pytest.mark.parametrize("cores, free_gb, container, jobs", [(2, 20, "max", 2), (64, 10, "max", 4), (64, 1, "max", 1), (64, 200, str(6 * 2**30), 2),
                                                             (16, 64, "max", 16), (8, 64, "9223372036854771712", 8)])
def test_jobs_are_bounded_by_cores_and_memory(cells, monkeypatch, tmp_path, cores, free_gb, container, jobs):
    (tmp_path / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:   {free_gb * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(container + "\n")
    real = cells.names["Path"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setitem(cells.names, "Path", lambda *parts: real(tmp_path, parts[-1].split("/proc/")[-1]))
    assert cells.build_jobs() == jobs


@pytest.mark.parametrize("layout", ["cu13", "cuda_runtime"])
def test_headers_of_pip_are_found_in_both_layouts(cells, monkeypatch, tmp_path, layout):
    for folder in (layout, "cudnn", "nccl"):
        (tmp_path / "nvidia" / folder / "include").mkdir(parents=True)
    (tmp_path / "nvidia" / layout / "include" / "cuda_runtime.h").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path)])
    assert cells.pip_headers() == sorted(str(tmp_path / "nvidia" / folder / "include") for folder in (layout, "cudnn", "nccl"))
    assert cells.pip_headers("cuda_runtime.h") == [str(tmp_path / "nvidia" / layout / "include")]


@pytest.mark.parametrize("cuda, expected", [("12.8", ["nvidia-cuda-nvcc-cu12==12.8.*", "nvidia-cuda-cccl-cu12==12.8.*"]),
                                            ("13.2", ["nvidia-cuda-crt==13.2.*", "nvidia-cuda-cccl==13.2.*"])])
def test_header_packages_have_the_version_of_torch(cells, monkeypatch, cuda, expected):
    cells.names.update(CUDA=cuda, CUDA_MAJOR=cuda[:2], pip_headers=lambda wanted="": ["/headers"])
    assert cells.build_helpers()[-2:] == expected
    cells.names["pip_headers"] = lambda wanted="": []  # torch did not come from pip: its toolkit has them
    assert not [name for name in cells.build_helpers() if name.startswith("nvidia")]


def make_toolkit(folder, version):
    (folder / "include").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "#$ _SPACE_=" >&2\necho "#\\$ TOP=$(dirname "$0")/.." >&2\n')
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize("kind", ["link", "wrapper"])
def test_the_toolkit_behind_an_nvcc(cells, monkeypatch, tmp_path, kind):
    nvcc = make_toolkit(tmp_path / "cuda-13.0", 13000)
    (tmp_path / "bin").mkdir()
    if kind == "link":
        (tmp_path / "bin" / "cuda").symlink_to(tmp_path / "cuda-13.0")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "bin" / "cuda"))
    else:
        (tmp_path / "bin" / "nvcc").write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert cells.toolkit() == str(tmp_path / "cuda-13.0")
    assert cells.build_settings()["CUDA_HOME"] == str(tmp_path / "cuda-13.0")


def test_a_toolkit_of_another_cuda_is_not_taken(cells, monkeypatch, tmp_path):
    nvcc = make_toolkit(tmp_path / "cuda-11.8", 11080)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-11.8"))
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    assert cells.toolkit() != str(tmp_path / "cuda-11.8")


# --------------------------------------------------------------------------- for real, on request

@pytest.mark.skipif(os.environ.get("TE_TUTORIAL_REAL_INSTALL") != "1", reason="downloads gigabytes and compiles 33 files; TE_TUTORIAL_REAL_INSTALL=1 runs it")
def test_real_install(tmp_path):
    """A fresh environment with pip's CUDA torch and nothing else; no GPU needed, the capability is assumed."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "torch", "numpy"], check=True)
    (tmp_path / "section_2.py").write_text(section_2())
    (tmp_path / "run.py").write_text(PREAMBLE + textwrap.dedent(f"""
        import torch, types
        SETTINGS = types.SimpleNamespace(install="auto", install_minutes=60)
        OUT = Path({str(tmp_path)!r})
        MACHINE = types.SimpleNamespace(capability=(9, 0), gpu="assumed", device="cuda")
        exec(Path({str(tmp_path / "section_2.py")!r}).read_text())
        assert te is not None, TE_REASON
        assert TE_VERSION == "2.20.2" and recipe.DelayedScaling and te.LayerNormMLP
        import transformer_engine_torch
        print(transformer_engine_torch.__file__)
        """))
    subprocess.run([python, tmp_path / "run.py"], check=True, cwd=tmp_path)
