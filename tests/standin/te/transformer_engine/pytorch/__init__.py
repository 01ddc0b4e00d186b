"""Public names of transformer_engine.pytorch that the tutorial or its tests may meet."""
import torch

from ..common import fail_import_in

fail_import_in("torch")

from . import optimizers
from .attention import DotProductAttention, MultiheadAttention
from .module import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from .quantization import (autocast, fp8_autocast, fp8_model_init, get_default_recipe,
                           is_fp8_available, is_fp8_block_scaling_available, is_mxfp8_available,
                           is_nvfp4_available, quantized_model_init)
from .quantized_tensor import Float8Tensor, QuantizedTensor
from .transformer import TransformerLayer
from .utils import get_cudnn_version, get_device_compute_capability, is_bf16_available
