"""Ways in which importing Transformer Engine is known to fail."""
import builtins
import os
import sys

IMPORT_ERRORS = {  # key: (where it happens, exception)
    "empty metapackage": ("core", RuntimeError(
        "Found empty `transformer-engine` meta package installed. Install `transformer-engine` with "
        "framework extensions via'pip3 install --no-build-isolation "
        "transformer-engine[pytorch,jax]==VERSION'")),
    "no cudnn": ("core", RuntimeError("cudnn shared object not found.")),
    "old cudnn": ("torch", RuntimeError(
        "Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.5.1.")),
    "no extension": ("torch", FileNotFoundError(
        "Could not find shared object file for Transformer Engine torch lib.")),
    "version mismatch": ("torch", AssertionError(
        "Transformer Engine package version mismatch. Found transformer_engine_torch v2.19.0, "
        "transformer-engine v2.20.2, and transformer-engine-cu13 v2.20.2.")),
    "libcublas": ("core", OSError(
        "libcublas.so.13: cannot open shared object file: No such file or directory")),
    "libcudnn": ("torch", ImportError(
        "libcudnn_graph.so.9: cannot open shared object file: No such file or directory")),
    "undefined symbol": ("torch", ImportError(
        "/site-packages/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs")),
    "StopIteration": ("core", StopIteration()),
}


def fail_import_in(place):
    if place == "core" and "torch" not in sys.modules:  # torch is what loads pip's NCCL
        raise OSError("libnccl.so.2: cannot open shared object file: No such file or directory")
    wanted = os.environ.get("STANDIN_TE_IMPORT_ERROR")
    if not wanted:
        return
    if wanted in IMPORT_ERRORS:
        where, error = IMPORT_ERRORS[wanted]
    else:
        kind, _, text = wanted.partition(": ")
        where, error = "torch", getattr(builtins, kind)(text)
    if where == place:
        raise error
