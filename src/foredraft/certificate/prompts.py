"""What is completed where the user gives no prompts: code, prose, lists and tables, some of which repeat themselves."""

PROMPTS = (
    "def fibonacci(n):",
    'def count_words(text):\n    """Return how often each word of the text occurs."""',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "import os\nimport sys\n\ndef main():\n    parser =",
    "for row in rows:\n    for column in columns:\n        total +=",
    "Once upon a time there was a little girl who",
    "The dog saw a cat on the wall. The cat",
    'Tom and his mother went to the park. "Look," said Tom,',
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "red green blue red green blue red green",
    "| name | age | town |\n|---|---|---|\n| Ann | 31 | Rome |\n|",
)
