"""Write the quickstart's data: requests in plain English, each answered by one JSON capability call.

    python examples/quickstart/generate.py                                   # 360 and 40 rows beside this file
    python examples/quickstart/generate.py examples/smollm2 --train 96 --heldout 20


Seeded: the same files every time. No held-out text is in the training file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

SEED = 3407

SYSTEM = """You control a house. Answer every request with exactly one JSON object and nothing else.
Capabilities:
- lamp: {"cap": "lamp", "room": ROOM, "on": true or false}
- heat: {"cap": "heat", "room": ROOM, "celsius": 15 to 25}
- blind: {"cap": "blind", "room": ROOM, "percent": 0, 25, 50, 75 or 100}
- music: {"cap": "music", "room": ROOM, "genre": GENRE}
- timer: {"cap": "timer", "minutes": 1 to 60}
- lock: {"cap": "lock", "door": DOOR, "locked": true or false}
ROOM is kitchen, bedroom, office, hall or attic. GENRE is jazz, rock, folk or techno.
DOOR is front, back or garage."""

ROOMS = ("kitchen", "bedroom", "office", "hall", "attic")
GENRES = ("jazz", "rock", "folk", "techno")
DOORS = ("front", "back", "garage")
OPENINGS = ("", "Please ", "Could you ", "Hey, ", "Quickly, ")

Call = dict[str, object]


def requests() -> list[tuple[str, Call]]:
    """Every request without its opening, with the call that answers it."""
    found: list[tuple[str, Call]] = []
    for room, on in itertools.product(ROOMS, (True, False)):
        call: Call = {"cap": "lamp", "room": room, "on": on}
        word = "on" if on else "off"
        found += [(f"switch the {room} lamp {word}", call), (f"turn {word} the light in the {room}", call)]
    for room, celsius in itertools.product(ROOMS, range(15, 26)):
        call = {"cap": "heat", "room": room, "celsius": celsius}
        found += [(f"heat the {room} to {celsius} degrees", call), (f"set {celsius} degrees in the {room}", call)]
    for room, percent in itertools.product(ROOMS, (0, 25, 50, 75, 100)):
        call = {"cap": "blind", "room": room, "percent": percent}
        found += [(f"lower the {room} blind to {percent} percent", call)]
    for room, genre in itertools.product(ROOMS, GENRES):
        call = {"cap": "music", "room": room, "genre": genre}
        found += [(f"play some {genre} in the {room}", call), (f"put {genre} music on in the {room}", call)]
    for minutes in range(1, 61):
        found.append((f"set a timer for {minutes} minutes", {"cap": "timer", "minutes": minutes}))
    for door, locked in itertools.product(DOORS, (True, False)):
        word = "lock" if locked else "unlock"
        found.append((f"{word} the {door} door", {"cap": "lock", "door": door, "locked": locked}))
    return found


def rows(train: int, heldout: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """So many training and held-out rows in the ``messages`` format."""
    chance = random.Random(SEED)
    asked = [(f"{opening}{text}", call) for (text, call), opening in itertools.product(requests(), OPENINGS)]
    chance.shuffle(asked)
    chosen = [row(text[0].upper() + text[1:] + ".", call) for text, call in asked[: train + heldout]]
    return chosen[:train], chosen[train:]


def row(request: str, call: Call) -> dict[str, object]:
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": request},
            {"role": "assistant", "content": json.dumps(call)},
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and heldout.jsonl.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--train", type=int, default=360, help="training rows")
    parser.add_argument("--heldout", type=int, default=40, help="held-out rows")
    options = parser.parse_args()
    for name, chosen in zip(("train.jsonl", "heldout.jsonl"), rows(options.train, options.heldout), strict=True):
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in chosen)
        (options.folder / name).write_bytes(text.encode())
        print(f"{name}: {len(chosen)} rows")


if __name__ == "__main__":
    main()
