"""foredraft inside other programs: a folder a program."""
