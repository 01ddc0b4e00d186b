"""Quantizers, which cast to FP8 (or FP4) and back, and parameters kept in FP8."""
import torch

E2M1_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp8_max(dtype):
    return torch.finfo(dtype).max


def through_fp8(x, scale, dtype):
    """x as FP8 sees it: scaled, saturated, rounded, scaled back."""
    largest = fp8_max(dtype)
    return (x.float() * scale).clamp(-largest, largest).to(dtype).float() * (1.0 / scale)


def scale_for(amax, largest, power_of_2=False):
    scale = largest / amax
    scale = torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


class Quantizer:
    """Called with a matrix [rows, columns], returns it twice: as quantized along the rows' direction
    (for forward and data gradients) and along the columns' (for the transposed operand)."""


class Float8Quantizer(Quantizer):
    """Delayed scaling: the scale is given, the amax is recorded."""

    def __init__(self, scale, amax, dtype):
        self.scale, self.amax, self.dtype = scale, amax, dtype

    def __call__(self, x):
        self.amax.copy_(torch.maximum(self.amax, x.detach().abs().amax().float().reshape(1)))
        quantized = through_fp8(x, self.scale.clone(), self.dtype)
        return quantized, quantized


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(self, dtype, power_of_2):
        self.dtype, self.power_of_2 = dtype, power_of_2

    def __call__(self, x):
        amax = x.detach().abs().amax().float()
        quantized = through_fp8(x, scale_for(amax, fp8_max(self.dtype), self.power_of_2), self.dtype)
        return quantized, quantized


class BlockQuantizer(Quantizer):
    """One scale for each block of values. cast(blocks, amax) rounds blocks [.., h, .., w]."""

    def __init__(self, row_block, column_block, cast, multiple=1, name=""):
        self.blocks, self.cast, self.multiple, self.name = (row_block, column_block), cast, multiple, name

    def __call__(self, x):
        rows, columns = x.shape
        if rows % self.multiple or columns % self.multiple:
            raise RuntimeError(f"Assertion failed: {self.name} requires tensor dims that are divisible by "
                               f"{self.multiple} (got shape=({rows}, {columns}))")
        return tuple(self.in_blocks(x.detach().float(), *block) for block in self.blocks)

    def in_blocks(self, x, height, width):
        rows, columns = x.shape
        padded = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        return self.cast(blocks, amax).reshape(padded.shape)[:rows, :columns]


def cast_fp8_blocks(dtype, power_of_2=True):
    return lambda blocks, amax: through_fp8(blocks, scale_for(amax, fp8_max(dtype), power_of_2), dtype)


def cast_fp4_blocks(blocks, amax):
    """NVFP4: an E4M3 scale per block, itself scaled by one number for the whole tensor."""
    tensor_scale = scale_for(amax.amax(), 6.0 * 448.0)
    block_scale = through_fp8(amax / 6.0, tensor_scale, torch.float8_e4m3fn)
    scaled = torch.where(block_scale > 0, blocks / block_scale, torch.zeros_like(blocks))
    middles = (E2M1_GRID[1:] + E2M1_GRID[:-1]) / 2
    return E2M1_GRID[torch.bucketize(scaled.abs().contiguous(), middles)] * scaled.sign() * block_scale


class QuantizedTensor(torch.nn.Parameter):
    """Base of parameters made under quantized_model_init. Unlike the real ones they are stored in high
    precision, holding values that the format can represent."""

    def dequantize(self, *, dtype=None):
        return self.detach().clone().to(dtype or self.dtype)


class Float8Tensor(QuantizedTensor):
    @torch.no_grad()
    def quantize_(self, tensor, *, noop_flag=None):
        """Take new values, cast with the scale of the moment; the amax is recorded."""
        self.copy_(self._quantizer(tensor.detach())[0])
        return self
