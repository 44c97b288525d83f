"""Small helpers that do not depend on models: process start-up, folders, argument checks, lazy imports."""
