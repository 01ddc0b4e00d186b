import os

import torch


def unsupported(**arguments):
    """The stand-in has the real parameter, but not what it switches on: {name: (value, default)}."""
    for name, (value, default) in arguments.items():
        if value != default:
            raise NotImplementedError(f"stand-in: {name}={value!r} is not imitated")


def need_cuda():
    if not torch.cuda.is_available():
        raise RuntimeError("Found no NVIDIA driver on your system.")


def get_device_compute_capability():
    need_cuda()
    return tuple(torch.cuda.get_device_capability())


def is_bf16_available(return_reason=False):
    available = get_device_compute_capability()[0] >= 8
    reason = "" if available else "BF16 support requires a GPU with compute capability 8.0 or higher."
    return (available, reason) if return_reason else available


def get_cudnn_version():
    version = torch.backends.cudnn.version()
    return version // 10000, version % 10000 // 100, version % 100


def assert_dim_for_fp8_exec(*tensors):
    for tensor in tensors:
        rows, last = tensor.shape[:-1].numel(), tensor.shape[-1]
        if rows % 8 != 0 or last % 16 != 0:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible"
                f" by 8 and the last dimension to be divisible by 16, but got tensor with "
                f"dims={list(tensor.shape)} (product of leading dims = {rows}, last dim = {last})")


def fail_if_told(recipe, phase):
    name = type(recipe).__name__ if recipe is not None else "HighPrecision"
    if f"{name}.{phase}" in os.environ.get("STANDIN_TE_FAIL", "").split(","):
        raise RuntimeError("/TransformerEngine/transformer_engine/common/gemm/cublaslt_gemm.cu:734 in "
                           "function cublas_gemm: cuBLAS Error: the functionality is not supported")
