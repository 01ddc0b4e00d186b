"""Linear, LayerNorm and what is fused from them."""
import os
import pickle
import warnings

import torch
import torch.nn.functional as F

from .quantization import FP8GlobalStateManager, RecipeState
from .quantized_tensor import Float8Tensor, QuantizedTensor
from .utils import assert_dim_for_fp8_exec, fail_if_told, need_cuda, unsupported


def init_normal(tensor):
    torch.nn.init.normal_(tensor, mean=0.0, std=0.023)


class TransformerEngineBaseModule(torch.nn.Module):
    """Keeps the FP8 state of a module: fp8_meta["scaling_fwd"] with three columns per GEMM (input,
    weight, output), fp8_meta["scaling_bwd"] with two (grad_output, grad_input)."""

    def __init__(self, name=None):
        super().__init__()
        if not torch.cuda.is_available():
            raise RuntimeError("TransformerEngine needs CUDA.")
        self.name = name
        self.fp8_initialized = self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self._fp8_workspaces = {}
        self.activation_dtype = None
        self.fuse_wgrad_accumulation = False

    # ---- Parameters

    def add_parameter(self, name, shape, dtype, device, init, column=None):
        """column: where the quantizer of this weight stands in scaling_fwd."""
        value = torch.empty(shape, dtype=dtype, device=device)
        init(value)
        parameter = torch.nn.Parameter(value)
        if column is not None and self.primary_weights_in_fp8:
            quantizer = self.quantizers["scaling_fwd"][column]
            parameter = Float8Tensor(quantizer(value.detach().view(shape))[0].to(dtype))
            parameter._quantizer = quantizer
            keep = FP8GlobalStateManager.quantization_state.high_precision_init_val
            if keep:
                parameter.get_high_precision_init_val = lambda: value.detach().cpu()
                parameter.clear_high_precision_init_val = lambda: None
        self.register_parameter(name, parameter)

    # ---- FP8 state

    def set_meta_tensor(self, fwd, recipe):
        key = "scaling_fwd" if fwd else "scaling_bwd"
        count = self.fp8_meta["num_gemms"] * (3 if fwd else 2)
        state = self.fp8_meta.get(key)
        if self.fp8_meta_tensors_initialized and type(recipe) is type(state.recipe):
            if recipe.delayed():
                self.adjust_amax_history_length(recipe.amax_history_len, fwd)
            return
        self.fp8_meta[key] = RecipeState(recipe, "forward" if fwd else "backward", count)
        self.quantizers[key] = self.fp8_meta[key].make_quantizers()

    def adjust_amax_history_length(self, length, fwd=None):
        for key in ("scaling_fwd", "scaling_bwd") if fwd is None else (
                ("scaling_fwd",) if fwd else ("scaling_bwd",)):
            state = self.fp8_meta[key]
            missing = length - state.amax_history.shape[0]
            if missing:
                state.amax_history = F.pad(state.amax_history, (0, 0, 0, missing)).clone()
                self.quantizers[key] = state.make_quantizers()

    def init_fp8_meta_tensors(self, recipe):
        self.set_meta_tensor(True, recipe)
        self.set_meta_tensor(False, recipe)
        self.fp8_meta_tensors_initialized = True

    def reset_fp8_meta_tensors(self, fp8_meta_tensors=None):
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in self.fp8_meta:
                scale, history = (1.0, 0.0) if fp8_meta_tensors is None else fp8_meta_tensors[key]
                self.fp8_meta[key].scale.copy_(torch.as_tensor(scale))
                self.fp8_meta[key].amax_history.copy_(torch.as_tensor(history))

    def init_fp8_metadata(self, num_gemms=1):
        meta = self.fp8_meta
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_calibration = FP8GlobalStateManager.is_fp8_calibration()
        fp8_enabled = self.fp8 or self.fp8_calibration
        meta["fp8_checkpoint"] = fp8_enabled
        if not fp8_enabled and not FP8GlobalStateManager.with_fp8_parameters():
            self.fp8_initialized = False
            return
        recipe, before = FP8GlobalStateManager.get_fp8_recipe(), meta.get("recipe")
        if self.fp8_initialized and recipe == before:
            return
        meta["recipe"], meta["num_gemms"] = recipe, num_gemms
        self.init_fp8_meta_tensors(recipe)
        if fp8_enabled:
            meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
            meta["fp8_max_fwd"], meta["fp8_max_bwd"] = recipe.fp8_format.value
            self.fp8_initialized = True
        if before is not None and type(before) is not type(recipe):
            warnings.warn(f"Recipe type changed from {type(before).__name__} to {type(recipe).__name__}. "
                          "This may affect model behavior.")
            self._fp8_workspaces.clear()

    # ---- Forward

    def set_activation_dtype(self, inp):
        if torch.is_autocast_enabled():
            self.activation_dtype = torch.get_autocast_dtype("cuda")
            return
        if self.activation_dtype == inp.dtype:
            return
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise TypeError("Data types for parameters must match when outside of autocasted region. "
                                f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}")
        self.activation_dtype = inp.dtype

    def prepare_forward(self, inp, num_gemms=1):
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms)
        if self.fp8 and self.primary_weights_in_fp8 and hasattr(self, "quantized_for"):  # attention has no weights
            made_for = self.quantized_for
            if not isinstance(self.fp8_meta["recipe"], made_for):
                raise RuntimeError(f"Recipe mismatch for 'weight': tensor supports recipe "
                                   f"{made_for.__name__}, but got "
                                   f"{type(self.fp8_meta['recipe']).__name__}. Please check the recipes "
                                   "assigned during quantized_model_init() and autocast() calls.")
        if self.fp8:
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)

    def start_quantized_parameters(self, num_gemms):
        if self.primary_weights_in_fp8:
            self.init_fp8_metadata(num_gemms)
            self.quantized_for = type(self.fp8_meta["recipe"])

    def gemm(self, inp, weight, bias, which=0, is_first_microbatch=None):
        """inp @ weight.T + bias in the precision of the moment. which: 0 for fc1, 1 for fc2."""
        plan = GemmPlan(self, which, is_first_microbatch)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            plan.main_grad, plan.overwrite = weight.main_grad, getattr(weight, "overwrite_main_grad", False)
        if torch.is_grad_enabled():
            if self.fp8 and any(t is not None and t.requires_grad for t in (inp, weight, bias)):
                plan.update_backward = FP8GlobalStateManager.is_first_fp8_module()
            return _Gemm.apply(inp, weight, bias, plan)
        return _Gemm.forward(None, inp, weight, bias, plan)

    def cast(self, bias):
        with torch.enable_grad():  # as in the real package, also under torch.no_grad()
            return bias.to(self.activation_dtype)

    # ---- Checkpoints

    def get_extra_state(self):
        if not (self.fp8_meta["fp8_checkpoint"] and self.fp8_meta["recipe"].delayed()):
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": {
            k: v for k, v in self.fp8_meta.items() if isinstance(v, (bool, int, float))}}
        for short in ("fwd", "bwd"):
            state[f"scale_{short}"] = self.fp8_meta[f"scaling_{short}"].scale.cpu()
            state[f"amax_history_{short}"] = self.fp8_meta[f"scaling_{short}"].amax_history.cpu()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is None or state.numel() == 0:
            return
        if os.getenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0") != "1":
            raise RuntimeError(f"Refusing to load pickled Transformer Engine extra state for "
                               f"{type(self).__name__}.")
        state = pickle.loads(state.numpy().tobytes())
        self.fp8_meta.update(state["extra_fp8_variables"], recipe=state["recipe"])
        self.init_fp8_meta_tensors(state["recipe"])
        for short in ("fwd", "bwd"):
            self.fp8_meta[f"scaling_{short}"].scale.copy_(state[f"scale_{short}"])
            self.fp8_meta[f"scaling_{short}"].amax_history.copy_(state[f"amax_history_{short}"])


class GemmPlan:
    """What one GEMM's forward and backward need to know of the module."""

    def __init__(self, module, which, is_first_microbatch):
        self.dtype, self.update_backward = module.activation_dtype, False
        self.main_grad, self.overwrite = None, False  # where the weight gradient goes instead of .grad
        self.recipe = module.fp8_meta["recipe"] if module.fp8 else None
        if self.recipe is not None:
            forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
            self.input, self.weight = forward[3 * which], forward[3 * which + 1]
            self.grad_output = backward[2 * which]
            if is_first_microbatch is not None:
                self.weight = self.cached(module._fp8_workspaces, which, is_first_microbatch)

    def cached(self, workspaces, which, is_first_microbatch):
        def quantizer(weight, quantize=self.weight):
            if is_first_microbatch or which not in workspaces:
                workspaces[which] = quantize(weight)
            return workspaces[which]
        return quantizer


class _Gemm(torch.autograd.Function):
    """Operands are rounded as the recipe says, products are summed in FP32."""

    @staticmethod
    def forward(ctx, inp, weight, bias, plan):
        fail_if_told(plan.recipe, "forward")
        with torch.autocast("cuda", enabled=False):
            if plan.recipe is not None:
                x, x_columns = plan.input(inp)
                in_fp8 = isinstance(weight, QuantizedTensor)  # already: taken as it is
                w, w_columns = (weight.detach().float(),) * 2 if in_fp8 else plan.weight(weight)
            else:
                x = x_columns = inp.to(plan.dtype).float()
                w = w_columns = weight.to(plan.dtype).float()
            out = x @ w.t()
            if bias is not None:
                out = out + bias.to(plan.dtype).float()
        if ctx is not None:
            ctx.save_for_backward(x_columns, w_columns)
            ctx.plan = plan
        return out.to(plan.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        plan, (x, w) = ctx.plan, ctx.saved_tensors
        fail_if_told(plan.recipe, "backward")
        dgrad = wgrad = None
        with torch.autocast("cuda", enabled=False):
            grad_bias = grad_output.float().sum(0).to(plan.dtype) if ctx.needs_input_grad[2] else None
            if plan.recipe is not None:
                dy, dy_columns = plan.grad_output(grad_output)
                if ctx.needs_input_grad[0]:
                    _check_inner_dimension(plan.recipe, grad_output.shape[1])
                if ctx.needs_input_grad[1]:
                    _check_inner_dimension(plan.recipe, grad_output.shape[0])
            else:
                dy = dy_columns = grad_output.to(plan.dtype).float()
            if ctx.needs_input_grad[0]:
                dgrad = (dy @ w).to(plan.dtype)
            if ctx.needs_input_grad[1]:
                wgrad = dy_columns.t() @ x
                if plan.main_grad is None:
                    wgrad = wgrad.to(plan.dtype)
                else:
                    plan.main_grad.copy_(wgrad) if plan.overwrite else plan.main_grad.add_(wgrad)
                    wgrad = None
        if plan.update_backward:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dgrad, wgrad, grad_bias, None


def _check_inner_dimension(recipe, size):
    """The dimension summed over is the leading one of the (transposed) FP8 operands."""
    if size % 16 != 0:
        what = "NVTE_BLOCK_SCALING GEMM" if recipe.float8_block_scaling() else "A for FP8 GEMM"
        raise RuntimeError("/TransformerEngine/transformer_engine/common/gemm/cublaslt_gemm.cu:157 in "
                           "function CanonicalizeGemmInput: Assertion failed: ret.lda % 16 == 0. "
                           f"Leading dimension requirement on {what}. Caller must pad.")


def normalize(kind, x, weight, bias, eps, zero_centered_gamma, dtype):
    """LayerNorm or RMSNorm: input and parameters in dtype, arithmetic in FP32, result in dtype."""
    with torch.autocast("cuda", enabled=False):
        x, weight = x.to(dtype).float(), weight.to(dtype).float()
        if zero_centered_gamma:
            weight = weight + 1.0
        if kind == "LayerNorm":
            out = F.layer_norm(x, weight.shape, weight, bias.to(dtype).float(), eps)
        else:
            out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        return out.to(dtype)


class _Norm(torch.nn.Module):
    """LayerNorm and RMSNorm cast their input to the parameters' dtype; they never raise TypeError."""

    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, **kwargs):
        super().__init__()
        need_cuda()
        if normalized_shape is None:
            if hidden_size is None:
                raise RuntimeError("Neither `normalized_shape` nor `hidden_size` (deprecated) args are "
                                   "provided")
            warnings.warn("`hidden_size` arg has been renamed to `normalized_shape` for compatibility "
                          "with `torch.nn.LayerNorm`.", DeprecationWarning, stacklevel=3)
            normalized_shape = hidden_size
        if set(kwargs) - {"device", "dtype", "sm_margin"}:
            raise TypeError(f"unexpected keyword arguments {sorted(kwargs)}")
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        dtype = params_dtype or kwargs.get("dtype") or torch.get_default_dtype()
        device = kwargs.get("device") or "cuda"
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(fill(shape, dtype=dtype, device=device))
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, input):
        if input.shape[-self.weight.dim():] != self.weight.shape:
            raise ValueError(f"Input tensor (shape={tuple(input.shape)}) and weight tensor "
                             f"(shape={tuple(self.weight.shape)}) are not compatible")
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else self.weight.dtype
        return normalize(self.kind, input, self.weight, getattr(self, "bias", None), self.eps,
                         self.zero_centered_gamma, dtype)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class LayerNorm(_Norm):
    kind = "LayerNorm"

    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, **kwargs):
        super().__init__(normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma,
                         hidden_size, **kwargs)


class RMSNorm(_Norm):
    kind = "RMSNorm"

    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, **kwargs):
        super().__init__(normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma,
                         hidden_size, **kwargs)


class _LinearBase(TransformerEngineBaseModule):
    """One GEMM whose weight may be split into several parameters."""

    def add_weights(self, in_features, out_features, bias, return_bias, params_dtype, device,
                    parameters_split, init_method):
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        if parameters_split is None:
            sizes = {"": out_features}
        elif not parameters_split:
            raise ValueError("Cannot split weight buffer into 0 parameters")
        elif isinstance(parameters_split, dict):
            sizes = {f"{name.rstrip('_')}_": size for name, size in parameters_split.items()}
        else:
            sizes = {f"{name.rstrip('_')}_": out_features // len(parameters_split)
                     for name in parameters_split}
        if sum(sizes.values()) != out_features:
            raise ValueError(f"Trying to split weight buffer ({out_features=}) with split sizes "
                             f"{list(sizes.values())}")
        if len(sizes) > 1 and self.primary_weights_in_fp8:
            raise RuntimeError("Splitting QuantizedTensor into multiple params is not supported")
        self.start_quantized_parameters(1)
        self.weight_names = [f"{prefix}weight" for prefix in sizes]
        self.bias_names = [f"{prefix}bias" for prefix in sizes]
        for name, size in zip(self.weight_names, sizes.values()):
            self.add_parameter(name, (size, in_features), dtype, device, init_method or init_normal,
                               column=1)
        for name, size in zip(self.bias_names, sizes.values()):
            if bias:
                self.add_parameter(name, (size,), dtype, device, torch.nn.init.zeros_)
            else:
                setattr(self, name, torch.empty(0, dtype=dtype, device=device))

    def joined(self, names):
        tensors = [getattr(self, name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def linear(self, inp, is_first_microbatch):
        """Returns out, or (out, bias) for someone else to add it."""
        weight, bias = self.joined(self.weight_names), self.joined(self.bias_names)
        apply_bias = self.use_bias and not self.return_bias
        out = self.gemm(inp.reshape(-1, self.in_features), weight, bias if apply_bias else None,
                        is_first_microbatch=is_first_microbatch)
        out = out.view(*inp.shape[:-1], self.out_features)
        return (out, self.cast(bias)) if self.return_bias else out

    def check_input(self, inp):
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        if self.fp8:
            assert_dim_for_fp8_exec(inp, self.joined(self.weight_names))


class Linear(_LinearBase):
    def __init__(self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
                 tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None,
                 init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None,
                 parameters_split=None, device="cuda"):
        super().__init__()
        unsupported(fuse_wgrad_accumulation=(fuse_wgrad_accumulation, False), tp_size=(tp_size, 1),
                    tp_group=(tp_group, None), parallel_mode=(parallel_mode, None))
        self.add_weights(in_features, out_features, bias, return_bias, params_dtype, device,
                         parameters_split, init_method)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self.prepare_forward(inp)
        self.check_input(inp)
        return self.linear(inp, is_first_microbatch)


class LayerNormLinear(_LinearBase):
    def __init__(self, in_features, out_features, eps=1e-5, sequence_parallel=False,
                 fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None,
                 init_method=None, bias=True, normalization="LayerNorm", return_bias=False,
                 params_dtype=None, parallel_mode=None, return_layernorm_output=False,
                 return_layernorm_output_gathered=False, parameters_split=None,
                 zero_centered_gamma=False, device="cuda"):
        super().__init__()
        unsupported(fuse_wgrad_accumulation=(fuse_wgrad_accumulation, False), tp_size=(tp_size, 1),
                    tp_group=(tp_group, None), parallel_mode=(parallel_mode, None))
        self.return_layernorm_output = return_layernorm_output
        _add_norm_parameters(self, in_features, normalization, eps, zero_centered_gamma, params_dtype,
                             device)
        self.add_weights(in_features, out_features, bias, return_bias, params_dtype, device,
                         parameters_split, init_method)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self.prepare_forward(inp)
        self.check_input(inp)
        normed = _apply_norm(self, inp)
        out = self.linear(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out, normed) if self.return_bias else (out, normed)


def _add_norm_parameters(module, size, normalization, eps, zero_centered_gamma, params_dtype, device):
    assert normalization in ["LayerNorm", "RMSNorm"], "Unsupported normalization type!"
    module.normalization, module.eps, module.zero_centered_gamma = normalization, eps, zero_centered_gamma
    dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
    init = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
    module.add_parameter("layer_norm_weight", (size,), dtype, device, init)
    if normalization == "LayerNorm":
        module.add_parameter("layer_norm_bias", (size,), dtype, device, torch.nn.init.zeros_)
    else:
        module.layer_norm_bias = None


def _apply_norm(module, inp):
    return normalize(module.normalization, inp, module.layer_norm_weight, module.layer_norm_bias,
                     module.eps, module.zero_centered_gamma, module.activation_dtype)


def _tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"gelu": _tanh_gelu, "relu": F.relu, "silu": F.silu, "srelu": lambda x: F.relu(x).square(),
               "qgelu": lambda x: x * torch.sigmoid(1.702 * x)}
GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu"}


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(self, hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
                 get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True,
                 normalization="LayerNorm", activation="gelu", activation_params=None,
                 output_layer_init_method=None, fuse_wgrad_accumulation=False, params_dtype=None,
                 return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
                 micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False,
                 device="cuda"):
        super().__init__()
        unsupported(fuse_wgrad_accumulation=(fuse_wgrad_accumulation, False), tp_size=(tp_size, 1),
                    tp_group=(tp_group, None), activation_params=(activation_params, None))
        self.hidden_size, self.activation = hidden_size, activation
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        _add_norm_parameters(self, hidden_size, normalization, eps, zero_centered_gamma, params_dtype,
                             device)
        self.start_quantized_parameters(2)
        fc1_out = ffn_hidden_size * (2 if activation in GATED else 1)
        for which, name, shape, init in (
                (0, "fc1", (fc1_out, hidden_size), init_method),
                (1, "fc2", (hidden_size, ffn_hidden_size), output_layer_init_method)):
            self.add_parameter(f"{name}_weight", shape, dtype, device, init or init_normal,
                               column=3 * which + 1)
            if bias:
                self.add_parameter(f"{name}_bias", shape[:1], dtype, device, torch.nn.init.zeros_)
            else:
                setattr(self, f"{name}_bias", torch.empty(0, dtype=dtype, device=device))

    def activate(self, x):
        kind = GATED.get(self.activation, self.activation)
        if kind not in ACTIVATIONS:
            raise NotImplementedError(f"Activation type {self.activation} is not supported!")
        with torch.autocast("cuda", enabled=False):
            if self.activation in GATED:
                x, gate = x.float().chunk(2, dim=-1)
                return (ACTIVATIONS[kind](x) * gate).to(self.activation_dtype)
            return ACTIVATIONS[kind](x.float()).to(self.activation_dtype)

    def forward(self, inp, is_first_microbatch=None):
        self.prepare_forward(inp, num_gemms=2)
        assert inp.shape[-1] == self.hidden_size, "GEMM not possible"
        if self.fp8:
            assert_dim_for_fp8_exec(inp, self.fc1_weight, self.fc2_weight)
        normed = _apply_norm(self, inp)
        hidden = self.gemm(normed.reshape(-1, self.hidden_size), self.fc1_weight,
                           self.fc1_bias if self.use_bias else None, 0, is_first_microbatch)
        apply_bias = self.use_bias and not self.return_bias
        out = self.gemm(self.activate(hidden), self.fc2_weight, self.fc2_bias if apply_bias else None, 1,
                        is_first_microbatch).view(inp.shape)
        outputs = (out,)
        if self.return_bias:
            outputs += (self.cast(self.fc2_bias),)
        if self.return_layernorm_output:
            outputs += (normed,)
        return outputs if len(outputs) > 1 else out
