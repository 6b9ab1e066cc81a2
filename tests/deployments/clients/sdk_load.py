"""The official Python SDK, unmodified, with its own retries: asks without a pause until a file is
there. Usage: sdk_load.py URL COUNT STOP; COUNT is the file that says how many are answered.
"""

import json
import sys
import threading
from pathlib import Path

from typesafe_sdk import Noul, TypeSafeClient

URL, COUNT, STOP = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
STATES = [f"state {i}: the card was charged twice" for i in range(12)]
CLIENTS = 4

answers: list[tuple[int, float]] = []
failed: list[str] = []


def ask_on(first: int) -> None:
    """One client, about one state after the other."""
    number = first
    with TypeSafeClient(base_url=URL, api_key="any") as client:
        while not STOP.exists():
            try:
                found = client.system_one(
                    state=STATES[number], questions={"q": Noul(instructions="Angry?")}
                )
                answers.append((number, found.nouls["q"].noul))
            except Exception as error:
                failed.append(f"{type(error).__name__} {error}")
            COUNT.write_text(str(len(answers)))
            number = (number + 1) % len(STATES)


threads = [threading.Thread(target=ask_on, args=(3 * i,)) for i in range(CLIENTS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
of = {n: [value for number, value in answers if number == n] for n, _ in answers}
spread = max(max(found) - min(found) for found in of.values())
print(json.dumps({"answered": len(answers), "failed": failed, "spread": spread}))
