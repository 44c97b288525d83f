"""Makes the golden files of this folder: small random heads in the form that their original programs write, and what those compute.

It needs the programs, and is not run by the tests:

    pip install --target LIB --no-deps speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0 loguru pydantic-settings python-dotenv \
        datasets psutil httpx httpcore dill multiprocess xxhash fsspec pyarrow pandas
    git clone https://github.com/SafeAILab/EAGLE; git clone https://github.com/FasterDecoding/Medusa
    git clone https://github.com/deepseek-ai/DeepSpec; git clone https://github.com/sgl-project/SpecForge
    PYTHONPATH=LIB HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 python tests/heads/make_golden.py \
        --eagle EAGLE --medusa Medusa --deepspec DeepSpec --specforge SpecForge [NAME ...]

A golden file has the tensors of a checkpoint (`checkpoint/NAME`, with numbers that bfloat16 can represent), its config.json (metadata
`config`), inputs (`inputs/..`) and outputs in float32 (`expected/..`).

An EAGLE head reads NUM_ROWS rows of (id, features), then two rows of (id, its own last state). `states` and `logits` are of
all rows of the first pass and the one row of each other pass; `drafted` has the best id of the target's vocabulary after the last row
of each pass.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parent / "golden"
VOCAB_SIZE, DRAFT_VOCAB_SIZE = 32, 20
NUM_ROWS, NUM_DRAFTS = 7, 3
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}


class Inputs(NamedTuple):
    """ids: [NUM_ROWS + NUM_DRAFTS - 1], of all rows. features: [NUM_ROWS + NUM_DRAFTS - 1, F]; only the first NUM_ROWS are read."""

    ids: Tensor
    features: Tensor


class Passes:
    """The results of the passes: states and logits [rows, ..]. target_ids: the columns' ids in the target's vocabulary."""

    def __init__(self, target_ids: Tensor | None) -> None:
        self._target_ids = target_ids
        self.states: list[Tensor] = []
        self.logits: list[Tensor] = []

    def add(self, states: Tensor, logits: Tensor) -> None:
        """Add a pass's results, [1, rows, ..] or [rows, ..]."""
        self.states.append(states.reshape(-1, states.shape[-1]))
        self.logits.append(logits.reshape(-1, logits.shape[-1]))

    def expected(self) -> dict[str, Tensor]:
        best = torch.stack([logits[-1].argmax() for logits in self.logits])
        drafted = best if self._target_ids is None else self._target_ids[best]
        return {"states": torch.cat(self.states), "logits": torch.cat(self.logits), "drafted": drafted}


def inputs_of(feature_size: int, seed: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    num_rows = NUM_ROWS + NUM_DRAFTS - 1
    ids = torch.randint(0, VOCAB_SIZE, (num_rows,), generator=generator)
    return Inputs(ids, torch.randn(num_rows, feature_size, generator=generator))


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Draw weights that bfloat16 can represent, large enough for states and logits to differ; norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(module.named_parameters()):
        values = torch.randn(weight.shape, generator=generator)
        values = (
            1 + 0.3 * values if "norm" in name else values * (0.5 if weight.dim() == 1 else weight.shape[1] ** -0.5)
        )
        weight.data = values.bfloat16().float()


def tables() -> tuple[Tensor, Tensor]:
    """(d2t, t2d) for DRAFT_VOCAB_SIZE random ids."""
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:DRAFT_VOCAB_SIZE].sort().values
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(DRAFT_VOCAB_SIZE), t2d


def ids_of(d2t: Tensor) -> Tensor:
    return d2t + torch.arange(len(d2t))


def write(
    name: str,
    config: dict[str, Any],
    checkpoint: dict[str, Tensor],
    inputs: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> None:
    tensors = {f"checkpoint/{key}": _small(tensor) for key, tensor in checkpoint.items()}
    tensors |= {f"inputs/{key}": tensor for key, tensor in inputs.items()}
    tensors |= {f"expected/{key}": tensor for key, tensor in expected.items()}
    path = FOLDER / f"{name}.safetensors"
    save_file(
        {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()},
        path,
        {"config": json.dumps(config)},
    )
    print(f"{path.name}: {path.stat().st_size} bytes")


def _small(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def write_eagle(
    name: str, config: dict[str, Any], checkpoint: dict[str, Tensor], inputs: Inputs, passes: Passes
) -> None:
    write(name, config, checkpoint, {"ids": inputs.ids, "features": inputs.features[:NUM_ROWS]}, passes.expected())


# speculators


def speculators(name: str, layer: Any, **settings: Any) -> None:
    """Runs the class's own training-time test, whose step j is pass j of every row, each with its own chain."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    settings = {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], **settings}
    model = (
        Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, speculators_config=about, **settings))
        .float()
        .eval()
    )
    randomise(model)
    d2t, t2d = tables()
    is_reduced = settings["draft_vocab_size"] < VOCAB_SIZE
    if is_reduced:
        model.load_vocab_mappings(t2d, d2t)
    inputs = inputs_of(len(settings["eagle_aux_hidden_state_layer_ids"]) * WIDTHS["hidden_size"])
    passes = Passes(ids_of(d2t) if is_reduced else None)
    raw: list[Tensor] = []
    normed: list[Tensor] = []
    logits: list[Tensor] = []
    model.norm.register_forward_hook(lambda _, args, out: raw.append(args[0]))
    model.norm.register_forward_hook(lambda _, args, out: normed.append(out))
    model.lm_head.register_forward_hook(lambda _, args, out: logits.append(out))
    model(
        hidden_states=inputs.features[None],
        input_ids=inputs.ids[None],
        document_ids=torch.zeros(1, len(inputs.ids), dtype=torch.int64),
        ttt_steps=NUM_DRAFTS,
    )
    fed_back = normed if settings.get("norm_output") else raw
    for step in range(NUM_DRAFTS):  # only the last row of the first pass is drafted from
        rows = slice(0 if step == 0 else NUM_ROWS - 1, NUM_ROWS)
        passes.add(fed_back[step][:, rows], logits[step][:, rows])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checkpoint = load_file(Path(folder) / "model.safetensors")
        config = json.loads((Path(folder) / "config.json").read_bytes())
    write_eagle(name, config, checkpoint, inputs, passes)


def peagle(name: str, layer: Any, **settings: Any) -> None:
    """Runs the class's own training pass, with no draft dropped, and keeps the rows of the text and of the draft after its last row."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm="peagle",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    settings = {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], **settings}
    made = PEagleSpeculatorConfig(
        transformer_layer_config=layer, speculators_config=about, mask_token_id=VOCAB_SIZE - 1, **settings
    )
    model = core.PEagleDraftModel(made).float().eval()
    randomise(model)
    d2t, t2d = tables()
    model.load_vocab_mappings(t2d, d2t)
    inputs = inputs_of(3 * WIDTHS["hidden_size"])
    rows, drafted = torch.arange(len(inputs.ids)), torch.full((NUM_DRAFTS - 1,), NUM_ROWS - 1)
    depths = torch.cat([torch.zeros_like(rows), torch.arange(1, NUM_DRAFTS)])
    core.generate_cod_sample_indices = lambda **_: (torch.cat([rows, drafted]), depths)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, args, out: logits.append(out))
    model(
        hidden_states=inputs.features[None],
        input_ids=inputs.ids[None],
        document_ids=torch.zeros(1, len(inputs.ids), dtype=torch.int64),
        verifier_last_hidden_states=torch.zeros(1, len(inputs.ids), WIDTHS["hidden_size"]),
        loss_config=resolve_loss_config("kl_div", "eager"),
        num_depths=NUM_DRAFTS,
    )
    wanted = torch.cat([torch.arange(NUM_ROWS), torch.arange(len(rows), len(depths))])
    found = logits[0][0, wanted]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checkpoint = load_file(Path(folder) / "model.safetensors")
        config = json.loads((Path(folder) / "config.json").read_bytes())
    given = {"ids": inputs.ids[:NUM_ROWS], "features": inputs.features[:NUM_ROWS]}
    write(name, config, checkpoint, given, {"logits": found, "drafted": ids_of(d2t)[found[NUM_ROWS - 1 :].argmax(-1)]})


# DFlash


BLOCK_SIZE = 4


def write_dflash(
    name: str,
    model: Any,
    config: dict[str, Any],
    inputs: Inputs,
    ends: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    without: Sequence[str] = (),
) -> None:
    """Write a block after NUM_ROWS tokens with features. ends: the target's embeddings and lm_head, if the head has none of its own.
    expected: `logits` of all rows; for a head with a correction also `corrected`, given that the text continues as in `following`."""
    checkpoint = {key: tensor for key, tensor in model.state_dict().items() if key not in without}
    given = {"ids": inputs.ids[: NUM_ROWS + 1], "features": inputs.features[:NUM_ROWS], **ends}
    write(name, config, checkpoint, given, expected)


def zlab(
    name: str, *, architecture: str = "DFlashDraftModel", inner: dict[str, Any] | None = None, **changes: Any
) -> None:
    """Runs z-lab's model; for DFlash-2 also its greedy draft, with the selector."""
    from dflash import model as program

    config = Qwen3Config(
        **{**WIDTHS, "num_hidden_layers": 2, "sliding_window": 3, "use_sliding_window": True, **changes}
    )
    config.num_target_layers, config.block_size = 8, BLOCK_SIZE
    config.dflash_config = {
        "mask_token_id": VOCAB_SIZE - 1,
        "target_layer_ids": [0, 3],
        "block_size": BLOCK_SIZE,
        **(inner or {}),
    }
    config.architectures = [architecture]
    model = getattr(program, architecture)(config).float().eval()
    randomise(model)
    inputs = inputs_of(2 * WIDTHS["hidden_size"])
    embeddings, lm_head = ends_of()
    block = torch.tensor([int(inputs.ids[NUM_ROWS]), *[VOCAB_SIZE - 1] * (BLOCK_SIZE - 1)])
    with torch.no_grad():
        hidden = model(
            position_ids=torch.arange(NUM_ROWS + BLOCK_SIZE)[None],
            noise_embedding=embeddings[block][None],
            target_hidden=inputs.features[None, :NUM_ROWS],
        )
        logits = (hidden @ lm_head.T)[0]
        expected = {"logits": logits}
        if architecture == "DFlash2DraftModel":
            path, _, _ = model.propose(hidden[:, 1:], inputs.ids[NUM_ROWS : NUM_ROWS + 1], lambda x: x @ lm_head.T, 0.0)
            expected["drafted"] = path[0]
    raw = json.loads(config.to_json_string())
    write_dflash(name, model, raw, inputs, {"embeddings": embeddings, "lm_head": lm_head}, expected)


def ends_of() -> tuple[Tensor, Tensor]:
    """A target's embeddings and lm_head, both [VOCAB_SIZE, H]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, VOCAB_SIZE, WIDTHS["hidden_size"], generator=generator).bfloat16().float().unbind(0)


def speculators_dflash(name: str, kind: str = "dflash", layers: dict[str, Any] | None = None, **settings: Any) -> None:
    """Runs the class's own training pass, with one anchor."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import core
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = Qwen3Config(**{**WIDTHS, "num_hidden_layers": 2, **(layers or {})})
    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK_SIZE - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config_class, model_class = speculators_classes(kind)
    made = config_class(
        transformer_layer_config=layer,
        speculators_config=about,
        aux_hidden_state_layer_ids=[1, 4],
        mask_token_id=VOCAB_SIZE - 1,
        block_size=BLOCK_SIZE,
        **{"draft_vocab_size": DRAFT_VOCAB_SIZE, **settings},
    )
    model = model_class(made).float().eval()
    randomise(model)
    if made.draft_vocab_size < VOCAB_SIZE:
        d2t, t2d = tables()
        model.load_vocab_mappings(t2d, d2t)
    inputs = inputs_of(2 * WIDTHS["hidden_size"])
    core.select_anchors = lambda *_: (torch.tensor([NUM_ROWS]), torch.tensor([True]))
    num_rows = NUM_ROWS + BLOCK_SIZE
    missing = num_rows - len(inputs.ids)  # after the anchor, where nothing is read
    ids = nn.functional.pad(inputs.ids, (0, missing), value=5)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            nn.functional.pad(inputs.features, (0, 0, 0, missing))[None],
            ids[None],
            torch.ones(1, num_rows),
            torch.zeros(1, num_rows, WIDTHS["hidden_size"]),
            torch.zeros(1, num_rows, dtype=torch.int64),
            max_anchors=1,
        )
        expected = {"logits": logits[0]}
        following = {}
        if kind != "dflash":
            following = {"following": ids[NUM_ROWS + 1 :]}
            expected["corrected"] = corrected(kind, model, hidden, logits, ids)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_bytes())
        kept = set(load_file(Path(folder) / "model.safetensors"))
    embeddings = model.embed_tokens.weight.detach()
    ends = {"embeddings": embeddings, **following}
    if made.draft_vocab_size == VOCAB_SIZE:
        ends["lm_head"] = model.lm_head.weight.detach()
    without = [key for key in model.state_dict() if key not in kept]
    write_dflash(name, model, config, inputs, ends, expected, without=without)


def speculators_classes(kind: str) -> tuple[Any, Any]:
    """(the class of the configuration, the class of the model)"""
    name = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "xpress": "XPress"}[kind]
    package = f"speculators.models.{kind}"
    config = getattr(importlib.import_module(f"{package}.config"), f"{name}SpeculatorConfig")
    return config, getattr(importlib.import_module(f"{package}.core"), f"{name}DraftModel")


def corrected(kind: str, model: Any, hidden: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    """[BLOCK_SIZE, D], the logits as corrected by the class's own forward pass, given the text's tokens."""
    block = ids[NUM_ROWS:][None]
    before = ids[NUM_ROWS - 1] if kind == "xpress" else ids[NUM_ROWS]
    previous = block if model.config.sample_from_anchor else torch.cat([before[None, None], block[:, :-1]], dim=1)
    if kind == "dspark":
        return (logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden))[0]
    if kind == "xpress":
        return (logits + model.refiner_head.block_bias(previous, hidden_states=hidden))[0]
    candidates, scores = model.candidate_selector.select(logits, hidden, previous)
    return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)[0]


# SafeAILab


def safeailab_config(**changes: Any) -> dict[str, Any]:
    widths = {key: value for key, value in WIDTHS.items() if key != "head_dim"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        **widths,
        **changes,
    }


def _unscaled(config: Any) -> Any:
    """Set two settings that transformers 5 moves to where the program does not find them."""
    config.rope_scaling, config.rope_theta = None, 10000.0
    return config


def chain(model: Any, inputs: Inputs, passes: Passes, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Run the passes of a SafeAILab model with its own cache."""
    with torch.no_grad():
        states, past = model(inputs.features[None, :NUM_ROWS], input_ids=inputs.ids[None, :NUM_ROWS], use_cache=True)
        passes.add(states, logits_of(states))
        for step in range(1, NUM_DRAFTS):
            ids = inputs.ids[None, NUM_ROWS - 1 + step : NUM_ROWS + step]
            states, past = model(states[:, -1:], input_ids=ids, past_key_values=past, use_cache=True)
            passes.add(states, logits_of(states))


def safeailab_eagle3(name: str, **changes: Any) -> None:
    from eagle.model.cnets import Model
    from eagle.model.configs import EConfig

    raw = safeailab_config(draft_vocab_size=DRAFT_VOCAB_SIZE, **changes)
    model = Model(_unscaled(EConfig(**raw)), top_k=2).eval()
    randomise(model)
    model.d2t, model.t2d = tables()
    model.reset()
    inputs = inputs_of(3 * raw.get("target_hidden_size", WIDTHS["hidden_size"]))
    passes = Passes(ids_of(model.d2t))
    chain(model, inputs, passes, lambda states: model.lm_head(model.norm(states)))
    write_eagle(name, raw, model.state_dict(), inputs, passes)


def safeailab_eagle1(name: str, *, bias: bool) -> None:
    from eagle.model.cnets1 import Model
    from eagle.model.configs import EConfig

    raw = safeailab_config(bias=bias)
    model = Model(_unscaled(EConfig(**raw)), bias=bias, top_k=2).eval()
    randomise(model)
    model.reset()
    inputs = inputs_of(WIDTHS["hidden_size"])
    head = nn.Linear(WIDTHS["hidden_size"], VOCAB_SIZE, bias=False)  # the target's
    randomise(head, seed=3)
    passes = Passes(None)
    chain(model, inputs, passes, head)
    rows = {"ids": inputs.ids, "features": inputs.features[:NUM_ROWS], "lm_head": head.weight.bfloat16()}
    write(name, raw, model.state_dict(), rows, passes.expected())


# SpecForge


def specforge(name: str, **changes: Any) -> None:
    """Runs the training's forward pass in steps, which equals a first pass and a chain with one growing cache."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    raw = safeailab_config(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB_SIZE, head_dim=8, **changes
    )
    model = LlamaForCausalLMEagle3(LlamaConfig(**raw), attention_backend="sdpa").float().eval()
    randomise(model)
    model.d2t, model.t2d = tables()
    inputs = inputs_of(3 * WIDTHS["hidden_size"])
    passes = Passes(ids_of(model.d2t))
    num_rows = len(inputs.ids)
    # in training step j reads ids shifted by j with its own states; row P sees rows 0..P of step 0 and row P of later steps
    cache_hidden: list[list[Tensor]] = [[], []]
    causal = torch.full((num_rows, num_rows), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        states = model.project_hidden_states(inputs.features[None])
        for step in range(NUM_DRAFTS):
            ids = torch.cat((inputs.ids[step:], inputs.ids.new_zeros(step)))
            states = model.backbone(
                input_embeds=model.embed_input_ids(ids[None]),
                hidden_states=states,
                cache_hidden=cache_hidden,
                attention_mask=causal,
                position_ids=torch.arange(num_rows)[None],
            )
            rows = slice(0 if step == 0 else NUM_ROWS - 1, NUM_ROWS)
            passes.add(states[:, rows], model.compute_logits(states)[:, rows])
    write_eagle(name, raw, model.state_dict(), inputs, passes)


# DeepSpec


def deepspec(name: str) -> None:
    from deepspec.modeling.eagle3.qwen3.modeling import Qwen3Eagle3Model
    from transformers import DynamicCache

    config = Qwen3Config(
        **WIDTHS,
        architectures=["Qwen3Eagle3Model"],
        num_target_layers=8,
        target_layer_ids=[0, 1, 3, 5, 6],
        ttt_length=7,
        step_loss_decay=0.8,
        draft_num_hidden_layers=1,
        layer_types=["full_attention"],
        target_model_name_or_path="some/target",
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = Qwen3Eagle3Model(config).float().eval()
    randomise(model)
    inputs = inputs_of(5 * WIDTHS["hidden_size"])
    passes = Passes(None)
    past, states = DynamicCache(), inputs.features[None, :NUM_ROWS]
    with torch.no_grad():
        for step in range(NUM_DRAFTS):
            first, last = (0, NUM_ROWS) if step == 0 else (NUM_ROWS - 1 + step, NUM_ROWS + step)
            out = model(
                states if step == 0 else states[:, -1:],
                inputs.ids[None, first:last],
                position_ids=torch.arange(first, last)[None],
                past_key_values=past,
                use_cache=True,
                attention_mask=torch.ones(1, last),
                return_logits=True,
            )
            states = out.hidden_states
            passes.add(states, out.draft_logits)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checkpoint = load_file(Path(folder) / "model.safetensors")
        raw = json.loads((Path(folder) / "config.json").read_bytes())
    write_eagle(name, raw, checkpoint, inputs, passes)


def deepspec_dspark(name: str, head_type: str = "vanilla") -> None:
    """Runs the program's own greedy drafting."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import DynamicCache

    config = Qwen3Config(
        **{**WIDTHS, "num_hidden_layers": 2},
        architectures=["Qwen3DSparkModel"],
        num_target_layers=8,
        block_size=BLOCK_SIZE,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * 2,
        mask_token_id=VOCAB_SIZE - 1,
        target_layer_ids=[0, 3],
        num_anchors=4,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        markov_rank=6,
        markov_head_type=head_type,
    )
    config._attn_implementation = "eager"
    model = Qwen3DSparkModel(config).float().eval()
    randomise(model)
    inputs = inputs_of(2 * WIDTHS["hidden_size"])
    block = torch.tensor([int(inputs.ids[NUM_ROWS]), *[VOCAB_SIZE - 1] * (BLOCK_SIZE - 1)])
    with torch.no_grad():
        hidden = model._forward_backbone(
            position_ids=torch.arange(NUM_ROWS + BLOCK_SIZE)[None],
            noise_embedding=model.embed_tokens(block)[None],
            target_hidden_states=inputs.features[None, :NUM_ROWS],
            past_key_values=DynamicCache(),
            use_cache=True,
        )
        logits = model.compute_logits(hidden)
        drafted, corrected_logits = model.sample_draft_tokens(
            logits, first_prev_token_ids=inputs.ids[NUM_ROWS : NUM_ROWS + 1], hidden_states=hidden
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        raw = json.loads((Path(folder) / "config.json").read_bytes())
    ends = {"following": drafted[0, :-1]}
    write_dflash(
        name, model, raw, inputs, ends, {"logits": logits[0], "corrected": corrected_logits[0], "drafted": drafted[0]}
    )


# Medusa


def medusa(name: str, source: Path, *, num_blocks: int) -> None:
    """Runs the residual block of medusa_model.py, which itself needs an old transformers."""
    block = residual_block(source / "medusa" / "model" / "medusa_model.py")
    hidden_size, num_heads = WIDTHS["hidden_size"], 3
    heads = nn.ModuleList(
        nn.Sequential(*([block(hidden_size)] * num_blocks), nn.Linear(hidden_size, VOCAB_SIZE, bias=False))
        for _ in range(num_heads)
    )
    randomise(heads)
    hidden = inputs_of(hidden_size).features[:NUM_ROWS]
    with torch.no_grad():
        states = torch.stack([head[:-1](hidden) for head in heads], dim=1)
        logits = torch.stack([head(hidden) for head in heads], dim=1)
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": num_blocks,
        "base_model_name_or_path": "some/target",
        "version": "2",
    }
    expected = {"states": states, "logits": logits, "drafted": logits[-1].argmax(-1)}
    write(name, config, heads.state_dict(), {"hidden": hidden}, expected)


def residual_block(path: Path) -> Any:
    tree = ast.parse(path.read_text())
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ResBlock")
    space: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(compile(ast.Module([node], []), str(path), "exec"), space)
    return space["ResBlock"]


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**WIDTHS, **changes})


def goldens(medusa_source: Path) -> dict[str, Callable[[str], None]]:
    return {
        "speculators_llama": lambda name: speculators(name, llama()),
        "speculators_qwen3": lambda name: speculators(name, Qwen3Config(**WIDTHS), norm_before_residual=True),
        "speculators_3_1": lambda name: speculators(name, llama(), fc_norm=True, norm_output=True),
        "speculators_norm_before_fc": lambda name: speculators(
            name, llama(rope_parameters=LLAMA3), norm_before_fc=True
        ),
        "speculators_two_layers": lambda name: speculators(
            name,
            Qwen3Config(**{**WIDTHS, "num_hidden_layers": 2}),
            draft_vocab_size=VOCAB_SIZE,
            eagle_aux_hidden_state_layer_ids=[2, 8],
        ),
        "peagle": lambda name: peagle(name, Qwen3Config(**{**WIDTHS, "num_hidden_layers": 2})),
        "peagle_3_1": lambda name: peagle(name, llama(num_hidden_layers=2), fc_norm=True, norm_before_residual=True),
        "dflash": zlab,
        "dflash_sliding": lambda name: zlab(name, layer_types=["sliding_attention", "full_attention"]),
        "speculators_dflash": speculators_dflash,
        "speculators_dflash_from_anchor": lambda name: speculators_dflash(name, sample_from_anchor=True),
        "speculators_dflash_sliding": lambda name: speculators_dflash(name, layers=SLIDING),
        "dflash2": lambda name: zlab(
            name,
            architecture="DFlash2DraftModel",
            inner={"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
        ),
        "speculators_dflash2": lambda name: speculators_dflash(
            name,
            "dflash2",
            SLIDING,
            draft_vocab_size=VOCAB_SIZE,
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=6,
            selector_top_k=5,
        ),
        "speculators_dspark": lambda name: speculators_dflash(name, "dspark", markov_rank=6),
        "speculators_dspark_gated": lambda name: speculators_dflash(
            name,
            "dspark",
            draft_vocab_size=VOCAB_SIZE,
            markov_rank=6,
            markov_head_type="gated",
            sample_from_anchor=False,
        ),
        "speculators_dspark_rnn": lambda name: speculators_dflash(
            name, "dspark", markov_rank=6, markov_head_type="rnn", sample_from_anchor=False
        ),
        "speculators_xpress": lambda name: speculators_dflash(name, "xpress", xpress_rank=6),
        "speculators_xpress_from_anchor": lambda name: speculators_dflash(
            name, "xpress", draft_vocab_size=VOCAB_SIZE, xpress_rank=6, sample_from_anchor=True
        ),
        "deepspec_dspark": deepspec_dspark,
        "deepspec_dspark_rnn": lambda name: deepspec_dspark(name, "rnn"),
        "safeailab_eagle3": safeailab_eagle3,
        "safeailab_eagle3_wide_target": lambda name: safeailab_eagle3(name, target_hidden_size=24),
        "safeailab_eagle1": lambda name: safeailab_eagle1(name, bias=True),
        "safeailab_eagle1_no_bias": lambda name: safeailab_eagle1(name, bias=False),
        "specforge": specforge,
        "specforge_3_1": lambda name: specforge(
            name, fc_norm=True, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
        ),
        "deepspec": deepspec,
        "medusa": lambda name: medusa(name, medusa_source, num_blocks=1),
        "medusa_two_blocks": lambda name: medusa(name, medusa_source, num_blocks=2),
    }


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for program in ("eagle", "medusa", "deepspec", "specforge"):
        parser.add_argument(f"--{program}", type=Path, default=Path(program), help="a checkout")
    parser.add_argument("names", nargs="*", help="which files; all by default")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.eagle), str(arguments.deepspec), str(arguments.specforge)]
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for name, make in goldens(arguments.medusa).items():
        if not arguments.names or name in arguments.names:
            make(name)


if __name__ == "__main__":
    main()
