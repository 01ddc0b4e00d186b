import torch

from .attention import MASK_TYPES, MultiheadAttention
from .module import LayerNormMLP
from .utils import unsupported


class TransformerLayer(torch.nn.Module):
    """h = x + proj(attention(LN(x))); out = h + fc2(act(fc1(LN(h)))). Sequence first by default!"""

    def __init__(self, hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None,
                 layernorm_epsilon=1e-5, hidden_dropout=0.1, attention_dropout=0.1, init_method=None,
                 output_layer_init_method=None, layer_number=None, kv_channels=None,
                 self_attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, softcap=0.0,
                 enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None,
                 enc_dec_window_size=None, tp_group=None, tp_size=1, params_dtype=None,
                 get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None,
                 micro_batch_size=None, sequence_parallel=False,
                 apply_residual_connection_post_layernorm=False, output_layernorm=False,
                 parallel_attention_mlp=False, layer_type="encoder", drop_path_rate=0.0,
                 set_parallel_mode=False, fuse_qkv_params=False, rotary_pos_interleaved=False,
                 zero_centered_gamma=False, qkv_weight_interleaved=True, ub_tp_comm_overlap=False,
                 ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=True,
                 ub_bulk_wgrad=True, bias=True, activation="gelu", activation_params=None,
                 normalization="LayerNorm", device="cuda", attn_input_format="sbhd"):
        super().__init__()
        unsupported(apply_residual_connection_post_layernorm=(apply_residual_connection_post_layernorm,
                    False), output_layernorm=(output_layernorm, False), layer_type=(layer_type, "encoder"),
                    parallel_attention_mlp=(parallel_attention_mlp, False),
                    drop_path_rate=(drop_path_rate, 0.0))
        if not fuse_qkv_params and fuse_wgrad_accumulation:
            raise ValueError("Gradient accumulation fusion (fuse_wgrad_accumulation=True) requires "
                             "fuse_qkv_params=True, but fuse_qkv_params is False.")
        self.self_attn_mask_type, self.hidden_dropout = self_attn_mask_type, hidden_dropout
        self.layer_number = layer_number
        common = {"params_dtype": params_dtype, "device": device, "bias": bias, "init_method": init_method,
                  "output_layer_init_method": output_layer_init_method, "tp_size": tp_size,
                  "zero_centered_gamma": zero_centered_gamma, "normalization": normalization,
                  "return_bias": True}
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            layer_number=layer_number, num_gqa_groups=num_gqa_groups, input_layernorm=True,
            window_size=window_size, softcap=softcap, fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved, qkv_format=attn_input_format, **common)
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, eps=layernorm_epsilon,
                                          activation=activation, activation_params=activation_params,
                                          **common)

    def forward(self, hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None,
                bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None,
                enc_dec_attn_mask_type=None, enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None,
                is_first_microbatch=None, checkpoint_core_attention=False, inference_params=None,
                rotary_pos_emb=None):
        mask_type = self_attn_mask_type or self.self_attn_mask_type
        if mask_type not in MASK_TYPES:
            raise ValueError(f"self_attn_mask_type {mask_type!r} is not supported.")
        if torch.is_autocast_enabled():
            hidden_states = hidden_states.to(torch.get_autocast_dtype("cuda"))
        out, bias = self.self_attention(
            hidden_states, attention_mask, encoder_output, attn_mask_type=mask_type,
            window_size=window_size, is_first_microbatch=is_first_microbatch,
            inference_params=inference_params, rotary_pos_emb=rotary_pos_emb)
        hidden_states = self._bias_dropout_add(out, bias, hidden_states)
        out, bias = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        return self._bias_dropout_add(out, bias, hidden_states)

    def _bias_dropout_add(self, hidden_state, bias, residual):
        # With a bias the fused kernel runs with gradients on, even under torch.no_grad().
        with torch.enable_grad() if bias.numel() else torch.set_grad_enabled(torch.is_grad_enabled()):
            if bias.numel():
                hidden_state = hidden_state + bias
            return residual + torch.dropout(hidden_state, self.hidden_dropout, self.training)
