"""Attention: DotProductAttention and, built around it, MultiheadAttention."""
import math

import torch
import torch.nn.functional as F

from .module import LayerNormLinear, Linear, TransformerEngineBaseModule
from .utils import unsupported

MASK_TYPES = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
              "padding_causal_bottom_right", "arbitrary")


def normalize_mask_type(mask_type):
    mask_type = mask_type.replace(",", "_")
    return "padding_causal" if mask_type == "causal_padding" else mask_type


def unpack(qkv_layer, query_layer, key_layer, value_layer, dim):
    if qkv_layer is None:
        if query_layer is None or key_layer is None or value_layer is None:
            raise ValueError("query_layer, key_layer and value_layer are required unless packed inputs "
                             "(qkv_layer or query_layer + kv_layer) are provided.")
        return query_layer, key_layer, value_layer
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim must be -3 (e.g. bs3hd) or -2 (e.g. bsh3d), got {dim}.")
    if any(x is not None for x in (query_layer, key_layer, value_layer)):
        raise ValueError("qkv_layer already packs Q, K and V: query_layer, key_layer and value_layer must "
                         "be None when qkv_layer is provided.")
    if qkv_layer.dim() != 5:
        raise ValueError(f"qkv_layer must be a 5D tensor, got {qkv_layer.dim()}D.")
    if qkv_layer.shape[dim] != 3:
        raise ValueError(f"qkv_layer must have size 3 at dim {dim} (qkv_interleave_dim), got shape "
                         f"{tuple(qkv_layer.shape)}.")
    return tuple(qkv_layer.select(dim, i) for i in range(3))


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
                 qkv_format="sbhd", attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
                 softcap=0.0, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
                 tp_group=None, layer_number=None, attention_type="self", cp_group=None,
                 cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None,
                 softmax_type="vanilla"):
        super().__init__()
        unsupported(window_size=(window_size, None), softcap=(softcap, 0.0), tp_size=(tp_size, 1),
                    softmax_type=(softmax_type, "vanilla"), attention_type=(attention_type, "self"),
                    cp_group=(cp_group, None))
        self.qkv_format, self.attn_mask_type = qkv_format, normalize_mask_type(attn_mask_type)
        self.num_attention_heads, self.head_dim = num_attention_heads, kv_channels
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % self.num_gqa_groups == 0, (
            "The number of attention heads must be divisible by the number of GQA groups!")
        self.attention_dropout = attention_dropout
        self.softmax_scale = 1.0 / math.sqrt(kv_channels) if softmax_scale is None else softmax_scale

    def forward(self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None,
                qkv_format=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,
                window_size=None, bottom_right_diagonal=None, softcap=None,
                checkpoint_core_attention=False, core_attention_bias_type="no_bias",
                core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None,
                pad_between_seqs=None, fp8_output=False, bf16_backward=False, num_splits=1,
                score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
                score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3):
        unsupported(cu_seqlens_q=(cu_seqlens_q, None), cu_seqlens_kv=(cu_seqlens_kv, None),
                    core_attention_bias_type=(core_attention_bias_type, "no_bias"),
                    inference_params=(inference_params, None), score_mod=(score_mod, None),
                    kv_layer=(kv_layer, None), alibi_slopes=(alibi_slopes, None))
        q, k, v = unpack(qkv_layer, query_layer, key_layer, value_layer, qkv_interleave_dim)
        self.prepare_forward(q, num_gemms=3)
        if self.fp8 and self.fp8_meta["recipe"].fp8_dpa and self.head_dim != 128:
            raise ValueError("No dot product attention backend is available for the provided inputs. "
                             "Please run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for "
                             "disabling all backends.")
        assert q.dtype == k.dtype == v.dtype, "Queries, keys and values must have the same data type!"
        assert k.shape[:-1] == v.shape[:-1], (
            "Keys and values must have the same batch size, sequence length and number of heads!")
        assert q.shape[-1] == k.shape[-1], "Queries and keys must have the same head dimension!"
        assert k.shape[-1] == self.head_dim, (
            f"Keys have head_dim = {k.shape[-1]}, but expected head_dim = {self.head_dim}!")
        assert k.shape[-2] == self.num_gqa_groups, (
            f"Keys and values must have num_gqa_group = {self.num_gqa_groups} heads! Found {k.shape[-2]}.")
        mask_type = normalize_mask_type(attn_mask_type or self.attn_mask_type)
        assert mask_type in MASK_TYPES, f"Attention mask type {mask_type} is not supported!"
        layout = qkv_format or self.qkv_format
        assert layout in ["sbhd", "bshd", "thd"], (
            "DotProductAttention only supports qkv_format = {'sbhd', 'bshd', 'thd'}!")
        unsupported(qkv_format=(layout == "thd", False))
        assert all(x.dim() == 4 for x in (q, k, v)), (
            f"Queries, keys and values must be 4D tensors when qkv_format={layout!r}!")

        to_bhsd = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (x.permute(to_bhsd) for x in (q, k, v))
        allowed = self.allowed(mask_type, attention_mask, q.shape[2], k.shape[2])
        with torch.autocast("cuda", enabled=False):
            out = F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), attn_mask=allowed, scale=self.softmax_scale,
                dropout_p=self.attention_dropout if self.training else 0.0,
                enable_gqa=self.num_gqa_groups != self.num_attention_heads).to(q.dtype)
        out = out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3))
        return out.flatten(2)

    @staticmethod
    def allowed(mask_type, attention_mask, queries, keys):
        """Boolean mask, True where attention is allowed. attention_mask says True where it is not."""
        allowed = None
        if "causal" in mask_type:
            first = keys - queries if "bottom_right" in mask_type else 0
            allowed = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(first)
        if "padding" in mask_type or mask_type == "arbitrary":
            mask = attention_mask[1] if isinstance(attention_mask, tuple) else attention_mask
            allowed = ~mask if allowed is None else allowed & ~mask
        return allowed


class MultiheadAttention(torch.nn.Module):
    def __init__(self, hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1,
                 layernorm_epsilon=1e-5, init_method=None, output_layer_init_method=None,
                 layer_number=None, attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
                 softcap=0.0, tp_group=None, tp_size=1, num_gqa_groups=None,
                 fuse_wgrad_accumulation=False, get_rng_state_tracker=None, sequence_parallel=False,
                 params_dtype=None, return_bias=False, return_layernorm_output=False,
                 input_layernorm=False, attention_type="self", set_parallel_mode=False,
                 fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True,
                 rotary_pos_interleaved=False, ub_overlap_ag=False, ub_overlap_rs=False,
                 ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, bias=True,
                 normalization="LayerNorm", device="cuda", qkv_format="sbhd"):
        super().__init__()
        if layer_number is not None:
            assert layer_number > 0, "layer_number must be a positive integer"
        unsupported(attention_type=(attention_type, "self"), tp_size=(tp_size, 1),
                    return_layernorm_output=(return_layernorm_output, False))
        self.attn_mask_type, self.qkv_format = attn_mask_type, qkv_format
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.head_dim = kv_channels or hidden_size // num_attention_heads
        self.interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        q_size, kv_size = self.head_dim * self.heads, self.head_dim * self.groups
        split = None if fuse_qkv_params else {"query": q_size, "key": kv_size, "value": kv_size}
        common = {"params_dtype": params_dtype, "device": device, "bias": bias}
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, q_size + 2 * kv_size, eps=layernorm_epsilon, init_method=init_method,
                parameters_split=split, zero_centered_gamma=zero_centered_gamma,
                normalization=normalization, **common)
        else:
            self.qkv = Linear(hidden_size, q_size + 2 * kv_size, init_method=init_method,
                              parameters_split=split, **common)
        self.core_attention = DotProductAttention(
            num_attention_heads, self.head_dim, num_gqa_groups=self.groups, window_size=window_size,
            attention_dropout=attention_dropout, qkv_format=qkv_format, softcap=softcap)
        self.proj = Linear(q_size, hidden_size, init_method=output_layer_init_method,
                           return_bias=return_bias, **common)

    def forward(self, hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None,
                window_size=None, bottom_right_diagonal=None, is_first_microbatch=None,
                checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None):
        unsupported(encoder_output=(encoder_output, None), inference_params=(inference_params, None),
                    rotary_pos_emb=(rotary_pos_emb, None))
        mixed = (self.layernorm_qkv if self.input_layernorm else self.qkv)(
            hidden_states, is_first_microbatch=is_first_microbatch)
        per_group = self.heads // self.groups
        if self.interleaved:  # [.., group, its queries + key + value, d]
            mixed = mixed.view(*mixed.shape[:-1], self.groups, per_group + 2, self.head_dim)
            q, k, v = mixed.split((per_group, 1, 1), dim=-2)
        else:
            mixed = mixed.view(*mixed.shape[:-1], per_group + 2, self.groups, self.head_dim)
            q, k, v = mixed.split((per_group, 1, 1), dim=-3)
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in (q, k, v))
        context = self.core_attention(q, k, v, attention_mask=attention_mask, window_size=window_size
                                      if window_size not in ((-1, 0), (-1, -1)) else None,
                                      attn_mask_type=attn_mask_type or self.attn_mask_type)
        return self.proj(context, is_first_microbatch=is_first_microbatch)
