"""What to use on the user's models, prompts and machine: measure, predict, run the few best, say so."""

from foredraft.tune.advise import Advice, Finalist, TuneResult, run_tune
from foredraft.tune.predict import Prediction
from foredraft.tune.report import as_settings

__all__ = ["Advice", "Finalist", "Prediction", "TuneResult", "as_settings", "run_tune"]
