"""The words from which all text of the demo model is made: plain English, invented companies, no one's data."""

from __future__ import annotations

NAMES = (
    "Maria Tom Anna Peter Lucia Omar Ingrid Victor Clara Samuel Nadia Oscar Elena Felix Grace Hugo Irene Jonas Kira "
    "Leo Mina Nils Olga Paul Rosa Simon Tara Viola Walter Zoe Amir Bella Carlos Diana Emil Fatima Georg Hannah Ivan "
    "Julia"
).split()
CITIES = (
    "Lisbon Oslo Paris Berlin Madrid Vienna Dublin Athens Prague Warsaw Helsinki Rome Cairo Lima Tokyo Sydney Toronto "
    "Boston Geneva Porto Munich Krakow Naples Seville"
).split()
CAPITALS = {
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "France": "Paris",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Finland": "Helsinki",
    "Italy": "Rome",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Japan": "Tokyo",
}
COLORS = "red blue green white black yellow silver golden brown grey".split()
ADJECTIVES = "old young small large quiet bright happy lonely brave clever tired gentle".split()
ITEMS = (
    "lamp chair table clock mirror basket blanket kettle bottle candle carpet pillow bicycle camera guitar umbrella "
    "backpack notebook teapot desk shelf vase ladder radio"
).split()
ANIMALS = "fox owl cat dog horse bear rabbit swan tiger wolf mouse raven".split()
PEOPLE = "sailor teacher farmer painter doctor baker singer gardener child captain king pilot".split()
PLACES = "garden river market harbor forest mountain library kitchen station bridge castle island village beach".split()
VERBS = "found watched followed painted remembered carried visited loved lost guarded".split()
ADVERBS = "today tonight again slowly quietly happily yesterday alone early together".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "young",
    "happy": "sad",
    "fast": "slow",
    "early": "late",
    "full": "empty",
    "dark": "bright",
    "loud": "quiet",
    "open": "closed",
    "high": "low",
    "long": "short",
}
ANIMAL_FACTS = {
    "fox": "A fox lives in the forest and hunts at night.",
    "owl": "An owl is a bird that sees very well in the dark.",
    "cat": "A cat is a small animal that likes to sleep in the sun.",
    "dog": "A dog is a loyal friend that loves long walks.",
    "horse": "A horse is a strong animal that can run very fast.",
    "bear": "A bear sleeps through the winter and loves honey.",
    "rabbit": "A rabbit has long ears and eats green leaves.",
    "swan": "A swan is a white bird that lives on quiet rivers.",
    "tiger": "A tiger is a large cat with black stripes.",
    "wolf": "A wolf lives in a pack and sings at night.",
    "mouse": "A mouse is a tiny animal that loves cheese.",
    "raven": "A raven is a clever black bird.",
}
