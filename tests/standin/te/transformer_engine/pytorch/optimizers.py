import warnings

import torch

from .quantized_tensor import QuantizedTensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with adam_w_mode=False) with optional FP32 master weights of its own."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, *,
                 bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False,
                 master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32,
                 exp_avg_sq_dtype=torch.float32, use_decoupled_grad=False, store_param_remainders=False,
                 set_grad_none=None):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
                raise RuntimeError(f"FusedAdam only supports fp32/fp16/bf16/fp8 {name}.")
        if capturable and master_weights and master_weight_dtype != torch.float32:
            raise RuntimeError("Capturable mode only supports fp32 master weights.")
        if capturable and not (exp_avg_dtype == exp_avg_sq_dtype
                               and exp_avg_dtype in (torch.float32, torch.bfloat16)):
            raise RuntimeError("Capturable mode requires exp_avg_dtype and exp_avg_sq_dtype to be both "
                               "torch.float32 or both torch.bfloat16.")
        if set_grad_none is not None:
            warnings.warn("set_grad_none kwarg in FusedAdam constructor is deprecated.",
                          DeprecationWarning)
        super().__init__(params, {"lr": torch.tensor(lr) if capturable else lr, "betas": betas,
                                  "eps": eps, "weight_decay": weight_decay,
                                  "bias_correction": bias_correction})
        self.adam_w_mode, self.capturable, self.master_weights = adam_w_mode, capturable, master_weights
        self.moment_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p, group):
        if isinstance(p, QuantizedTensor) and self.capturable:
            raise RuntimeError("FusedAdam does not support FP8 model weights with capturable=True.")
        state, (beta1, beta2), step = self.state[p], group["betas"], group["step"]
        if not state:
            for name, dtype in self.moment_dtypes.items():
                state[name] = torch.zeros_like(p, dtype=torch.float32 if dtype == torch.uint8 else dtype)
            if self.master_weights:
                state["master_param"] = p.detach().clone().float()
        value = (state["master_param"] if self.master_weights else p.detach().float())
        gradient = p.grad.float()
        if not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * value
        first = beta1 * state["exp_avg"].float() + (1 - beta1) * gradient
        second = beta2 * state["exp_avg_sq"].float() + (1 - beta2) * gradient.square()
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        if group["bias_correction"]:
            first, second = first / (1 - beta1**step), second / (1 - beta2**step)
        change = first / (second.sqrt() + group["eps"])
        if self.adam_w_mode:
            change = change + group["weight_decay"] * value
        value = value - group["lr"] * change
        if self.master_weights:
            state["master_param"].copy_(value)
        p.copy_(value)
