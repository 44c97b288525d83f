"""Questions of many kinds for a chat model to answer, so that a head can be trained on its answers.

    python recipes/chat_questions.py NUMBER > questions.txt

NUMBER of distinct questions, one a line, drawn from the forms and subjects below. They are this project's own, and no question of a
benchmark is among them.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator

SEED = 0

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


def subjects_of(kind: str) -> list[str]:
    """Of "other_city" and "third_city" those of "city"."""
    base = re.sub("^(other|third)_", "", kind)
    return [" ".join(subject.split()) for subject in SUBJECTS[base].split(";")]


def question(form: str, draw: random.Random) -> str:
    """A form with subjects drawn for its places, no two places with the same one."""
    chosen: dict[str, str] = {}
    for kind in dict.fromkeys(re.findall(r"\{(\w+)\}", form)):
        chosen[kind] = draw.choice([subject for subject in subjects_of(kind) if subject not in chosen.values()])
    return form.format(**chosen)


def questions(draw: random.Random) -> Iterator[str]:
    """Distinct ones, of each form in turn, without an end as long as there are more."""
    forms = FORMS.strip().split("\n")
    seen: set[str] = set()
    while True:
        for form in draw.sample(forms, len(forms)):
            new = question(form, draw)
            if new not in seen:
                seen.add(new)
                yield new


def main() -> None:
    wanted = int(sys.argv[1])
    for _, text in zip(range(wanted), questions(random.Random(SEED)), strict=False):
        print(text)


if __name__ == "__main__":
    main()
