"""Questions of many kinds for a chat model to answer, so that a head can be trained on its answers.

    python recipes/chat_questions.py NUMBER > questions.jsonl
    python recipes/chat_questions.py NUMBER TARGET [SEED [constrained]] > questions.jsonl

Prints NUMBER distinct questions, one object with "text" per line, drawn from the forms and subjects below. TARGET, a chat model, adds
forms about words of its vocabulary, and about code and documentation of Python's standard library. Another SEED than 1 draws other
questions. The forms are this project's own, and none is a question of a benchmark.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from foredraft.model import LoadOptions, load_tokenizer

WORD_LEN = 5
"""The shortest vocabulary words that are used, in characters; shorter ones are often pieces of other words."""

PASSAGE_LENS = range(150, 700)
"""The lengths of code and documentation, in characters, so that they fit into a conversation of 512 tokens."""

FORMS = """
Write a short story about {person} who finds {thing}.
Write a poem about {theme} in {number} lines.
Write a persuasive letter to {person} about {issue}.
Write a blog post about {place} for people who like {hobby}.
Write a short email to {person} to ask for {request}.
Draft an outline for an article that compares {device} and {other_device}.
Describe {place} in vivid detail.
Write an advertisement for {device}.
Write the opening paragraph of a novel in which {event}.
Write a speech about {theme} for {occasion}.
Write a review of {work}, covering its plot and its characters.
Write a dialogue between {person} and {other_person} about {issue}.
Pretend to be {person} and explain why {event}.
Imagine that you are {character}. How would you spend a day at {place}?
You are {person}. A customer asks you about {issue}. What do you answer?
Act as a tutor and explain {science} to {person}.
Answer as {character} would: what do you think about {theme}?
Play the role of a doctor and give advice to somebody who suffers from {ailment}.
What is {science}, and why does it matter?
Explain {science} in simple terms, with an example.
What is the difference between {science} and {other_science}?
How does {science} affect {field}?
Describe the main steps of {process}.
What are the causes and the consequences of {issue}?
Give three examples of {science} in everyday life.
What role does {field} play in {issue}?
How did {history} change the world?
Who were the most important people in {history}, and what did they do?
Compare {history} with {other_history}.
What were the causes of {history}?
How does {economy} influence the economy of a country?
Explain the relation between {economy} and {other_economy}.
What are the advantages and the disadvantages of {issue}?
Make a lesson plan that teaches {history} to {person}.
Write a Python function that {task}.
Write a C++ program that {task}.
Write a JavaScript function that {task}, and explain how it works.
Implement {algorithm} in Python.
What is {algorithm}, and what is its time complexity?
How can I debug a program that {bug}?
Write an HTML page with {widget}.
Write an SQL query that finds {query}.
Explain the difference between {algorithm} and {other_algorithm}.
{name} has {number} {goods} and buys {other_number} more. Each costs {price} dollars. How much did {name} spend in all?
A train travels {number} kilometres in {other_number} hours. What is its average speed?
Solve for x: {number}x + {other_number} = {price}.
What is the area of a rectangle whose sides are {number} and {other_number}?
A shop sells {goods} at {price} dollars each and takes off {number} percent. What does a customer pay for {other_number}?
If {number} workers build a wall in {other_number} days, how long do {price} workers need?
What is the probability of drawing {draw} from {container}?
Find the next number in the sequence: {number}, {other_number}, {price}. Explain your reasoning.
{name} is older than {other_name}, and {other_name} is older than Sam. Who is the youngest? Explain.
A farmer has {number} {animals} and {other_number} hens. How many legs are there in all?
Is it true that {claim}? Give reasons for your answer.
Which of these does not belong with the others: {thing}, {other_thing}, {device}? Why?
List five {kind} and describe each in one sentence.
Give me ten ideas for {occasion}.
Suggest a healthy recipe with {food}, and list the ingredients and the steps.
How can I learn {hobby} as a beginner?
Give me tips to {goal}.
Plan a trip of {number} days to {place}.
What should I consider before I buy {device}?
How do I {goal} without spending much money?
Summarise what is known about {issue} in one paragraph.
Extract the names and the places from this sentence: "{name} met {other_name} in {city} before they travelled to {other_city}."
Sort these cities by population and explain: {city}, {other_city}, {third_city}.
Write the following as a JSON object: {name} is {number} years old and lives in {city}.
Correct the grammar of this sentence: "{name} have went to {city} for buy {goods}."
Rewrite this sentence in a formal style: "{name} can't come because {excuse}."
Translate into plain English for {person}: {science}.
Classify this review as positive, neutral or negative: "The {goods} were {quality}, and {person} was {manner}."
What questions would you ask in an interview with {person}?
Who was {figure}, and what is {figure} known for?
What is your opinion about {theme}?
Hello! Can you help me to {goal}?
Tell me a joke about {person}.
What does the proverb about {theme} teach us?
Describe the character of {character}.
How would the world look if {event}?
What are the ethical questions of {issue}?
"""

WIDE_FORMS = """
What is {word}?
What does the word "{word}" mean? Use it in two sentences.
Explain the connection between {word} and {other_word}.
Write a short story with the words {word}, {other_word} and {third_word}.
Write a paragraph about {word}.
Write an essay about {word} and {other_word}.
Write a haiku about {word}.
Write a limerick that mentions {word}.
Write a song about {word}, with two verses and a chorus.
Write a product description for a {word}.
Write a newspaper headline and a first paragraph about {word}.
Write a scene in which two friends argue about {word}.
Tell a fairy tale about a {word} and a {other_word}.
Tell me five facts about {word}.
Tell me about {word} as if I had never heard of it.
Give me three synonyms of "{word}" and a sentence for each.
What is the opposite of "{word}"? Explain.
What is the difference between "{word}" and "{other_word}"?
List the pros and cons of {word}.
List ten words that have to do with {word}.
Name three famous people who are connected with {word}, and say why.
How has {word} changed over the last hundred years?
How would you explain {word} to a child?
How would you teach {word} in a class?
How is {word} used in {field}?
What can {word} tell us about {other_word}?
What are common mistakes with {word}?
What should every beginner know about {word}?
Which tools do I need for {word}?
Why is {word} important in {field}?
Why do people care about {word}?
Where does the word "{word}" come from?
When was {word} most important in history?
Who should know about {word}, and who should not?
Is {word} good or bad? Argue for both sides.
Do you think that {word} will matter in the future?
Can {word} be measured? How?
Compare {word} with {other_word} in a table.
Make a quiz of four questions about {word}, with answers.
Make a crossword clue for "{word}".
Make a mind map about {word} as a nested list.
Make a list of steps to improve {word}.
Create a daily schedule for somebody who works with {word}.
Create a slogan for a company that sells {word}.
Create a character whose weakness is {word}.
Design an experiment about {word}.
Design a board game about {word}, and give its rules.
Describe {word} with all five senses.
Describe a world without {word}.
Summarise the history of {word} in five sentences.
Summarise the debate about {word} and {field}.
Rewrite this sentence so that it sounds friendlier: "We need the {word} before the {other_word}, or else."
Rewrite this sentence in the past tense: "The {word} goes to {city} and sees a {other_word}."
Rewrite in the passive voice: "{name} moved the {word} to {city}."
Rewrite "{name} has a {word}." as a question.
Make this sentence longer and more vivid: "The {word} was near the {other_word}."
Make this sentence shorter: "It was due to the fact of the {word} that {name} decided that the {other_word} had to be given back."
Fix the spelling: "I recieved teh {word} yesterdey and definately liek it."
Translate into Spanish: "Where is the {word}?"
Translate into French: "My {word} is bigger than your {other_word}."
Continue this story: "When {name} saw the {word}, everything in {city} changed."
Continue: "The {word} had always been a secret, but"
Finish the sentence in five ways: "A {word} is like a {other_word} because"
Complete the analogy: {word} is to {other_word} as {third_word} is to what?
Write a dictionary entry for "{word}".
Write an encyclopedia article about {word}.
Write a tweet about {word} with two hashtags.
Write a letter of complaint about a {word} that arrived broken.
Write a thank-you note for a {word}.
Write an apology to {name} about the {word}.
Write a cover letter for a position that has to do with {word}.
Write a job advertisement for an expert in {word}.
Write meeting notes about {word}, {other_word} and who does what.
Write a checklist for a trip to {city} in which {word} plays a part.
Write instructions for {goal} in numbered steps.
Write a travel guide to {city} in four paragraphs.
Write a horoscope that warns of {word}.
Write a monologue of a {word}.
Write a review of a restaurant in {city} that serves {food}.
Write the minutes of a town hall meeting about {issue}.
Write a debate between a supporter and an opponent of {issue}.
Write a bedtime story about {animals} who find a {word}.
Write three interview questions about {word}, with good answers.
Write a regular expression that matches {word}, and explain it.
Write a Python class that represents a {word}, with two methods.
Write a Python program that reads a file and counts the lines with "{word}".
Write a function that returns the first {number} multiples of {other_number}.
Write a unit test for a function that {task}.
Write a shell script that renames all files with "{word}" in their names.
Write a JavaScript class for a {word} and a {other_word}.
Write a Java program that {task}.
Write a Rust function that {task}.
Write pseudocode for a program that {task}.
Write an SQL table for {goods} with their prices, and insert three rows.
Write a YAML file that describes a {word} with three properties.
Write CSS that shows "{word}" in large red letters.
What does this print? for i in range({number}): print(i * {other_number})
What is wrong with this code? def f(x): return x + "{word}" + {number}
How do I install a program for {word} on Linux?
How do I sort a list of {goods} by price in Python?
Explain {algorithm} to {person}.
Give an example of {algorithm} on the numbers {number}, {other_number} and {price}.
What are the limits of {algorithm}?
What is {number} times {other_number}?
What is {price} divided by {number}? Show the steps.
What is {number} percent of {price}?
Add {number}, {other_number} and {price}, and explain how you did it.
Convert {number} kilometres to miles.
Convert {price} minutes to hours and minutes.
Simplify: ({number}x + {other_number}) - ({price}x - 4).
Factor x^2 + {number}x + {other_number}, if it can be done.
What is the derivative of {number}x^3 + {other_number}x?
A circle has a radius of {number}. What are its area and circumference?
A triangle has sides of {number}, {other_number} and {price}. Can it exist? Why?
{name} reads {number} pages a day. How long does a book of {price} pages take?
{name} saves {number} dollars a week. After how many weeks can {name} buy a {word} for {price} dollars?
{name} and {other_name} share {price} {goods} in the ratio {number} to {other_number}. How many does each get?
In a class of {price} students, {number} like {hobby} and {other_number} like {word}. What can you say about the others?
The average of three numbers is {number}. Two are {other_number} and {price}. What is the third?
All {animals} are animals. Some animals can swim. Can all {animals} swim? Explain.
If it rains, {name} stays at home. {name} is in {city}. Does it rain? Explain.
There are {number} boxes, and each has {other_number} {goods}. {name} takes {price} away. How many are left?
Order these events in time: {history}, {other_history}. Explain.
What would have happened without {history}?
What can we learn from {history} today?
Describe the daily life of {person} during {history}.
Explain how {process} works to {person}.
What can go wrong in {process}?
Which laws of physics explain {science}?
Name an experiment that shows {science}.
Is {science} the same as {word}? Explain.
What do scientists not know yet about {science}?
What is the relation between {economy} and {issue}?
How does {economy} affect {person}?
What would {figure} think about {issue}?
Imagine a conversation between {figure} and {character}.
Give a timeline of the life of {figure}.
Which book should I read about {history}, and why?
Recommend three films for people who like {word}.
Recommend a hobby for somebody who likes {hobby} and {word}.
Recommend a meal with {food} for {number} guests.
Plan a budget of {price} dollars for {occasion}.
Plan a workout for somebody who suffers from {ailment}.
Plan a garden with {word} and {other_word}.
I feel sad because of {word}. What should I do?
I have an interview about {word} tomorrow. Help me to prepare.
I am writing a novel about {word}. Suggest a title and a plot.
My friend says that {claim}. Is that right?
My boss wants a report about {word} by Friday. Where do I start?
My {device} does not start. What can I do?
Should I buy {device} or {other_device}?
Is it safe to eat {food} every day?
Hi, who are you and what can you do?
Hello, I am {name} from {city}. Tell me something interesting about {word}.
You are an expert in {word}. Answer in one paragraph: what matters most?
You are a {word}. Describe your day.
Pretend to be a {word} who talks to a {other_word}.
Act as a travel agent and sell me a trip to {city}.
Act as an interpreter: say "{word}" in five languages.
Act as a critic and judge {work}.
As {person}, write a diary entry about {word}.
Extract all numbers from this text: "{name} bought {number} {goods} for {price} dollars and sold {other_number} of them."
Extract the product, the price and the place: "In {city} a {word} costs {price} dollars, and in {other_city} it costs less."
From this text, who is the oldest? "{name} is {number}, {other_name} is {price}, and their friend from {city} is between the two."
Read this and answer: "{name} left {city} on Monday with a {word} and came to {other_city} on Friday." How long was the trip?
Read this and say who has the {word}: "{name} gave a {word} to {other_name}, who wanted a {other_word}."
Turn this into a table: {name}: {number} {goods}, {other_name}: {other_number}, total: {price}.
Turn this list into a sentence: {word}, {other_word}, {third_word}.
Put these words in alphabetical order: {word}, {other_word}, {third_word}.
Which of these words is the longest: {word}, {other_word}, {third_word}?
Find the odd one out: {word}, {other_word}, {city}, {other_city}. Explain.
Group these: {word}, {city}, {other_word}, {other_city}, {name}.
Is the tone of this message positive or negative? "The {word} was {quality}, but I liked the {other_word}."
What is the main idea of this text? "People in {city} disagree about {issue}. Some fear for the {word}, others want more {other_word}."
Give this text a title: "{name} never wanted a {word}. But when the {other_word} came to {city}, there was no choice."
Summarise this text in one sentence: {passage}
Summarise this text in a list of points: {passage}
Explain this text in simple words: {passage}
What questions does this text answer? {passage}
Rewrite this text in a friendlier tone: {passage}
Extract the most important words of this text: {passage}
Translate this text into German: {passage}
What does this code do?{code}
Explain this code line by line:{code}
Find a mistake in this code, or say that there is none:{code}
Add comments to this code:{code}
Write a test for this code:{code}
Rewrite this code so that it is easier to read:{code}
Write this code in JavaScript:{code}
"""

CONSTRAINTS = """
Answer in one paragraph.
Answer in fewer than {words} words.
Use no more than {count} sentences.
Use bullet points.
Explain your answer step by step.
Give at least {count} examples.
Use simple words.
Write in a humorous tone.
Write in a formal tone.
Use a metaphor where it helps.
End with a question.
Begin every sentence with a different letter.
Include a title.
Mention a historical example.
Compare it with an alternative, too.
Justify every claim.
Be concise.
Be as detailed as you can.
Address the reader directly.
Give the answer first, and the reasons afterwards.
Write at least {words} words.
Add a short summary at the end.
Format the answer as a table.
Format the answer as JSON.
Assume that the reader is an expert.
Assume that the reader knows nothing about it.
Do not use the letter "z".
Show the calculation.
Add comments to any code.
Also name the most common mistake.
What would you do differently the next time?
Which assumptions do you make?
Then criticise your own answer.
Rhyme where you can.
Quote somebody.
Only give the final answer.
"""

JOINING = ("Also: ", "Then: ", "Afterwards, answer this: ", "")

SUBJECTS = {
    "person": """a retired sailor; a young teacher; a shy student; a tired nurse; an ambitious chef; a curious child; a software
        engineer; a farmer; a museum guide; a detective; your supervisor; your neighbour; a mayor; a first-year student; a customer; a
        friend who fears flying; a grandmother; a librarian; a football coach; a bank clerk; a violin teacher; a space engineer""",
    "thing": """an old map; a talking mirror; a locked suitcase; a forgotten letter; a broken clock; a strange coin; a hidden door; a
        lamp that never goes out; a book without an ending; a wounded owl; a silver key; a message in a bottle""",
    "theme": """friendship; autumn; the sea; courage; patience; growing old; honesty; silence; the night sky; hard work; change; home;
        forgiveness; freedom; luck; music; learning from mistakes; trust; winter mornings; curiosity""",
    "issue": """climate change; remote work; plastic in the oceans; artificial intelligence in schools; traffic in cities; social media;
        fast fashion; nuclear energy; food waste; ageing societies; data privacy; self-driving cars; public libraries; noise at night;
        online shopping; genetic engineering; urbanisation; deforestation; rising rents; shorter working weeks""",
    "place": """Lisbon; a small island in Greece; the Rocky Mountains; Kyoto; a night market in Bangkok; the Scottish Highlands; Cape
        Town; an old railway station; New Orleans; a rain forest in Costa Rica; Prague; the Sahara; a village in the Alps; Buenos
        Aires; a crowded beach; Iceland; Vancouver; a botanical garden""",
    "hobby": """photography; gardening; chess; cooking; hiking; painting; playing the guitar; knitting; bird watching; astronomy; sailing;
        writing; running; baking bread; woodworking; swimming; Spanish; drawing""",
    "request": """a day off; feedback on a report; a meeting next week; a letter of recommendation; a refund; a later deadline; help with
        a project; the results of an experiment; an invoice; a rise in salary""",
    "device": """a smartphone; a laptop; an electric bicycle; a coffee machine; a tablet; a vacuum robot; a digital camera; an electric
        car; a smart watch; noise-cancelling headphones; a washing machine; a 3D printer; a tent; a water filter""",
    "event": """the lights go out in a whole city; a stranger knocks at midnight; animals learn to speak; nobody can lie any more; the
        last ship leaves the harbour; a village wakes up on an island; all clocks stop; the rain does not end; machines do all of the
        work; people live on Mars; the internet disappears; a letter arrives forty years late""",
    "occasion": """a graduation; a birthday party; a company meeting; a science fair; a wedding; a family weekend; a school project; a
        farewell; a rainy Sunday; a charity event; a team event; a book club""",
    "work": """a science fiction film; a detective novel; a musical; a documentary about whales; a historical drama; a fantasy series; an
        animated film; a cookbook; a play about a king; an adventure game""",
    "character": """Sherlock Holmes; a medieval knight; a pirate captain; a robot who has just been switched on; a dragon; an astronaut on
        a space station; a cat; Cleopatra; a wizard; a time traveller; Robin Hood; a lighthouse keeper; Leonardo da Vinci""",
    "science": """photosynthesis; gravity; quantum mechanics; natural selection; plate tectonics; the water cycle; machine learning;
        electricity; DNA; black holes; vaccination; thermodynamics; the greenhouse effect; magnetism; the immune system; evolution;
        radioactivity; chemical bonds; osmosis; the Big Bang; superconductivity; neural networks; fermentation; the speed of light;
        acids and bases; the nitrogen cycle; antibiotics; friction; entropy; stem cells; relativity; blockchain; inertia""",
    "field": """agriculture; medicine; education; transport; architecture; politics; sport; the arts; psychology; engineering; marine
        biology; law; journalism; banking; tourism""",
    "process": """cell division; making steel; brewing beer; writing a research paper; the digestion of food; electing a president;
        launching a rocket; baking bread; recycling paper; the life cycle of a butterfly; designing an experiment; training a neural
        network; purifying water; building a house; the formation of a star; publishing a book""",
    "history": """the French Revolution; the Industrial Revolution; the Roman Empire; the Cold War; the Renaissance; the invention of
        printing; the American Civil War; the Silk Road; the fall of the Berlin Wall; the Age of Exploration; the Great Depression;
        ancient Egypt; the First World War; the women's suffrage movement; the Black Death; the space race; the Meiji Restoration""",
    "economy": """inflation; unemployment; interest rates; international trade; taxation; public debt; consumer spending; competition;
        subsidies; the gross domestic product; monopoly; minimum wages; exchange rates; supply and demand""",
    "ailment": """a headache; insomnia; back pain; a cold; hay fever; stress; stomach ache; a sprained ankle; migraine; tired eyes""",
    "task": """reverses a string; counts the words of a text; finds the largest number in a list; checks whether a word is a palindrome;
        removes duplicates from a list; merges two sorted lists; computes the factorial of a number; converts Celsius to Fahrenheit;
        sorts a list of names; finds all primes below n; counts the vowels of a string; reads a CSV file and prints its first rows;
        computes the Fibonacci sequence; checks whether two words are anagrams; transposes a matrix; finds the second largest element;
        groups words by their length; validates an email address; flattens a nested list; finds the longest common prefix; rotates an
        array by k places; sums the digits of a number; checks that brackets match; downloads a file and saves it; finds the median of
        two lists; counts how often each letter occurs; computes the greatest common divisor; generates a random password""",
    "algorithm": """binary search; quicksort; a linked list; a hash table; breadth-first search; a binary tree; dynamic programming;
        Dijkstra's algorithm; a stack; merge sort; a priority queue; recursion; depth-first search; bubble sort; a graph; memoisation;
        a queue with two stacks; the sieve of Eratosthenes; gradient descent; k-means clustering""",
    "bug": """crashes on empty input; runs out of memory; never ends; prints the wrong sum; works on one machine only; is too slow; loses
        data when two users save at once; fails only sometimes; reports an index out of range""",
    "widget": """a form for a name and an email address; a table of prices; a button that changes the colour of the page; a menu with
        three links; a picture gallery; a clock; a list of tasks; a login screen; a random joke""",
    "query": """the five customers with the most orders; all employees hired after 2015; the average salary by department; products
        that were never sold; duplicate email addresses; the newest order of each customer; students with more than three courses""",
    "name": "Anna; Carlos; Fatima; Yuki; Ben; Olga; Priya; Tom; Amina; Lucas; Grace; Ivan; Mei; Peter; Sofia; Daniel",
    "number": "2; 3; 4; 5; 6; 7; 8; 9; 10; 12; 15; 20; 24; 30; 36; 40; 48; 60; 75; 80; 100; 120",
    "price": "3; 5; 8; 11; 14; 17; 25; 32; 45; 50; 64; 90; 99; 144; 150; 200; 250; 360; 500",
    "goods": "apples; pencils; books; tickets; chairs; lamps; shirts; notebooks; cups; flowers; shoes; batteries; cakes; plates",
    "animals": "cows; sheep; goats; horses; pigs; dogs; rabbits; donkeys",
    "draw": "a red ball; an ace; two blue marbles; a king or a queen; an even number; a black card; three green balls in a row",
    "container": """a bag of 5 red and 7 blue balls; a deck of 52 cards; a box of 4 green, 3 red and 2 blue marbles; an urn with the
        numbers from 1 to 20; a drawer with 6 black and 8 white socks""",
    "claim": """the sun is a star; bats are blind; all squares are rectangles; lightning never strikes twice; water always boils at 100
        degrees; humans use a tenth of their brain; the moon has its own light; sugar makes children restless; whales are fish; money
        makes people happy; reading in the dark harms the eyes; plants need soil to grow""",
    "kind": """renewable sources of energy; famous inventors; European capitals; kinds of clouds; healthy snacks; programming languages;
        works of Shakespeare; mammals that live in the sea; large deserts; ways to save water; musical instruments; team games; famous
        bridges; habits of successful people; household tools; trees; mistakes in job interviews; classic novels""",
    "food": """chickpeas; salmon; sweet potatoes; eggs and spinach; lentils; chicken and rice; tomatoes; mushrooms; oats; tofu; pasta;
        pumpkin; black beans; apples and cinnamon""",
    "goal": """sleep better; save money; learn a language; write a better CV; eat less sugar; speak in public; keep a garden; be more
        productive; run a marathon; prepare for an exam; make new friends; clean the kitchen; reduce stress; start a small business;
        write a novel; stop procrastinating; improve my memory; organise my desk; protect my passwords; read more books""",
    "city": """Paris; Nairobi; Toronto; Osaka; Berlin; Lima; Chicago; Mumbai; Sydney; Oslo; Cairo; Rome; Boston; Seoul; Madrid; Istanbul;
        Dublin; Bogotá; Vienna; Jakarta""",
    "excuse": """the car broke down; it's way too late; there's a lot of work; nobody told me; the kids are sick; the train was late""",
    "quality": "excellent; broken; better than expected; overpriced; exactly as described; late; quite good; disappointing",
    "manner": "friendly; rude; helpful; nowhere to be found; very patient; not interested",
    "figure": """Marie Curie; Isaac Newton; Ada Lovelace; Mahatma Gandhi; Albert Einstein; Frida Kahlo; Aristotle; Charles Darwin; Mozart;
        Nelson Mandela; Galileo; Florence Nightingale; Alan Turing; Confucius; Napoleon; Jane Austen; Nikola Tesla; Rosa Parks""",
}


def listed_forms(listed: str) -> list[str]:
    return listed.strip().split("\n")


Subjects = Mapping[str, Sequence[str]]


def listed_subjects() -> dict[str, list[str]]:
    return {kind: [" ".join(subject.split()) for subject in listed.split(";")] for kind, listed in SUBJECTS.items()}


def wide_subjects(target: str) -> dict[str, list[str]]:
    """The listed subjects, words of the target's vocabulary, and passages of the standard library."""
    documentation, code = standard_library()
    return {**listed_subjects(), "word": vocabulary_words(target), "passage": documentation, "code": code}


def vocabulary_words(target: str) -> list[str]:
    """Lower-case words that are a single token."""
    tokenizer = load_tokenizer(target, LoadOptions())
    texts = (tokenizer.decode([token]) for token in range(len(tokenizer)))
    return sorted({text[1:] for text in texts if re.fullmatch(f" [a-z]{{{WORD_LEN},}}", text)})


def standard_library() -> tuple[list[str], list[str]]:
    """-> documentation, each on one line, and the code of functions"""
    documentation: set[str] = set()
    code: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                documentation.add(" ".join((ast.get_docstring(node) or "").split()))
            if isinstance(node, ast.FunctionDef) and node.col_offset == 0:
                code.add(f"\n\n{_code_of(node, lines)}")
    return _of_good_length(documentation), _of_good_length(code)


def _code_of(function: ast.FunctionDef, lines: Sequence[str]) -> str:
    """What ast.get_source_segment gives, which splits the whole file into lines for each function."""
    *first, last = lines[function.lineno - 1 : function.end_lineno]
    return "\n".join([*first, last.encode()[: function.end_col_offset].decode()])


def _of_good_length(texts: set[str]) -> list[str]:
    return sorted(text for text in texts if len(text) in PASSAGE_LENS)


def question(form: str, subjects: Subjects, draw: random.Random) -> str:
    """Fill a form with random subjects, all different. {other_city} and {third_city} are cities too."""
    chosen: dict[str, str] = {}
    for kind in dict.fromkeys(re.findall(r"\{(\w+)\}", form)):
        base = re.sub("^(other|third)_", "", kind)
        chosen[kind] = draw.choice([subject for subject in subjects[base] if subject not in chosen.values()])
    return form.format(**chosen)


def questions(forms: Sequence[str], subjects: Subjects, draw: random.Random) -> Iterator[str]:
    """Distinct questions, from all forms in turn. Never returns if more are requested than there are."""
    seen: set[str] = set()
    while True:
        for form in draw.sample(forms, len(forms)):
            new = question(form, subjects, draw)
            if new not in seen:
                seen.add(new)
                yield new


def constrained(drawn: Sequence[str], draw: random.Random) -> Iterator[str]:
    """The questions, nearly half of them with one or two constraints, and a tenth joined with another one. Those with code stay as they
    are."""
    constraints = listed_forms(CONSTRAINTS)
    for text in drawn:
        if "\n" in text:
            yield text
        elif draw.random() < 0.45:
            chosen = draw.sample(constraints, draw.choice([1, 1, 2]))
            numbers = [(draw.choice([20, 50, 100, 150, 200]), draw.choice([2, 3, 4, 5])) for _ in chosen]
            filled = (
                each.format(words=words, count=count) for each, (words, count) in zip(chosen, numbers, strict=True)
            )
            yield " ".join([text, *filled])
        elif draw.random() < 0.15:
            other = draw.choice(drawn)
            is_short = "\n" not in other and len(other) < 200
            yield f"{text} {draw.choice(JOINING)}{other}" if is_short else text
        else:
            yield text


def main() -> None:
    number, options = int(sys.argv[1]), sys.argv[2:]
    if options:
        target, seed = options[0], int(options[1]) if len(options) > 1 else 1
        drawn = questions([*listed_forms(FORMS), *listed_forms(WIDE_FORMS)], wide_subjects(target), random.Random(seed))
    else:
        drawn = questions(listed_forms(FORMS), listed_subjects(), random.Random(0))
    texts = list(islice(drawn, number))
    for text in constrained(texts, random.Random(3)) if "constrained" in options else texts:
        print(json.dumps({"text": text}))


if __name__ == "__main__":
    main()
