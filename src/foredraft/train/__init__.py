"""Drafts that fit: a language model from text, a draft distilled from a target, and what a draft is worth for it."""

from foredraft.train.evaluate import KindReport, SpeedPrediction, evaluate, predict_speed
from foredraft.train.expected import Expectation, expect
from foredraft.train.loop import StepRecord, ValidationRecord
from foredraft.train.optimiser import FITTING, LearningRates
from foredraft.train.recipe import Data, Outcome, Recipe, Start
from foredraft.train.run import Watch, train_distill, train_lm

__all__ = [
    "FITTING",
    "Data",
    "Expectation",
    "KindReport",
    "LearningRates",
    "Outcome",
    "Recipe",
    "SpeedPrediction",
    "Start",
    "StepRecord",
    "ValidationRecord",
    "Watch",
    "evaluate",
    "expect",
    "predict_speed",
    "train_distill",
    "train_lm",
]
