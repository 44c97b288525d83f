"""A family and the Llama that it is compared with read the same number of weights per token."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.kernels.families import _COMMON, FAMILIES, equal_llama, num_weights_read
from foredraft.model.families import FAMILIES as COMPILED


def test_weights_are_those_of_the_matrices_and_the_head() -> None:
    llama = CONFIG_MAPPING["llama"](**_COMMON)
    width, kv = llama.hidden_size, llama.num_key_value_heads * 64
    layer = 2 * width**2 + 2 * kv * width + 3 * width * llama.intermediate_size
    assert num_weights_read(llama) == llama.num_hidden_layers * layer + width * llama.vocab_size


@pytest.mark.parametrize("name", ["gemma3", "starcoder2", "mixtral", "gpt_oss"])
def test_the_llama_reads_as_many_weights(name: str) -> None:
    model_type, settings = FAMILIES[name]
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **settings})
    assert num_weights_read(equal_llama(config)) == pytest.approx(num_weights_read(config), rel=0.005)


def test_every_compiled_family_is_measured() -> None:
    assert len(FAMILIES) == len(COMPILED) - 1  # all except Llama
