"""A stand-in for NVIDIA Transformer Engine 2.20.2, for tests on machines without a GPU.

Pure PyTorch, the published names and signatures, and the real rules: the same exceptions where
the real package raises, the same FP8 state where it keeps some. Speed and memory are not imitated.
It runs where torch.cuda.is_available(); tests/standin/gpu pretends that.

    STANDIN_TE_IMPORT_ERROR  a key of IMPORT_ERRORS below, or "SomeError: any text": the import fails
    STANDIN_TE_UNAVAILABLE   "fp8,fp8_block=the reason": is_*_available() says no
    STANDIN_TE_FAIL          "Float8BlockScaling.backward,DelayedScaling.forward": GEMMs of that
                             recipe raise there ("HighPrecision" stands for no recipe)
    STANDIN_TE_CUBLASLT      cuBLASLt's version, 130000 by default; Ada's FP8 wants 120103
"""
from . import common

common.fail_import_in("core")
try:
    from . import pytorch
except ImportError:
    pass  # as in the real package: only importing transformer_engine.pytorch shows the error
except FileNotFoundError:
    import warnings

    warnings.warn("Detected a PyTorch installation but could not find the shared object file for the "
                  "Transformer Engine PyTorch extension library.", RuntimeWarning)

__version__ = "2.20.2"
