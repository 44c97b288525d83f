"""One process per compared program: it keeps its models loaded and answers requests on standard input."""
