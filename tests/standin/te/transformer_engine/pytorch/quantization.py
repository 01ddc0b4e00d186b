"""FP8 state: autocast, recipes' state, and the update of delayed scaling."""
import contextlib
import dataclasses
import os
import warnings

import torch

from ..common.recipe import (DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format,
                             MXFP8BlockScaling, NVFP4BlockScaling)
from .quantized_tensor import (BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer,
                               cast_fp4_blocks, cast_fp8_blocks, fp8_max, scale_for)
from .utils import get_device_compute_capability

# ---- What this GPU can do -------------------------------------------------------------------------


def _forced_unavailable(name):
    for entry in filter(None, os.environ.get("STANDIN_TE_UNAVAILABLE", "").split(",")):
        forced, _, reason = entry.partition("=")
        if forced == name:
            return reason or "Switched off by STANDIN_TE_UNAVAILABLE."


def _support(name, check):
    capability = get_device_compute_capability()
    reason = _forced_unavailable(name)
    if reason is None:
        reason = check(capability)
    return reason == "", reason


def _check_fp8(capability):
    if capability >= (9, 0):
        return ""
    if capability < (8, 9):
        return "Device compute capability 8.9 or higher required for FP8 execution."
    if int(os.environ.get("STANDIN_TE_CUBLASLT", "130000")) < 120103:
        return "CublasLt version 12.1.3.x or higher required for FP8 execution on Ada."
    return "" if float(torch.version.cuda) >= 12.1 else (
        "Cuda version 12.1 or higher required for FP8 execution on Ada.")


def _check_mxfp8(capability):
    if capability >= (12, 0):
        return "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
    return "" if capability >= (10, 0) else (
        "Device compute capability 10.0 or higher required for MXFP8 execution.")


def _check_nvfp4(capability):
    return "" if capability >= (10, 0) else (
        "Device compute capability 10.0 or higher required for NVFP4 execution.")


def _check_fp8_block(capability):
    return "" if capability >= (9, 0) and float(torch.version.cuda) >= 12.9 else (
        "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9.")


def check_fp8_support():
    return _support("fp8", _check_fp8)


def check_mxfp8_support():
    return _support("mxfp8", _check_mxfp8)


def check_nvfp4_support():
    return _support("nvfp4", _check_nvfp4)


def check_fp8_block_scaling_support():
    return _support("fp8_block", _check_fp8_block)


def is_fp8_available(return_reason=False):
    return check_fp8_support() if return_reason else check_fp8_support()[0]


def is_mxfp8_available(return_reason=False):
    return check_mxfp8_support() if return_reason else check_mxfp8_support()[0]


def is_fp8_block_scaling_available(return_reason=False):
    return check_fp8_block_scaling_support() if return_reason else check_fp8_block_scaling_support()[0]


def is_nvfp4_available(return_reason=False):
    return check_nvfp4_support() if return_reason else check_nvfp4_support()[0]


def get_default_recipe():
    if check_mxfp8_support()[0]:
        return MXFP8BlockScaling()
    if get_device_compute_capability() >= (12, 0):
        return Float8CurrentScaling()
    return DelayedScaling()


def check_recipe_support(recipe):
    """Notice what is missing here, as in the real package: NVFP4."""
    available, reason = True, ""
    if isinstance(recipe, (DelayedScaling, Float8CurrentScaling)):
        available, reason = check_fp8_support()
    elif isinstance(recipe, Float8BlockScaling):
        available, reason = check_fp8_block_scaling_support()
    elif isinstance(recipe, MXFP8BlockScaling):
        available, reason = check_mxfp8_support()
    if not available:
        raise RuntimeError(reason)


# ---- State of one module and direction -------------------------------------------------------------


class RecipeState:
    def __init__(self, recipe, mode, num_quantizers):
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        hybrid_gradient = recipe.fp8_format == Format.HYBRID and mode == "backward"
        self.dtype = torch.float8_e5m2 if hybrid_gradient else torch.float8_e4m3fn
        if recipe.delayed():
            with torch.inference_mode(False):  # to be updated in training, wherever they were made
                self.scale = torch.ones(num_quantizers, device="cuda")
                self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, device="cuda")

    def make_quantizers(self):
        return [self._make(i, weight=self.mode == "forward" and i % 3 == 1)
                for i in range(self.num_quantizers)]

    def _make(self, i, weight):
        recipe = self.recipe
        if recipe.delayed():
            with torch.inference_mode(False):
                return Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape(1), self.dtype)
        if recipe.float8_current_scaling():
            return Float8CurrentScalingQuantizer(self.dtype, recipe.use_power_2_scales)
        if recipe.mxfp8():
            return BlockQuantizer((1, 32), (32, 1), cast_fp8_blocks(self.dtype), 32, "MXFP8")
        if recipe.nvfp4():
            two_d = weight and not recipe.disable_2d_quantization
            row, column = ((16, 16), (16, 16)) if two_d else ((1, 16), (16, 1))
            return BlockQuantizer(row, column, cast_fp4_blocks, 16, "NVFP4")
        two_d = 2 == (recipe.w_block_scaling_dim if weight else recipe.grad_block_scaling_dim
                      if self.mode == "backward" else recipe.x_block_scaling_dim)
        row, column = ((128, 128), (128, 128)) if two_d else ((1, 128), (128, 1))
        return BlockQuantizer(row, column, cast_fp8_blocks(self.dtype, not recipe.use_f32_scales))


def _amax_and_scale_update(state, recipe):
    """amax of the window -> scale; the staging row 0 becomes the newest, last row."""
    history = state.amax_history
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history)
    else:
        amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
    if len(history) > 1:  # a tensor that was not seen since the last update keeps its history (measured on an H200)
        history.copy_(torch.where(history[0] != 0, history.roll(-1, 0), history))
    history[0].zero_()
    if recipe.scaling_factor_compute_algo is not None:
        scale = recipe.scaling_factor_compute_algo(amax, state.scale, fp8_max(state.dtype), recipe)
    else:
        scale = torch.where((amax > 0) & amax.isfinite(),
                            scale_for(amax, fp8_max(state.dtype)) / 2**recipe.margin, state.scale)
    state.scale.copy_(scale)


# ---- State of the process --------------------------------------------------------------------------


@dataclasses.dataclass
class FP8GlobalState:
    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: object = None
    fp8_distributed_group: object = None
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    is_first_fp8_module: bool = False
    autocast_depth: int = 0
    # {"forward_<recipe>": [states to update together]}, {"<recipe>": (recipe, group)}
    buffers: dict = dataclasses.field(default_factory=dict)
    autocast_arguments: dict = dataclasses.field(default_factory=dict)


AUTOCAST_FIELDS = ("fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group",
                   "is_first_fp8_module")


class FP8GlobalStateManager:
    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls):
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls):
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls):
        return cls.quantization_state.fp8_parameters

    @classmethod
    def get_fp8_recipe(cls):
        recipe = cls.quantization_state.fp8_recipe
        return get_default_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls):
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def is_first_fp8_module(cls):
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def get_autocast_state(cls):
        return tuple(getattr(cls.quantization_state, name) for name in AUTOCAST_FIELDS)

    @classmethod
    def set_autocast_state(cls, state):
        for name, value in zip(AUTOCAST_FIELDS, state):
            setattr(cls.quantization_state, name, value)

    @staticmethod
    def get_unique_autocast_key(recipe=None, group=None):
        return f"recipe={recipe},group={None if group is None else id(group)}"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta):
        if not fp8_meta["recipe"].delayed() or "buffer_index_and_autocast_key" in fp8_meta:
            return
        fp8_meta["buffer_index_and_autocast_key"] = True
        key = cls.get_unique_autocast_key(fp8_meta["recipe"], fp8_meta["fp8_group"])
        for direction, name in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            cls.quantization_state.buffers.setdefault(f"{direction}_{key}", []).append(fp8_meta[name])

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        """Updates every module ever seen, whichever recipe or model this autocast was for."""
        direction = "forward" if forward else "backward"
        for buffer_key, states in cls.quantization_state.buffers.items():
            this_direction, autocast_key = buffer_key.split("_", 1)
            if this_direction != direction:
                continue
            recipe, group = cls.quantization_state.autocast_arguments[autocast_key]
            with torch.no_grad():
                if recipe.reduce_amax and torch.distributed.is_initialized():
                    together = torch.cat([state.amax_history[0] for state in states])
                    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group=group)
                    for state, amax in zip(states, together.split([s.num_quantizers for s in states])):
                        state.amax_history[0].copy_(amax)
                for state in states:
                    _amax_and_scale_update(state, recipe)

    @classmethod
    def autocast_enter(cls, enabled=False, calibrating=False, fp8_recipe=None, fp8_group=None,
                       _graph=False):
        recipe = get_default_recipe() if fp8_recipe is None else fp8_recipe
        state = cls.quantization_state
        state.autocast_arguments[cls.get_unique_autocast_key(recipe, fp8_group)] = (recipe, fp8_group)
        state.fp8_enabled, state.fp8_calibration = enabled, calibrating
        state.fp8_recipe, state.fp8_distributed_group = recipe, fp8_group
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1
        if enabled:  # too late for a clean refusal: FP8 is on already
            available, reason = check_fp8_support()
            assert available, reason
            if isinstance(recipe, NVFP4BlockScaling):
                available, reason = check_nvfp4_support()
                assert available, reason

    @classmethod
    def autocast_exit(cls, enabled, _graph):
        cls.quantization_state.autocast_depth -= 1
        if enabled and cls.quantization_state.autocast_depth == 0 and not _graph and \
                torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)


class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None,
                 _graph=False):
        self._enabled, self._calibrating, self._recipe = enabled, calibrating, recipe
        self._amax_reduction_group, self._graph, self._fp8_state = amax_reduction_group, _graph, None

    def __enter__(self):
        if self._fp8_state is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once concurrently")
        if self._enabled:
            check_recipe_support(self._recipe)
        self._fp8_state = FP8GlobalStateManager.get_autocast_state()
        FP8GlobalStateManager.autocast_enter(self._enabled, self._calibrating, self._recipe,
                                             self._amax_reduction_group, self._graph)
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        try:
            FP8GlobalStateManager.set_autocast_state(self._fp8_state)
            FP8GlobalStateManager.autocast_exit(self._enabled, self._graph)
        finally:
            self._fp8_state = None


@contextlib.contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    state = FP8GlobalStateManager.quantization_state
    names = ("fp8_parameters", "fp8_recipe", "high_precision_init_val")
    before = [getattr(state, name) for name in names]
    now = (enabled, get_default_recipe() if recipe is None else recipe, preserve_high_precision_init_val)
    try:
        for name, value in zip(names, now):
            setattr(state, name, value)
        yield
    finally:
        for name, value in zip(names, before):
            setattr(state, name, value)


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    warnings.warn("fp8_autocast is deprecated and will be removed in a future release. Use autocast "
                  "instead.", category=DeprecationWarning, stacklevel=2)
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe,
                    amax_reduction_group=fp8_group, _graph=_graph)


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    warnings.warn("fp8_model_init is deprecated and will be removed in a future release. Use "
                  "quantized_model_init instead.", category=DeprecationWarning, stacklevel=2)
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield
