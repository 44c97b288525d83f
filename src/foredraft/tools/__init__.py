"""Commands that look at a model or show it off: inspection, quality of a precision, the demo."""
