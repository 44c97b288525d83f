"""foredraft's drafters inside vLLM: `--speculative-config` with the method "custom_class" and this package's Proposer as the model.
Nothing here imports vLLM."""

from foredraft.integrations.vllm.proposer import Proposer

__all__ = ["Proposer"]
