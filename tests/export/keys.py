"""The keys that engines accept, recorded from the sources of these versions. An export may write no others."""

from __future__ import annotations

VLLM_SPECULATIVE = {
    "draft_sample_method",
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "quantization",
    "rejection_sample_method",
    "use_heterogeneous_vocab",
}
"""Those of vLLM 0.32.0's SpeculativeConfig that say how to draft."""

SGLANG = {
    "model_path",
    "speculative_adaptive",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_quantization",
    "speculative_eagle_topk",
    "speculative_ngram_capacity",
    "speculative_ngram_match_type",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_min_bfs_breadth",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_use_block_verification",
    "speculative_use_rejection_sampling",
}
"""The lossless ones of SGLang 0.5.23's arguments that say how to draft."""

_DECODING = {
    "allow_advanced_sampling",
    "decoding_type",
    "draft_len_schedule",
    "max_concurrency",
    "max_draft_len",
    "speculative_model",
    "use_rejection_sampling",
}
TENSORRT_LLM = {
    "Draft_Target": _DECODING,
    "Eagle3": _DECODING | {"eagle3_layers_to_capture", "sa_config"},
    "NGram": _DECODING | {"is_keep_all", "is_public_pool", "is_use_oldest", "max_matching_ngram_size"},
    "SA": _DECODING | {"enable_global_pool", "max_matching_ngram_size"},
}
"""Those of TensorRT-LLM 1.4's configurations, by decoding type; its models accept no other keys."""

MAX = {
    "adaptive_speculative_widths",
    "draft_model",
    "draft_proposal",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "speculative_method",
}
"""The lossless ones of MAX 26.7.0's SpeculativeConfig, and the models."""

LLAMACPP = {
    "model",
    "model_draft",
    "spec_draft_n_max",
    "spec_draft_n_min",
    "spec_draft_p_min",
    "spec_ngram_simple_size_m",
    "spec_ngram_simple_size_n",
    "spec_type",
}
"""Those of llama-server."""
