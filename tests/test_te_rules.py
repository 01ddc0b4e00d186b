"""What Transformer Engine does, as far as the tutorial rests on it. The same rules are asked of the real
package on a GPU machine and of the stand-in elsewhere, so that the stand-in can be trusted.

Rules are functions rule_*. On a GPU they run in this process; without one they run in a child process
that has tests/standin on its PYTHONPATH, once as an H200 and once as a B200."""
import contextlib
import copy
import functools
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F

STANDIN = pathlib.Path(__file__).resolve().parent / "standin"
REAL = torch.cuda.is_available() and "FAKE_GPU" not in os.environ and bool(
    importlib.util.find_spec("transformer_engine"))


class NotHere(Exception):
    """This rule says nothing about this machine."""


def modules():
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    return te, recipe, FP8GlobalStateManager


def capability():
    return torch.cuda.get_device_capability()


def rand(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def decibel(signal, other):
    signal, other = signal.detach().float(), other.detach().float()
    return (20 * torch.log10(signal.norm() / (signal - other).norm())).item()


def bf16():
    return torch.autocast("cuda", dtype=torch.bfloat16)


def train(te, module, x, recipe, grad=None):
    """One forward and backward in FP8; returns the output."""
    with te.autocast(enabled=True, recipe=recipe):
        out = module(x)
    out.backward(torch.ones_like(out) if grad is None else grad)
    return out


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- Names, recipes, availability ------------------------------------------------------------------------


def rule_versions_and_deprecated_names():
    te, recipe, _ = modules()
    import transformer_engine
    assert transformer_engine.__version__.startswith("2.20")
    assert not hasattr(te, "__version__")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        te.fp8_autocast(enabled=False, fp8_recipe=recipe.DelayedScaling())
    assert any(w.category is DeprecationWarning for w in caught)


def rule_a_recipe_ignores_unknown_keywords_silently():
    _, recipe, _ = modules()
    r = recipe.DelayedScaling(amax_history_length=3)
    assert r.amax_history_len == 1024 and not hasattr(r, "amax_history_length")
    assert recipe.DelayedScaling(amax_history_len=16) == recipe.DelayedScaling(amax_history_len="16")


def rule_a_recipe_refuses_wrong_values_with_ValueError():
    _, recipe, _ = modules()
    for wrong in ({"fp8_format": recipe.Format.E5M2}, {"fp8_format": "HYBRID"},
                  {"amax_compute_algo": "median"}, {"amax_history_len": 1.5}):
        with pytest.raises(ValueError):
            recipe.DelayedScaling(**wrong)


def rule_defaults_of_recipes():
    _, recipe, _ = modules()
    r = recipe.DelayedScaling()
    assert (r.margin, r.amax_history_len, r.amax_compute_algo) == (0, 1024, "max")
    assert r.fp8_format is recipe.Format.HYBRID
    assert recipe.Format.HYBRID.value.max_fwd == 448 and recipe.Format.HYBRID.value.max_bwd == 57344
    assert recipe.Float8CurrentScaling().fp8_format is recipe.Format.HYBRID
    for name in ("Float8BlockScaling", "MXFP8BlockScaling"):
        assert getattr(recipe, name)().fp8_format is recipe.Format.E4M3
    assert r.delayed() and not r.mxfp8() and recipe.NVFP4BlockScaling().nvfp4()


def rule_availability_follows_the_capability():
    te, recipe, _ = modules()
    sm, cuda = capability(), tuple(int(n) for n in torch.version.cuda.split("."))
    expected = {"is_bf16_available": sm >= (8, 0), "is_fp8_available": sm >= (8, 9),
                "is_fp8_block_scaling_available": sm >= (9, 0) and cuda >= (12, 9),
                "is_mxfp8_available": (10, 0) <= sm < (12, 0), "is_nvfp4_available": sm >= (10, 0)}
    for name, available in expected.items():
        said, reason = getattr(te, name)(return_reason=True)
        assert said == available == getattr(te, name)() and (reason == "") == available, name
    default = "MXFP8BlockScaling" if (10, 0) <= sm < (12, 0) else (
        "Float8CurrentScaling" if sm >= (12, 0) else "DelayedScaling")
    assert type(te.get_default_recipe()).__name__ == default


def rule_unsupported_mxfp8_raises_and_leaves_fp8_off():
    te, recipe, manager = modules()
    if te.is_mxfp8_available():
        raise NotHere
    with pytest.raises(RuntimeError):
        te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()).__enter__()
    assert not manager.is_fp8_enabled()


def rule_unsupported_nvfp4_raises_and_leaves_fp8_on():
    te, recipe, manager = modules()
    if te.is_nvfp4_available():
        raise NotHere
    with pytest.raises(AssertionError):
        with te.autocast(enabled=True, recipe=recipe.NVFP4BlockScaling()):
            pass
    assert manager.is_fp8_enabled()
    manager.reset()


# ---- Dtypes and shapes ------------------------------------------------------------------------------------


def rule_input_dtype_must_be_the_parameters_outside_autocast():
    te, _, _ = modules()
    for module in (te.Linear(32, 32), te.LayerNormLinear(32, 32), te.LayerNormMLP(32, 64)):
        with pytest.raises(TypeError):
            module(rand(16, 32))
        with bf16():
            assert module(rand(16, 32, dtype=torch.float32)).dtype is torch.bfloat16
        assert module(rand(16, 32, dtype=torch.float32)).dtype is torch.float32
    assert te.LayerNorm(32)(rand(16, 32)).dtype is torch.float32  # norms cast instead
    assert te.RMSNorm(32, params_dtype=torch.bfloat16)(rand(16, 32, dtype=torch.float32)).dtype \
        is torch.bfloat16


def rule_fp8_forward_wants_rows_by_8_and_features_by_16():
    te, recipe, _ = modules()
    with torch.no_grad():
        for shape, features, ok in (((8, 32), 32, True), ((2, 4, 32), 32, True), ((9, 32), 32, False),
                                    ((1, 32), 32, False), ((16, 24), 24, False)):
            linear = te.Linear(features, 32, params_dtype=torch.bfloat16)
            linear(rand(*shape))
            with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
                with contextlib.nullcontext() if ok else pytest.raises(ValueError, match="divisible by 8"):
                    linear(rand(*shape))
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
            te.Linear(32, 96, params_dtype=torch.bfloat16)(rand(16, 32))
            with pytest.raises(ValueError):
                te.Linear(32, 65, params_dtype=torch.bfloat16)(rand(16, 32))


def rule_fp8_backward_wants_rows_by_16():
    te, recipe, _ = modules()
    if capability() >= (10, 0):  # other GEMM layouts there; not seen
        raise NotHere
    for r in (recipe.DelayedScaling(), recipe.Float8CurrentScaling()):
        for rows in (8, 24, 32):
            linear = te.Linear(32, 32, params_dtype=torch.bfloat16)
            with te.autocast(enabled=True, recipe=r):
                out = linear(rand(rows, 32))  # forward passes
            with contextlib.nullcontext() if rows % 16 == 0 else pytest.raises(RuntimeError):
                out.sum().backward()


def rule_block_scaling_cannot_train_24_rows_either():
    te, recipe, _ = modules()
    if not te.is_fp8_block_scaling_available():
        raise NotHere
    for rows in (24, 32):
        linear = te.Linear(32, 32, params_dtype=torch.bfloat16)
        with contextlib.nullcontext() if rows == 32 else pytest.raises((RuntimeError, ValueError)):
            train(te, linear, rand(rows, 32), recipe.Float8BlockScaling())


def rule_fp8_backward_wants_output_features_by_16():
    te, recipe, _ = modules()
    if capability() >= (10, 0):
        raise NotHere
    linear = te.Linear(32, 24, params_dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        out = linear(rand(16, 32).requires_grad_())
    with pytest.raises(RuntimeError):
        out.sum().backward()


def rule_mxfp8_wants_everything_by_32():
    te, recipe, _ = modules()
    if not te.is_mxfp8_available():
        raise NotHere
    for rows, ok in ((32, True), (16, False)):
        linear = te.Linear(32, 64, params_dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
            with contextlib.nullcontext() if ok else pytest.raises(RuntimeError):
                linear(rand(rows, 32)).sum().backward()


# ---- Modules against PyTorch ------------------------------------------------------------------------------


def close(a, b, tolerance):
    a, b = a.detach().float(), b.detach().float()
    error = ((a - b).norm() / b.norm()).item()
    assert error < tolerance, error


def rule_modules_compute_what_pytorch_does():
    te, _, _ = modules()
    x = rand(4, 16, 64, dtype=torch.float32)
    for module in (te.LayerNorm(64), te.RMSNorm(64), te.Linear(64, 48), te.LayerNormLinear(64, 48),
                   te.LayerNormLinear(64, 48, normalization="RMSNorm", bias=False),
                   te.LayerNormMLP(64, 128)):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(rand(*p.shape, dtype=torch.float32, seed=1) * 0.3)
        p = dict(module.named_parameters())
        y = x
        norm = p.get("layer_norm_weight", p["weight"] if p["weight"].dim() == 1 else None) \
            if "weight" in p else p["layer_norm_weight"]
        if norm is not None:
            bias = p.get("layer_norm_bias", p.get("bias") if p.get("weight") is norm else None)
            y = F.rms_norm(y, (64,), norm, 1e-5) if bias is None else F.layer_norm(y, (64,), norm, bias)
        if "fc1_weight" in p:
            y = F.gelu(F.linear(y, p["fc1_weight"], p["fc1_bias"]), approximate="tanh")
            y = F.linear(y, p["fc2_weight"], p["fc2_bias"])
        elif p["weight"].dim() == 2:
            y = F.linear(y, p["weight"], p.get("bias"))
        close(module(x), y, 2e-3)


def rule_gelu_is_the_tanh_form():
    te, _, _ = modules()
    mlp, x = te.LayerNormMLP(64, 64), torch.linspace(-3, -1.5, 64, device="cuda")
    with torch.no_grad():  # fc1 yields x itself, fc2 passes it on
        mlp.fc1_weight.zero_()
        mlp.fc1_bias.copy_(x)
        mlp.fc2_weight.copy_(torch.eye(64))
        out = mlp(rand(16, 64, dtype=torch.float32))[0]
    assert (out - F.gelu(x, approximate="tanh")).abs().max() < 1e-4 < 2e-4 < (out - F.gelu(x)).abs().max()


def transformer_twin(layer, x, heads):
    """The layer in plain PyTorch, batch first, causal."""
    p = {name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1]: value
         for name, value in layer.named_parameters()}
    D = x.shape[-1]
    h = F.layer_norm(x, (D,), p["layernorm_qkv.layer_norm_weight"], p["layernorm_qkv.layer_norm_bias"])
    q, k, v = (F.linear(h, p[f"layernorm_qkv.{n}_weight"], p[f"layernorm_qkv.{n}_bias"])
               .unflatten(-1, (heads, -1)).transpose(1, 2) for n in ("query", "key", "value"))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + F.linear(a, p["proj.weight"], p["proj.bias"])
    h = F.layer_norm(x, (D,), p["layernorm_mlp.layer_norm_weight"], p["layernorm_mlp.layer_norm_bias"])
    h = F.gelu(F.linear(h, p["layernorm_mlp.fc1_weight"], p["layernorm_mlp.fc1_bias"]), approximate="tanh")
    return x + F.linear(h, p["layernorm_mlp.fc2_weight"], p["layernorm_mlp.fc2_bias"])


def transformer_layer(te, **options):
    defaults = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    return te.TransformerLayer(64, 128, 4, **{**defaults, **options})


def rule_transformer_layer_is_a_pre_norm_block():
    te, _, _ = modules()
    layer = transformer_layer(te)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(rand(*p.shape, dtype=torch.float32, seed=2) * 0.1)
    x, y = (rand(2, 16, 64, dtype=torch.float32).requires_grad_() for _ in range(2))
    out, twin = layer(x), transformer_twin(layer, y, 4)
    close(out, twin, 2e-3)
    close(torch.autograd.grad(out.square().sum(), x)[0], torch.autograd.grad(twin.square().sum(), y)[0], 5e-3)
    x = x.detach()
    with bf16():
        close(layer(x), twin, 2e-2)


def rule_initial_values():
    te, _, _ = modules()
    layer = te.TransformerLayer(256, 1024, 4)
    for name, p in layer.named_parameters():
        if "layer_norm_weight" in name:
            assert (p == 1).all()
        elif "bias" in name:
            assert (p == 0).all()
        else:
            assert abs(p.std().item() - 0.023) < 0.001 and abs(p.mean().item()) < 0.001
            assert p.dtype is torch.float32


def rule_parameter_names():
    te, _, _ = modules()
    layer = transformer_layer(te)
    names = {name for name, _ in layer.named_parameters()}
    qkv, mlp = "self_attention.layernorm_qkv.", "layernorm_mlp."
    assert names == {qkv + n for n in ("layer_norm_weight", "layer_norm_bias", "query_weight", "query_bias",
                                       "key_weight", "key_bias", "value_weight", "value_bias")} | {
        "self_attention.proj.weight", "self_attention.proj.bias"} | {
        mlp + n for n in ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight",
                          "fc2_bias")}
    assert layer.layernorm_mlp.fc1_weight.shape == (128, 64) and layer.layernorm_mlp.fc2_bias.shape == (64,)


def rule_fused_qkv_without_interleaving_is_q_then_k_then_v():
    te, _, _ = modules()
    split = transformer_layer(te)
    fused = transformer_layer(te, fuse_qkv_params=True, qkv_weight_interleaved=False)
    state = {k: v for k, v in split.state_dict().items() if not k.endswith("_extra_state")}
    prefix = "self_attention.layernorm_qkv."
    for kind in ("weight", "bias"):
        state[prefix + kind] = torch.cat([state.pop(f"{prefix}{n}_{kind}") for n in ("query", "key", "value")])
    missing, unexpected = fused.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing)
    x = rand(2, 16, 64, dtype=torch.float32)
    close(fused(x), split(x), 1e-3)


def rule_the_default_layout_is_sequence_first():
    te, _, _ = modules()
    x = rand(2, 16, 64, dtype=torch.float32)
    other_row, later_token = x.clone(), x.clone()
    other_row[0] = rand(16, 64, dtype=torch.float32, seed=1)
    later_token[:, 9:] = rand(2, 7, 64, dtype=torch.float32, seed=1)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    with torch.no_grad():
        default = te.TransformerLayer(64, 128, 4, **options)
        assert not torch.allclose(default(x)[1], default(other_row)[1], atol=1e-4)  # rows mix
        bshd = te.TransformerLayer(64, 128, 4, attn_input_format="bshd", **options)
        assert torch.allclose(bshd(x)[1], bshd(other_row)[1], atol=1e-4)
        assert torch.allclose(bshd(x)[:, :9], bshd(later_token)[:, :9], atol=1e-4)  # causal by default
        assert not torch.allclose(bshd(x)[:, 9:], bshd(later_token)[:, 9:], atol=1e-4)


def rule_attention_takes_a_packed_qkv():
    te, _, _ = modules()
    attention = te.DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="causal")
    qkv = rand(2, 32, 3, 4, 64)
    q, k, v = (t.contiguous() for t in qkv.unbind(2))
    packed = attention(qkv_layer=qkv)
    assert packed.shape == (2, 32, 256)
    close(packed, attention(q, k, v), 1e-2)
    close(packed, F.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in (q, k, v)),
                                                 is_causal=True).transpose(1, 2).flatten(2), 2e-2)
    with pytest.raises(ValueError):
        attention(q, k, v, qkv_layer=qkv)
    with pytest.raises(ValueError):
        attention(q, k)
    with pytest.raises(AssertionError):
        te.DotProductAttention(4, 32, qkv_format="bshd")(q, k, v)  # heads of another size


def rule_no_grad_does_not_stop_the_layer_from_tracking():
    te, _, _ = modules()
    layer, x = transformer_layer(te), rand(2, 16, 64, dtype=torch.float32)
    with torch.no_grad():
        assert layer(x).requires_grad
    with torch.inference_mode():
        assert not layer(x).requires_grad


def rule_without_cuda_nothing_works():
    """In a child process that sees no GPU."""
    code = """
import torch, transformer_engine.pytorch as te
for make in (lambda: te.Linear(16, 16), lambda: te.LayerNormMLP(16, 16), te.is_fp8_available, te.is_bf16_available,
             lambda: te.TransformerLayer(16, 16, 1), lambda: te.LayerNorm(16), te.get_default_recipe):
    try:
        make()
    except RuntimeError:
        continue
    raise SystemExit("did not raise RuntimeError")
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FAKE_GPU")}
    child = subprocess.run([sys.executable, "-c", code], env={**environment, "CUDA_VISIBLE_DEVICES": ""},
                           capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


# ---- FP8 state of delayed scaling -------------------------------------------------------------------------


def rule_state_appears_with_the_first_fp8_forward():
    te, recipe, _ = modules()
    r = recipe.DelayedScaling(amax_history_len=5)
    for module, gemms in ((te.Linear(64, 64), 1), (te.LayerNormLinear(64, 64), 1),
                          (te.LayerNormMLP(64, 64), 2)):
        x = rand(16, 64, dtype=torch.float32)
        module(x)
        assert "scaling_fwd" not in module.fp8_meta
        with bf16(), te.autocast(enabled=True, recipe=r):
            module(x)
        forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
        assert forward.scale.shape == (3 * gemms,) and forward.amax_history.shape == (5, 3 * gemms)
        assert backward.scale.shape == (2 * gemms,) and backward.amax_history.shape == (5, 2 * gemms)
    layer = transformer_layer(te)
    with bf16(), te.autocast(enabled=True, recipe=r):
        layer(rand(2, 16, 64, dtype=torch.float32))
    assert not hasattr(layer, "fp8_meta")
    assert "scaling_fwd" in layer.self_attention.layernorm_qkv.fp8_meta
    # Attention itself gets state too, which stays empty without fp8_dpa.
    core = layer.self_attention.core_attention.fp8_meta["scaling_fwd"]
    assert core.scale.shape == (9,) and (core.scale == 1).all() and (core.amax_history == 0).all()
    current = te.Linear(64, 64, params_dtype=torch.bfloat16)
    train(te, current, rand(16, 64), recipe.Float8CurrentScaling())
    assert not hasattr(current.fp8_meta["scaling_fwd"], "amax_history")


def rule_scale_is_fp8_max_over_amax():
    te, recipe, _ = modules()
    for margin in (0, 2):
        linear, x, g = te.Linear(64, 32, params_dtype=torch.bfloat16), rand(16, 64), rand(16, 32, seed=3)
        train(te, linear, x, recipe.DelayedScaling(amax_history_len=4, margin=margin), g)
        forward, backward = linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]
        newest = forward.amax_history[-1]  # row 0 is the staging row
        assert (forward.amax_history[0] == 0).all() and (forward.amax_history[1:-1] == 0).all()
        assert newest.tolist() == [x.abs().max().item(), linear.weight.abs().max().item(), 0.0]
        assert backward.amax_history[-1].tolist() == [g.abs().max().item(), 0.0]
        torch.testing.assert_close(forward.scale[:2], 448 / newest[:2] / 2**margin)
        torch.testing.assert_close(backward.scale[:1], 57344 / g.abs().max().float().reshape(1) / 2**margin)
        assert forward.scale[2] == 1 and backward.scale[1] == 1


def rule_e4m3_only_uses_448_for_gradients_too():
    te, recipe, _ = modules()
    linear, g = te.Linear(64, 32, params_dtype=torch.bfloat16), rand(16, 32, seed=3)
    train(te, linear, rand(16, 64), recipe.DelayedScaling(fp8_format=recipe.Format.E4M3), g)
    torch.testing.assert_close(linear.fp8_meta["scaling_bwd"].scale[0], 448 / g.abs().max().float())


def rule_the_window_keeps_its_maximum_and_then_forgets_it():
    te, recipe, _ = modules()
    linear, x = te.Linear(64, 64, params_dtype=torch.bfloat16), rand(16, 64)
    x = x / x.abs().max()
    r, seen = recipe.DelayedScaling(amax_history_len=3), []
    for size in (8.0, 1.0, 2.0, 0.5, 0.25):
        train(te, linear, x * size, r)
        seen.append(448 / linear.fp8_meta["scaling_fwd"].scale[0].item())
    history = linear.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
    assert history == [0.0, 0.5, 0.25]
    # The staging row counts while the scale is computed, so a window of 3 sees three values.
    assert [round(value, 3) for value in seen] == [8.0, 8.0, 8.0, 2.0, 2.0]


def rule_most_recent_looks_at_the_newest_only():
    te, recipe, _ = modules()
    linear, x = te.Linear(64, 64, params_dtype=torch.bfloat16), rand(16, 64)
    x = x / x.abs().max()
    for size in (8.0, 0.5):
        train(te, linear, x * size, recipe.DelayedScaling(amax_compute_algo="most_recent"))
        assert abs(linear.fp8_meta["scaling_fwd"].scale[0].item() - 448 / size) < 1e-2


def rule_forward_scales_change_at_exit_backward_scales_in_backward():
    te, recipe, _ = modules()
    linear = te.Linear(64, 64, params_dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        out = linear(rand(16, 64))
        forward, backward = linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]
        assert (forward.scale == 1).all()
    assert forward.scale[0] != 1 and (backward.scale == 1).all()
    out.sum().backward()
    assert backward.scale[0] != 1


def rule_only_the_outermost_autocast_updates():
    te, recipe, _ = modules()
    linear, r = te.Linear(64, 64, params_dtype=torch.bfloat16), recipe.DelayedScaling()
    with te.autocast(enabled=True, recipe=r):
        with te.autocast(enabled=True, recipe=r):
            linear(rand(16, 64))
        assert (linear.fp8_meta["scaling_fwd"].scale == 1).all()
        with te.autocast(enabled=False):
            te.Linear(64, 64, params_dtype=torch.bfloat16)(rand(9, 64))  # not FP8: any shape
    assert linear.fp8_meta["scaling_fwd"].scale[0] != 1


def rule_one_autocast_object_can_be_entered_again_but_not_twice_at_once():
    te, recipe, _ = modules()
    context = te.autocast(enabled=True, recipe=recipe.DelayedScaling())
    for _ in range(2):
        with context:
            with pytest.raises(RuntimeError):
                context.__enter__()


def rule_an_idle_module_keeps_its_history():
    te, recipe, _ = modules()
    one, two = (te.Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(2))
    r, x = recipe.DelayedScaling(amax_history_len=3), rand(16, 64)
    train(te, one, x, r)
    state = one.fp8_meta["scaling_fwd"]
    scale, history = state.scale.clone(), state.amax_history.clone()
    assert (history[-1, :2] > 0).all()
    for _ in range(4):
        train(te, two, x, r)
    assert torch.equal(state.amax_history, history) and torch.equal(state.scale, scale)


def rule_evaluation_waits_in_row_0_for_the_next_training_step():
    te, recipe, _ = modules()
    for mode in (torch.no_grad, torch.inference_mode):
        linear, x = te.Linear(64, 64, params_dtype=torch.bfloat16), rand(16, 64)
        r = recipe.DelayedScaling(amax_history_len=4)
        train(te, linear, x, r)
        state = linear.fp8_meta["scaling_fwd"]
        before = state.scale.clone(), state.amax_history.clone()
        with mode(), te.autocast(enabled=True, recipe=r):
            linear(x * 100)
        assert torch.equal(state.scale, before[0])
        assert torch.equal(state.amax_history[1:], before[1][1:])
        big = (x * 100).abs().max().item()
        assert state.amax_history[0, 0].item() == big
        train(te, linear, x, r)
        assert abs(state.scale[0].item() / (448 / big) - 1) < 1e-3
        # Saved and restored, evaluation leaves no trace.
        before = state.scale.clone(), state.amax_history.clone()
        with mode(), te.autocast(enabled=True, recipe=r):
            linear(x * 1000)
        with torch.no_grad():
            state.scale.copy_(before[0])
            state.amax_history.copy_(before[1])
        train(te, linear, x, r)
        assert state.scale[0].item() <= 448 / big * 1.001 and state.scale[0].item() > 448 / (big * 1.01)


def rule_a_first_forward_in_inference_mode_can_be_trained_later():
    te, recipe, _ = modules()
    linear, r = te.Linear(64, 64, params_dtype=torch.bfloat16), recipe.DelayedScaling()
    with torch.inference_mode(), te.autocast(enabled=True, recipe=r):
        linear(rand(16, 64))
    train(te, linear, rand(16, 64), r)
    assert linear.fp8_meta["scaling_bwd"].scale[0] != 1


def rule_back_to_delayed_scaling_the_scales_stand_still():
    """After another recipe in between, a module's new state is no longer updated."""
    te, recipe, _ = modules()
    linear, x = te.Linear(64, 64, params_dtype=torch.bfloat16), rand(16, 64)
    with no_warnings():
        for r in (recipe.DelayedScaling(), recipe.Float8CurrentScaling(), recipe.DelayedScaling()):
            train(te, linear, x, r)
    assert (linear.fp8_meta["scaling_fwd"].scale == 1).all()


# ---- FP8 numbers ------------------------------------------------------------------------------------------


def recipes(te, recipe):
    yield recipe.DelayedScaling()
    yield recipe.Float8CurrentScaling()
    if te.is_fp8_block_scaling_available():
        yield recipe.Float8BlockScaling()
    if te.is_mxfp8_available():
        yield recipe.MXFP8BlockScaling()


def rule_one_fp8_gemm_keeps_about_28_decibels():
    te, recipe, _ = modules()
    x = rand(128, 256)
    for r in recipes(te, recipe):
        linear = te.Linear(256, 128, params_dtype=torch.bfloat16)
        exact = linear(x)
        train(te, linear, x, r)
        out = train(te, linear, x, r)
        assert out.dtype is torch.bfloat16
        assert 24 < decibel(exact, out) < 34, (type(r).__name__, decibel(exact, out))


def rule_fp8_gradients_are_close_too():
    te, recipe, _ = modules()
    for r in recipes(te, recipe):
        linear, g = te.Linear(256, 128, params_dtype=torch.bfloat16), rand(128, 128, seed=5)
        x = rand(128, 256).requires_grad_()
        exact = torch.autograd.grad(linear(x), [x, *linear.parameters()], g)
        train(te, linear, x, r, g)
        linear.zero_grad(set_to_none=True)
        x.grad = None
        train(te, linear, x, r, g)
        for one, other in zip(exact, (x.grad, linear.weight.grad, linear.bias.grad)):
            assert 18 < decibel(one, other), type(r).__name__
        assert decibel(exact[0], x.grad) < 40  # it really went through FP8


def rule_values_that_fp8_can_hold_give_the_exact_result():
    te, recipe, _ = modules()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-4, 5, (16, 64), generator=generator).float() for _ in range(2))
    x[:, 1] = w[:, 0] = 0.0
    x[0, 0] = w[0, 1] = 448.0  # amax 448: the scale is 1
    linear = te.Linear(64, 16, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(w)
    for r in (recipe.DelayedScaling(), recipe.Float8CurrentScaling()):
        with torch.no_grad(), no_warnings(), te.autocast(enabled=True, recipe=r):
            out = linear(x.to("cuda", torch.bfloat16))
        assert torch.equal(out.float().cpu(), (x @ w.t()).bfloat16().float())


def rule_a_stale_scale_saturates():
    """Delayed scaling after a sudden jump of the range against current scaling."""
    te, recipe, _ = modules()
    linear, x = te.Linear(64, 64, params_dtype=torch.bfloat16), rand(64, 64)
    for _ in range(2):
        train(te, linear, x, recipe.DelayedScaling())
    exact = linear(x * 64)
    jumped = train(te, linear, x * 64, recipe.DelayedScaling())
    adapted = train(te, linear, x * 64, recipe.DelayedScaling())
    assert decibel(exact, jumped) < 10 < 24 < decibel(exact, adapted)
    assert jumped.isfinite().all()


# ---- Checkpoints, FP8 parameters, optimizer ---------------------------------------------------------------


def rule_extra_state_is_saved_and_refused():
    te, recipe, _ = modules()
    linear = te.Linear(64, 64, params_dtype=torch.bfloat16)
    assert linear.state_dict()["_extra_state"].numel() == 0
    train(te, linear, rand(16, 64), recipe.DelayedScaling())
    state = copy.deepcopy(linear.state_dict())
    assert state["_extra_state"].numel() > 0
    fresh = te.Linear(64, 64, params_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        fresh.load_state_dict(state)
    del state["_extra_state"]
    assert fresh.load_state_dict(state, strict=False).missing_keys == ["_extra_state"]
    assert torch.equal(fresh.weight, linear.weight)
    keys = transformer_layer(te).state_dict()
    assert "self_attention.core_attention._extra_state" in keys and "_extra_state" not in keys


def rule_quantized_parameters():
    te, recipe, _ = modules()
    with te.quantized_model_init(enabled=True, recipe=recipe.DelayedScaling()):
        linear = te.Linear(64, 64, params_dtype=torch.bfloat16)
        mlp = te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16)
        with pytest.raises(RuntimeError):
            transformer_layer(te, params_dtype=torch.bfloat16)
        transformer_layer(te, params_dtype=torch.bfloat16, fuse_qkv_params=True)
    assert isinstance(linear.weight, te.QuantizedTensor) and isinstance(mlp.fc2_weight, te.QuantizedTensor)
    assert not isinstance(linear.bias, te.QuantizedTensor)
    assert linear.weight.dequantize().shape == (64, 64)
    train(te, linear, rand(16, 64), recipe.DelayedScaling())
    with pytest.raises(RuntimeError), no_warnings():
        train(te, linear, rand(16, 64), recipe.Float8CurrentScaling())


def rule_weight_gradients_go_where_they_are_told():
    te, recipe, _ = modules()
    found = {}
    for overwrite in (False, True):
        linear = te.Linear(64, 64)
        linear.fuse_wgrad_accumulation = True
        linear.weight.main_grad = torch.ones(64, 64, device="cuda")
        linear.weight.overwrite_main_grad = overwrite
        with bf16():
            train(te, linear, rand(16, 64), recipe.DelayedScaling())
        assert linear.weight.grad is None and linear.bias.grad is not None
        assert linear.weight.main_grad.dtype == torch.float32
        found[overwrite] = linear.weight.main_grad
    assert torch.allclose(found[False], found[True] + 1, atol=1e-4) and found[True].abs().mean() > 0.1


def rule_quantized_parameters_take_new_values():
    te, recipe, _ = modules()
    with te.quantized_model_init(enabled=True, recipe=recipe.DelayedScaling()):
        linear = te.Linear(64, 64)
    linear.fuse_wgrad_accumulation = linear.weight.overwrite_main_grad = True
    linear.weight.main_grad = torch.zeros(64, 64, device="cuda")
    master = rand(64, 64, dtype=torch.float32)
    for step in range(3):  # the scale of a weight follows from what it was given before
        linear.weight.quantize_(master)
        with bf16():
            train(te, linear, rand(16, 64), recipe.DelayedScaling())
        assert linear.weight.grad is None and linear.weight.main_grad.abs().sum() > 0
        off = (linear.weight.dequantize().float() - master).norm() / master.norm()
        assert off < 0.05
    assert math.isclose(linear.fp8_meta["scaling_fwd"].scale[1].item(), 448 / master.abs().max().item(), rel_tol=1e-6)


def rule_fused_adam_refuses_capturable_with_quantized_parameters():
    te, recipe, _ = modules()
    with te.quantized_model_init(enabled=True, recipe=recipe.DelayedScaling()):
        linear = te.Linear(64, 64, params_dtype=torch.bfloat16)
    optimizer = te.optimizers.FusedAdam(linear.parameters(), master_weights=True, capturable=True)
    train(te, linear, rand(16, 64), recipe.DelayedScaling())
    with pytest.raises(RuntimeError):
        optimizer.step()


def rule_quantized_parameters_learn():
    te, recipe, _ = modules()
    with te.quantized_model_init(enabled=True, recipe=recipe.DelayedScaling()):
        linear = te.Linear(64, 64, params_dtype=torch.bfloat16)
    optimizer = te.optimizers.FusedAdam(linear.parameters(), lr=1e-2, master_weights=True)
    before, losses = linear.weight.dequantize().float(), []
    for _ in range(8):
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
            loss = (linear(rand(16, 64)) - rand(16, 64, seed=7)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not torch.equal(before, linear.weight.dequantize().float())


def rule_fused_adam_is_adamw():
    te, _, _ = modules()
    for capturable in (False, True):
        ours, theirs = (torch.nn.Parameter(rand(64, 64, dtype=torch.float32)) for _ in range(2))
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        fused = te.optimizers.FusedAdam([ours], **options, capturable=capturable)
        plain = torch.optim.AdamW([theirs], **options)
        for step in range(4):
            ours.grad, theirs.grad = (rand(64, 64, dtype=torch.float32, seed=step) for _ in range(2))
            fused.step()
            plain.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert te.optimizers.FusedAdam([ours]).param_groups[0]["weight_decay"] == 0.0


def rule_master_weights_keep_small_updates():
    te, _, _ = modules()
    moved = {}
    for master_weights in (False, True):
        p = torch.nn.Parameter(torch.ones(32, device="cuda", dtype=torch.bfloat16))
        optimizer = te.optimizers.FusedAdam([p], lr=1e-4, master_weights=master_weights)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[master_weights] = (1 - p.float()).abs().max().item()
    assert moved[False] == 0.0 and abs(moved[True] - 0.01) < 0.005


# ---- Running the rules ------------------------------------------------------------------------------------

RULES = {name[5:]: rule for name, rule in list(globals().items()) if name.startswith("rule_")}
CHILDREN = ("9.0", "10.0")


def run_rules():
    """{rule: None, "not here" or a traceback}"""
    results = {}
    for name, rule in RULES.items():
        modules()[2].reset()
        torch.manual_seed(0)
        try:
            rule()
            results[name] = None
        except NotHere:
            results[name] = "not here"
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
    return results


def child_environment(fake_gpu=None, **extra):
    paths = [str(STANDIN / "gpu"), str(STANDIN / "te")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FAKE_GPU", "STANDIN_TE"))}
    if fake_gpu:
        extra["FAKE_GPU"] = fake_gpu
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "FAKE_GPU_COMPILE": "0",
            "OMP_NUM_THREADS": "1", **extra}


@functools.cache
def results_of(fake_gpu):
    child = subprocess.run([sys.executable, __file__], env=child_environment(fake_gpu),
                           capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("where", ["real"] if REAL else CHILDREN)
@pytest.mark.parametrize("name", RULES)
def test_rule(name, where):
    if where == "real":
        modules()[2].reset()
        torch.manual_seed(0)
        try:
            RULES[name]()
        except NotHere:
            pytest.skip("says nothing about this GPU")
        finally:
            modules()[2].reset()
    else:
        result = results_of(where)[name]
        if result == "not here":
            pytest.skip(f"says nothing about capability {where}")
        assert result is None, f"with FAKE_GPU={where}:\n{result}"


# ---- The stand-in's own switches --------------------------------------------------------------------------

TRY_SWITCHES = """
import importlib, json, os, sys, torch
found = {}
def te():
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    return importlib.import_module("transformer_engine.pytorch")
def attempt(name, action):
    try:
        found[name] = action()
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
te()
from transformer_engine.common import IMPORT_ERRORS
for key in [*IMPORT_ERRORS, "MemoryError: no luck"]:
    os.environ["STANDIN_TE_IMPORT_ERROR"] = key
    attempt(key, lambda: te() and "imported")
del os.environ["STANDIN_TE_IMPORT_ERROR"]
os.environ["STANDIN_TE_UNAVAILABLE"] = "mxfp8,fp8_block=too bad"
attempt("fp8", lambda: te().is_fp8_available(return_reason=True))
attempt("fp8_block", lambda: te().is_fp8_block_scaling_available(return_reason=True))
os.environ["STANDIN_TE_FAIL"] = "DelayedScaling.forward,Float8CurrentScaling.backward,HighPrecision.forward"
t, r = te(), importlib.import_module("transformer_engine.common.recipe")
for name, recipe in (("DelayedScaling", r.DelayedScaling()), ("Float8CurrentScaling", r.Float8CurrentScaling()), ("HighPrecision", None)):
    linear = t.Linear(32, 32)
    def forward():
        with t.autocast(enabled=recipe is not None, recipe=recipe):
            linear.out = linear(torch.ones(16, 32, device="cuda"))
        return "passed"
    attempt(name + " forward", forward)
    attempt(name + " backward", lambda: linear.out.sum().backward() or "passed")
print(json.dumps(found))
"""


def run_child(code, **environment):
    child = subprocess.run([sys.executable, "-c", code], env=child_environment(**environment),
                           capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_standin_fails_as_told():
    found = run_child(TRY_SWITCHES, fake_gpu="9.0")
    kinds = {"empty metapackage": "RuntimeError", "no cudnn": "RuntimeError", "old cudnn": "RuntimeError",
             "no extension": "FileNotFoundError", "version mismatch": "AssertionError",
             "libcublas": "OSError", "libcudnn": "ImportError", "undefined symbol": "ImportError",
             "StopIteration": "StopIteration", "MemoryError: no luck": "MemoryError"}
    assert {key: found[key].split(":")[0] for key in kinds} == kinds
    assert found["fp8"] == [True, ""] and found["fp8_block"] == [False, "too bad"]
    assert "not supported" in found["DelayedScaling forward"]
    assert found["Float8CurrentScaling forward"] == "passed"
    assert "not supported" in found["Float8CurrentScaling backward"]
    assert "not supported" in found["HighPrecision forward"]


ANSWERS = """
import json, torch
import transformer_engine.pytorch as te
assert torch.cuda.is_available() and torch.zeros(2, device="cuda:0").sum() == 0
for make in (torch.cuda.CUDAGraph, lambda: torch.cuda.graph(None)):
    try:
        make()
    except RuntimeError as error:
        assert "stand-in: no CUDA graphs here" in str(error)
    else:
        raise SystemExit("a CUDA graph")
print(json.dumps([torch.cuda.get_device_name(), torch.cuda.get_device_capability(), te.is_bf16_available(),
    te.is_fp8_available(), te.is_fp8_block_scaling_available(), te.is_mxfp8_available(), te.is_nvfp4_available()]))
"""


@pytest.mark.parametrize("fake_gpu, environment, expected", [
    ("7.5", {}, ["Tesla T4", [7, 5], False, False, False, False, False]),
    ("8.0", {}, ["NVIDIA A100-SXM4-40GB", [8, 0], True, False, False, False, False]),
    ("8.9", {"STANDIN_TE_CUBLASLT": "110000"}, ["NVIDIA L4", [8, 9], True, False, False, False, False]),
    ("12.0", {"FAKE_GPU_NAME": "My GPU"}, ["My GPU", [12, 0], True, True, True, False, True]),
])
def test_fake_gpu_answers(fake_gpu, environment, expected):
    assert run_child(ANSWERS, fake_gpu=fake_gpu, **environment) == expected


ORDINARY_TRAINING = """
import json, torch
device = torch.device("cuda")
losses = {}
for dtype in (torch.float16, torch.bfloat16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(64, 16, device=device, generator=generator)
    y = torch.randint(0, 4, (64,), device="cuda", generator=generator)
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        for step in range(60):
            with torch.autocast(device_type="cuda", dtype=dtype):
                assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is dtype
                logits = torch.compile(model)(x)
                loss = torch.nn.functional.cross_entropy(logits.float(), y)
            assert logits.dtype is dtype and not torch.is_autocast_enabled("cpu")
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    losses[str(dtype)] = loss.item()
    assert torch.cuda.max_memory_allocated() >= sum(p.nbytes for p in model.parameters())
print(json.dumps(losses))
"""


def test_ordinary_training_code_runs_on_the_fake_gpu():
    assert all(loss < 0.5 for loss in run_child(ORDINARY_TRAINING, fake_gpu="9.0").values())


def test_without_the_variable_there_is_no_fake_gpu():
    code = "import json, torch; print(json.dumps(torch.cuda.is_available()))"
    if REAL:
        pytest.skip("this machine has a GPU")
    assert run_child(code) == torch.cuda.is_available()


if __name__ == "__main__":
    with no_warnings():
        outcome = run_rules()
    print(json.dumps(outcome))
