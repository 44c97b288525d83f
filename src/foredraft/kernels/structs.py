"""The structs of structs.h, as ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("corrections", c_void_p),
        ("bias", c_void_p),
        ("levels", c_void_p),
        *((name, c_int64) for name in ("n", "k", "kind", "group", "scale_bytes", "has_offsets")),
    ]


class NormStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class MlpStruct(ctypes.Structure):
    _fields_ = [("up", MatrixStruct), ("down", MatrixStruct)]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, NormStruct) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, NormStruct) for name in ("residual_norm", "embedding_norm")),
        *((name, c_void_p) for name in ("q_norm", "k_norm")),
        *((name, MatrixStruct) for name in ("qkv", "out")),
        ("mlps", POINTER(MlpStruct)),
        ("router", MatrixStruct),
        ("sinks", c_void_p),
        ("cross_norm", NormStruct),
        *((name, MatrixStruct) for name in ("cross_query", "cross_out")),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("is_fused", "is_mixture", "window", "rotary_table")),
    ]


class StackStruct(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        ("embedding", c_void_p),
        ("packed_embedding", MatrixStruct),
        ("position_rows", c_void_p),
        ("fusion", MatrixStruct),
        ("features_fc", MatrixStruct),
        ("features_norm", c_void_p),
        *((name, c_int64) for name in ("features_parts", "features_width")),
        ("final_norm", NormStruct),
        ("head", MatrixStruct),
        ("column_ids", c_void_p),
        ("num_experts_read", POINTER(c_int64)),
        *(
            (name, c_int64)
            for name in (
                *("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "rotary_dim"),
                *(
                    "norm_kind",
                    "is_parallel",
                    "norms_residual",
                    "sees_all",
                    "farthest",
                    "is_gated",
                    "activation",
                    "joint_head_norm",
                    "head_norm_stride",
                ),
                *("num_experts", "experts_per_token", "normalizes_experts", "state_tap"),
            )
        ),
        *(
            (name, c_float)
            for name in (
                *("epsilon", "scale", "softcap", "embedding_scale", "residual_scale"),
                *("logit_scale", "logit_softcap", "swiglu_alpha", "swiglu_limit"),
            )
        ),
    ]


class BatchStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "ids",
                "positions",
                "slots",
                "paths",
                "wanted",
                "read_features",
                "spans",
                "stores",
                "sources",
                "taps",
                "features",
                "states",
                "cos",
                "sin",
                "logits",
            )
        ),
        *(
            (name, c_int64)
            for name in ("num_rows", "num_wanted", "num_spans", "rotary_stride", "path_stride", "num_taps")
        ),
    ]


class AdjustmentsStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "counts", "biased", "biases", "banned", "banned_tokens")),
        *((name, c_int64) for name in ("num_ids", "num_prompt_ids", "num_biased", "num_banned")),
        *((name, c_float) for name in ("repetition", "frequency", "presence", "unused")),
    ]


class AdjustmentBatchStruct(ctypes.Structure):
    _fields_ = [("each", POINTER(AdjustmentsStruct)), ("columns", c_void_p), ("num_ids", c_int64)]


class AttentionCallStruct(ctypes.Structure):
    _fields_ = [
        ("query", c_void_p),
        ("query_head", c_int64),
        ("query_row", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("capacity", c_int64),
        ("positions", c_void_p),
        ("paths", c_void_p),
        ("mask", c_void_p),
        ("mask_keys", c_int64),
        ("sinks", c_void_p),
        ("bias", c_void_p),
        ("farthest", c_int64),
        ("num_seen", c_int64),
        ("output", c_void_p),
        *(
            (name, c_int64)
            for name in (
                *("path_stride", "num_rows", "start", "num_heads", "num_kv_heads", "key_dim", "value_dim"),
                "window",
            )
        ),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class TokenProbsStruct(ctypes.Structure):
    _fields_ = [("probs", c_void_p), ("ids", c_void_p), ("kept", c_void_p), ("width", c_int64)]


class VerificationBatchStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                *("first_rows", "lens", "specs", "rules"),
                *("ids", "prob_rows", "probs", "kept_ids", "uniforms"),
            )
        ),
        *((name, c_int64) for name in ("num_sequences", "max_len", "columns", "probs_stride", "kept_stride")),
    ]
