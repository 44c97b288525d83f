"""One process per program under test: each keeps its models loaded and answers requests on standard input."""
