"""The class that vLLM instantiates. It implements vLLM's interface and imports nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters import DrafterContext, SuffixDrafter, build
from foredraft.engine.hybrids import hybrid_of, with_hybrid
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter
from foredraft.integrations.vllm.drafting import Drafting
from foredraft.integrations.vllm.options import ProposerOptions
from foredraft.integrations.vllm.texts import Texts
from foredraft.model import LanguageModel, LoadOptions, available_memory, load_model
from foredraft.policy import Controller, FixedPolicy, Policy, SafePolicy
from foredraft.sampling import AUTO
from foredraft.utils.isolation import brief

logger = logging.getLogger("foredraft")

_MEMORY_SHARE = 0.25
_UNKNOWN_MEMORY = 2 * 2**30


class Proposer:
    """Drafts for vLLM (0.32) by suffix, n-gram, a draft model on the CPU, or several of them, as many tokens as pay.

    Drafts are certain: vLLM verifies each draft token as a point mass, so the target's distribution is preserved. Options are read from
    `additional_config["foredraft"]`, see ProposerOptions. Several tensor-parallel ranks must draft alike, so there "auto" does not
    depend on a clock: the first method drafts vLLM's num_speculative_tokens in each step.

    vllm_config: a VllmConfig, of which only model_config, scheduler_config, speculative_config, parallel_config and
    additional_config are read. Raises ForedraftError for options that cannot work.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = ProposerOptions.of(_table(vllm_config.additional_config))
        most = int(vllm_config.speculative_config.num_speculative_tokens)
        max_len = int(vllm_config.model_config.max_model_len)
        vocab_size = int(vllm_config.model_config.get_vocab_size())
        alike = int(vllm_config.parallel_config.tensor_parallel_size) > 1
        tokens = most if alike and options.speculative_tokens == AUTO else options.speculative_tokens
        fixed = None if isinstance(tokens, str) else min(tokens, most)
        self._texts = Texts(max_len, fixed)
        drafters = _drafters(options, vocab_size, max_len, int(vllm_config.scheduler_config.max_num_seqs))
        policy: Policy = FixedPolicy(next(iter(drafters)))
        if fixed is None:
            drafters = with_hybrid(drafters)
            policy = Controller([*drafters], max_draft=most, hybrid=hybrid_of(drafters))
        safe = SafePolicy(policy, drafters)
        self._drafting = Drafting(drafters, safe, self._texts, vocab_size, most, learns=fixed is None)
        self._has_failed = False

    def load_model(self, target_model: Any) -> None:
        """Called by vLLM once its target is loaded; nothing is read from it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row, at most num_speculative_tokens long; empty drafts if drafting fails.

        sampled_token_ids: the new tokens of each row in this step; none for a row that is reading its prompt. num_tokens_no_spec: [B],
        the length of each row's history. token_ids_cpu: [B, L], the histories.
        """
        try:
            return self._drafting.step(self._texts.read(sampled_token_ids, num_tokens_no_spec, token_ids_cpu))
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("drafting failed: %s; this step continues without drafts", brief(error))
            self._drafting.reset()
            return [[] for _ in sampled_token_ids]


def _table(additional_config: Any) -> dict[str, Any]:
    table = additional_config.get("foredraft", {}) if isinstance(additional_config, dict) else {}
    return dict(table)


def _drafters(options: ProposerOptions, vocab_size: int, max_len: int, num_seqs: int) -> dict[str, Drafter]:
    model = None
    if options.draft_model is not None:
        model = load_model(options.draft_model, LoadOptions(device="cpu", quantization=options.draft_quantization))
    pool = MemoryPool(0 if model is None else options.draft_memory or _memory_for(model, num_seqs))
    context = DrafterContext(vocab_size, pool, model, context_len=max_len)
    drafters = {name: build(name, context) for name in options.method}
    if "suffix" in drafters and options.corpus_tokens:
        drafters["suffix"] = SuffixDrafter(corpus_tokens=options.corpus_tokens)
    return drafters


def _memory_for(model: LanguageModel, num_seqs: int) -> int:
    """Bytes for the keys and values of num_seqs full contexts, at most a quarter of the free memory."""
    free = available_memory(model.device)
    most = int(_MEMORY_SHARE * free) if free else _UNKNOWN_MEMORY
    return max(1, min(model.traits.bytes_per_token * model.traits.context_len * num_seqs, most))
