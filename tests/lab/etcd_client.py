"""A client of an etcd ensemble: writes constantly and records the leaders.

`python tests/lab/etcd_client.py URL…` runs until its standard input closes. Then it reads
everything back and prints one JSON object: acknowledged writes, lost writes, and leaders. Before it
writes, it makes the member at the first URL the leader and prints `leads`. A restart in the order
of the list then changes the leader at least twice, because the next leader is still to be
restarted.
"""

import base64
import json
import sys
import threading
import time
import urllib.request
from typing import Any

ANSWER_S = 20.0
READ_BACK_S = 600.0


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url + path, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        result: dict[str, Any] = json.load(response)
        return result


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Writer:
    """Writes one key after the other, and remembers the acknowledged ones."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.acknowledged: list[int] = []
        self.failed = 0

    def run(self, stop: threading.Event) -> None:
        number = 0
        while not stop.wait(0.05):
            url = self.urls[number % len(self.urls)]
            number += 1
            try:
                ask(url, "/v3/kv/put", {"key": b64(f"k{number}"), "value": b64(str(number))})
            except (OSError, ValueError):
                self.failed += 1  # not acknowledged: the key may exist or not
            else:
                self.acknowledged.append(number)

    def lost(self) -> list[int]:
        deadline = time.monotonic() + READ_BACK_S
        while True:
            try:
                body = {"key": b64("k"), "range_end": b64("l"), "limit": "1000000"}
                kvs = ask(self.urls[0], "/v3/kv/range", body).get("kvs", [])
                there = {int(base64.b64decode(kv["value"])) for kv in kvs}
                return sorted(set(self.acknowledged) - there)
            except (OSError, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def lead(urls: list[str]) -> None:
    """Make the first member the leader, and return once that member confirms it.

    Raises TimeoutError if the ensemble does not agree in time.
    """
    deadline = time.monotonic() + READ_BACK_S
    while time.monotonic() < deadline:
        try:
            first = ask(urls[0], "/v3/maintenance/status", {})
            wanted, leader = first["header"]["member_id"], first.get("leader")
            if leader == wanted:
                return
            for url in urls[1:]:
                result = ask(url, "/v3/maintenance/status", {})
                if result["header"]["member_id"] == leader:
                    ask(url, "/v3/maintenance/transfer-leadership", {"targetID": wanted})
        except (OSError, ValueError, KeyError):
            pass  # an election is running, or a member is slow
        time.sleep(0.2)
    raise TimeoutError(f"{urls[0]} does not lead after {READ_BACK_S:g} s")


def watch_leaders(urls: list[str], stop: threading.Event, terms: dict[int, str]) -> None:
    """Record the leader of each term that a member reported.

    A leader may be replaced before it is queried; its term remains visible. With pre-votes, the
    default in etcd, a term begins only when a majority wants another leader. So the terms count the
    changes, and the names are for the reader.
    """
    while not stop.wait(0.2):
        for url in urls:
            try:
                result = ask(url, "/v3/maintenance/status", {})
            except (OSError, ValueError):
                continue
            if result.get("leader", "0") != "0":
                terms[int(result["raftTerm"])] = result["leader"]


def main() -> None:
    urls, stop = sys.argv[1:], threading.Event()
    lead(urls)
    print("leads", flush=True)
    writer, terms = Writer(urls), dict[int, str]()
    threads = [
        threading.Thread(target=writer.run, args=(stop,)),
        threading.Thread(target=watch_leaders, args=(urls, stop, terms)),
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    result = {
        "acknowledged": len(writer.acknowledged),
        "failed": writer.failed,
        "lost": writer.lost(),
        "leader_changes": max(terms) - min(terms),
        "terms": terms,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
