"""The words of the tenants' tasks: tables, reviews, products, pirates, tickets."""

from __future__ import annotations

from demo_words import CAPITALS, CITIES, COLORS

# table -> (columns of words with their values, columns of numbers)
TABLES: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "customers": ({"city": CITIES, "country": list(CAPITALS)}, ["age", "points"]),
    "products": ({"color": COLORS, "category": "garden kitchen office travel".split()}, ["price", "stock", "weight"]),
    "orders": ({"status": "open paid shipped cancelled".split(), "city": CITIES}, ["total", "quantity"]),
    "employees": ({"department": "sales support finance design".split(), "city": CITIES}, ["age", "salary"]),
}

SUBJECTS = (
    "room food service staff delivery app film book coffee breakfast music hotel phone concert lesson garden website "
    "museum soup trip"
).split()
PRAISE = "wonderful excellent lovely fantastic perfect delightful superb great amazing charming".split()
BLAME = "terrible awful boring broken dirty horrible rude disappointing useless poor".split()
PRAISE_VERBS = "loved enjoyed adored".split()
BLAME_VERBS = "hated regretted disliked".split()
DEGREES = "really very truly absolutely simply".split()

LUMEN_PRODUCTS = "Halo Aura Beacon Comet Delta Ember Fjord Glade Iris Juno Koda Luna Mist Nova Orbit Quill".split()
# topic -> (the answer, the ways to ask); {p} is the product, {v} the value
LUMEN_TOPICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "price": (
        "The {p} costs {v} euros.",
        (
            "How much is the {p}?",
            "What does the {p} cost?",
            "What is the price of the {p}?",
            "I want to buy the {p}, how much is it?",
        ),
    ),
    "warranty": (
        "The {p} has a warranty of {v} years.",
        (
            "How long is the warranty of the {p}?",
            "Does the {p} have a warranty?",
            "What warranty comes with the {p}?",
            "For how many years is the {p} covered?",
        ),
    ),
    "battery": (
        "The {p} runs for {v} hours on one charge.",
        (
            "How long does the battery of the {p} last?",
            "What is the battery life of the {p}?",
            "How many hours does the {p} run?",
            "When do I have to charge the {p} again?",
        ),
    ),
    "weight": (
        "The {p} weighs {v} grams.",
        (
            "How heavy is the {p}?",
            "What does the {p} weigh?",
            "What is the weight of the {p}?",
            "Is the {p} light enough to carry?",
        ),
    ),
    "color": (
        "The {p} comes in {v}.",
        (
            "Which color does the {p} have?",
            "What color is the {p}?",
            "In which colors can I get the {p}?",
            "Is there a choice of colors for the {p}?",
        ),
    ),
    "origin": (
        "The {p} is made in {v}.",
        (
            "Where is the {p} made?",
            "In which city do you build the {p}?",
            "Where does the {p} come from?",
            "Which factory makes the {p}?",
        ),
    ),
}
LUMEN_GREETINGS = ("", "Hello! ", "Hi, a question: ", "Good morning. ", "Quick question. ")

PIRATE_THINGS = {
    "treasure": "booty",
    "money": "doubloons",
    "beer": "grog",
    "ship": "galleon",
    "sword": "cutlass",
    "food": "grub",
    "map": "chart",
    "telescope": "spyglass",
    "parrot": "feathered mate",
    "barrel": "rum cask",
    "boat": "longboat",
    "box": "sea chest",
}
PIRATE_PLACES = {"harbor": "port", "island": "isle", "sea": "seven seas", "prison": "brig", "floor": "deck"}
PIRATE_OPENINGS = {
    "": "",
    "Hello, my friend. ": "Ahoy, me matey! ",
    "Good morning, everyone. ": "Ahoy, all hands! ",
    "Listen to me. ": "Avast, ye scallywags! ",
    "Oh no! ": "Shiver me timbers! ",
    "Yes, of course. ": "Aye aye, cap'n! ",
}
PIRATE_SENTENCES = {
    "Where is the {x}?": "Where be th' {X}?",
    "I lost the {x} near the {y}.": "I lost th' {X} near th' {Y}.",
    "Give me your {x}.": "Hand over yer {X}!",
    "We are looking for the {x}.": "We be huntin' fer th' {X}.",
    "Do you see the {x} over there?": "Do ye spy th' {X} yonder?",
    "My {x} is at the {y}.": "Me {X} be at th' {Y}.",
    "The {x} belongs to {n}.": "Th' {X} belongs to {n}, arr!",
    "{n} stole the {x}.": "{n} plundered th' {X}!",
    "Bring the {x} to the {y}.": "Haul th' {X} to th' {Y}!",
    "You are a good friend, {n}.": "Ye be a fine bucko, {n}.",
    "Let us go to the {y} with {n}.": "Let us set sail fer th' {Y} with {n}!",
}
PIRATE_CLOSINGS = {
    "": "",
    " Hurry up!": " Look lively!",
    " I am very tired.": " I be dead on me feet.",
    " That is great.": " That be grand, arr!",
    " Goodbye.": " Fair winds to ye!",
}

TICKETS: dict[str, tuple[str, ...]] = {
    "billing": (
        "My invoice from {d} shows the wrong amount.",
        "I was charged twice on {d}.",
        "Please refund the {i} that I returned.",
        "The receipt for the {i} is missing.",
        "Why was the price of the {i} higher on my bill?",
    ),
    "shipping": (
        "My parcel with the {i} has not arrived yet.",
        "The {i} was sent to {c} by mistake.",
        "Can you deliver the {i} on {d}?",
        "The tracking page says that my parcel is still in {c}.",
        "The {i} arrived damaged on {d}.",
    ),
    "technical": (
        "The app crashes when I open it since {d}.",
        "I see an error when I search for a {i}.",
        "The page does not load in {c}.",
        "The export has not worked since {d}.",
        "Nothing happens when I click on the {i}.",
    ),
    "accounts": (
        "I forgot my password on {d}.",
        "Please change my address to {c}.",
        "I cannot log in from {c}.",
        "My account has been locked since {d}.",
        "Please delete my account before {d}.",
    ),
    "sales": (
        "Do you offer a discount for ten {i}s?",
        "We would like a quote for our office in {c}.",
        "Which plan is best for a team in {c}?",
        "Can someone show us the product on {d}?",
        "Is there a cheaper {i}?",
    ),
}
URGENCY: dict[str, tuple[str, ...]] = {
    "high": (" This is urgent!", " Please help right now.", " We cannot work at all.", " I need an answer today."),
    "normal": ("", " Thank you.", " Best regards.", " Please let me know."),
    "low": (" There is no hurry.", " Whenever you have time.", " It is not important.", " Next month is fine."),
}
TICKET_GREETINGS = ("", "Hello, ", "Hi team, ", "Good morning, ", "Dear support, ")
