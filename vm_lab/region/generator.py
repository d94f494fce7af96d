"""Machines of a made-up region: region > data center > MSB > row > rack > machine.

A region has several buildings, a building tens of MSBs, an MSB tens of rows and a row tens of
racks (paper §2.1). A rack is bought at once, so all its machines are alike; an MSB that was
built later has newer ones. Names follow Meta's: region PRN has the buildings PRN1, PRN2, …

    python -m vm_lab.region.generator --machines 10000 --csv > machines.csv
    twinectl machine import machines.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.api import Location
from control_plane.api.machines import Hardware, MachineRecord

GIB = 1 << 30
REGIONS = (
    *("prn", "ftw", "atn", "lla", "cln", "frc", "rva", "snc", "pnb", "odn", "nao", "vll"),
    *("eag", "ldc", "ash", "nha", "hnt", "gal", "dkl", "cco", "mzo", "sgp", "kcm", "tpl"),
)
"""Codes of regions; the paper and the talks name PRN."""


@dataclass(frozen=True, slots=True)
class HardwareType:
    """One type of machine: its share of a region's racks, and when it was bought."""

    name: str
    share: float
    first: float
    """Age of the youngest MSB with it; 1 is the oldest."""
    last: float
    """Age of the oldest MSB with it."""
    hardware: Hardware


def _type(
    name: str, share: float, bought: tuple[float, float], rru: float, sku: str, **parts: int | str
) -> HardwareType:
    generation = name.split("-")[1]
    memory = int(parts.pop("memory")) * GIB
    made = {"generation": generation, "sku": sku, "rru": rru, "memory_bytes": memory, **parts}
    return HardwareType(name, share, *bought, Hardware(**made))  # type: ignore[arg-type]


TYPES = (
    _type("web-broadwell", 18, (0.4, 1), 0.75, "1s-16c-32g", cpus=32, memory=32,
          network_mbps=12_500, power_w=185),
    _type("web-skylake", 26, (0.1, 1), 1.0, "1s-18c-64g", cpus=36, memory=64,
          network_mbps=25_000, power_w=210),
    _type("web-cooperlake", 22, (0, 0.7), 1.45, "1s-26c-64g", cpus=52, memory=64,
          network_mbps=50_000, power_w=290),
    _type("web-milan", 8, (0, 0.3), 2.1, "1s-36c-64g", cpus=72, memory=64,
          network_mbps=50_000, power_w=330),
    _type("compute-broadwell", 5, (0.5, 1), 1.6, "2s-28c-256g", cpus=56, memory=256,
          network_mbps=25_000, power_w=390),
    _type("compute-skylake", 7, (0, 0.9), 2.2, "2s-40c-256g", cpus=80, memory=256,
          network_mbps=25_000, power_w=430),
    _type("cache-skylake", 6, (0, 1), 1.0, "1s-18c-256g", cpus=36, memory=256,
          network_mbps=50_000, power_w=260),
    _type("storage-skylake", 5, (0, 1), 0.9, "1s-16c-64g-36d", cpus=32, memory=64,
          network_mbps=25_000, power_w=480),
    _type("inference-skylake", 1.5, (0, 0.8), 1.1, "1s-18c-64g-2t4", cpus=36, memory=64,
          gpus=2, gpu_type="t4", network_mbps=25_000, power_w=380),
    _type("training-volta", 0.8, (0.2, 0.9), 2.4, "2s-40c-512g-8v100", cpus=80, memory=512,
          gpus=8, gpu_type="v100", network_mbps=100_000, power_w=3_200),
    _type("training-ampere", 0.7, (0, 0.5), 3.0, "2s-56c-1024g-8a100", cpus=112, memory=1024,
          gpus=8, gpu_type="a100", network_mbps=200_000, power_w=4_600),
)  # fmt: skip
"""Sizes and shares in the proportions of a web company's fleet; figures of public machines."""
BY_NAME = {kind.name: kind for kind in TYPES}

_RACK = 36
_RACKS_OF_ROW = 24


@dataclass(frozen=True, slots=True)
class Rack:
    """A rack: machines of one type at one location."""

    location: Location
    kind: HardwareType
    size: int
    cluster: str


def make_racks(
    machines: int,
    datacenters: int = 5,
    msbs_per_datacenter: int = 12,
    seed: int = 1,
    region: str = REGIONS[0],
) -> Iterator[Rack]:
    """Yield the racks of a region, data center by data center; their sizes add up."""
    chance = random.Random(f"{seed} {region} {machines} {datacenters} {msbs_per_datacenter}")
    msbs = datacenters * msbs_per_datacenter
    sizes = _parts(machines, [chance.uniform(0.85, 1.15) for _ in range(msbs)])
    ages = [0.3 + 0.7 * (1 - dc / max(1, datacenters - 1)) for dc in range(datacenters)]
    for number, size in enumerate(sizes):
        dc, msb = divmod(number, msbs_per_datacenter)
        datacenter = f"{region}{dc + 1}"
        name = f"{datacenter}-m{msb + 1:02}"
        age = ages[dc] - 0.3 * msb / msbs_per_datacenter  # its MSBs were built one after the other
        kinds = [kind for kind in TYPES if kind.first <= age <= kind.last]
        # small regions have small racks, or an MSB would hold two types in all
        full = min(_RACK, max(4, math.isqrt(size)))
        racks = math.ceil(size / full)
        chosen = _by_share(kinds, racks, chance)
        for rack, kind in enumerate(chosen):
            row = f"{name}-r{rack // _RACKS_OF_ROW + 1:02}"
            yield Rack(
                Location(
                    region=region,
                    datacenter=datacenter,
                    msb=name,
                    row=row,
                    rack=f"{row}-k{rack % _RACKS_OF_ROW + 1:02}",
                ),
                kind,
                min(full, size - rack * full),
                f"{datacenter}-c{msb // 4 + 1}",
            )


def make_region(
    machines: int,
    datacenters: int = 5,
    msbs_per_datacenter: int = 12,
    seed: int = 1,
    region: str = REGIONS[0],
) -> Iterator[MachineRecord]:
    """Yield the machines of a region, all free, up and known by their inventory alone.

    Machines of a rack share one `Location`, machines of a type one `Hardware`.
    """
    number = 0
    for rack in make_racks(machines, datacenters, msbs_per_datacenter, seed, region):
        for _ in range(rack.size):
            yield MachineRecord(
                machine=f"{rack.location.datacenter}-{number:07}",
                location=rack.location,
                machine_type=rack.kind.name,
                hardware=rack.kind.hardware,
                cluster=rack.cluster,
            )
            number += 1


def make_regions(count: int, machines: int, seed: int = 1) -> Iterator[MachineRecord]:
    """Yield the machines of several regions, `machines` in all (MO19); no two are alike."""
    chance = random.Random(seed)
    sizes = _parts(machines, [chance.uniform(0.5, 1.5) for _ in range(count)])
    for number, size in enumerate(sizes):
        again = number // len(REGIONS)
        region = REGIONS[number % len(REGIONS)] + (f"-{again + 1}-" if again else "")
        yield from make_region(size, chance.randint(2, 6), 12, seed, region)


def columns(record: MachineRecord) -> dict[str, object]:
    """Return a machine as a line of the list that `twinectl machine import` reads."""
    hardware = record.hardware or Hardware()
    place = record.location
    return {
        "machine": record.machine,
        "region": place.region,
        "datacenter": place.datacenter,
        "msb": place.msb,
        "row": place.row,
        "rack": place.rack,
        "machine_type": record.machine_type,
        "generation": hardware.generation,
        "sku": hardware.sku,
        "rru": hardware.rru,
        "cpus": hardware.cpus,
        "memory": f"{hardware.memory_bytes // GIB}G",
        "gpus": hardware.gpus,
        "gpu_type": hardware.gpu_type,
        "network_mbps": hardware.network_mbps,
        "power_w": hardware.power_w,
        "cluster": record.cluster,
        "address": record.address,
        "labels": " ".join(f"{name}={text}" for name, text in (record.labels or {}).items()),
        "disk": f"{hardware.disk_bytes // GIB}G" if hardware.disk_bytes else "",
    }


def _parts(total: int, weights: Iterable[float]) -> list[int]:
    """Split a number by weights; the parts are whole and add up."""
    given = list(weights)
    parts, reached, due = [], 0, 0.0
    for weight in given:
        due += total * weight / sum(given)
        parts.append(round(due) - reached)
        reached = round(due)
    return parts


def _by_share(kinds: list[HardwareType], racks: int, chance: random.Random) -> list[HardwareType]:
    """Return a type for each rack, in the shares of the types, in random order."""
    bounds = [chance.random() / racks + i / racks for i in range(racks)] if racks else []
    total = sum(kind.share for kind in kinds)
    chosen, reached, at = [], kinds[0].share / total, 0
    for bound in bounds:
        while bound >= reached and at < len(kinds) - 1:
            at += 1
            reached += kinds[at].share / total
        chosen.append(kinds[at])
    chance.shuffle(chosen)
    return chosen


def _count(text: str) -> int:
    """Return a number of an option; raise `ArgumentTypeError` unless it is 1 or more."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def main() -> None:
    """Print an inventory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=_count, required=True)
    parser.add_argument("--regions", type=_count, default=1)
    parser.add_argument("--datacenters", type=_count, default=5)
    parser.add_argument("--msbs", type=_count, default=12, help="of each data center")
    parser.add_argument("--seed", type=int, default=1)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="the default")
    form.add_argument("--json", action="store_true", help="one list of objects")
    options = parser.parse_args()
    if options.regions > 1:
        records = make_regions(options.regions, options.machines, options.seed)
    else:
        records = make_region(
            machines=options.machines,
            datacenters=options.datacenters,
            msbs_per_datacenter=options.msbs,
            seed=options.seed,
        )
    if options.json:
        lines = (json.dumps(columns(record)) for record in records)
        sys.stdout.write("[")
        for number, line in enumerate(lines):
            sys.stdout.write((",\n " if number else "\n ") + line)
        sys.stdout.write("\n]\n")
        return
    writer: csv.DictWriter[str] | None = None
    for record in records:
        row = columns(record)
        if writer is None:
            writer = csv.DictWriter(sys.stdout, row.keys(), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
