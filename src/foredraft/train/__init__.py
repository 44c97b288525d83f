"""Trains language models on text, trains draft models and heads on a target's distribution, and evaluates drafts."""

from foredraft.train.block_heads import DFlashKind, DSparkKind
from foredraft.train.decoder_head import DecoderKind
from foredraft.train.eagle1 import Eagle1Kind
from foredraft.train.eagle3 import Eagle3Kind
from foredraft.train.evaluate import KindReport, SpeedPrediction, evaluate, predict_speed
from foredraft.train.exit_head import ExitKind
from foredraft.train.expected import Expectation, expect
from foredraft.train.head_kinds import HeadKind
from foredraft.train.head_training import train_head
from foredraft.train.medusa import MedusaKind
from foredraft.train.objectives import fastest_autocast
from foredraft.train.optimiser import FINE_TUNING, LearningRates
from foredraft.train.peak_memory import MemoryForecast
from foredraft.train.recipe import Data, MemoryUse, Outcome, Recipe, Start
from foredraft.train.records import StepRecord, ValidationRecord
from foredraft.train.training import train_distill, train_lm
from foredraft.train.watch import Watch

__all__ = [
    "FINE_TUNING",
    "DFlashKind",
    "DSparkKind",
    "Data",
    "DecoderKind",
    "Eagle1Kind",
    "Eagle3Kind",
    "ExitKind",
    "Expectation",
    "HeadKind",
    "KindReport",
    "LearningRates",
    "MedusaKind",
    "MemoryForecast",
    "MemoryUse",
    "Outcome",
    "Recipe",
    "SpeedPrediction",
    "Start",
    "StepRecord",
    "ValidationRecord",
    "Watch",
    "evaluate",
    "expect",
    "fastest_autocast",
    "predict_speed",
    "train_distill",
    "train_head",
    "train_lm",
]
