"""The default prompts of a benchmark: texts to continue, of four kinds that differ in how well drafts do; and for encoder-decoders,
sources to answer, of two kinds.

They are short, so that models with a small context can read them. None ends in a newline, because in many vocabularies a newline
and the indentation after it are one token.
"""

from __future__ import annotations

from foredraft.bench.workload import Question, Workload

_PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        'def running_mean(values, width):\n    """Return the mean of each window of width values, in order."""',
        'def is_balanced(text):\n    """Return True if every bracket in text is closed in the right order."""',
        'def merge_intervals(intervals):\n    """Join the intervals that overlap and return them sorted."""',
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
        'def transpose(matrix):\n    """Return the rows of matrix as its columns."""',
        'def word_counts(path):\n    """Return how often each word comes in the text file at path."""',
    ),
    "story": (
        "Once upon a time there was a small fox who was afraid of the rain. One day",
        "Mia found a blue button under the big tree in the park. She picked it up and",
        "The old boat had not moved for many years. Then one morning Tom and his dad",
        "Ben wanted to bake a cake for his grandma, but there was no sugar in the house. He",
        "Every night the moon looked into the room of a little girl named Anna. She said",
        "A bird with a red hat sat down on the fence. The dog looked up and",
    ),
    "repetition": (
        "The cat sat on the mat. The dog sat on the log. The bird sat on the word. The cat sat on the mat. The dog",
        "import os\nimport re\nimport sys\n\nNAMES = ['os', 're', 'sys']\n\nprint(os.name)\nprint(re.name)\nprint(",
        "name = row['name']\nage = row['age']\ncity = row['city']\nstreet = row['street']\nname_text = str(name)\nage_text =",
        "Lily had a ball. The ball was red. Lily had a doll. The doll was red. Lily had a cup. The cup was",
        "def get_width(self):\n    return self.width\n\ndef get_height(self):\n    return self.height\n\ndef get_depth(self):",
        "One little duck went out to play. Two little ducks went out to play. Three little ducks went out",
    ),
    "dialogue": (
        '"Can you help me find my shoes?" asked Sam. His mom said, "Look',
        '"Why is the sky blue?" asked the little bear. The owl thought for a while and said,',
        "# How do I read a file line by line in Python?\n# Answer: open it, and loop over it:\nwith open(path) as",
        '"I do not want to share my toys," said Tim. His sister looked sad and said,',
        "# How do I sort a dictionary by its values?\n# Answer: sort its items by the second part:\npairs = sorted(",
        '"What did you learn at school today?" asked Dad. Lucy smiled and told him',
    ),
}


_SOURCES: dict[str, tuple[str, ...]] = {
    "translation": (
        "We left the house early. It was still dark outside. Nobody else was on the road.",
        "My sister wants to learn German. She reads a new book every week.",
        "Can you tell me where the station is? I have to catch the last train.",
        "Tom forgot his keys at work. He had to wait for an hour in the rain.",
        "The children are playing in the garden. Their father is cooking dinner.",
        "I have never seen such a beautiful town. I would like to live here.",
    ),
    "summarisation": (
        "def mean(values):\n    if not values:\n        raise ValueError('no values')\n    return sum(values) / len(values)",
        "def is_sorted(items):\n    return all(a <= b for a, b in zip(items, items[1:]))",
        "def read_lines(path):\n    with open(path) as stream:\n        return [line.rstrip() for line in stream]",
        "def find(self, key):\n    node = self.root\n    while node and node.key != key:\n        node = node.left if key < node.key else "
        "node.right\n    return node",
        "def count_words(text):\n    counts = {}\n    for word in text.split():\n        counts[word] = counts.get(word, 0) + 1\n    "
        "return counts",
        "def remove_duplicates(items):\n    seen = set()\n    return [x for x in items if not (x in seen or seen.add(x))]",
    ),
}


def built_in_workload(*, of_sources: bool = False) -> Workload:
    """of_sources: whether it is for an encoder-decoder, which answers sources."""
    questions = [
        Question(f"{category}-{number}", category, (prompt,))
        for category, prompts in (_SOURCES if of_sources else _PROMPTS).items()
        for number, prompt in enumerate(prompts, start=1)
    ]
    return Workload("built-in prompts", tuple(questions))
