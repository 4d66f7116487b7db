"""Writes the small tasks that llmtrain brings (training/tasks/bundled/). All items are made here.

python tools/bundled_tasks.py            write the files
python tools/bundled_tasks.py --check    only check that they are up to date
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "src" / "llmtrain" / "training" / "tasks" / "bundled"
Item = dict[str, Any]
_COMMON = """about above across afternoon again against almost always animal another answer apple around asked away
because become before began behind believe beside better between beyond bottle bridge bright bring brother building
butter called candle careful carry certain change children church circle city clean clear climb cloud coffee cold
common corner country course cousin cover dance danger daughter decide different dinner distance doctor dollar double
dream during early earth either empty engine enough evening every example family famous farmer father feather field
finger finish floor flower follow forest forget forward friend garden gentle ground happen heavy history horse hundred
husband important island kitchen ladder language laugh letter listen little market matter member middle minute moment
money month morning mother mountain music narrow nature neighbor never nothing number office orange order other outside
paper parent people person picture plain planet please pocket possible power present pretty problem promise question
quick quiet rather reason remember river school science season second silver simple single sister slowly small smile
soldier something sound spring square station story straight stream street strong sudden sugar summer surface teacher
thick thought thousand through together tomorrow travel trouble under until village voice wagon water weather window
winter without woman wonder world yellow yesterday young"""
WORDS = _COMMON.split()
# (singular, plural, what they do in the singular and in the plural)
SUBJECTS = [
    ("dog", "dogs", "barks", "bark"),
    ("child", "children", "laughs", "laugh"),
    ("teacher", "teachers", "reads", "read"),
    ("farmer", "farmers", "works", "work"),
    ("bird", "birds", "sings", "sing"),
    ("woman", "women", "speaks", "speak"),
    ("soldier", "soldiers", "waits", "wait"),
    ("horse", "horses", "runs", "run"),
    ("doctor", "doctors", "writes", "write"),
    ("boy", "boys", "sleeps", "sleep"),
]
PLACES = ["in the garden", "near the river", "with the cats", "beside the houses", "behind the tree", "from the city"]


def spelling() -> list[Item]:
    """A common word among three in which two neighboring letters are swapped."""
    items = []
    for number, word in enumerate(WORDS):
        swaps = set()
        for index in range(1, len(word) - 1):
            swapped = word[:index] + word[index + 1] + word[index] + word[index + 2 :]
            if swapped != word and swapped not in WORDS:
                swaps.add(swapped)
        rng = random.Random(number)
        choices = rng.sample(sorted(swaps), min(3, len(swaps)))
        if choices:
            choices.insert(rng.randrange(len(choices) + 1), word)
            items.append({"question": "Then he said the word", "choices": choices, "answer": choices.index(word)})
    return items


def grammar() -> list[Item]:
    """The verb must agree with its subject, and not with the noun before it."""
    items = []
    for singular, plural, does, do in SUBJECTS:
        for number, place in enumerate(PLACES):
            verbs = [does, do] if number % 2 == 0 else [do, does]
            items.append({"question": f"The {singular} {place}", "choices": verbs, "answer": verbs.index(does)})
            items.append({"question": f"The {plural} {place}", "choices": verbs, "answer": verbs.index(do)})
    return items


def arithmetic() -> list[Item]:
    """Sums and differences of small numbers, as text to complete."""
    items = []
    for left in range(1, 11):
        for right in range(1, 11):
            items.append({"prompt": f"{left} + {right} =", "answer": str(left + right), "until": "\n"})
            if right <= left:
                items.append({"prompt": f"{left} - {right} =", "answer": str(left - right), "until": "\n"})
    return random.Random(0).sample(items, 100)


TASKS = {"arithmetic": arithmetic, "grammar": grammar, "spelling": spelling}


def text_of(items: list[Item]) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def main() -> int:
    is_check = "--check" in sys.argv
    outdated = []
    for name, make in TASKS.items():
        path = FOLDER / f"{name}.jsonl"
        text = text_of(make())
        if is_check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            outdated.append(name)
        elif not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if outdated:
        print(f"outdated: {', '.join(outdated)}; run python tools/bundled_tasks.py")
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
