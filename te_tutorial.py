# %% [markdown]
# # Transformer Engine, proven on your own machine
#
# NVIDIA Transformer Engine (TE) runs the matrix multiplications of a transformer in FP8: eight bits a number instead of
# sixteen. On the right GPU that can nearly double their speed. On the wrong GPU, or on a small model, it gains nothing.
# This script finds out which case is yours.
#
# **What you will learn**
# - which number formats your GPU can compute in, tested rather than looked up;
# - what an FP8 cast does to a tensor, and why it needs a scale;
# - what each TE module fuses, and how far its results lie from plain PyTorch;
# - how to wire FP8 into a training step so that it learns as well as BF16 does;
# - whether FP8 is faster here, what bounds it, and from which model width it pays.
#
# **What you need.** PyTorch. A GPU of compute capability 8.9 or higher trains in FP8, and newer ones know more kinds
# of it. An older GPU, or none, runs the same story on what it has, and says what it leaves out.
#
# **How to read it.** Run `python te_tutorial.py`, or open the file as a notebook and run the cells in order. Claims
# are followed by checks, computed on this machine. The checks are kept in `results.json` and decide the exit code.

# %% [markdown]
# ## 0. Settings
#
# One model size, one data set, one optimizer for the whole tutorial. As a script, each field is a flag (`--d-model
# 2048`); in a notebook, fill `GIVEN` below. On a machine without a GPU, a smaller preset replaces the sizes you did
# not give.

# %%
import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import site
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import urllib.request
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a bar that a notebook could draw better
        from tqdm.auto import tqdm
except ImportError:  # a progress bar is a comfort, not a need
    tqdm = None


@dataclasses.dataclass
class Settings:
    vocab: int = 96  # number of distinct tokens
    d_model: int = 768  # width
    n_heads: int = 12  # attention heads; each is d_model / n_heads wide
    n_layers: int = 4  # transformer blocks
    d_ff: int = 3072  # hidden width of the MLP
    seq: int = 256  # tokens in a training sequence
    batch: int = 16  # sequences in a training step
    steps: int = 1200  # training steps of each run
    lr: float = 3e-4  # peak; warms up, then decays to zero
    margin: float = 0.15  # how far above the best possible loss training may end, as a share of it
    recipe: str = "delayed"  # FP8 recipe to train with: delayed, current, block, mxfp8 or nvfp4
    amax_history: int = 16  # delayed scaling: steps the scale looks back
    prompt: int = 8  # tokens given to the generator
    gen: int = 24  # tokens it adds
    bench_batch: int = 32  # sequences in a step of the benchmark
    bench_warmup: int = 10  # its untimed steps
    bench_steps: int = 30  # its timed steps of each row
    gemm_size: int = 8192  # the square matrix multiplication that sets the ceiling
    benchmark: str = "quick"  # quick, full (more rows and widths) or off
    preset: str = "auto"  # auto, full or small
    install: str = "auto"  # auto: install TE if this GPU can use it and it is missing; never: do not
    install_minutes: int = 30  # give up on the install after this long
    seed: int = 1234  # of the initial weights and the batches
    out: str = "te_tutorial_out"  # folder for results.json and the figure


SMALL = dict(d_model=64, n_heads=4, n_layers=2, d_ff=256, seq=32, batch=64, steps=500, lr=4e-3, margin=0.25,
             bench_warmup=2, gemm_size=1024)
CHOICES = dict(recipe=["delayed", "current", "block", "mxfp8", "nvfp4"], benchmark=["quick", "full", "off"],
               preset=["auto", "full", "small"], install=["auto", "never"])

# %% [markdown]
# The flags and what `--help` says of them are made from the fields above and their comments.

# %%
def parse_arguments(argv):
    """Return {field: value} of the flags that were given. A bad flag ends the run with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="te_tutorial.py", description="Learn NVIDIA Transformer Engine by running it.")
    parser.error = refuse
    fields = Path(__file__).read_text(encoding="utf-8").partition("\nSMALL = ")[0]
    comments = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.+)$", fields, re.MULTILINE))
    for field in dataclasses.fields(Settings):
        small = f"; small preset: {SMALL[field.name]}" if field.name in SMALL else ""
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), choices=CHOICES.get(field.name),
                            default=argparse.SUPPRESS, help=f"{comments.get(field.name, '').replace('%', '%%')} (default: {field.default}{small})")
    return vars(parser.parse_args(argv))


def refuse(message):
    """End the run before any work: one clear line, exit code 2."""
    print(f"te_tutorial.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def nearest_heads(d_model, wanted):
    """The number of heads nearest to `wanted` that cuts the width into multiples of 8; None if there is none."""
    return min((h for h in range(1, d_model // 8 + 1) if d_model % (8 * h) == 0), key=lambda h: abs(h - wanted), default=None)


def choose_settings(given, has_gpu):
    """Return (Settings, note): the preset for this machine, then what was given, then what follows from it."""
    preset = given.get("preset", Settings.preset)
    small = preset == "small" or (preset == "auto" and not has_gpu)
    values = {**(SMALL if small else {}), **given}
    note = ("the small preset (no GPU; --preset full overrides, and takes hours without one)" if small and not has_gpu
            else "the small preset" if small else "")
    if "d_model" in given and "n_heads" not in given:  # heads of 64, or of 128 in wide models
        values["n_heads"] = nearest_heads(given["d_model"], given["d_model"] // (128 if given["d_model"] >= 2048 else 64)) or 1
    if "d_model" in given and "d_ff" not in given:
        values["d_ff"] = 4 * given["d_model"]
    return Settings(**values), note

# %% [markdown]
# Impossible settings are refused now, not after ten minutes. FP8 adds rules of its own: each matrix multiplication
# wants its inner dimensions in multiples of 16, and a training step wants batch x seq in multiples of 16 as well. A
# forward pass alone is content with 8, which is why 24 rows run forward and then fail in backward. The rules hold on
# every machine, so that a command that works here works on the GPU box too.

# %%
def check_settings(s):
    """Refuse settings that cannot work, naming the rule and the nearest legal values."""
    numbers = [f.name for f in dataclasses.fields(s) if type(f.default) in (int, float) and f.name != "seed"]
    for name in numbers:
        if not (getattr(s, name) > 0 and math.isfinite(getattr(s, name))):
            refuse(f"--{name.replace('_', '-')} must be a finite number above zero, got {getattr(s, name)}")
    for name in ("d_model", "d_ff"):
        check_multiple_of_16(name, getattr(s, name), name)
    if s.d_model % s.n_heads or (s.d_model // s.n_heads) % 8:
        refuse(f"--n-heads {s.n_heads} must divide --d-model {s.d_model} into heads of a multiple of 8; "
               f"try --n-heads {nearest_heads(s.d_model, s.n_heads)}")
    check_multiple_of_16("batch x seq", s.batch * s.seq, "batch", s.seq)
    check_multiple_of_16("bench-batch x seq", s.bench_batch * s.seq, "bench_batch", s.seq)
    if s.amax_history < 2:
        refuse(f"--amax-history {s.amax_history} leaves no history; it must be 2 or more")
    if not 0 <= s.seed < 2**32:
        refuse(f"--seed must lie between 0 and {2**32 - 1}, got {s.seed}")
    if s.seq < 16:
        refuse(f"--seq {s.seq} is too short for the checks of the generator, it must be 16 or more; try --seq 16")
    for name, allowed in CHOICES.items():
        if getattr(s, name) not in allowed:
            refuse(f"--{name} {getattr(s, name)} is not known; choose from {', '.join(allowed)}")
    if s.vocab < 8:
        refuse(f"--vocab {s.vocab} is too small: the strides run from 1 to 6, so it must be 8 or more")
    if s.prompt < 2:
        refuse(f"--prompt {s.prompt} hides the stride; it must be 2 or more")
    if s.prompt + s.gen > s.seq:
        prompt = min(s.prompt, s.seq // 2)
        refuse(f"--prompt {s.prompt} plus --gen {s.gen} must fit in --seq {s.seq}; "
               f"try --prompt {prompt} --gen {min(s.gen, s.seq - prompt)}")


def check_multiple_of_16(what, value, flag, factor=1):
    """Refuse `value` (= flag x factor) unless it is a multiple of 16, as FP8 training needs."""
    if value % 16:
        step = 16 // math.gcd(16, factor)
        lower = value // factor // step * step
        flag = flag.replace("_", "-")
        refuse(f"{what} is {value}, but FP8 training needs a multiple of 16; try "
               + (f"--{flag} {lower} or " if lower else "") + f"--{flag} {lower + step}")

# %% [markdown]
# What the script finds goes into one dictionary, and each claim into a list of checks. Both are written to
# `results.json` at the end, also when something fails on the way.

# %%
RESULTS = {"checks": []}
SKIPPED = []  # what this machine cannot show, for the report


def check(name, passed, detail):
    """Print and keep the verdict on one claim; a failed check makes the exit code 1."""
    RESULTS["checks"].append({"name": name, "passed": bool(passed), "detail": detail})
    print(f"  [{'pass' if passed else 'FAIL'}] {name}: {detail}")


def skip(what, reason):
    """Say in one line what is not shown here, and why."""
    SKIPPED.append(f"{what}: {reason}")
    print(f"  [skip] {what}: {reason}")


def in_a_line(error):
    """The kind of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:150]}"


class Stop(Exception):
    """A step broke in a way we foresaw: its message says what and where; no traceback."""


def write_results():
    if RANK == 0:
        (OUT / "results.json").write_text(json.dumps(RESULTS, indent=1, default=str))


def on_error(kind, error, trace):
    """The last word of a script that did not reach its end. A notebook shows the exception itself instead."""
    if kind is BrokenPipeError:  # the reader of our output has left, as in `| head`
        os._exit(1)
    code, last = 1, str(error) if kind is Stop else f"{kind.__name__}: {error}"
    if kind is KeyboardInterrupt:
        code, last = 130, "interrupted"
    elif kind is torch.OutOfMemoryError or "can't allocate memory" in last:
        last = "the memory is full; a smaller --d-model, --n-layers, --seq, --batch or --bench-batch needs less"
    elif kind is not Stop:
        sys.__excepthook__(kind, error, trace)
    RESULTS["stopped"] = last
    with contextlib.suppress(OSError):
        write_results()
    print(f"\nStopped: {last}", file=sys.stderr, flush=True)
    os._exit(code)

# %% [markdown]
# Then the script's manners: it survives terminals without UTF-8, folders that cannot be written and pipes that close,
# and under `torchrun` only one process speaks.

# %%
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
IS_SCRIPT = "__file__" in globals() and Path(sys.argv[0]).name == Path(__file__).name  # some notebooks set __file__ too
if hasattr(sys.stdout, "reconfigure"):  # a terminal without UTF-8 gets escapes instead of an exception
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
if RANK > 0:  # under torchrun only rank 0 speaks
    sys.stdout = open(os.devnull, "w")
if [int(part) for part in re.findall(r"\d+", torch.__version__)[:2]] < [2, 5]:
    refuse(f"torch {torch.__version__} is too old; 2.5 or later is needed: pip install --upgrade torch")

# %%
GIVEN = {}  # in a notebook, put your settings here, such as {"steps": 100}
if IS_SCRIPT:
    GIVEN = parse_arguments(sys.argv[1:])
SETTINGS, NOTE = choose_settings(GIVEN, torch.cuda.is_available())
check_settings(SETTINGS)
if IS_SCRIPT:
    sys.excepthook = on_error

OUT = Path(SETTINGS.out)
try:
    OUT.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=OUT).close()
except OSError as error:
    OUT = Path(tempfile.mkdtemp(prefix="te_tutorial_"))
    print(f"cannot write to {SETTINGS.out} ({error.strerror}); using {OUT}")
torch.manual_seed(SETTINGS.seed)
RESULTS["settings"] = dataclasses.asdict(SETTINGS)
print(f"Settings{': ' + NOTE if NOTE else ''}")
flags = ", ".join(f"--{k.replace('_', '-')} {v}" for k, v in RESULTS["settings"].items())
print(textwrap.indent(textwrap.fill(flags, 120, break_on_hyphens=False), "  "))

# %% [markdown]
# ## 1. Your machine
#
# A GPU's *compute capability* says which number formats its tensor cores multiply. BF16 came with 8.0 (A100), FP8
# with 8.9 (L4, RTX 40) and 9.0 (H100), MXFP8 and NVFP4 with 10.0 (B200). A GPU that PyTorch can see but not run on
# counts as none: one tiny multiplication tells.

# %%
print("\n== 1. Your machine ==")


@dataclasses.dataclass
class Machine:
    device: str  # "cuda" or "cpu"
    gpu: str  # name, or why there is none
    capability: tuple = None  # (major, minor), None without a GPU
    memory_gb: float = None


def why_no_gpu():
    """The likeliest reason that torch sees no GPU, in one line."""
    if torch.version.cuda is None:
        return "this torch build has no CUDA support (if there is an NVIDIA GPU: pip install --force-reinstall torch)"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return "torch finds no usable NVIDIA driver or GPU"


def look_at_machine():
    """Return the Machine this process runs on. Under torchrun each process takes the GPU of its LOCAL_RANK."""
    if not torch.cuda.is_available():
        return Machine("cpu", why_no_gpu())
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        refuse(f"torchrun started more processes than there are GPUs; use --nproc-per-node {count}")
    try:
        torch.cuda.set_device(local)
        assert (torch.ones(16, 16, device="cuda") @ torch.ones(16, 16, device="cuda")).sum().item() == 4096
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        return Machine("cpu", f"the GPU does not run this torch build ({in_a_line(error)})")
    return Machine("cuda", found.name, (found.major, found.minor), found.total_memory / 1e9)


MACHINE = look_at_machine()
DEVICE = MACHINE.device
if DEVICE == "cpu" and torch.cuda.is_available():  # a GPU that does not run: take the settings of a machine without one
    SETTINGS, NOTE = choose_settings(GIVEN, False)
    check_settings(SETTINGS)
    RESULTS["settings"] = dataclasses.asdict(SETTINGS)
    print(f"no usable GPU, so {NOTE or 'the same settings, slowly'}")
if WORLD > 1:  # data-parallel: every process runs this script, on a GPU of its own if there are any
    torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")

# %% [markdown]
# From the capability follows what to expect. `torch.cuda.is_bf16_supported()` is not asked: it says yes on a T4,
# because it counts a slow emulation. Section 2 tests each promise by a forward and backward pass.

# %%
FORMATS = ["FP32", "FP16", "BF16", "FP8 delayed", "FP8 current", "FP8 block", "MXFP8", "NVFP4"]


def why_not(name, capability):
    """Why a GPU of this capability cannot run the format, or "" if it should. `capability` None: no GPU."""
    if name == "FP32":
        return ""
    if capability is None:
        return "needs an NVIDIA GPU"
    lowest = {"FP16": (6, 0), "BF16": (8, 0), "FP8 delayed": (8, 9), "FP8 current": (8, 9), "FP8 block": (9, 0),
              "MXFP8": (10, 0), "NVFP4": (10, 0)}[name]
    if capability < lowest:
        return f"needs capability {lowest[0]}.{lowest[1]}, this GPU has {capability[0]}.{capability[1]}"
    if name == "MXFP8" and capability >= (12, 0):
        return "not offered by TE above capability 10.x"
    return ""


def print_table(header, rows):
    """Print rows (of strings) under a header, each column as wide as its widest entry."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())

# %%
def driver_version():
    with contextlib.suppress(OSError):
        if found := re.search(r"\d{3}\.\d[\d.]*", Path("/proc/driver/nvidia/version").read_text()):
            return found[0]
    return "unknown"


RESULTS["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
RESULTS["machine"] = {"gpu": MACHINE.gpu if DEVICE == "cuda" else None, "capability": MACHINE.capability,
                      "memory_gb": MACHINE.memory_gb}
if DEVICE == "cuda":
    RESULTS["versions"]["driver"] = driver_version()
    print(f"GPU: {MACHINE.gpu}, compute capability {MACHINE.capability[0]}.{MACHINE.capability[1]}, {MACHINE.memory_gb:.0f} GB, "
          f"{'one per process' if WORLD > 1 else f'1 of {torch.cuda.device_count()} used'}")
else:
    print(f"No GPU: {MACHINE.gpu}. Everything below runs on the CPU "
          f"({torch.get_num_threads()} threads{' per process' if WORLD > 1 else ''}).")
print("Versions:", ", ".join(f"{k} {v}" for k, v in RESULTS["versions"].items() if v))
print_table(["precision", "expected here?", "why not"],
            [[name, "no" if why_not(name, MACHINE.capability) else "yes", why_not(name, MACHINE.capability)] for name in FORMATS])

# %% [markdown]
# ## 2. Transformer Engine, or why not
#
# Transformer Engine (TE) is hard to install for one reason: the part of it that talks to PyTorch must fit *this*
# torch, *this* CUDA and *this* Python. Where no ready-made part exists, pip compiles 33 C++ files. This section
# imports TE if you have it, installs it if your GPU can use it, and otherwise says what is wrong and which command
# mends it. Either way the tutorial goes on, without TE in plain PyTorch. (If TE imports for you, you can skip to
# "What really runs here".)
#
# Two details of importing. `import torch` comes first, because it loads the CUDA libraries that TE needs. And the
# module to try is `transformer_engine.pytorch`: `import transformer_engine` alone also succeeds when its PyTorch part
# is broken.

# %%
print("\n== 2. Transformer Engine, or why not ==")
TE_WANTED = "2.20.2"
CUDA = torch.version.cuda or "13.0"  # the CUDA version this torch was built for
CUDA_MAJOR = CUDA.split(".")[0]


def import_te():
    """transformer_engine.pytorch, or the exception that importing it raised."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name) == "":
            del os.environ[name]  # set but empty, it makes TE search the whole disk for its libraries
    os.environ.setdefault("NVTE_BIAS_GELU_NVFUSION", "0")  # BF16: GELU by cuBLAS, faster than what TE would compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning inside TE must not stop us under `python -W error`
        try:
            return importlib.import_module("transformer_engine.pytorch")
        except Exception as error:  # seen so far: seven types
            return error


def has_pip():
    """Asked of the finder of files alone: setuptools listens to find_spec("pip") and then breaks what torch.compile needs of it."""
    return importlib.machinery.PathFinder.find_spec("pip") is not None


def pip_command(action, *arguments):
    """The command that lets pip (or uv, where pip is missing) change the packages of the Python that runs this."""
    if has_pip():
        return [sys.executable, "-m", "pip", action, *(["-y"] if action == "uninstall" else []), *arguments]
    return ["uv", "pip", action, "--python", sys.executable, *arguments]

# %% [markdown]
# An import fails in a dozen known ways. Each row of the table is: what the message looks like, what it means, the
# command that mends it. Where the command removes TE, run this tutorial again afterwards: it installs one that fits.
# The script itself never removes anything.

# %%
ADD = shlex.join(pip_command("install")).replace("\\", "/")
ADD_TOOLKIT = f'{ADD} "cuda-toolkit[nvcc,cccl,cudart,cublas,cusolver,cusparse,nvtx]=={CUDA}.*"'
REMOVE = shlex.join(pip_command("uninstall", *["transformer_engine" + part for part in ("", "_torch", "_cu12", "_cu13")]))
REMOVE = REMOVE.replace("\\", "/")
IMPORT_FAILURES = [
    (r"empty .transformer-engine. meta|No module named 'transformer_engine",
     "TE is here without its PyTorch part, the extra [pytorch]", REMOVE),
    (r"No module named '(\w+)", r"TE needs the Python module \1, which is missing", rf"{ADD} \1"),
    (r"cuDNN [\d.]+ or later.* is ([\d.]+\d)", r"cuDNN \1 is too old for TE", f'{ADD} "nvidia-cudnn-cu{CUDA_MAJOR}>=9.12"'),
    (r"cudnn shared object|libcudnn", "TE does not find cuDNN", f"{ADD} nvidia-cudnn-cu{CUDA_MAJOR}"),
    (r"shared object file for", "TE is here without its compiled extension", REMOVE),
    (r"version mismatch|Could not find (TE core|.transformer)", "TE's packages have different versions, or one is missing", REMOVE),
    (r"libnccl", "TE does not find NCCL, which torch should have loaded", f"{ADD} nvidia-nccl-cu{CUDA_MAJOR}"),
    (r"(lib(?:cu|nv)\w+)\.so\.(\d+)", rf"TE was built for CUDA \2 (it wants \1), this torch for CUDA {CUDA}", REMOVE),
    (r"GLIBC\w*_[\d.]+", "TE was built for a newer C or C++ library than this system has", "conda install -c conda-forge libstdcxx-ng"),
    (r"undefined symbol", f"TE was compiled for another torch than {torch.__version__}", REMOVE),
    (r"StopIteration", "this old TE does not find its own library", REMOVE),
    (r"(\w+) shared object not found", r"TE does not find the CUDA library \1",
     f'{ADD} "cuda-toolkit[nvrtc,curand,cublas,cudart]=={CUDA}.*"'),
]

# %% [markdown]
# A build fails in more ways, and pip ends all of them with "Failed building wheel", hundreds of lines below the one
# that matters. So its log is searched for that line.

# %%
AGAIN = "python te_tutorial.py"
NEW_VENV = f"python3 -m venv --system-site-packages te && te/bin/{AGAIN}"  # sees the torch that is installed now
CONDA = "conda install -c conda-forge transformer-engine-torch"  # comes compiled, with its own torch
BUILD_FAILURES = [
    (r"time limit reached", "the installation took longer than its time limit", f"{AGAIN} --install-minutes 90"),
    (r"externally.managed", "this Python belongs to the operating system, which forbids pip to change it", NEW_VENV),
    (r"No space left|[Qq]uota exceeded", "the disk is full", f"TMPDIR=/a/larger/disk {AGAIN}"),
    (r"error: Killed|Killed signal|exit code -9|bad_alloc|memory exhausted|allocate memory|out of memory", "the compiler ran out of memory",
     f"MAX_JOBS=1 {AGAIN}"),
    (r"error: (nccl|cudnn)\w*\.h: No such", r"the header files of \1 are missing", rf"{ADD} nvidia-\1-cu{CUDA_MAJOR}"),
    (r"error: Python\.h: No such", "the header files of Python are missing", "sudo apt-get install python3-dev"),
    (r"error: (crt/|nv/|cu|nv)\S*: No such|CUDA_HOME environ|either find NVCC|CUDA not found|nvcc: not found|'\S*nvcc'",
     "parts of the CUDA toolkit are missing", ADD_TOOLKIT),
    (r"command '?\S*(\+\+|cc|clang)\S* failed: No such|(\+\+|cc): (command )?not found|"
     r"unable to execute|exec\w* .cc1plus|directory: '\S*(\+\+|cc)'",
     "there is no C++ compiler", "sudo apt-get install g++"),
    (r"need C\+\+\d+|unrecognized command.line option .-std", "the C++ compiler is too old for this torch", f"CXX=g++-12 {AGAIN}"),
    (r"not find CMake|cmake: not found|'cmake'", "CMake is missing", f"{ADD} cmake"),
    (r"requires CUDA 12", "the CUDA toolkit found here is older than 12", f"CUDA_HOME=/path/of/cuda-{CUDA} {AGAIN}"),
    (r"[Vv]ersion: 'None'|Unsupported cuda|needs Torch to build", "TE cannot be built with this torch", f"{ADD} --force-reinstall torch"),
    (r"No module named '(\w+)", r"the build needs the Python module \1", rf"{ADD} \1"),
    (r"ResolutionImpossible|No solution found", "TE contradicts a package that is installed",
     f"python3 -m venv te && te/bin/pip install torch && te/bin/{AGAIN}"),
    (r"CERTIFICATE_VERIFY", "the package server's certificate is not trusted", f"PIP_CERT=/path/of/your/ca.pem {AGAIN}"),
    (r"wheel not found[\s\S]*error:", f"no ready-made TE fits torch {torch.__version__}, and compiling it failed", CONDA),
    (r"Permission denied|Errno 13", "pip may not write into this Python", NEW_VENV),
    (r"name resolution|NewConnection|Max retries|unreachable|timed out|dns error|sending request", "there is no way to the package server",
     f"PIP_INDEX_URL=https://your.mirror/simple {AGAIN}"),
    (r"No matching distribution found for (\S+)", r"\1 is not published for this system and Python", CONDA),
]

# %% [markdown]
# What no row knows is shown as it is: the last line that names an error, and where the whole log lies.

# %%
def telling_lines(text):
    """The lines of a log that name an error, without pip's own summary of it and the vain look for a ready-made extension."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"error:|killed|: not found|time limit", line, re.IGNORECASE)]
    noise = r"subprocess-exited|Failed (building|to build)|originates from|URLError|gaierror"
    lines = [line for line in lines if not re.search(noise, line)]
    return list(dict.fromkeys(lines)) or text.strip().splitlines()[-1:] or ["no output"]


def diagnose(trouble, log=None):
    """One line about an exception, or about the text of a log: the cause, and the command that mends it."""
    failed_import = isinstance(trouble, Exception)
    text = f"{type(trouble).__name__}: {trouble}" if failed_import else trouble
    for pattern, cause, fix in IMPORT_FAILURES if failed_import else BUILD_FAILURES:
        if match := re.search(pattern, text):
            return match.expand(f"{cause}. This mends it: {fix}")
    return f"not a known failure: {telling_lines(text)[-1]}" + (f" (the whole log: {log})" if log else "")

# %% [markdown]
# Before any pip command we ask whether it can succeed. TE's extension is plain C++: `nvcc` is *not* needed, although
# error messages ask for it. Needed are a C++ compiler, Python's header files, and CUDA's in the version of torch.
# pip's torch brings nearly all of those, in `site-packages/nvidia/*/include`, where the build does not look by
# itself; two more come in small packages. A torch that came another way needs a CUDA toolkit beside it.

# %%
def pip_headers(wanted=""):
    """The header folders of pip's CUDA packages; given a file name, only those that hold that file."""
    folders = [folder for entry in dict.fromkeys(sys.path) for folder in sorted(Path(entry).glob("nvidia/*/include"))]
    return [str(folder) for folder in folders if (folder / wanted).exists()]


def toolkit():
    """The folder of a CUDA toolkit of torch's major version, or "". An nvcc may be a link or a wrapper: ask it where it lives."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        answer = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True)
        homes[1:1] = re.findall("TOP=(.*)", answer.stderr)
    for home in filter(None, homes):
        header = Path(home, "include", "cuda.h")
        if header.is_file() and f"define CUDA_VERSION {CUDA_MAJOR}" in header.read_text(errors="replace"):
            return os.path.realpath(home)
    return ""


def compiler():
    names = [os.environ.get("CXX"), "g++", "c++", "clang++"]
    return next((name for name in names if name and shutil.which(name.split()[0])), "")

# %% [markdown]
# Where one of these is missing, one way is left: TE's build first looks for a ready-made extension on its release
# page. We look there too, and start nothing that cannot end well.

# %%
def ready_made():
    """Is there a ready-made extension for exactly this torch, CUDA and Python? (The build forms the address in the same way.)"""
    python, abi = f"cp{sys.version_info[0]}{sys.version_info[1]}", str(torch.compiled_with_cxx11_abi()).upper()
    url = (f"https://github.com/NVIDIA/TransformerEngine/releases/download/v{TE_WANTED}/transformer_engine_torch-{TE_WANTED}+cu{CUDA_MAJOR}"
           f"torch{torch.__version__}cxx11abi{abi}-{python}-{python}-linux_{platform.machine()}.whl")
    try:
        return urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10).status == 200
    except OSError:  # not there, or no network
        return False


def torch_on_disk():
    """The version of the torch package that pip sees now. The running one may be another."""
    importlib.invalidate_caches()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")

# %%
def why_not_install():
    """The reason not to start pip, or an empty string."""
    installed, running = str(torch_on_disk()).split("+")[0], torch.__version__.split("+")[0]
    python_h = Path(sysconfig.get_path("include"), "Python.h")
    obstacles = [  # (is it in the way?, cause, what mends it); asked in this order, the costly questions last
        (lambda: SETTINGS.install == "never", "it is not installed, and --install never forbids it", f"{AGAIN} --install auto"),
        (lambda: sys.platform != "linux", "it exists for Linux only, on Windows that means WSL", "wsl --install"),
        (lambda: sys.version_info < (3, 10), f"it needs Python 3.10 or newer, this is {platform.python_version()}",
         "uv venv --python 3.12"),
        (lambda: torch.version.cuda is None or CUDA_MAJOR not in ("12", "13"),
         f"it needs a torch for CUDA 12 or 13, this one has {torch.version.cuda or 'no CUDA'}", f"{ADD} --upgrade torch"),
        (lambda: os.environ.get("WORLD_SIZE", "1") != "1",
         "it is not installed, and only one process may do that, so not under torchrun", AGAIN),
        (lambda: not has_pip() and not shutil.which("uv"), "neither pip nor uv is here to install it",
         f"{shlex.quote(sys.executable)} -m ensurepip"),
        (lambda: installed != running, f"torch {running} runs but {installed} is installed", "restart Python (in a notebook: the kernel)"),
        (lambda: not compiler() and not ready_made(), "there is no C++ compiler", "sudo apt-get install g++"),
        (lambda: not python_h.is_file() and not ready_made(), "the header files of Python are missing", "sudo apt-get install python3-dev"),
        (lambda: not (pip_headers("cuda_runtime.h") or toolkit() or ready_made()), "CUDA's header files are missing", ADD_TOOLKIT),
    ]
    return next((f"{cause}. This mends it: {fix}" for in_the_way, cause, fix in obstacles if in_the_way()), "")

# %% [markdown]
# The build is told all this through environment variables. It compiles as many files at once as cores *and memory*
# allow: one takes about 2 GB, the largest 3.5 GB. Without that bound a machine with many cores and little memory
# freezes.

# %%
def build_jobs():
    """How many files to compile at once."""
    memory_gb = [int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) / 2**20]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            memory_gb.append(int(Path("/sys/fs/cgroup", limit).read_text()) / 2**30)
    return max(1, min(len(os.sched_getaffinity(0)), int(min(memory_gb) - 2) // 2))


def build_settings():
    """The environment variables for the build."""
    home = toolkit()
    paths = {"CPATH": [*pip_headers(), home and f"{home}/include", os.environ.get("CPATH")],
             "PATH": [os.path.dirname(sys.executable), os.environ.get("PATH")]}  # pip puts ninja beside python
    settings = {name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()}
    settings.update(MAX_JOBS=os.environ.get("MAX_JOBS") or str(build_jobs()), CXX=compiler(), CUDA_HOME=home)
    if pip_headers("cuda_runtime.h"):
        settings["NVTE_BUILD_USE_NVIDIA_WHEELS"] = "1"  # these headers rather than a toolkit's: they have torch's own version
    return {name: value for name, value in settings.items() if value}


def build_helpers():
    """The packages that the compilation needs; pip leaves alone those that are here."""
    header_packages = ["nvidia-cuda-crt", "nvidia-cuda-cccl"] if CUDA_MAJOR == "13" else ["nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12"]
    versions = [f"{name}=={CUDA}.*" for name in header_packages if pip_headers("cuda_runtime.h")]
    return ["setuptools", "wheel", "packaging", "ninja", *versions]

# %% [markdown]
# pip runs in a process group of its own. So the time limit, Ctrl-C, `kill` and a closed terminal end the compilers
# too, which would otherwise go on for minutes, unseen.

# %%
@contextlib.contextmanager
def process_group(command, settings, output):
    """A running command; it and all its children end when the `with` block is left, whatever the reason."""
    def leave(number, frame):  # let `kill` and a closed terminal unwind the stack, as Ctrl-C does
        sys.exit(128 + number)
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    process = subprocess.Popen(command, env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                               start_new_session=True)
    try:
        yield process
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                try:
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(5)
                finally:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

# %%
HEARTBEAT_S = 30


def progress(log):
    """How far pip has come: how many files are compiled, or its last line."""
    text = log.read_text(errors="replace")
    counts = re.findall(r"^\s*\[(\d+)/(\d+)\]", text, re.MULTILINE)
    if counts and counts[-1][0] != counts[-1][1]:
        return "{} of {} files compiled".format(*counts[-1])
    return text.strip().splitlines()[-1].strip()[:70]


def run_logged(command, settings, log, deadline):
    """Run a command, its output in the log, with a sign of life now and then. True if it succeeds before the deadline."""
    begin = time.monotonic()
    with open(log, "a") as output, process_group(command, settings, output) as process:
        while process.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                print("time limit reached", file=output)
                return False
            try:
                process.wait(min(HEARTBEAT_S, left))
            except subprocess.TimeoutExpired:
                minutes, seconds = divmod(int(time.monotonic() - begin), 60)
                print(f"  {minutes}:{seconds:02d} {progress(log)}")
        print(f"exit code {process.returncode}", file=output)
    return process.returncode == 0

# %% [markdown]
# Two more traps. pip must not replace the torch that is running: a constraint pins it, and afterwards we look whether
# that held. And pip keeps what it compiled once, even for another torch: `--no-cache-dir` avoids that.
# `--no-build-isolation` shows your torch to the build.

# %%
def install_te():
    """Install TE for the running torch. Returns the reason of a failure, or an empty string."""
    before, log = torch_on_disk(), OUT / "te_install.log"
    log.write_text("")
    pins = log.with_name("te_pins.txt")
    pins.write_text(f"torch=={before}\n")
    print(f"Installing Transformer Engine {TE_WANTED}. If there is no ready-made one for torch {before}, 33 C++ files are compiled: about\n"
        f"2 minutes on 16 cores, 16 on 2, {SETTINGS.install_minutes} at most. Ctrl-C stops it, --install never avoids it. Log: {log}")
    deadline = time.monotonic() + 60 * SETTINGS.install_minutes
    for packages in (build_helpers(), ["-v", "--no-cache-dir", "--no-build-isolation", f"transformer_engine[pytorch]=={TE_WANTED}"]):
        command, settings = pip_command("install", "--constraint", str(pins), *packages), build_settings()
        print(f"$ {shlex.join(command)}")
        with open(log, "a") as output:
            print(*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(command), file=output)
        done = run_logged(command, settings, log, deadline)  # without the helpers a ready-made TE may still come
    if torch_on_disk() != before:
        return f"pip replaced torch {before} by {torch_on_disk()}. This mends it: restart Python (in a notebook: the kernel)"
    if done:
        return ""
    text = log.read_text(errors="replace")
    print("\n".join(["The installation failed:", *(f"  {line[:200]}" for line in telling_lines(text)[:3]), f"  The whole log: {log}"]))
    return diagnose(text, log)

# %%
def load_te():
    """The module transformer_engine.pytorch and "", or None and the reason."""
    if MACHINE.capability is None:
        return None, "no usable NVIDIA GPU"
    if MACHINE.capability < (8, 0):
        return None, f"{MACHINE.gpu} has compute capability {MACHINE.capability[0]}.{MACHINE.capability[1]}, TE needs 8.0 (A100) or more"
    found = import_te()
    if isinstance(found, ModuleNotFoundError) and getattr(importlib.util.find_spec("transformer_engine"), "origin", None) is None:
        if reason := why_not_install() or install_te():
            return None, reason
        if site.ENABLE_USER_SITE:
            site.addsitedir(site.getusersitepackages())  # pip may just have made that folder
        sys.modules.pop("transformer_engine", None)  # an empty folder of that name imports as an empty module
        found = import_te()
    if isinstance(found, Exception):
        print(f"  importing it raised {in_a_line(found)}")
        return None, diagnose(found)
    if not hasattr(found, "autocast"):
        return None, f"this TE is too old for the tutorial. This mends it: {REMOVE}"
    return found, ""


te, TE_REASON = load_te()
warnings.filterwarnings("ignore", message="Recipe type changed")  # the tour runs one module in each recipe
recipe = importlib.import_module("transformer_engine.common.recipe") if te else None
TE_VERSION = importlib.import_module("transformer_engine").__version__ if te else None
print(f"Transformer Engine {TE_VERSION} is ready." if te else f"Going on without Transformer Engine: {TE_REASON}")

# %% [markdown]
# ### What really runs here
#
# From here on one object says what "FP8" or "BF16" means: a `Precision` holds the name, the 16-bit type of everything
# that is not an FP8 matrix multiplication, and TE's recipe. Its `context()` is entered around the forward pass only.
# Backward follows what forward recorded, so it runs outside.

# %%
@dataclasses.dataclass
class Precision:
    name: str
    dtype: torch.dtype = torch.float32  # activations and the 16-bit matrix multiplications
    recipe: object = None  # TE's quantization recipe, or None
    reason: str = ""  # why it does not run here; "" if it does

    @contextlib.contextmanager
    def context(self):
        with contextlib.ExitStack() as stack:
            if self.dtype != torch.float32:
                stack.enter_context(torch.autocast(DEVICE, self.dtype))
            if self.recipe is not None:
                stack.enter_context(te.autocast(enabled=True, recipe=self.recipe))
            yield


def make_recipe(name):
    """The TE recipe of this name, or None. TE ignores a misspelt argument silently, so the fields are read back."""
    if te is None or name not in FORMATS[3:]:
        return None
    if name == "FP8 delayed":
        made = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=SETTINGS.amax_history, amax_compute_algo="max")
        assert (made.amax_history_len, made.amax_compute_algo) == (SETTINGS.amax_history, "max")
        return made
    kind = {"FP8 current": "Float8CurrentScaling", "FP8 block": "Float8BlockScaling", "MXFP8": "MXFP8BlockScaling",
            "NVFP4": "NVFP4BlockScaling"}[name]
    return getattr(recipe, kind, lambda: None)()

# %% [markdown]
# Three judges, in this order: the compute capability, TE's own `is_*_available`, and a forward and backward pass. The
# order matters. Entering `te.autocast` with a recipe the GPU lacks raises, and for NVFP4 it also leaves FP8 switched
# on. And an FP8 forward that works proves little: backward multiplies other shapes in other formats.

# %%
def te_says_no(name):
    """TE's own reason against the format, or ""."""
    ask = {"BF16": "is_bf16_available", "FP8 delayed": "is_fp8_available", "FP8 current": "is_fp8_available",
           "FP8 block": "is_fp8_block_scaling_available", "MXFP8": "is_mxfp8_available", "NVFP4": "is_nvfp4_available"}
    question = getattr(te, ask.get(name, ""), None)  # another version of TE may not know all of them
    if question is None:
        return ""
    available, reason = question(return_reason=True)
    return "" if available else f"TE says: {' '.join(reason.split()) or 'not available'}"


def probe(precision):
    """Run a forward and backward pass in this precision, at your sizes; return what went wrong, or ""."""
    try:
        D, FF = SETTINGS.d_model, SETTINGS.d_ff
        net = te.LayerNormMLP(D, FF) if precision.recipe is not None else nn.Linear(D, D, device=DEVICE)
        x = torch.randn(SETTINGS.batch * SETTINGS.seq if precision.recipe is not None else 128, D, device=DEVICE, requires_grad=True)
        with precision.context():
            y = net(x)
        y.float().pow(2).mean().backward()
        return "" if torch.isfinite(x.grad).all() else "the gradients of a test were not finite"
    except Exception as error:  # whatever it is, it takes out this precision alone
        return f"failed a test: {in_a_line(error)}"


def judge(name):
    """Return the Precision of this name with the reason why it does not run here, if any."""
    dtype = {"FP32": torch.float32, "FP16": torch.float16}.get(name, torch.bfloat16)
    needs_te = name not in ("FP32", "FP16", "BF16")
    reason = why_not(name, MACHINE.capability) or ("TE is not there (see above)" if needs_te and te is None else "")
    reason = reason or (te_says_no(name) if te else "")
    made = Precision(name, dtype, make_recipe(name) if not reason else None, reason)
    made.reason = reason or ("this TE has no such recipe" if needs_te and made.recipe is None else probe(made))
    return made

# %%
PRECISIONS = {name: judge(name) for name in FORMATS}
RUNS = [p for p in PRECISIONS.values() if not p.reason]  # all that work here
FP8S = [p for p in RUNS if p.recipe is not None]
BASE = next(p for p in [PRECISIONS["BF16"], PRECISIONS["FP16"], PRECISIONS["FP32"]] if not p.reason)  # to compare FP8 with
WANTED = {"delayed": "FP8 delayed", "current": "FP8 current", "block": "FP8 block", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}[SETTINGS.recipe]
FP8 = next((p for p in sorted(FP8S, key=lambda p: p.name != WANTED)), None)  # the wanted recipe, else one that runs
USE_TE = te is not None and BASE.name == "BF16"
RESULTS["backend"] = "te" if USE_TE else "torch"
RESULTS["versions"]["transformer_engine"] = TE_VERSION
RESULTS["precisions"] = [{"name": p.name, "available": not p.reason, "reason": p.reason} for p in PRECISIONS.values()]
print_table(["precision", "runs here?", "why not"], [[p.name, "no" if p.reason else "yes", p.reason] for p in PRECISIONS.values()])
print(f"The model will be built from {'Transformer Engine' if USE_TE else 'plain PyTorch'} modules and trained in "
      f"{BASE.name}{' with a GradScaler' if BASE.name == 'FP16' else ''}"
      + (f" and in {FP8.name}." if FP8 else ". FP8 does not run here."))
if FP8 and FP8.name != WANTED or not FP8 and "recipe" in GIVEN:
    print(f"You asked for {WANTED}, which does not run here"
          + (f"; {FP8.name} takes its place." if FP8 else f": {PRECISIONS[WANTED].reason}."))

# %% [markdown]
# ## 3. FP8 by hand
#
# FP8 comes in two layouts. E4M3 (4 exponent bits, 3 mantissa bits) reaches 448; E5M2 trades a mantissa bit for range
# and reaches 57344. E4M3 is narrow: gradients fall below its smallest number, and activations with outliers climb
# above its largest. Invented tensors show both below; section 9 shows real ones. So each tensor gets a *scale*: scale
# the tensor up, cast it, and divide the scale out of the product. The best scale puts the tensor's largest magnitude,
# its *amax*, on the largest number of the format: `scale = fp8_max / amax`.
#
# What a cast costs is given in decibels: SQNR, the signal-to-quantization-noise ratio. Each mantissa bit is worth
# about 6 dB.

# %%
print("\n== 3. FP8 by hand ==")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max}  # 448 and 57344


def cast_fp8(x, layout, scale):
    """x -> FP8 -> x again: what is left of `x` after a cast with `scale`. Values beyond the range saturate."""
    largest = FP8_MAX[layout]
    return (x * scale).clamp(-largest, largest).to(layout).float() / scale


def sqnr_db(exact, approximate):
    """Signal-to-quantization-noise ratio in dB: 20 log10(|exact| / |exact - approximate|)."""
    noise = (exact.double() - approximate.double()).norm()
    return (20 * torch.log10(exact.double().norm() / noise)).item() if noise > 0 else math.inf


TENSORS = {"gradients": torch.randn(512, 512) * 2e-4, "activations": torch.randn(512, 512) * 200,
           "heavy-tailed": torch.randn(512, 512) * torch.exp(3 * torch.randn(512, 512))}
rows = []
for title, x in TENSORS.items():
    for layout in (E4M3, E5M2):
        for how, scale in (("no scale", 1.0), ("fp8_max / amax", FP8_MAX[layout] / x.abs().max().item())):
            y = cast_fp8(x, layout, scale)
            lost, saturated = (y == 0).float().mean().item(), (x.abs() * scale > FP8_MAX[layout]).float().mean().item()
            rows.append([title, str(layout)[13:17].upper(), how, f"{lost:.1%}", f"{saturated:.1%}", f"{sqnr_db(x, y):.1f}"])
x = TENSORS["activations"]
# of one scaled cast, for the bounds further down
CAST_DB = {layout: sqnr_db(x, cast_fp8(x, layout, FP8_MAX[layout] / x.abs().max().item())) for layout in FP8_MAX}
print_table(["tensor", "layout", "scale", "became zero", "saturated", "SQNR dB"], rows)

# %% [markdown]
# Without a scale E4M3 loses all the gradients and clips some activations. With one, both tensors keep the same
# quality, and that quality is set by the mantissa alone. Why then does backward use E5M2? For its range: the third
# tensor spans so many magnitudes that no scale fits it into E4M3: with its largest number in range, half of it
# becomes zero. Gradients can be like that.
#
# The quality can be predicted. Between 1 and 2, a format with *m* mantissa bits has steps of 2^-m; rounding to them
# leaves a mean square error of 4^-m / 12. The mean square of numbers spread evenly between 1 and 2 is 7/3. So the SQNR
# is 10 log10(28 * 4^m): every further bit buys 6 dB. Our tensors are normally distributed rather than evenly, which
# costs about 1 dB.

# %%
PREDICTED_DB = {E4M3: 10 * math.log10(28 * 4**3), E5M2: 10 * math.log10(28 * 4**2)}
check("a scaled cast is as good as its mantissa", all(abs(CAST_DB[layout] - db) < 1.5 for layout, db in PREDICTED_DB.items()),
      f"E4M3 {CAST_DB[E4M3]:.1f} dB, E5M2 {CAST_DB[E5M2]:.1f} dB; "
      f"predicted {PREDICTED_DB[E4M3]:.1f} and {PREDICTED_DB[E5M2]:.1f}, within 1.5")
x = TENSORS["gradients"]
bare, scaled = (cast_fp8(x, E4M3, scale) for scale in (1.0, 448 / x.abs().max().item()))
check("without a scale, E4M3 loses small gradients", sqnr_db(x, bare) < 10 < sqnr_db(x, scaled),
      f"{(bare == 0).float().mean():.0%} became zero; with the scale {(scaled == 0).float().mean():.1%}")

# %% [markdown]
# TE does the same. After one forward pass its delayed-scaling state holds the scale we compute by hand. And when
# inputs and weights are numbers that FP8 has, a short FP8 matrix multiplication is exact: the error comes from the
# cast. (Long sums can lose a little more, as section 8 explains.)

# %%
def te_linear(weight, precision, *inputs):
    """A te.Linear with this weight, run forward on each input in turn; returns (module, last output)."""
    linear = te.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    for x in inputs:
        with precision.context():
            y = linear(x)
    return linear, y.detach()


if PRECISIONS["FP8 delayed"] in FP8S:
    x = TENSORS["activations"].to(DEVICE, torch.bfloat16)
    linear, _ = te_linear(torch.eye(512), PRECISIONS["FP8 delayed"], x)
    by_te, by_hand = linear.fp8_meta["scaling_fwd"].scale[0].item(), 448 / x.abs().max().item()
    check("TE's scale is the one computed by hand", math.isclose(by_te, by_hand, rel_tol=1e-6), f"{by_te:.6f} and {by_hand:.6f}")
    grid = torch.arange(-7, 8, device=DEVICE) / 4  # -1.75 ... 1.75 in quarters: all exact in E4M3, also times 448 / 1.75 = 256
    x, w = (grid[torch.randint(0, 15, (64, 64), device=DEVICE)] for _ in range(2))
    x[0, 0] = w[0, 0] = 1.75
    _, y = te_linear(w, PRECISIONS["FP8 delayed"], x.bfloat16(), x.bfloat16())
    exact = (x.double() @ w.double().T).bfloat16()
    check("what FP8 can represent, it multiplies exactly", torch.equal(y, exact), f"{(y == exact).float().mean():.0%} of outputs equal")
else:
    skip("TE's scale against ours", PRECISIONS["FP8 delayed"].reason)

# %% [markdown]
# ### Choosing a recipe: what a history costs
#
# *Current scaling* reads a tensor twice: once for its amax, once to cast it. *Delayed scaling* casts at once, with a
# scale from the largest amax of the last steps, and notes the new amax on the way. That is right as long as tensors
# change slowly. When they jump, it is wrong for one step: values beyond the old range saturate. (A jump down costs
# little: FP8 numbers are floating-point numbers, as fine near 1 as near 100.) Below, the input grows 64-fold at step
# 20. The weight is the identity, so the output is the cast itself.

# %%
def by_hand(delayed, inputs):
    """SQNR of the cast of each input under delayed or current scaling."""
    history, quality = [], []
    for x in inputs:
        amax = x.abs().max().item()
        known = max(history[-SETTINGS.amax_history:], default=448.0) if delayed else amax
        quality.append(sqnr_db(x, cast_fp8(x, E4M3, 448 / known)))
        history.append(amax)
    return quality


def by_te(delayed, inputs):
    """The same, measured through te.Linear."""
    linear = te.Linear(256, 256, bias=False)
    linear.weight.data.copy_(torch.eye(256))
    quality = []
    for x in inputs:
        with PRECISIONS["FP8 delayed" if delayed else "FP8 current"].context():
            quality.append(sqnr_db(x.bfloat16(), linear(x.bfloat16())))
    return quality


real = {"FP8 delayed", "FP8 current"} <= {p.name for p in FP8S}
inputs = [torch.randn(256, 256, device=DEVICE) * (64 if step >= 20 else 1) for step in range(24)]
DELAYED, CURRENT = ((by_te if real else by_hand)(delayed, inputs) for delayed in (True, False))
print_table(["SQNR dB at step", "19", "20 (jump)", "21", "22"],
            [[name] + [f"{q[i]:.1f}" for i in (19, 20, 21, 22)] for name, q in (("delayed", DELAYED), ("current", CURRENT))])
check("delayed scaling pays for a jump, once", DELAYED[20] < 10 < 25 < min(DELAYED[19], DELAYED[21], *CURRENT[19:]),
      f"{DELAYED[20]:.1f} dB in the step of the jump, {DELAYED[21]:.1f} dB one step later; current scaling {CURRENT[20]:.1f} dB "
      f"({'measured in TE' if real else 'computed by hand'})")

# %% [markdown]
# ## 4. The modules
#
# TE's modules fuse what a transformer does around its matrix multiplications: the norm before, the activation
# between, the cast to FP8. Each has a plain PyTorch twin. The twins below use TE's parameter names, so weights move
# between the two by name, and the same model can be built from either *kit*.

# %%
print("\n== 4. The modules ==")


class TorchLayerNormLinear(nn.Module):
    """[..., n_in] -> [..., n_out]: what te.LayerNormLinear fuses."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = nn.Parameter(torch.ones(n_in)), nn.Parameter(torch.zeros(n_in))
        self.weight, self.bias = nn.Parameter(torch.empty(n_out, n_in)), nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return F.linear(F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias), self.weight, self.bias)


class TorchLayerNormMLP(nn.Module):
    """[..., d_model] -> d_ff -> [..., d_model]: what te.LayerNormMLP fuses. TE's gelu is the tanh form."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.fc1_weight, self.fc1_bias = nn.Parameter(torch.empty(d_ff, d_model)), nn.Parameter(torch.zeros(d_ff))
        self.fc2_weight, self.fc2_bias = nn.Parameter(torch.empty(d_model, d_ff)), nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias)
        return F.linear(F.gelu(F.linear(x, self.fc1_weight, self.fc1_bias), approximate="tanh"), self.fc2_weight, self.fc2_bias)

# %% [markdown]
# Attention takes the packed projection `[batch, seq, 3, heads, head]` and returns `[batch, seq, d_model]`. One trap
# is silent: TE's modules assume *sequence first* (`sbhd`) by default. Feed them batch-first tensors without saying
# `bshd` and they attend across the batch, never across time. Nothing crashes; the model just cannot learn.
#
# A second one costs time. TE wants the packed tensor whole, as `qkv_layer=`, and slices it inside. Autograd then
# undoes the three slices with three zero fills, three copies and two additions per layer. We split the tensor
# ourselves instead. TE recognises the three views as one buffer and returns their gradients in one buffer too, so our
# backward copies nothing. (TE 2.20 calls this recognition deprecated. Section 8 measures both ways.)

# %%
class SplitQKV(torch.autograd.Function):
    """[B, T, 3, H, d] -> three views [B, T, H, d]; in backward, gradients that already lie packed are used in place."""

    @staticmethod
    def forward(ctx, qkv):
        return qkv.unbind(2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        B, T, H, d = dq.shape
        third = H * d  # one third of a token's packed row
        packed = (T * 3 * third, 3 * third, d, 1)  # the strides of a slice of one [B, T, 3, H, d] buffer
        if dq.stride() == dk.stride() == dv.stride() == packed and all(
                g.untyped_storage().data_ptr() == dq.untyped_storage().data_ptr() and g.storage_offset() == dq.storage_offset() + i * third
                for i, g in enumerate((dq, dk, dv))):
            return dq.as_strided((B, T, 3, H, d), (*packed[:2], third, d, 1))
        return torch.stack((dq, dk, dv), dim=2)


class TEAttention(nn.Module):
    def __init__(self, d_model, n_heads, declare=False):
        super().__init__()
        self.declare = declare  # True: hand TE the packed tensor, as it prefers
        self.core = te.DotProductAttention(n_heads, d_model // n_heads, qkv_format="bshd", attn_mask_type="causal")

    def forward(self, qkv):
        if self.declare:
            return self.core(qkv_layer=qkv)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return self.core(*SplitQKV.apply(qkv))


class TorchAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()

    def forward(self, qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, d]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

# %%
class Block(nn.Module):
    """One pre-norm transformer layer, [B, T, d_model] -> the same: the four modules of a kit and two residual additions."""

    def __init__(self, kit, d_model, n_heads, d_ff, **attention):
        super().__init__()
        self.heads = (3, n_heads, d_model // n_heads)
        self.qkv = kit.LayerNormLinear(d_model, 3 * d_model)  # rows of the weight: all of Q, then K, then V
        self.attention = kit.Attention(d_model, n_heads, **attention)
        self.proj = kit.Linear(d_model, d_model)
        self.mlp = kit.LayerNormMLP(d_model, d_ff)

    def forward(self, x):
        x = x + self.proj(self.attention(self.qkv(x).unflatten(-1, self.heads)))
        return x + self.mlp(x)


TORCH_KIT = SimpleNamespace(name="PyTorch", Linear=nn.Linear, LayerNorm=nn.LayerNorm, RMSNorm=nn.RMSNorm,
                            LayerNormLinear=TorchLayerNormLinear, LayerNormMLP=TorchLayerNormMLP, Attention=TorchAttention)
TE_KIT = te and SimpleNamespace(name="TE", Linear=te.Linear, LayerNorm=te.LayerNorm, RMSNorm=te.RMSNorm,
                                LayerNormLinear=te.LayerNormLinear, LayerNormMLP=te.LayerNormMLP, Attention=TEAttention)
KIT = TE_KIT if USE_TE else TORCH_KIT

# %% [markdown]
# `te.TransformerLayer` is these four modules in one. Its parameters carry longer names; shortened, they fit our
# block. So one pair of functions moves weights between any two modules that compute the same thing.

# %%
def short(name):
    """The name in our Block of a parameter of te.TransformerLayer; any other name as it is."""
    for long, ours in {"self_attention.layernorm_qkv.": "qkv.", "self_attention.proj.": "proj.", "layernorm_mlp.": "mlp."}.items():
        name = name.replace(long, ours)
    return name


def weights_of(module):
    """{short name: FP32 copy} of all parameters. TE's pickled `_extra_state` is not needed and stays behind."""
    return {short(name): p.detach().float().clone() for name, p in module.named_parameters()}


def load_weights(module, weights):
    """Copy weights from `weights_of` into a module of either kit; names must match."""
    own = {short(name): p for name, p in module.named_parameters()}
    if own.keys() != weights.keys():
        raise Stop(f"weights do not fit: {sorted(own.keys() ^ weights.keys())[:4]}")
    for name, p in own.items():
        p.data.copy_(weights[name])
    return module


def initialise(module, seed):
    """Seeded weights, the same for every kit and as in TE: matrices N(0, 0.023), biases 0, norm weights 1."""
    for name, p in module.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p.data, std=0.023, generator=torch.Generator(p.device).manual_seed(seed))
            seed += 1
        elif name.endswith("bias"):
            p.data.zero_()
    return module

# %% [markdown]
# Is our block an ordinary transformer layer? PyTorch has one of its own, written by others. With the same weights, both
# must compute the same.

# %%
@torch.inference_mode()
def difference_to_pytorch():
    """Relative difference of a Block's output to nn.TransformerEncoderLayer with the same weights, in FP32."""
    ours = initialise(Block(TORCH_KIT, 64, 4, 128), SETTINGS.seed)
    for i, p in enumerate(ours.parameters()):
        if p.dim() == 1:  # biases and norms that are not 0 and 1
            p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    theirs = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation=partial(F.gelu, approximate="tanh"),
                                        batch_first=True, norm_first=True)
    names = {"self_attn.in_proj_weight": "qkv.weight", "self_attn.in_proj_bias": "qkv.bias", "self_attn.out_proj.weight": "proj.weight",
             "self_attn.out_proj.bias": "proj.bias", "norm1.weight": "qkv.layer_norm_weight", "norm1.bias": "qkv.layer_norm_bias",
             "norm2.weight": "mlp.layer_norm_weight", "norm2.bias": "mlp.layer_norm_bias", "linear1.weight": "mlp.fc1_weight",
             "linear1.bias": "mlp.fc1_bias", "linear2.weight": "mlp.fc2_weight", "linear2.bias": "mlp.fc2_bias"}
    for name, p in theirs.named_parameters():
        p.copy_(ours.get_parameter(names[name]))
    x = torch.randn(2, 32, 64)
    a, b = ours(x), theirs(x, src_mask=nn.Transformer.generate_square_subsequent_mask(32), is_causal=True)
    return ((a - b).norm() / b.norm()).item()


check("our block computes what PyTorch's own layer computes", (apart := difference_to_pytorch()) < 1e-5,
      f"relative difference {apart:.1e} in FP32")

# %% [markdown]
# Now the tour. Each module gets the weights of its twin and the same input, and both run forward and backward. The
# yardstick is the twin in FP32. Two bounds, each with a reason:
#
# - in 16 bits, TE may err twice as much as PyTorch itself does in 16 bits, plus two BF16 roundings (about 2^-9 each), since
#   TE rounds the input and output of a norm, which PyTorch's autocast keeps in FP32;
# - in FP8, section 3 gives the noise of one cast. A chain of *n* matrix multiplications casts 2*n* tensors, which lowers
#   the SQNR by 10 log10(2*n*) dB. Delayed and current scaling cast gradients to E5M2, so backward starts from that
#   layout's quality; block scaling and MXFP8 keep E4M3. 3 dB are left as a margin.

# %%
def forward_backward(module, x, dy, precision):
    """Run a module forward and backward; the gradients are then in `x` and in its parameters. Returns the output."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    with precision.context():
        y = module(x)
    y.backward(dy.to(y.dtype))
    return y.detach()


def outcome(module, x, dy, precision, rounds=1):
    """{name: tensor} of the output and every gradient. Delayed scaling needs a first round to learn its scales."""
    for _ in range(rounds):
        y = forward_backward(module, x, dy, precision)
    return {"output": y.float(), "input": x.grad.float(), **{short(n): p.grad.float() for n, p in module.named_parameters()}}


def errors(exact, found):
    """(relative error of the output, worst relative error of a gradient)."""
    relative = {name: ((exact[name] - found[name]).norm() / exact[name].norm()).item() for name in exact}
    return relative.pop("output"), max(relative.values(), key=lambda e: (math.isnan(e), e))  # max() alone may skip a NaN


def decibel(relative_error):
    return -20 * math.log10(max(relative_error, 1e-12))


def mark():
    """A point in time: a device event on a GPU, the clock elsewhere."""
    if DEVICE != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(marks):
    """Milliseconds from each mark to the next."""
    if DEVICE != "cuda":
        return [1e3 * (b - a) for a, b in zip(marks, marks[1:])]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def time_ms(function, repeats=20):
    """Median time of one call in ms, the calls following each other without a pause."""
    for _ in range(3):
        function()
    marks = [mark()]
    for _ in range(repeats):
        function()
        marks.append(mark())
    return statistics.median(between(marks))

# %%
def record(function):
    """Record what a function launches on the GPU into a CUDA graph; returns (graph, result). RuntimeError where that fails."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError:  # torch would go on as if it were still recording: end that by recording something harmless
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=DEVICE)
        raise
    return graph, result


def burst(function, calls):
    """A function that makes several calls at once: on a GPU one CUDA graph, so that Python's launches do not count."""
    def several():
        for _ in range(calls):
            function()
    if DEVICE != "cuda":
        return several
    with torch.cuda.stream(torch.cuda.Stream()):  # nothing may run for the first time while it is recorded
        function()
    torch.cuda.synchronize()
    try:
        return record(several)[0].replay
    except RuntimeError:
        return several

# %%
D, FF, HEADS = SETTINGS.d_model, SETTINGS.d_ff, SETTINGS.n_heads
FP8_DB = CAST_DB[E4M3], CAST_DB[E5M2]  # quality of one cast, forward and backward
BLOCK_DB = CAST_DB[E4M3], CAST_DB[E4M3] - 3  # all E4M3; 3 dB of slack for sums that cancel in gradients
NOISE_DB = {"FP8 block": BLOCK_DB, "MXFP8": BLOCK_DB, "NVFP4": [10 * math.log10(28 * 4)] * 2}  # NVFP4 has one mantissa bit
TOUR = {  # name: (how either kit makes it, matrix multiplications in a row)
    "Linear": (lambda kit: kit.Linear(D, D), 1),
    "LayerNorm": (lambda kit: kit.LayerNorm(D), 0),
    "RMSNorm": (lambda kit: kit.RMSNorm(D, eps=1e-5), 0),
    "LayerNormLinear": (lambda kit: kit.LayerNormLinear(D, 3 * D), 1),
    "LayerNormMLP": (lambda kit: kit.LayerNormMLP(D, FF), 2),
    "TransformerLayer": (lambda kit: Block(kit, D, HEADS, FF) if kit is TORCH_KIT else te.TransformerLayer(
        D, FF, HEADS, hidden_dropout=0.0, attention_dropout=0.0, layer_number=1, self_attn_mask_type="causal",
        fuse_qkv_params=True, qkv_weight_interleaved=False, attn_input_format="bshd"), 4),
    "Block (ours)": (lambda kit: Block(kit, D, HEADS, FF), 4),
}


def time_of(module, x, dy, precision):
    """Milliseconds of one pass forward and backward."""
    return time_ms(burst(lambda: forward_backward(module, x, dy, precision), 4), 3) / 4


def visit(name, precisions):
    """Compare one module with its twin, in BASE and in these FP8 precisions; return a row of the results."""
    make, n_gemms = TOUR[name]
    torch.manual_seed(SETTINGS.seed)  # a second visit sees the same numbers
    twin = initialise(make(TORCH_KIT), SETTINGS.seed).to(DEVICE)
    x = torch.randn(SETTINGS.batch, SETTINGS.seq, D, device=DEVICE, requires_grad=True)
    with PRECISIONS["FP32"].context():
        dy = torch.randn_like(twin(x)) / math.sqrt(SETTINGS.batch * SETTINGS.seq)
    row = {"module": name, "input": list(x.shape), "output": list(dy.shape), "parameters": sum(p.numel() for p in twin.parameters())}
    exact, plain = outcome(twin, x, dy, PRECISIONS["FP32"]), outcome(twin, x, dy, BASE)
    row["torch_error"], row["torch_ms"] = errors(exact, plain), time_of(twin, x, dy, BASE)
    if USE_TE:
        module = load_weights(make(TE_KIT), weights_of(twin))
        row["te_error"] = errors(exact, outcome(module, x, dy, BASE))
        row["te_ms"] = time_of(module, x, dy, BASE)
        if n_gemms and precisions:
            row["db"] = {p.name: [decibel(e) for e in errors(exact, outcome(module, x, dy, p, rounds=2))] for p in precisions}
            row["bound_db"] = {p.name: [db - 10 * math.log10(2 * n_gemms) - 3 for db in NOISE_DB.get(p.name, FP8_DB)] for p in precisions}
            row["fp8_ms"] = time_of(module, x, dy, FP8)
    return row


RESULTS["tour"] = [visit(name, FP8S) for name in TOUR if USE_TE or name != "Block (ours)"]  # in plain PyTorch that is the same

# %% [markdown]
# The time is forward plus backward. On a GPU, four passes are recorded into one *CUDA graph* and replayed, because
# launched one by one, kernels as small as these wait for Python. Section 8 measures both ways.

# %%
def shape(size):
    return "x".join(map(str, size))


def tour_line(row):
    """The cells of one row of the tour."""
    cells = [row["module"], f"{shape(row['input'])} -> {shape(row['output'])}", f"{row['parameters']:,}", f"{row['torch_ms']:.2f}"]
    if USE_TE:
        cells += [f"{row['te_ms']:.2f}"] + ([f"{row['fp8_ms']:.2f}" if "fp8_ms" in row else "-"] if FP8 else [])
        cells += ["{:.1e} / {:.1e}".format(*row["torch_error"]), "{:.1e} / {:.1e}".format(*row["te_error"])]
        cells += ["{:.1f} / {:.1f}".format(*row["db"][p.name]) if "db" in row else "-" for p in FP8S]
    return cells


columns = ["module", "shape", "parameters", "PyTorch ms"]
if USE_TE:
    columns += ["TE ms", *([f"{FP8.name} ms"] if FP8 else []),
                f"PyTorch {BASE.name} error", f"TE {BASE.name} error", *(f"{p.name} dB" for p in FP8S)]
print_table(columns, [tour_line(row) for row in RESULTS["tour"]])
if USE_TE:
    print("  (two numbers: output / worst gradient; error relative to PyTorch FP32)")
    for title, key in ((f"TE {BASE.name}", "te_ms"), *([(f"TE {FP8.name}", "fp8_ms")] if FP8 else [])):
        faster = [row["module"] for row in RESULTS["tour"] if key in row and row[key] < row["torch_ms"]]
        print(f"  {title} is faster here than the plain PyTorch twin in {BASE.name} for: {', '.join(faster) or 'none of them'}")
for row in RESULTS["tour"] if USE_TE else []:
    check(f"{row['module']}: TE in {BASE.name} is as accurate as PyTorch in {BASE.name}",
          all(a <= 2 * b + 2 * 2**-9 for a, b in zip(row["te_error"], row["torch_error"])),
          "output {:.1e}, gradients {:.1e} from FP32; PyTorch {:.1e} and {:.1e}".format(*row["te_error"], *row["torch_error"]))
    for name, db in row.get("db", {}).items():
        check(f"{row['module']} in {name}: only cast noise", all(a >= b for a, b in zip(db, row["bound_db"][name])),
              "output {:.1f} dB, gradients {:.1f} dB; at least {:.1f} and {:.1f} wanted".format(*db, *row["bound_db"][name]))
if not USE_TE:
    skip("TE's modules beside their twins", TE_REASON or BASE.reason or PRECISIONS["BF16"].reason)

# %% [markdown]
# One difference is too small for these tables: GELU has an exact and a tanh form, and TE uses the tanh form. The two
# differ clearly only where little is left of the input: by 11% at -3, so we look there.

# %%
def gelu_of(kit, x):
    """gelu(x) as the MLP of a kit computes it: no norm, both matrices the identity."""
    mlp = kit.LayerNormMLP(64, 64).to(DEVICE)
    for name, p in mlp.named_parameters():
        p.data.copy_(torch.eye(64) if p.dim() > 1 else torch.full((64,), x if name == "layer_norm_bias" else 0.0))
    with BASE.context():
        return mlp(torch.zeros(16, 64, device=DEVICE, dtype=BASE.dtype)).mean().item()


if USE_TE:
    ours, theirs = (gelu_of(kit, -3.0) for kit in (TORCH_KIT, TE_KIT))
    check("TE's gelu is the tanh form", abs(theirs / ours - 1) < 0.02, f"gelu(-3) is {theirs:.5f} in TE, {ours:.5f} in the twin")

# %% [markdown]
# ## 5. MiniGPT
#
# Token and position embeddings, a few blocks, a final norm, a head. The head stays in 16 bits: here it is a sliver of
# the work, and its width, the vocabulary, need not be legal for FP8. Between blocks the activations travel in the
# 16-bit type.

# %%
print("\n== 5. MiniGPT ==")


def embed(tokens, token, position, dtype):
    """Tokens [B, T] -> activations [B, T, d_model]."""
    return (F.embedding(tokens, token) + position[: tokens.shape[1]]).to(dtype)


def head(h, norm_weight, norm_bias, weight):
    """Activations [..., d_model] -> logits [..., vocab] in FP32."""
    return F.linear(F.layer_norm(h, h.shape[-1:], norm_weight, norm_bias), weight).float()


def head_loss(h, targets, *parameters):
    return F.cross_entropy(head(h, *parameters).flatten(0, 1), targets.flatten())


class MiniGPT(nn.Module):
    """Causal language model: tokens [B, T] -> logits [B, T, vocab] in FP32."""

    def __init__(self, kit, s, dtype, **attention):
        super().__init__()
        self.dtype = dtype  # of the activations between blocks
        self.token, self.position = nn.Embedding(s.vocab, s.d_model), nn.Embedding(s.seq, s.d_model)
        self.blocks = nn.ModuleList(Block(kit, s.d_model, s.n_heads, s.d_ff, **attention) for _ in range(s.n_layers))
        self.norm, self.head = nn.LayerNorm(s.d_model), nn.Linear(s.d_model, s.vocab, bias=False)

    def trunk(self, tokens, embed=embed):
        h = embed(tokens, self.token.weight, self.position.weight, self.dtype)
        for block in self.blocks:
            h = block(h)
        return h

    def logits(self, h):
        return head(h, self.norm.weight, self.norm.bias, self.head.weight)

    def forward(self, tokens):
        return self.logits(self.trunk(tokens))

    def loss(self, tokens, targets, embed=embed, head_loss=head_loss):
        return head_loss(self.trunk(tokens, embed), targets, self.norm.weight, self.norm.bias, self.head.weight)


def new_model(kit, s=SETTINGS, dtype=BASE.dtype, **attention):
    """A MiniGPT with the seeded initial weights, on the device."""
    return initialise(MiniGPT(kit, s, dtype, **attention).to(DEVICE), s.seed)


model = new_model(KIT)
N_PARAMETERS = sum(p.numel() for p in model.parameters())
print(f"MiniGPT from {KIT.name} blocks: {N_PARAMETERS / 1e6:.1f}M parameters, {SETTINGS.n_layers} layers, width {SETTINGS.d_model}, "
      f"{SETTINGS.n_heads} heads of {SETTINGS.d_model // SETTINGS.n_heads}, FFN {SETTINGS.d_ff}, sequences of {SETTINGS.seq}")

# %% [markdown]
# Two proofs before any training. First: the model from TE blocks is the model from PyTorch blocks. Weights are copied
# there and back; logits and all gradients may be twice as far from PyTorch in FP32 as PyTorch's own in 16 bits.

# %%
def logits_and_gradients(model, tokens, precision):
    model.zero_grad(set_to_none=True)
    with precision.context():
        logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    return {"output": logits.detach(), **{name: p.grad.float() for name, p in model.named_parameters()}}


if USE_TE:
    tokens = torch.randint(SETTINGS.vocab, (SETTINGS.batch, SETTINGS.seq), device=DEVICE)
    twin = load_weights(MiniGPT(TORCH_KIT, SETTINGS, torch.float32).to(DEVICE), weights_of(model))
    exact = logits_and_gradients(twin, tokens, PRECISIONS["FP32"])
    twin.dtype = BASE.dtype
    plain, ours = errors(exact, logits_and_gradients(twin, tokens, BASE)), errors(exact, logits_and_gradients(model, tokens, BASE))
    check("TE and PyTorch models agree", all(a <= 2 * b for a, b in zip(ours, plain)),
          "logits {:.1e}, gradients {:.1e} from FP32; PyTorch {:.1e} and {:.1e}; at most twice that allowed".format(*ours, *plain))
    back = weights_of(load_weights(MiniGPT(TE_KIT, SETTINGS, BASE.dtype).to(DEVICE), weights_of(twin)))
    check("weights survive the way there and back", all(torch.equal(back[n], p) for n, p in model.named_parameters()),
          f"{len(back)} tensors equal to the bit")
    del twin, exact, back
else:
    skip("TE model against PyTorch model", TE_REASON or PRECISIONS["BF16"].reason)

# %% [markdown]
# Second: the model is causal, and the rows of a batch do not see each other. Changing token *t* of row 0 may change
# only row 0 from *t* on. To the bit, even in FP8 with delayed scaling, since its scales are fixed before the pass,
# and with block scales, which belong to one token each. Current scaling takes one amax over the whole tensor: one
# token can change the scale, and with it the rounding of all others. There the change elsewhere may be as large as
# the noise of FP8 itself, measured as the distance to the 16-bit logits.

# %%
def leak(model, precision):
    """RMS change of the logits, in units of their spread, after changing one token: (where none may change, where they must, FP8 noise)."""
    t = SETTINGS.seq // 2
    before = torch.randint(SETTINGS.vocab, (SETTINGS.batch, SETTINGS.seq), device=DEVICE)
    after = before.clone()
    after[0, t] = (after[0, t] + 1) % SETTINGS.vocab
    with precision.context():
        model(before)  # delayed scaling learns its scales here: only with gradients enabled
    results = []
    with torch.inference_mode():
        for tokens, how in ((before, precision), (after, precision), (before, BASE)):
            with how.context():
                results.append(model(tokens))
    a, b, reference = results
    allowed = torch.zeros(before.shape, dtype=torch.bool, device=DEVICE)
    allowed[0, t:] = True
    return [(d.pow(2).mean().sqrt() / a.std()).item() for d in ((a - b)[~allowed], (a - b)[allowed], a - reference)]


for precision in [BASE, *(FP8S if USE_TE else [])]:
    wrong, right, noise = leak(model, precision)
    limit = noise if precision.name in ("FP8 current", "NVFP4") else 0
    check(f"causal, rows independent ({precision.name})", wrong <= limit and wrong < right,
          f"elsewhere {wrong:.1e} (at most {limit:.1e}), from the changed token on {right:.1e}")
del model

# %% [markdown]
# ## 6. Data
#
# Arithmetic sequences: a random start, a random stride from 1 to 6, counted up modulo the vocabulary. Nothing can
# predict the stride before the second token is seen. Everything after follows. So the best possible mean loss is
# known: ln(6) nats for one token out of `seq`. And there are only vocab x 6 sequences, so a model can be examined on
# all of them.

# %%
print("\n== 6. Data ==")
STRIDES = 6
FLOOR = math.log(STRIDES) / SETTINGS.seq  # best possible mean loss, nats per token


def sequences(phase, stride, length):
    """phase, stride [B] -> tokens [B, length]."""
    return (phase[:, None] + stride[:, None] * torch.arange(length)) % SETTINGS.vocab


def batches(seed, rows, s=SETTINGS):
    """Endless (tokens, targets), each [rows, seq], on the CPU. Under torchrun each rank takes its own rows of one batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        phase = torch.randint(s.vocab, (rows * WORLD,), generator=generator)
        stride = torch.randint(1, STRIDES + 1, (rows * WORLD,), generator=generator)
        whole = sequences(phase, stride, s.seq + 1)[RANK::WORLD]
        yield whole[:, :-1], whole[:, 1:]


EVERY = sequences(torch.arange(SETTINGS.vocab).repeat_interleave(STRIDES), torch.arange(1, STRIDES + 1).repeat(SETTINGS.vocab),
                  SETTINGS.seq + 1)
for row in EVERY[[0, 7, 14]].tolist():
    print("  stride", (row[1] - row[0]) % SETTINGS.vocab, "|", *row[:16], "...")
print(f"{len(EVERY)} sequences exist. Floor: ln({STRIDES}) / {SETTINGS.seq} = {FLOOR:.5f} nats per token; "
      f"guessing costs ln({SETTINGS.vocab}) = {math.log(SETTINGS.vocab):.2f}.")

# %% [markdown]
# ## 7. Training
#
# The optimizer holds *FP32 master weights*. A BF16 number has 8 significant bits; an update smaller than 1/512 of a
# weight always rounds away, and one below 1/256 often. So the weights that AdamW changes are FP32. What multiplies
# them is cheaper:
#
# - TE reads an FP32 matrix and writes its FP8 copy directly. A BF16 copy in between would only be moved twice.
# - TE can write the gradient of a matrix in FP32, straight into a buffer we give it (`fuse_wgrad_accumulation`, `main_grad`),
#   instead of a BF16 tensor that a second kernel widens.
# - TE casts each bias and norm weight by a kernel of its own. They are tiny, but dozens. We keep BF16 working copies of
#   these vectors, and refresh all of them from their FP32 masters in one call.
#
# | parameter | what AdamW changes | what the model uses | where the gradient arises |
# |---|---|---|---|
# | matrix of a TE module | the parameter itself, FP32 | TE casts it to FP8 or BF16 | in FP32, written by TE into `main_grad` |
# | vector of a TE module | an FP32 master | the parameter, BF16 | in BF16, copied to the master |
# | embedding, final norm, head; all of the PyTorch kit | the parameter itself, FP32 | `torch.autocast` casts it | in FP32 |

# %%
print("\n== 7. Training ==")


class MasterAdamW:
    """AdamW on FP32 master weights, for a model of either kit. `low` is the 16-bit type of the working copies. Where the
    model keeps its matrices in FP8 (section 8 tries that), `exact` holds their FP32 values by name."""

    def __init__(self, model, lr, low, exact=None):
        self.copies, self.masters, self.plain = [], [], []  # 16-bit vectors, their FP32 masters, all other parameters
        self.direct = []  # FP32 matrices whose gradient TE writes itself
        self.quantized = []  # (FP8 matrix, its FP32 master)
        for prefix, module in model.named_modules():
            fused = USE_TE and hasattr(module, "fuse_wgrad_accumulation")
            if fused:
                module.fuse_wgrad_accumulation = True
            for name, p in module.named_parameters(prefix, recurse=False):
                if fused and p.dim() == 1:
                    self.masters.append(p.detach().clone())
                    self.masters[-1].grad = torch.zeros_like(p)
                    p.data = p.data.to(low)
                    self.copies.append(p)
                elif fused:
                    weight = exact[name] if exact else p
                    weight.grad = p.main_grad = torch.zeros_like(weight)
                    p.overwrite_main_grad = True  # TE need not add to what is there
                    self.quantized.append((p, weight)) if exact else self.direct.append(p)
                else:
                    self.plain.append(p)
        self.plain += self.direct
        on_gpu = DEVICE == "cuda"
        self.weights = [*self.plain, *self.masters, *(master for _, master in self.quantized)]
        self.refresh()
        self.lr = lr
        self.adamw = torch.optim.AdamW(self.weights, lr=torch.tensor(lr, device=DEVICE) if on_gpu else lr, fused=on_gpu,
                                       capturable=on_gpu, weight_decay=0)  # no decay: what moves has a gradient

    def set_lr(self, share):
        """Set the learning rate to a share of its peak. A graph reads it from a tensor."""
        group = self.adamw.param_groups[0]
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(self.lr * share)
        else:
            group["lr"] = self.lr * share

    def clear(self):
        direct = set(self.direct)
        for p in [*self.plain, *self.copies]:
            if p not in direct:
                p.grad = None

    def step(self, scaler=None):
        if self.copies:
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.copies])
        if WORLD > 1:  # data-parallel: everyone takes the mean gradient
            for p in self.weights:
                torch.distributed.all_reduce(p.grad)
                p.grad /= WORLD
        scaler.step(self.adamw) if scaler else self.adamw.step()
        self.refresh()

    def refresh(self):
        """Bring the working copies up to date with their masters."""
        if self.copies:
            torch._foreach_copy_([p.data for p in self.copies], self.masters)
        for p, master in self.quantized:
            p.quantize_(master)

# %% [markdown]
# One `Trainer` serves training, benchmark and tests: one model, one optimizer, one step. A step of this model is some
# hundred kernels of a few microseconds each, and Python launches them more slowly than the GPU runs them. So on a GPU
# the whole step, optimizer included, is recorded once into a *CUDA graph* and then replayed by a single launch. The
# graph reads its batch from fixed buffers. TE's scale updates are recorded with it; a replay needs no autocast.

# %%
class Trainer:
    def __init__(self, kit, precision, rows, s=SETTINGS, compiled="", fp8_weights=False, **attention):
        """compiled: "" nothing, "ends" embedding and loss around the blocks, "all" the whole loss. fp8_weights: TE keeps
        its matrices in FP8 alone."""
        self.precision, self.graph = precision, None
        exact = weights_of(new_model(kit, s, precision.dtype)) if fp8_weights else None
        with te.quantized_model_init(enabled=True, recipe=precision.recipe) if fp8_weights else contextlib.nullcontext():
            self.model = new_model(kit, s, precision.dtype, **attention)
        self.optimizer = MasterAdamW(self.model, s.lr, precision.dtype, exact)
        self.tokens, self.targets = (torch.zeros(rows, s.seq, dtype=torch.long, device=DEVICE) for _ in range(2))
        self.scaler = torch.amp.GradScaler(DEVICE) if precision.dtype == torch.float16 else None
        self.loss_function = torch.compile(self.model.loss) if compiled == "all" else self.model.loss
        if compiled == "ends":
            self.loss_function = partial(self.model.loss, embed=torch.compile(embed), head_loss=torch.compile(head_loss))

    def step(self):
        """Forward, backward, optimizer on the buffers; returns the loss [] on the device."""
        self.optimizer.clear()
        with self.precision.context():
            loss = self.loss_function(self.tokens, self.targets)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        self.optimizer.step(self.scaler)
        if self.scaler:
            self.scaler.update()
        return loss.detach()

    def capture(self):
        """Record the step into a CUDA graph. Its warm-up trains for three steps. Returns why it did not work, or ""."""
        obstacles = {"needs a GPU": DEVICE != "cuda", "not with several processes": WORLD > 1, "not with a GradScaler": self.scaler}
        if reason := next((why for why, there in obstacles.items() if there), ""):
            return reason
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.optimizer.clear()
            self.graph, self.captured_loss = record(self.step)
        except RuntimeError as error:
            return f"CUDA graph capture failed: {in_a_line(error)}"
        return ""

    def fill(self, tokens, targets):
        self.tokens.copy_(tokens, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)

    def run(self, *batch):
        """One training step, on a new batch if one is given, by graph if there is one."""
        if batch:
            self.fill(*batch)
        if self.graph is None:
            return self.step()
        self.graph.replay()
        return self.captured_loss

    @contextlib.contextmanager
    def untouched(self):
        """Whatever happens inside, weights and optimizer are afterwards what they were. The FP8 scales are not."""
        saved = [w.detach().clone() for w in self.optimizer.weights]
        moments = [v.clone() for state in self.optimizer.adamw.state.values() for v in state.values()]
        try:
            yield
        finally:
            for w, value in zip(self.optimizer.weights, saved):
                w.data.copy_(value)
            self.optimizer.refresh()
            now = [v for state in self.optimizer.adamw.state.values() for v in state.values()]
            for v, value in zip(now, moments or [torch.zeros_like(v) for v in now]):
                v.copy_(value)

# %% [markdown]
# FP8 with delayed scaling has state outside the weights: the amax histories and scales. Here lies a trap. An evaluation
# pass leaves its amax in the history's staging row, and the *next training step* takes it into the scale: one unusual
# prompt can spoil the scales of a training run. So evaluation below saves this state and puts it back.

# %%
def fp8_states(model):
    """Yield (module name, "forward" or "backward", state) for each TE module of the model that has a delayed-scaling state."""
    for name, module in model.named_modules():
        for direction, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            state = getattr(module, "fp8_meta", {}).get(key)
            if state is not None and hasattr(state, "amax_history"):
                yield name, direction, state


@contextlib.contextmanager
def evaluation(model):
    """Evaluate without a trace: no gradients, eval mode, and afterwards the mode and the FP8 state of before."""
    saved = [(state, state.scale.clone(), state.amax_history.clone()) for _, _, state in fp8_states(model)]
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
        for state, scale, history in saved:
            state.scale.copy_(scale)
            state.amax_history.copy_(history)


def chunks(tokens):
    """Pieces of about 64k tokens, each padded with copies of its first row to a multiple of 32 rows: any length is then legal in FP8."""
    size = max(32, 65536 // tokens.shape[1] // 32 * 32)
    for piece in tokens.split(size):
        yield len(piece), torch.cat([piece, piece[:1].expand(-len(piece) % 32, -1)])


def exam(model, precision):
    """Mean loss over every sequence that exists."""
    total = 0.0
    with evaluation(model):
        for rows, piece in chunks(EVERY.to(DEVICE)):
            with precision.context():
                logits = model(piece[:, :-1])[:rows]
            total += F.cross_entropy(logits.flatten(0, 1), piece[:rows, 1:].flatten(), reduction="sum").item()
    return total / (len(EVERY) * SETTINGS.seq)

# %%
def progress_bar(total, title):
    """A tqdm bar on stderr; one that draws nothing where there is no tqdm, or where another process draws it."""
    if tqdm and RANK == 0:
        return tqdm(total=total, desc=title, leave=False)
    return SimpleNamespace(n=0, update=lambda n=1: None, set_postfix_str=lambda text: None, close=lambda: None)


def train(precision, seed, steps=SETTINGS.steps, each_step=lambda step, trainer: None):
    """Train a fresh MiniGPT; returns (trainer, losses per step, ms per step, why there was no CUDA graph).
    Raises Stop when the loss is not finite."""
    trainer = Trainer(KIT, precision, SETTINGS.batch)
    trainer.fill(*next(batches(seed, SETTINGS.batch)))  # so that the warm-up fits the FP8 scales to real data
    trainer.optimizer.set_lr(0)
    with trainer.untouched():
        no_graph = trainer.capture()
    losses, times, bar = torch.zeros(steps, device=DEVICE), [], progress_bar(steps, f"training in {precision.name}")
    source, begin = batches(seed, SETTINGS.batch), time.perf_counter()
    for step in range(steps):
        trainer.optimizer.set_lr(min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps)))  # warm up, then decay to zero
        losses[step] = trainer.run(*next(source))
        each_step(step, trainer)
        if step % 20 == 19 or step == steps - 1:  # looking at the loss waits for the GPU, so look seldom
            recent = losses[: step + 1].tolist()
            if bad := [i for i, loss in enumerate(recent) if not math.isfinite(loss)]:
                raise Stop(f"training in {precision.name}: the loss was {recent[bad[0]]} at step {bad[0] + 1}. A lower --lr may help.")
            times.append((time.perf_counter() - begin) * 1e3 / (step % 20 + 1))
            begin = time.perf_counter()
            bar.update(step + 1 - bar.n)
            bar.set_postfix_str(f"loss {recent[-1]:.4f}")
    bar.close()
    trainer.graph = trainer.captured_loss = None  # a graph keeps its memory; the few steps to come do without
    return trainer, losses.tolist(), statistics.median(times), no_graph

# %% [markdown]
# With FP8, the model is trained twice in the base precision, on different data, and once in FP8, on the same batches
# as the first of the two; without FP8, once. All start from the same weights. The two show how much chance alone
# moves the result: a fair yardstick for what FP8 changes. (Where chance happens to move less than 1% of the floor,
# that 1% counts.)
#
# Sixty steps, as many demonstrations take, are too few to learn the rule. For the full model on an H200, 500 steps
# continued all but one of the two-token prompts, and 1,000 continued all of them. The default leaves some room.

# %%
TIMELINE = []  # (step, [scales of block 0]), recorded while FP8 trains


def record_scales(step, trainer):
    if step % max(1, SETTINGS.steps // 50) == 0:
        TIMELINE.append((step, [(n, d, state.scale.clone()) for n, d, state in fp8_states(trainer.model.blocks[0])]))


EXAMS, CURVES, MS, NO_GRAPH = {}, {}, {}, {}
for i in range(2 if FP8 else 1):
    TRAINED, losses, ms, reason = train(BASE, SETTINGS.seed + i)
    EXAMS.setdefault(BASE.name, []).append(exam(TRAINED.model, BASE))
    if i == 0:
        CURVES[BASE.name], MS[BASE.name], NO_GRAPH[BASE.name] = losses, ms, reason
    TRAINED = None if FP8 else TRAINED  # make room for the next
if FP8:
    TRAINED, CURVES[FP8.name], MS[FP8.name], NO_GRAPH[FP8.name] = train(FP8, SETTINGS.seed, each_step=record_scales)
    EXAMS[FP8.name] = [exam(TRAINED.model, FP8)]
RESULTS["training"] = {name: {"loss": EXAMS[name][0], "floor": FLOOR, "ms_per_step": MS[name]} for name in MS}
print_table(["precision", "ms/step", "launched", "last batch", "loss over all sequences", "above the floor"],
            [[n, f"{MS[n]:.2f}", "from Python" if NO_GRAPH[n] else "as a CUDA graph", f"{CURVES[n][-1]:.5f}", f"{EXAMS[n][0]:.5f}",
              f"{EXAMS[n][0] / FLOOR - 1:+.1%}"] for n in MS])
print(f"  floor {FLOOR:.5f}; a step is {f'{WORLD} x ' if WORLD > 1 else ''}{SETTINGS.batch} sequences of {SETTINGS.seq} tokens")
for name, reason in NO_GRAPH.items():
    if reason:
        print(f"  {name}: no CUDA graph ({reason})")

# %%
for name, found in EXAMS.items():
    check(f"{name} comes near the floor", all(loss <= FLOOR * (1 + SETTINGS.margin) for loss in found),
          f"loss {' and '.join(f'{loss:.5f}' for loss in found)}, floor {FLOOR:.5f}, margin {SETTINGS.margin:.0%}")
if FP8:
    noise = max(EXAMS[BASE.name]) - min(EXAMS[BASE.name])
    apart = abs(EXAMS[FP8.name][0] - EXAMS[BASE.name][0])
    check("FP8 learns as well", apart <= max(noise, 0.01 * FLOOR),
          f"FP8 and {BASE.name} end {apart:.1e} apart; {BASE.name} with other data moves by {noise:.1e}; "
          f"1% of the floor is {0.01 * FLOOR:.1e}")
else:
    skip("training in FP8", PRECISIONS["FP8 delayed"].reason)

# %% [markdown]
# Did the master weights matter? Take one more step, at half the peak learning rate and at a hundredth of it, and ask
# which of its updates a BF16 weight would have swallowed.

# %%
initial, now = weights_of(new_model(KIT)), weights_of(TRAINED.model)
moved = sum((initial[n] != now[n]).sum().item() for n in now if now[n].dim() > 1) / sum(now[n].numel() for n in now if now[n].dim() > 1)
LOST = {}  # {share of the peak learning rate: share of the updates that BF16 weights would lose}
for share in (0.5, 0.01):
    with TRAINED.untouched():
        TRAINED.optimizer.set_lr(share)
        before = [w.detach().clone() for w in TRAINED.optimizer.plain]
        TRAINED.run(*next(batches(SETTINGS.seed + 99, SETTINGS.batch)))
        pairs = [(a.bfloat16(), (a.bfloat16().float() + (b - a)).bfloat16(), a != b) for a, b in zip(before, TRAINED.optimizer.plain)]
    LOST[share] = sum(((a == b) & moves).sum().item() for a, b, moves in pairs) / max(1, sum(moves.sum().item() for *_, moves in pairs))
check("weights moved", moved > 0.99, f"{moved:.1%} of the matrix weights differ from their initial values")
check("master weights are FP32", all(w.dtype == torch.float32 for w in TRAINED.optimizer.weights),
      f"{sum(w.numel() for w in TRAINED.optimizer.weights):,} of them. BF16 weights would have lost {LOST[0.5]:.0%} of a step's updates "
      f"at half the peak learning rate, {LOST[0.01]:.0%} at a hundredth")
del initial, now, before, pairs  # copies of a large model

# %% [markdown]
# Two controls. The same seed must give the same losses: to the bit where every kernel adds in a fixed order. On a GPU
# the fused attention adds the gradients of the queries in whichever order its thread blocks finish, so the last bits
# may differ from run to run; the first loss, before any backward pass, may not. And on uniformly random tokens,
# nothing can be learned: a loss below ln(vocab) would mean that the model sees the token it should predict. Short
# sequences, because in long ones such a leak takes hundreds of steps to be found.

# %%
def first_losses(precision, steps=10):
    trainer, source = Trainer(KIT, precision, SETTINGS.batch), batches(SETTINGS.seed, SETTINGS.batch)
    return [trainer.run(*next(source)).item() for _ in range(steps)]


for precision in filter(None, [BASE, FP8]):
    one, two = first_losses(precision), first_losses(precision)
    apart = max(abs(a - b) / a for a, b in zip(one, two))
    check(f"same seed, same losses ({precision.name})", one[0] == two[0] and apart <= (0 if DEVICE == "cpu" else 1e-2),
          f"10 steps twice: {'equal to the bit' if one == two else f'apart by at most {apart:.1e} of the loss'}")

short_s = dataclasses.replace(SETTINGS, seq=min(32, SETTINGS.seq))
trainer, generator = Trainer(KIT, BASE, SETTINGS.batch, short_s), torch.Generator().manual_seed(SETTINGS.seed)
noise = [torch.randint(SETTINGS.vocab, (SETTINGS.batch, short_s.seq + 1), generator=generator) for _ in range(100)]
losses = [trainer.run(tokens[:, :-1], tokens[:, 1:]).item() for tokens in noise]
check("random tokens teach nothing", statistics.mean(losses[-10:]) > math.log(SETTINGS.vocab) - 0.05,
      f"loss {statistics.mean(losses[-10:]):.3f} after {len(losses)} steps, ln({SETTINGS.vocab}) = {math.log(SETTINGS.vocab):.3f}")
del trainer

# %% [markdown]
# ## 8. Benchmark
#
# A ladder, from plain PyTorch upward: each row changes one thing in an earlier one. All rows run the same full step
# (forward, backward, optimizer) from the same FP32 weights on the same batch, with the same causal mask and no
# dropout. They take turns in short rounds, so that warming up and throttling affect them alike. (The slow FP32 rows,
# and rows that do not fit in memory beside the others, take turns in groups of their own.) The honest rival of TE is
# not PyTorch as it comes, but PyTorch with `torch.compile` and a CUDA graph.
#
# First the ceiling: how fast this card multiplies large matrices. A share of a measured ceiling says more than a
# share of a data sheet.

# %%
print("\n== 8. Benchmark ==")


def digits(x):
    """Three digits, or all before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def multiplication(kind, m, k, n):
    """A function that multiplies [m, k] by [k, n] in the number format `kind`, or raises where that is not possible.
    FP8 products are added up as TE does in backward, "FP8 fast" as in forward (see the variations below)."""
    dtype = {"FP32": torch.float32, "FP16": torch.float16}.get(kind, torch.bfloat16)
    a, b = torch.randn(m, k, device=DEVICE, dtype=dtype), torch.randn(k, n, device=DEVICE, dtype=dtype)
    if "FP8" not in kind:
        return lambda: a @ b
    a, b, one = a.to(E4M3), b.t().contiguous().to(E4M3).t(), torch.ones((), device=DEVICE)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=kind == "FP8 fast")


def gemm_rate(kind, m, k, n, seconds=0.2):
    """TFLOP/s of one matrix multiplication, sustained for about `seconds`; None where it does not run."""
    calls = 20 if m * k * n < 2**37 else 4
    try:
        run = burst(multiplication(kind, m, k, n), calls)
        repeats = max(3, int(seconds * 1e3 / time_ms(run, 1)))
        return 2 * m * k * n * calls / time_ms(run, repeats) / 1e9
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


SIZE = SETTINGS.gemm_size
NO_BENCHMARK = "--benchmark off" if SETTINGS.benchmark == "off" else "several processes disturb each other's times" if WORLD > 1 else ""
BENCHMARK = not NO_BENCHMARK
kinds = {p.name.split()[0] for p in RUNS} & {"FP32", "FP16", "BF16", "FP8"}
CEILING = {}  # {format: TFLOP/s}
for kind in sorted(kinds) if BENCHMARK else []:
    rates = [gemm_rate(way, SIZE, SIZE, SIZE) for way in ([kind, "FP8 fast"] if kind == "FP8" else [kind])]
    if any(rates):
        CEILING[kind] = max(filter(None, rates))
if CEILING:
    print(f"Square matrix multiplication of size {SIZE} on this machine:",
          ", ".join(f"{k} {digits(rate)} TFLOP/s" for k, rate in CEILING.items()))

# %% [markdown]
# The work in a step is counted by hand. Each weight of a matrix takes part in 6 floating-point operations per token:
# a multiplication and an addition in forward, and twice that in backward. Causal attention adds 6 T^2 d_model per
# layer and sequence, half of what a full square would.

# %%
def flops_per_step(s, rows):
    """Floating-point operations of forward and backward; the head counts, embeddings and elementwise work do not."""
    matrices = s.n_layers * (4 * s.d_model**2 + 2 * s.d_model * s.d_ff) + s.vocab * s.d_model
    return 6 * matrices * rows * s.seq + 6 * s.n_layers * rows * s.seq**2 * s.d_model


# %% [markdown]
# A `Row` is one line of the ladder. Rows that differ only in how a step is launched share one trainer, with and
# without its graph. A turn lasts about 0.6 s, but at least two steps, and its first step does not count.

# %%
@contextlib.contextmanager
def tf32(on):
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@dataclasses.dataclass
class Row:
    """One row of the ladder: what it runs, and what was measured."""

    name: str
    kit: SimpleNamespace
    precision: Precision
    compiled: str = ""
    graph: bool = False
    changes: str = ""  # the row that this one changes
    tf32: bool = False
    options: dict = dataclasses.field(default_factory=dict)  # of the Trainer
    trainer: Trainer = None
    peak_gb: float = None
    held_gb: float = None  # while it waits for its turn
    first_loss: float = None  # before any step, of the row that made the trainer
    launch: list = dataclasses.field(default_factory=list)  # ms that the CPU takes to launch a step
    times: list = dataclasses.field(default_factory=list)  # ms from one step's end to the next

    def build(self, trainers):
        """Make the trainer, or take that of a row which differs only in how it is launched. Returns why it does not work, or ""."""
        key = (self.kit.name, id(self.precision), self.compiled, *self.options)
        if DEVICE == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        if key not in trainers:
            resting = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
            trainers[key] = Trainer(self.kit, self.precision, SETTINGS.bench_batch, compiled=self.compiled, **self.options)
            trainers[key].resting = resting
            self.first_loss = trainers[key].run(*next(batches(SETTINGS.seed, SETTINGS.bench_batch))).item()
        self.trainer = trainers[key]
        reason = self.trainer.capture() if self.graph else ""
        if not reason:
            self.run(SETTINGS.bench_warmup)
            self.launch, self.times = [], []
        if DEVICE == "cuda":  # counted from before the capture: a replay allocates nothing and would seem to need nothing
            self.peak_gb = (torch.cuda.max_memory_allocated() - self.trainer.resting) / 1e9
            self.held_gb = (torch.cuda.memory_allocated() - self.trainer.resting) / 1e9
        return reason

    def run(self, steps):
        """Time some steps, about 0.6 s of them, after one that does not count."""
        captured, self.trainer.graph = self.trainer.graph, self.trainer.graph if self.graph else None  # the trainer may be shared
        try:
            with tf32(self.tf32):
                begin = time.perf_counter()
                self.trainer.run().item()
                steps = max(1, min(steps, int(0.6 / (time.perf_counter() - begin))))
                marks = [mark()]
                for i in range(steps):
                    begin = time.perf_counter()
                    self.trainer.run()
                    if i < 3:  # later launches may wait for room in the queue
                        self.launch.append(1e3 * (time.perf_counter() - begin))
                    marks.append(mark())
        finally:
            self.trainer.graph = captured
        self.times += between(marks)

    def figures(self):
        """What was measured, as it goes to results.json."""
        q1, median, q3 = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else self.times * 3
        tflops = flops_per_step(SETTINGS, SETTINGS.bench_batch) / median / 1e9
        ceiling = CEILING.get(self.precision.name.split()[0])  # the FP8 recipes are measured by plain FP8, MXFP8 and NVFP4 by nothing
        return {"row": self.name, "changes": self.changes, "kit": self.kit.name, "precision": self.precision.name, "graph": self.graph,
                "ms_median": median, "ms_iqr": q3 - q1, "steps": len(self.times), "cpu_launch_ms": statistics.median(self.launch),
                "tokens_per_s": SETTINGS.bench_batch * SETTINGS.seq / median * 1e3, "tflops": tflops,
                "share_of_gemm": tflops / ceiling if ceiling and not self.tf32 else None,
                "peak_memory_gb": self.peak_gb, "first_loss": self.first_loss}

# %% [markdown]
# `torch.compile` joins small kernels into larger ones. The PyTorch model is compiled whole; of the TE model only the
# two ends (embedding, final norm, loss), since TE's modules are compiled already. In the training above it was left
# out: on an H200, compiling took longer than it saved there.
#
# Three variations of the FP8 row follow it:
#
# - *QKV declared*: the packed tensor is handed to TE whole, as it prefers (section 4).
# - *fast accumulation*: the tensor cores of Hopper and Ada add FP8 products up with fewer bits than FP32 has. In
#   backward, TE moves the sums to FP32 registers now and then, a *split accumulator*, which takes time. A recipe can tell
#   it not to.
# - *FP8 weights*: `quantized_model_init` makes a model that keeps its matrices in FP8 alone. The optimizer holds the FP32
#   masters and casts after each step; the forward pass casts nothing.

# %%
def why_not_compile():
    """Try torch.compile on this device; return what went wrong, or ""."""
    if DEVICE != "cuda" and SETTINGS.benchmark != "full":
        return "takes longer to compile than it saves on a CPU (--benchmark full tries it)"
    try:
        torch.compile(lambda x: (x * 2).sum())(torch.ones(64, device=DEVICE))
        return ""
    except Exception as error:
        return in_a_line(error)


def fast_accumulation(precision):
    """The same precision with a recipe of its own that adds products up the fast way in backward too; None where that is fixed."""
    if not precision or precision.name not in ("FP8 delayed", "FP8 current"):
        return None
    made = make_recipe(precision.name)  # DelayedScaling does not list the next two fields, but TE's modules look for them in any recipe
    made.fp8_gemm_dgrad = made.fp8_gemm_wgrad = recipe.MMParams(use_split_accumulator=False)
    return dataclasses.replace(precision, recipe=made)


FAST = fast_accumulation(FP8)

# %%
def ladder():
    """The rows that exist on this machine, in the order in which they are printed."""
    no_compile = why_not_compile()
    ends = "" if no_compile else "ends"
    rows = [Row("PyTorch FP32", TORCH_KIT, PRECISIONS["FP32"])]
    if DEVICE == "cuda" and MACHINE.capability >= (8, 0):
        rows.append(Row("PyTorch TF32", TORCH_KIT, PRECISIONS["FP32"], changes="PyTorch FP32", tf32=True))
    plain = rows[0].name
    if BASE.name != "FP32":
        rows.append(Row(f"PyTorch {BASE.name}", TORCH_KIT, BASE, changes=rows[-1].name))
        plain = rows[-1].name
    if no_compile:
        skip("torch.compile", no_compile)
    else:
        rows.append(Row(plain + " + compile", TORCH_KIT, BASE, "all", changes=plain))
        if DEVICE == "cuda":
            rows.append(Row(plain + " + compile + graph", TORCH_KIT, BASE, "all", True, changes=plain + " + compile"))
    if USE_TE:
        usual = f"TE {BASE.name}"
        rows += [Row(usual, TE_KIT, BASE, ends, changes=plain + (" + compile" if ends else "")),
                 Row(usual + " + graph", TE_KIT, BASE, ends, True, changes=usual)]
    if FP8:
        name = f"TE {FP8.name}"
        graph = name + " + graph"
        rows += [Row(name, TE_KIT, FP8, ends, changes=usual), Row(graph, TE_KIT, FP8, ends, True, changes=name),
                 Row(graph + ", QKV declared", TE_KIT, FP8, ends, True, graph, options={"declare": True}),
                 *([Row(graph + ", fast accumulation", TE_KIT, FAST, ends, True, graph)] if FAST else []),
                 Row(graph + ", FP8 weights", TE_KIT, FP8, ends, True, graph, options={"fp8_weights": True})]
        rows += [Row(f"TE {p.name} + graph", TE_KIT, p, ends, True, graph) for p in FP8S if p is not FP8]
    return rows

# %%
def memory_is_short(group):
    """Might another row not fit beside those of the group? It may need as much as the largest, and eager rows need room to run."""
    if DEVICE != "cuda":
        return False
    torch.cuda.empty_cache()  # what a graph holds is not free, even where nothing is allocated in it
    free = torch.cuda.mem_get_info()[0]
    return free < 1e9 * (max(r.peak_gb for r in group) + max(r.peak_gb - r.held_gb for r in group))


def run_ladder(rows):
    """Build and time the rows, taking turns. When memory runs short: time those that are there, free them, go on."""
    done, group, trainers, bar = [], [], {}, progress_bar(len(rows), "benchmark")

    def drop(row, reason):
        """Say why a row is missing, and free its trainer unless another row uses it."""
        skip(f"benchmark row {row.name}", reason)
        row.trainer = None
        for key in [key for key, trainer in trainers.items() if all(trainer is not r.trainer for r in group)]:
            del trainers[key]

    def finish_group():
        for row in 5 * group:
            if row not in group:  # dropped in an earlier turn
                continue
            try:
                row.run(max(1, SETTINGS.bench_steps // 5))
            except torch.OutOfMemoryError:
                group.remove(row)
                drop(row, "not enough GPU memory")
        done.extend(row.figures() for row in group)
        for row in group:
            row.trainer = None
        group.clear()
        trainers.clear()
        gc.collect()

    for row in rows:
        if group and (memory_is_short(group) or group[-1].precision.name == "FP32" != row.precision.name and DEVICE == "cuda"):
            finish_group()  # the FP32 rows are slow, large and no rivals: they keep to themselves
        try:
            reason = row.build(trainers)
        except Exception as error:  # whatever it is, it takes out this row alone
            reason = "not enough GPU memory" if isinstance(error, torch.OutOfMemoryError) else in_a_line(error)
        if reason:
            drop(row, reason)
        else:
            group.append(row)
        bar.update()
    finish_group()
    bar.close()
    return done

# %% [markdown]
# How to read the table. *ms* is the median of a whole step, with the interquartile range beside it. *launch* is the
# time the CPU needs to launch a step: where it comes near to *ms*, the GPU waits for Python. *share* is the part of
# this card's own matrix multiplication rate (for FP8: of the fastest one with a scale per tensor). *gain* is the
# speed-up against the row that this one changes: mostly the row above, for TE from Python the PyTorch row launched
# the same way, and for everything below the FP8 row with a graph that row. *best PyTorch* is the speed-up against the
# fastest plain PyTorch row. Below 1 means slower.

# %%
def compare(new, old, equal=0.0):
    """How a time `new` compares with `old`, in words that follow the numbers. At most `equal` apart counts as equal."""
    if abs(new - old) <= equal:
        return "as fast as"
    return f"{old / new:.2f}x faster than" if new < old else f"{new / old:.2f}x slower than"


def compare_memory(new, old, equal):
    if abs(new - old) <= equal:
        return "as much memory as"
    return f"{abs(new / old - 1):.0%} {'less' if new < old else 'more'} memory than"


def print_ladder(rows):
    plain = min((r["ms_median"] for r in rows if r["kit"] == "PyTorch"), default=math.nan)
    ms = {r["row"]: r["ms_median"] for r in rows}
    cells = []
    for r in rows:
        cells.append([r["row"], f"{r['ms_median']:.2f} ({r['ms_iqr']:.2f})",
                      f"{r['cpu_launch_ms']:.2f}" if DEVICE == "cuda" else "-", f"{r['tokens_per_s']:,.0f}",
                      digits(r["tflops"]), f"{r['share_of_gemm']:.0%}" if r["share_of_gemm"] else "-",
                      f"{r['peak_memory_gb']:.2f}" if r["peak_memory_gb"] else "-",
                      f"{ms[r['changes']] / r['ms_median']:.2f}x" if r["changes"] in ms else "-", f"{plain / r['ms_median']:.2f}x"])
    print_table(["row", "ms (IQR)", "launch ms", "tokens/s", "TFLOP/s", "share", "peak GB", "gain", "best PyTorch"], cells)


LADDER = run_ladder(ladder()) if BENCHMARK else []
NAMED = {r["row"]: r for r in LADDER}
RESULTS["benchmark"], RESULTS["gemm_tflops"] = LADDER, CEILING
if LADDER:
    print(f"Full training step, {SETTINGS.bench_batch} sequences of {SETTINGS.seq} tokens, "
          f"width {SETTINGS.d_model}, {SETTINGS.n_layers} layers:")
    print_ladder(LADDER)
else:
    skip("the benchmark", NO_BENCHMARK)

# %% [markdown]
# What the numbers say, in words chosen by the numbers:

# %%
def fastest(rows, kit, precision=None):
    """The fastest row of a kit, and of a precision if one is given; None if there is none."""
    return min((r for r in rows if r["kit"] == kit and precision in (None, r["precision"])), key=lambda r: r["ms_median"], default=None)


def unsure(*rows):
    """About the 95% uncertainty of the rows' medians in ms: 1.9 IQR / sqrt(n) for normal times."""
    return max(1.9 * r["ms_iqr"] / math.sqrt(r["steps"]) for r in rows)


def against(a, b):
    """How row a compares with row b."""
    return compare(a["ms_median"], b["ms_median"], unsure(a, b))


def findings(rows, base, fp8):
    """Sentences about the ladder. `base` and `fp8` are precision names; fp8 may be None."""
    said, named = [], {r["row"]: r for r in rows}
    plain, best = fastest(rows, "PyTorch"), fastest(rows, "TE", fp8)
    for ending, how in (("", "Launched from Python"), (" + graph", "As a CUDA graph")):
        a, b = named.get(f"TE {base}{ending}"), named.get(f"TE {fp8}{ending}")
        if a and b:
            said.append(f"{how}, {fp8} is {against(b, a)} {base} in TE.")
            if b["cpu_launch_ms"] > 0.8 * b["ms_median"]:
                said[-1] += f" Python needs about as long to launch it ({b['cpu_launch_ms']:.1f} ms): the GPU waits."
    if fp8 and plain and best:
        said.append(f"The fastest {fp8} row, {best['row']}, is {against(best, plain)} the fastest plain PyTorch row, {plain['row']}.")
    eager = named.get(f"PyTorch {base}", plain)
    if plain is not eager and eager["ms_median"] - plain["ms_median"] > unsure(plain, eager):
        said.append(f"PyTorch alone gains too: {plain['row']} is {against(plain, eager)} {eager['row']}.")
    for r in rows:  # the variations of the FP8 row
        variation, usual = r["row"].removeprefix(r["changes"] + ", "), named.get(r["changes"])
        if usual and variation != r["row"]:
            memory = r["peak_memory_gb"], usual["peak_memory_gb"]
            said.append(f"With {variation}, a step is {against(r, usual)} without"
                        + (f", and takes {compare_memory(*memory, 0.1)} without." if all(memory) else "."))
    return said


for sentence in findings(LADDER, BASE.name, FP8 and FP8.name):
    print("  -", sentence)
if LADDER:
    first = [r["first_loss"] for r in LADDER if r["first_loss"]]
    if len(first) > 1:
        check("every row starts from the same loss", max(first) / min(first) < 1.002,
              f"{min(first):.5f} to {max(first):.5f}, before any step")
    check("the benchmark measured every row", all(math.isfinite(r["ms_median"]) and r["ms_median"] > 0 for r in LADDER),
          f"rows: {len(LADDER)}, each timed in 5 rounds")
    if any(r["share_of_gemm"] for r in LADDER):
        top = max((r for r in LADDER if r["share_of_gemm"]), key=lambda r: r["share_of_gemm"])
        check("no row beats the ceiling", top["share_of_gemm"] <= 1.05, f"highest share {top['share_of_gemm']:.0%} ({top['row']})")
    if any(r["row"].endswith("fast accumulation") for r in LADDER):
        split, fast = RESULTS["tour"][-1]["db"][FP8.name][1], visit("Block (ours)", [FAST])["db"][FP8.name][1]
        check("fast accumulation keeps the gradients", fast > split - 1,
              f"worst gradient of a block {fast:.1f} dB, {split:.1f} with the split accumulator")

# %% [markdown]
# ### From which width does FP8 pay?
#
# FP8 saves time in matrix multiplications and spends time on casts. Per layer, token and step, the matrix
# multiplications of a block are 72 W^2 floating-point operations (W is the width). And this is what FP8 moves on top
# of BF16, in bytes:
#
# - 1 for each number that leaves a fused norm or GELU (6 W of them): it is written in 8 bits instead of 16, but then read
#   and written once more, for the transposed copy that backward needs;
# - 4 for each number that needs a cast of its own (the output of attention, and the gradients of qkv, proj and fc2: 6 W of
#   them): 16 bits read, 8 written twice;
# - nothing for the gradient of fc1, which leaves the fused GELU gradient in 8 bits twice instead of 16 once.
#
# Together 30 W bytes, on Ada and Hopper with delayed scaling. (Blackwell multiplies without a transposed copy, and
# other recipes move other amounts: nothing is predicted there.) So FP8 pays when
#
#     72 W^2 (1 / rate16 - 1 / rate8)  >  30 W / bandwidth
#
# The number of tokens cancels out. It comes back through the CPU: launched from Python, a step is hardly faster than
# its launch, and only enough work per kernel hides that. Below, both are measured, with the rates of this card at
# each width.

# %%
def bandwidth():
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_ms(lambda: target.copy_(source)) * 1e3


TRANSPOSED = MACHINE.capability is not None and not (10, 0) <= MACHINE.capability < (12, 0)  # does FP8 backward need transposed copies?


def cross(width, rows, layers=2):
    """Step times (ms) of a small model of this width in BASE and FP8, by graph and from Python, and the prediction for the graph."""
    heads = nearest_heads(width, width // (128 if width >= 2048 else 64))
    s = dataclasses.replace(SETTINGS, d_model=width, n_heads=heads, d_ff=4 * width, n_layers=layers)
    found = {"width": width, "tokens": rows * s.seq}
    for p in (BASE, FP8):
        trainer = Trainer(TE_KIT, p, rows, s)
        trainer.run(*next(batches(s.seed, rows, s)))
        found[p.name, "eager"] = time_ms(trainer.run, 8)
        if reason := trainer.capture():
            raise Stop(reason)
        found[p.name, "graph"] = time_ms(trainer.run, 15)
    if FP8.name != "FP8 delayed" or not TRANSPOSED:
        return found
    rate16, rate8 = (gemm_rate(kind, rows * s.seq, width, 4 * width, 0.02) for kind in ("BF16", "FP8"))
    if not (rate16 and rate8):
        raise Stop("a matrix multiplication of this width does not run alone")
    saved = layers * 72 * width**2 * rows * s.seq * (1 / rate16 - 1 / rate8) / 1e9
    spent = layers * 30 * width * rows * s.seq / BANDWIDTH * 1e3
    return {**found, "predicted": found[BASE.name, "graph"] - saved + spent}

# %%
SWEEP = []
if BENCHMARK and FP8 and "FP8" in CEILING and f"TE {FP8.name} + graph" in NAMED:
    BANDWIDTH = bandwidth()
    wide = sorted({256, 512, 2048, SETTINGS.d_model, *([768, 1024, 1536, 3072, 4096] if SETTINGS.benchmark == "full" else [])})
    sizes, few = [SETTINGS.bench_batch], max(1, SETTINGS.bench_batch // 4)
    if SETTINGS.benchmark == "full" and few * SETTINGS.seq % 16 == 0:
        sizes.insert(0, few)
    plan = [(width, rows) for rows in sizes for width in wide]
    bar = progress_bar(len(plan), "widths")
    for width, rows in plan:
        try:
            SWEEP.append(cross(width, rows))
        except Exception as error:  # takes out this width alone
            skip(f"width {width}", str(error) if isinstance(error, Stop) else in_a_line(error))
        gc.collect()
        bar.update()
    bar.close()
    ratio = {how: [r[BASE.name, how] / r[FP8.name, how] for r in SWEEP] for how in ("eager", "graph")}
    print_table(["width", "tokens", f"{BASE.name} ms", f"{FP8.name} ms", "speed-up", "predicted", "speed-up from Python"],
                [[r["width"], r["tokens"], f"{r[BASE.name, 'graph']:.2f}", f"{r[FP8.name, 'graph']:.2f}", f"{g:.2f}x",
                  f"{r[BASE.name, 'graph'] / r['predicted']:.2f}x" if "predicted" in r else "-", f"{e:.2f}x"]
                 for r, g, e in zip(SWEEP, ratio["graph"], ratio["eager"])])
RESULTS["crossover"] = [{k if isinstance(k, str) else " ".join(k): v for k, v in r.items()} for r in SWEEP]

# %%
def pays_from(points):
    """(wider than, width, at most): between which measured widths the speed-up begins to stay above 1, and where if interpolated.
    None if it never does; "wider than" is None if it always does."""
    points = sorted(points)
    last_loss = max((i for i, (_, gain) in enumerate(points) if gain <= 1), default=-1)
    if last_loss == len(points) - 1:
        return None
    if last_loss < 0:
        return None, points[0][0], points[0][0]
    (w0, g0), (w1, g1) = points[last_loss], points[last_loss + 1]
    return w0, w0 + (w1 - w0) * (1 - g0) / (g1 - g0), w1


def answer(title, points):
    found = pays_from(points)
    if found is None:
        return f"{title}: FP8 does not pay at any width up to {max(points)[0]}"
    low, width, high = found
    return f"{title}: FP8 pays " + (f"from width {high} at the latest" if low is None else
                                    f"from a width between {low} and {high} (about {width:.0f})")


for tokens in sorted({r["tokens"] for r in SWEEP}):
    here = [r for r in SWEEP if r["tokens"] == tokens]
    print(f"On this {MACHINE.gpu}, at {tokens:,} tokens a step:")
    for title, how in (("  as a CUDA graph", "graph"), ("  launched from Python, by this CPU", "eager")):
        print(answer(title, [(r["width"], r[BASE.name, how] / r[FP8.name, how]) for r in here]))
    if predicted := [(r["width"], r[BASE.name, "graph"] / r["predicted"]) for r in here if "predicted" in r]:
        print(answer("  predicted for the graph", predicted))
if SWEEP and f"TE {BASE.name} + graph" in NAMED:
    print(f"At your size (width {SETTINGS.d_model}, {SETTINGS.n_layers} layers) FP8 is "
          f"{against(NAMED[f'TE {FP8.name} + graph'], NAMED[f'TE {BASE.name} + graph'])} {BASE.name}, both as a graph.")
elif BENCHMARK:
    skip("the width from which FP8 pays", "FP8 does not run here" if not FP8 else "no CUDA graph or FP8 multiplication here")

# %% [markdown]
# ### Where the memory goes
#
# FP8 is often bought for memory, and often disappoints: weights stay in FP32, and AdamW keeps two more numbers for
# each. The ledger predicts what must lie in memory between steps: 4 bytes for each master weight, 8 for AdamW, 4 for
# each gradient that TE writes into a buffer of its own, 2 for the 16-bit vectors. What a step keeps for backward is
# measured. Part of it is known: the copies of the matrices that multiply, 2 bytes per weight in BF16 (one copy) as in
# FP8 (two, one of them transposed; Blackwell needs only one). The rest are activations.

# %%
def ledger(precision):
    """Bytes of one trainer: predicted and measured between steps, kept for backward, at the peak of a step launched from Python."""
    gc.collect()
    resting = torch.cuda.memory_allocated()
    trainer = Trainer(KIT, precision, SETTINGS.bench_batch)
    trainer.run(*next(batches(SETTINGS.seed, SETTINGS.bench_batch)))
    trainer.step()
    trainer.optimizer.clear()
    o, count = trainer.optimizer, lambda tensors: sum(t.numel() for t in tensors)
    predicted = {"master weights": 4 * count(o.weights), "AdamW": 8 * count(o.weights),
                 "gradient buffers": 4 * count([*o.direct, *o.masters]),
                 "16-bit vectors": 2 * count(o.copies), "batch": 16 * trainer.tokens.numel()}
    between_steps = torch.cuda.memory_allocated() - resting
    torch.cuda.reset_peak_memory_stats()
    with precision.context():
        loss = trainer.loss_function(trainer.tokens, trainer.targets)
    kept = torch.cuda.memory_allocated() - resting - between_steps
    del loss
    trainer.step()
    peak = torch.cuda.max_memory_allocated() - resting
    copies = (2 if precision is BASE or TRANSPOSED else 1) * sum(p.numel() for p in trainer.model.blocks.parameters() if p.dim() > 1)
    return {"precision": precision.name, **predicted, "predicted": sum(predicted.values()), "between steps": between_steps,
            "copies of matrices": copies, "activations": kept - copies, "kept for backward": kept, "peak": peak}


RESULTS["memory"] = [ledger(p) for p in [BASE, *([FP8] if FP8 else [])]] if DEVICE == "cuda" else []
if RESULTS["memory"]:
    print_table(["MB", *(r["precision"] for r in RESULTS["memory"])],
                [[item, *(f"{r[item] / 1e6:,.1f}" for r in RESULTS["memory"])] for item in RESULTS["memory"][0] if item != "precision"])
    for r in RESULTS["memory"]:
        check(f"the memory ledger adds up ({r['precision']})", abs(r["predicted"] / r["between steps"] - 1) < 0.1,
              f"{r['predicted'] / 1e9:.3f} GB predicted between steps, {r['between steps'] / 1e9:.3f} measured")
else:
    skip("the memory ledger", "PyTorch counts memory on a GPU only")
if len(RESULTS["memory"]) == 2:
    a, b = RESULTS["memory"]
    print(f"At its peak, {b['precision']} takes {compare_memory(b['peak'], a['peak'], 0.005 * a['peak'])} {a['precision']}. "
          "The FP32 state between steps is the same; "
          f"the activations kept for backward are {b['activations'] / 1e6:,.0f} instead of {a['activations'] / 1e6:,.0f} MB.")

# %% [markdown]
# ## 9. The state behind FP8
#
# Delayed scaling keeps, for each tensor of each matrix multiplication, the amax of the last steps and the scale that
# follows from their maximum. Here is that state for the first block, as training left it. One GEMM has three tensors in
# forward (input, weight, output) and two in backward (gradient of the output, gradient of the input). Outputs and input
# gradients leave the GEMM in 16 bits, so their columns stay at scale 1 and are not shown.
#
# Reading a history has two traps. Row 0 is the staging row, zero after each update; the newest value is in the *last*
# row. And the update that sets the scale also drops the oldest value, so the maximum of what is left can be smaller
# than the one the scale came from. To see the whole window, we copy the history, take one more step, and add the new
# last row.

# %%
print("\n== 9. The state behind FP8 ==")
GEMMS = {"qkv": ["qkv"], "proj": ["proj"], "mlp": ["fc1", "fc2"]}


def watch_a_step(trainer):
    """[(module, direction, scale [n], window [len, n])] of block 0 after one more step: all amax the new scales were made of."""
    states = list(fp8_states(trainer.model.blocks[0]))
    before = [state.amax_history.clone() for _, _, state in states]
    with trainer.untouched():
        trainer.run(*next(batches(SETTINGS.seed + 98, SETTINGS.batch)))
    return [(name, direction, state.scale.clone(), torch.cat([history[1:], state.amax_history[-1:]]))
            for (name, direction, state), history in zip(states, before)]


def state_rows(states):
    """[{gemm, role, layout, amax, window, scale, expected}] of the used columns. A GEMM has 3 columns forward and 2 backward."""
    rows = []
    for module, direction, scale, history in states:
        if module not in GEMMS:  # attention has columns too, unused unless it runs in FP8
            continue
        roles, largest = (("input", "weight"), 448.0) if direction == "forward" else (("grad_output",), 57344.0)
        for i, gemm in enumerate(GEMMS[module]):
            for j, role in enumerate(roles):
                column = i * (3 if direction == "forward" else 2) + j
                window = history[:, column].max().item()
                rows.append({"gemm": gemm, "role": role, "layout": "E4M3" if direction == "forward" else "E5M2",
                             "amax": history[-1, column].item(),
                             "window": window, "scale": scale[column].item(), "expected": largest / window if window > 0 else 1.0})
    return rows


RESULTS["fp8_state"] = state_rows(watch_a_step(TRAINED))
if RESULTS["fp8_state"]:
    print_table(["GEMM", "tensor", "layout", "newest amax", f"amax of {SETTINGS.amax_history} steps", "scale", "fp8_max / amax"],
                [[r["gemm"], r["role"],
                  r["layout"]] + [f"{r[k]:.4g}" for k in ("amax", "window", "scale", "expected")] for r in RESULTS["fp8_state"]])
    off = max(abs(r["scale"] / r["expected"] - 1) for r in RESULTS["fp8_state"])
    check("every scale is fp8_max / amax", len(RESULTS["fp8_state"]) == 12 and off < 1e-5,
          f"{len(RESULTS['fp8_state'])} tensors, largest deviation {off:.1e}")
    check("every tensor was seen", all(r["window"] >= r["amax"] > 0 for r in RESULTS["fp8_state"]),
          f"smallest newest amax {min(r['amax'] for r in RESULTS['fp8_state']):.2e}")
elif FP8:
    skip("amax histories", f"{FP8.name} computes each scale from the tensor it casts and keeps no history; --recipe delayed shows one")
else:
    skip("the FP8 state", PRECISIONS["FP8 delayed"].reason)

# %% [markdown]
# Gradients are far smaller than activations, and shrink as the loss falls. Their scales follow. That is why no loss
# scaling is needed in FP8.

# %%
def scale_lines():
    """{label: [(step, scale)]} of the recorded training, for the used columns of block 0."""
    lines = {}
    for step, states in TIMELINE:
        for r in state_rows([(n, d, scale, torch.ones(1, len(scale))) for n, d, scale in states]):
            lines.setdefault(f"{r['gemm']} {r['role']}", []).append((step, r["scale"]))
    return lines


RESULTS["fp8_timeline"] = scale_lines()
if RESULTS["fp8_timeline"]:
    print_table(["scale of", *(f"step {step}" for step, _ in TIMELINE[:: max(1, len(TIMELINE) // 5)])],
                [[label, *(f"{scale:.4g}" for _, scale in line[:: max(1, len(line) // 5)])] for label,
                 line in RESULTS["fp8_timeline"].items()])

# %% [markdown]
# ## 10. Greedy generation
#
# A prompt of two tokens already determines the rest, so every continuation can be checked. The generator works on one
# buffer of the full length: right padding is harmless under a causal mask as long as we read the logits of the last
# real position. (With current scaling it may change the amax, and so the rounding.) Rows are padded too, so that one
# prompt of any length is legal in FP8.

# %%
print("\n== 10. Greedy generation ==")


def generate(model, precision, prompts, n_new):
    """Greedy continuation: prompts [B, P] -> [B, P + n_new]. Leaves no trace in the model."""
    tokens = torch.zeros(len(prompts), prompts.shape[1] + n_new, dtype=torch.long, device=DEVICE)
    tokens[:, : prompts.shape[1]] = prompts
    with evaluation(model):
        done = []
        for rows, piece in chunks(tokens):
            piece = piece.clone()
            for t in range(prompts.shape[1], piece.shape[1]):
                with precision.context():
                    logits = model.logits(model.trunk(piece)[:, t - 1])
                piece[:, t] = logits.argmax(-1)
            done.append(piece[:rows])
    return torch.cat(done)


GENERATE_IN = FP8 or BASE
examples = EVERY[[i % len(EVERY) for i in (5, 100, 300)], : SETTINGS.prompt].to(DEVICE)
for row in generate(TRAINED.model, GENERATE_IN, examples, SETTINGS.gen).tolist():
    print("  prompt", *row[: SETTINGS.prompt], "->", *row[SETTINGS.prompt:], "| strides",
          sorted({(b - a) % SETTINGS.vocab for a, b in zip(row, row[1:])}))

# %% [markdown]
# Now all prompts there are, at three lengths: the shortest that shows the stride, yours, and one that ends at the last
# position the model knows. Prompts are continued in large batches; a loop over single prompts is timed beside it.

# %%
def exact_match(length, n_new):
    """(share of all prompts of this length that are continued exactly, tokens/s)."""
    begin = time.perf_counter()
    found = generate(TRAINED.model, GENERATE_IN, EVERY[:, :length].to(DEVICE), n_new).cpu()
    return (found == EVERY[:, : length + n_new]).all(1).float().mean().item(), len(EVERY) * n_new / (time.perf_counter() - begin)


before = [(s.scale.clone(), s.amax_history.clone()) for _, _, s in fp8_states(TRAINED.model)], TRAINED.model.training
RESULTS["generation"] = {"prompts": len(EVERY), "precision": GENERATE_IN.name, "by_length": {}}
for length, n_new in ((2, SETTINGS.gen), (SETTINGS.prompt, SETTINGS.gen), (SETTINGS.seq - 4, 4)):
    rate, speed = exact_match(length, n_new)
    RESULTS["generation"]["by_length"][length] = rate
    if length == SETTINGS.prompt:
        RESULTS["generation"].update(exact_match=rate, tokens_per_s=speed)
    check(f"all {len(EVERY)} prompts of length {length} are continued exactly", rate == 1,
          f"{rate:.1%} exact, {n_new} new tokens each, {speed:,.0f} tokens/s")

# %% [markdown]
# Two more checks. Padding must not change what is generated: the reference is the PyTorch twin with the same weights,
# one unpadded prompt at a time, odd lengths included. Its speed is measured too, as the plain loop to compare with.
# (Neither keeps the keys and values of earlier tokens, so neither is as fast as an inference library.) And generation
# must leave no trace in the training state.

# %%
@torch.inference_mode()
def unpadded(model, precision, prompt, n_new):
    """The plain loop: one prompt [P], no padding."""
    tokens = prompt[None].to(DEVICE)
    for _ in range(n_new):
        with precision.context():
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0]


twin = load_weights(MiniGPT(TORCH_KIT, SETTINGS, BASE.dtype).to(DEVICE), weights_of(TRAINED.model))
same = [torch.equal(generate(TRAINED.model, GENERATE_IN, EVERY[i - 1:i + 1, :length].to(DEVICE), 9)[1],
                    unpadded(twin, BASE, EVERY[i, :length], 9))
        for i, length in ((1, 2), (20, 3), (333 % len(EVERY), 7), (575 % len(EVERY), min(13, SETTINGS.seq - 9)))]
check("padded generation equals the unpadded reference", all(same),
      f"{sum(same)} of {len(same)} prompts, {GENERATE_IN.name} padded against {BASE.name} unpadded")
begin = time.perf_counter()
for prompt in EVERY[:3, : SETTINGS.prompt]:
    unpadded(twin, BASE, prompt, SETTINGS.gen).cpu()
RESULTS["generation"]["plain_tokens_per_s"] = 3 * SETTINGS.gen / (time.perf_counter() - begin)
print("  in batches: {tokens_per_s:,.0f} tokens/s; the plain loop, one prompt at a time: {plain_tokens_per_s:,.0f}. "
      "The batch does that, not FP8.".format(**RESULTS["generation"]))
after = [(s.scale, s.amax_history) for _, _, s in fp8_states(TRAINED.model)], TRAINED.model.training
check("generation leaves no trace",
      before[1] and after[1] and all(torch.equal(x, y) for a, b in zip(before[0], after[0], strict=True) for x, y in zip(a, b)),
      f"training mode kept; {len(after[0])} FP8 states unchanged" if after[0] else "training mode kept; this precision has no FP8 state")

# %% [markdown]
# ## 11. Report

# %%
print("\n== 11. Report ==")


def draw():
    """Save a figure of the loss curves, the benchmark, the FP8 scales and the widths; return its path."""
    import matplotlib
    if IS_SCRIPT:
        matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt
    figure, panels = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    loss, bench, scales, widths = panels.flat
    for name, curve in CURVES.items():
        loss.plot(range(1, len(curve) + 1), curve, label=name, lw=1)
    loss.axhline(FLOOR, color="black", ls=":", label=f"floor ln({STRIDES})/{SETTINGS.seq}")
    loss.set(title="Training loss", xlabel="step", ylabel="nats per token", yscale="log")
    loss.legend()
    bench.barh([r["row"] for r in LADDER], [r["ms_median"] for r in LADDER], xerr=[min(r["ms_iqr"] / 2, r["ms_median"]) for r in LADDER],
               color=["tab:green" if "FP8" in r["row"] else "tab:blue" if r["kit"] == "TE" else "tab:gray" for r in LADDER])
    bench.invert_yaxis()
    bench.tick_params(axis="y", labelsize=8)
    bench.set(title="Full training step", xlabel="ms (median, bars: IQR)")
    for label, line in RESULTS["fp8_timeline"].items():
        scales.plot(*zip(*line), label=label, lw=1, ls="--" if "grad" in label else "-")
    if RESULTS["fp8_timeline"]:
        scales.set(title="FP8 scales of block 0", xlabel="step", yscale="log")
        scales.legend(fontsize=7, ncol=2)
    for how, style in (("graph", "-o"), ("eager", "--s")):
        points = [(r["width"], r[BASE.name, how] / r[FP8.name, how]) for r in SWEEP if r["tokens"] == SWEEP[-1]["tokens"]]
        if points:
            widths.plot(*zip(*points), style, label={"graph": "CUDA graph", "eager": "launched from Python"}[how])
    if SWEEP:
        widths.axhline(1, color="black", lw=1)
        widths.set(title="FP8 speed-up by width", xlabel="d_model")
        widths.legend()
    for axes, there, what in ((bench, LADDER, "benchmark: switched off"), (widths, SWEEP, "FP8 speed-up by width: not measured here"),
                              (scales, RESULTS["fp8_timeline"],
                               f"FP8 scales: {FP8.name} keeps no history" if FP8 else "FP8 scales: no FP8 here")):
        if not there:
            axes.clear()
            axes.axis("off")
            axes.text(0.5, 0.5, what, ha="center")
    figure.savefig(OUT / "figure.png", dpi=110)
    if IS_SCRIPT:
        plt.close(figure)
    return OUT / "figure.png"


FIGURE = None
try:
    FIGURE = draw() if RANK == 0 else None
except ImportError:
    skip("the figure", "matplotlib is not installed (pip install matplotlib)")
except Exception as error:  # a picture is not worth losing the report
    skip("the figure", in_a_line(error))

# %%
write_results()
failed = [c for c in RESULTS["checks"] if not c["passed"]]
print("Checks:")
for c in RESULTS["checks"]:
    print(f"  {'pass' if c['passed'] else 'FAIL'} | {c['name']} | {c['detail']}")
if SKIPPED:
    print("Not shown on this machine:")
    for line in SKIPPED:
        print("  -", line)
print("Try next:")
NEXT = {"--n-layers 4": "a deeper model", "--benchmark full": "torch.compile too",
        "--seed 7": "other weights and batches"} if DEVICE == "cpu" else {
    f"--d-model {2048 if MACHINE.memory_gb > 40 else 1024} --n-layers 12": "a model that fills the GPU",
    "--recipe current": "FP8 without a history",
    "--amax-history 1024": "a longer memory", "--benchmark full": "more widths, and fewer tokens"}
for command, why in NEXT.items():
    if not any(flag[2:].replace("-", "_") in GIVEN for flag in command.split()[::2]):
        print(f"  python te_tutorial.py {command:30s}  {why}")
print(f"Written: {OUT / 'results.json'}{f', {FIGURE}' if FIGURE else ''}")
print(f"{len(RESULTS['checks']) - len(failed)} of {len(RESULTS['checks'])} checks passed"
      + (f"; FAILED: {', '.join(c['name'] for c in failed)}" if failed else ""))
if WORLD > 1:
    torch.distributed.barrier()  # a process that ends with 1 makes torchrun kill the others
    torch.distributed.destroy_process_group()
if failed and IS_SCRIPT:
    sys.exit(1)
