"""foredraft inside other programs: one package per program."""
