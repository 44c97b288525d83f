"""Commands that examine or demonstrate models: inspection, the quality of a precision, the demo."""
