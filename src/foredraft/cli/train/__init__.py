"""foredraft train"""

from foredraft.cli.train import evaluate, head, make
from foredraft.cli.train.app import train

__all__ = ["evaluate", "head", "make", "train"]
