"""Small helpers that know nothing of models: process start-up, folders, argument checks, lazy imports."""
