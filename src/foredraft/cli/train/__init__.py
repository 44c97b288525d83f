"""foredraft train"""

from foredraft.cli.train import evaluate, make
from foredraft.cli.train.app import train

__all__ = ["evaluate", "make", "train"]
