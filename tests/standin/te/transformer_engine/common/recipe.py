"""Quantization recipes. They behave as pydantic dataclasses do in the real package: an unknown
keyword vanishes without a word, a value of the wrong kind is a ValueError."""
import dataclasses
import enum
import functools
import inspect
import os
from typing import Callable, NamedTuple, Optional


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclasses.dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


class ValidationError(ValueError):
    """Stands for pydantic_core.ValidationError."""


def _validated(name, kind, value):
    if kind is Format:
        with_value = [f for f in Format if value in (f, f.value)]
        if with_value:
            return with_value[0]
    elif kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        known = words.get(str(value).lower())
        if known is not None:
            return known
    elif kind is int:
        try:
            if int(value) == float(value):
                return int(value)
        except (TypeError, ValueError):
            pass
    elif kind == "amax_compute_algo":
        if value in ("max", "most_recent") or callable(value):
            return value
    else:
        return value
    raise ValidationError(f"1 validation error\n{name}\n  Input should be a valid "
                          f"{getattr(kind, '__name__', kind)}, got {value!r}")


def _recipe(cls):
    cls = dataclasses.dataclass(repr=False)(cls)
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    plain_init = cls.__init__

    @functools.wraps(plain_init)
    def __init__(self, *args, **kwargs):
        if len(args) > len(fields):
            raise ValidationError("Unexpected positional argument")
        values = dict(zip(fields, args)) | {k: v for k, v in kwargs.items() if k in fields}
        values = {k: _validated(k, fields[k], v) for k, v in values.items()}
        try:
            plain_init(self, **values)
        except AssertionError as error:
            raise ValidationError(f"1 validation error\n  Assertion failed, {error}") from None

    __init__.__signature__ = inspect.signature(plain_init)
    cls.__init__ = __init__
    return cls


class Recipe:
    def __repr__(self):
        values = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
        return f"recipe_type={type(self).__name__}, {values}"

    def _refuse_pure_e5m2(self):
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."

    @classmethod
    def delayed(cls):
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls):
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls):
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls):
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls):
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls):
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls):
        return False


@_recipe
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: "amax_compute_algo" = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = os.getenv("NVTE_BACKWARD_OVERRIDE", None)

    def __post_init__(self):
        self._refuse_pure_e5m2()
        assert self.backward_override is None, "Delayed scaling only supports backward_override=None."


@_recipe
class Float8CurrentScaling(Recipe):
    use_power_2_scales: bool = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    def __post_init__(self):
        self._refuse_pure_e5m2()
        self.fp8_dpa = self.fp8_mha = False


@_recipe
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self):
        self._refuse_pure_e5m2()


@_recipe
class Float8BlockScaling(Recipe):
    use_f32_scales: bool = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self):
        for name in ("x", "w", "grad"):
            assert getattr(self, f"{name}_block_scaling_dim") in (1, 2), (
                f"Only 1D or 2D blocks supported for {name}")
        two_d = [self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim]
        assert two_d.count(2) <= 1, "2D by 2D block gemm not supported."
        self._refuse_pure_e5m2()
        self.fp8_dpa = self.fp8_mha = False


@_recipe
class NVFP4BlockScaling(Recipe):
    disable_rht: bool = os.getenv("NVTE_NVFP4_DISABLE_RHT", "0") == "1"
    disable_stochastic_rounding: bool = os.getenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "0") == "1"
    disable_2d_quantization: bool = os.getenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "0") == "1"

    def __post_init__(self):
        self.fp4_format, self.fp8_format = Format.E2M1, Format.E4M3
        self.fp8_dpa = self.fp8_mha = False
