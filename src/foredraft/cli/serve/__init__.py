"""foredraft serve"""

from foredraft.cli.serve.command import serve

__all__ = ["serve"]
