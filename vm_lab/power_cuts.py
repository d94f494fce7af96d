"""Cuts the power of a guest at random moments while its agent works, and checks the result.

A cut is SIGKILL of QEMU. Data that the guest had not sent to its disk is lost, and so is unflushed
data that the disk had not written (`cache: unsafe` only skips the host's fsync: the host stays up).
After each boot every acknowledged order must be in effect, tasks must run, fsck must find nothing,
and btrfs must have no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import click
import msgspec

from vm_lab.cli import lab_command
from vm_lab.errors import LabError
from vm_lab.guest_requests import BUSYBOX, Order, OrderResult
from vm_lab.image.build import BUSYBOX as OUR_BUSYBOX
from vm_lab.lab import Lab, UpOptions
from vm_lab.progress import PATIENCE_S, wait_until
from vm_lab.promises import LabPromises
from vm_lab.state import DAMAGED

MACHINE = "m1"
TASKS = 5
MAX_IMAGES = 6
MAX_ORDERS, PAUSE_S = 20, 2.0
"""A cut follows at most 20 acknowledged orders, then within 2 s. On a slow machine a series takes
longer, but tests as much."""
GUEST_COMMAND = "/opt/twine/bin/python -I -m vm_lab.guest_requests"
DISK_ERRORS = "btrfs device stats -c / && ! dmesg | grep -E 'BTRFS (error|critical)'"


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One cut, and the state after it."""

    number: int
    after_s: float
    acknowledged: int
    """Orders that the agent had acknowledged by then, since the cut before."""
    open: list[str]
    """Orders that were under way."""
    boot_s: float
    """Until ssh answered."""
    rest_s: float
    """From then until every task that must run ran."""
    wrong: list[str]


class CutSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A series of cuts with one seed; a later call can continue it."""

    seed: int
    cuts: list[Cut] = []


class GuestClient:
    """The program in the guest that carries out orders (`vm_lab.guest_requests`)."""

    def __init__(self, process: asyncio.subprocess.Process, promises: LabPromises) -> None:
        self._process = process
        self.promises = promises
        self._waiting: dict[int, asyncio.Future[OrderResult]] = {}
        self._reader = asyncio.create_task(self._read())
        self._number = 0

    async def send(
        self, what: str, name: str = "", generation: int = 0, image: str = ""
    ) -> OrderResult:
        """Send an order and return its answer; never returns if the guest is off."""
        self._number += 1
        order = Order(number=self._number, what=what, name=name, generation=generation, image=image)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[order.number] = answer
        self.promises.order_sent(order)
        assert self._process.stdin
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            await self._process.stdin.drain()
        result: OrderResult = await answer
        return result

    async def _read(self) -> None:
        assert self._process.stdout
        while line := await self._process.stdout.readline():
            done = msgspec.json.decode(line, type=OrderResult)
            self.promises.answer_received(done)
            if not (answer := self._waiting.pop(done.number)).done():
                answer.set_result(done)

    async def close(self) -> None:
        """End the connection; answers that have arrived count."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader


class PowerCuts:
    """A guest, and its series of cuts."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.machine = lab.machine(MACHINE)
        self.say = lab.progress.say
        self.file = lab.paths.state / "power-cuts.json"
        self.series = saved_series(self.file, seed)
        self._generation = 0

    def prepare(self) -> None:
        """Enable an agent in the guest that starts with each boot."""
        put = f"cat >{BUSYBOX} && chmod 0755 {BUSYBOX}"
        self.lab.guests.run(self.machine, put, stdin=OUR_BUSYBOX)
        unit = "twine-agent.service"
        self._ssh(f"systemctl enable -q {unit} && sync && systemctl start --no-block {unit}")

    def _ssh(self, command: str) -> str:
        return self.lab.guests.run(self.machine, command)

    async def run(self, cuts: int) -> None:
        """Run until there were `cuts` cuts, or one found an error."""
        guest, state = await self._connect(LabPromises())
        state = await self._remove_tasks_and_images(guest, state)
        while len(self.series.cuts) < cuts:
            guest.promises = guest.promises.renewed(state)
            cut, guest, state = await self._make_cut(guest, len(self.series.cuts) + 1)
            self.series.cuts.append(cut)
            self.lab.paths.save(self.file, self.series)
            self.say(f"cut {cut.number}/{cuts}: {'; '.join(cut.wrong) or 'all is as promised'}")
            if cut.wrong:
                break
        await guest.close()

    async def _remove_tasks_and_images(self, guest: GuestClient, state: OrderResult) -> OrderResult:
        """Remove tasks and images of other programs: those images may lack our task's program."""
        for task in state.tasks:
            await guest.send("no-task", task, self._next_generation())
        while (state := await guest.send("look")).tasks:
            await asyncio.sleep(0.5)
        for digest in state.images:
            await guest.send("no-image", image=digest)
        return await guest.send("look")

    async def _make_cut(
        self, guest: GuestClient, number: int
    ) -> tuple[Cut, GuestClient, OrderResult]:
        promises, before = guest.promises, guest.promises.acknowledged
        after_s = await self._work_until_cut(guest, number)
        await guest.close()
        acknowledged = promises.acknowledged - before
        open_orders = [f"{o.what} {o.name or o.image[:15]}" for o in promises.open.values()]
        began = time.monotonic()
        await asyncio.to_thread(self._boot)
        booted = time.monotonic()
        guest, state = await self._connect(promises)
        wrong = promises.broken(state) + (await guest.send("fsck")).wrong
        wrong += await asyncio.to_thread(self._disk_errors)
        return (
            Cut(
                number=number,
                after_s=round(after_s, 1),
                acknowledged=acknowledged,
                open=open_orders,
                boot_s=round(booted - began, 1),
                rest_s=round(time.monotonic() - booted, 1),
                wrong=wrong,
            ),
            guest,
            state,
        )

    async def _work_until_cut(self, guest: GuestClient, number: int) -> float:
        """Give orders until the power is cut amid them; return the seconds until then."""
        chance = random.Random(f"{self.series.seed}/{number}")
        orders, pause_s = chance.randint(1, MAX_ORDERS), chance.uniform(0.0, PAUSE_S)
        work = [
            asyncio.create_task(self._change_task(guest, f"t{n}", random.Random(chance.random())))
            for n in range(TASKS)
        ]
        work.append(asyncio.create_task(self._change_images(guest, random.Random(chance.random()))))
        began, before = time.monotonic(), guest.promises.acknowledged
        while guest.promises.acknowledged < before + orders and not any(t.done() for t in work):
            await asyncio.sleep(0.05)
        await asyncio.wait(work, timeout=pause_s, return_when=asyncio.FIRST_EXCEPTION)
        self._kill()
        after_s = time.monotonic() - began
        for task in work:
            task.cancel()
        for ended in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return after_s

    def _kill(self) -> None:
        """Cut the power: QEMU cannot write any more data."""
        pid = self.lab.paths.state / "libvirt/run/qemu" / f"{MACHINE}.pid"
        os.kill(int(pid.read_text()), signal.SIGKILL)

    def _boot(self) -> None:
        self.lab.guests.forget_connection(self.machine)
        late = LabError(f"after {PATIENCE_S:g} s still not: libvirt sees that it is off")
        wait_until(lambda: self._power_state() == "shut off", lambda: late)
        self.lab.power_on(MACHINE)

    def _power_state(self) -> str:
        return self.lab.domains.power()[MACHINE]

    async def _connect(self, promises: LabPromises) -> tuple[GuestClient, OrderResult]:
        """Return the state of the host once the agent keeps its promises, or after the timeout."""
        wait = "until systemctl is-active -q twine-agent.service; do sleep 1; done"
        await asyncio.to_thread(self._ssh, f"timeout {PATIENCE_S:g} sh -c '{wait}'")
        argv = self.lab.guests.command(self.machine, f"exec {GUEST_COMMAND}")
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 22
        )
        guest = GuestClient(process, LabPromises())
        deadline = time.monotonic() + PATIENCE_S
        while True:
            async with asyncio.timeout(PATIENCE_S):
                state = await guest.send("look")
            self._generation = max([self._generation, *(g for g, _ in state.tasks.values())])
            if not promises.broken(state) or time.monotonic() > deadline:
                return guest, state
            await asyncio.sleep(0.5)

    def _disk_errors(self) -> list[str]:
        """Return the errors that btrfs reports."""
        try:
            self._ssh(f"({DISK_ERRORS}) 2>&1")
        except LabError as e:
            return [str(e)]
        return []

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    async def _change_task(self, guest: GuestClient, name: str, chance: random.Random) -> None:
        """Start, update and stop a task, again and again."""
        while True:
            images = guest.promises.present_images()
            if guest.promises.tasks.get(name) and chance.random() < 0.4:
                await guest.send("no-task", name, self._next_generation())
            elif images:
                await guest.send("task", name, self._next_generation(), chance.choice(images))
            await asyncio.sleep(chance.uniform(0.0, 2.0))

    async def _change_images(self, guest: GuestClient, chance: random.Random) -> None:
        """Add and remove images until cancelled."""
        while True:
            images = guest.promises.present_images()
            if len(images) < 2 or (len(images) < MAX_IMAGES and chance.random() < 0.6):
                await guest.send("image", f"{chance.random()}")
            else:
                await guest.send("no-image", image=chance.choice(images))
            await asyncio.sleep(chance.uniform(0.0, 1.0))


def saved_series(file: Path, seed: int) -> CutSeries:
    """Return the series in a file if it has this seed, else a new one."""
    try:
        saved = msgspec.json.decode(file.read_bytes(), type=CutSeries)
    except FileNotFoundError:
        return CutSeries(seed=seed)
    except DAMAGED as e:
        raise LabError(f"cannot use {file}: {e}", hint="remove it to begin a new series") from e
    return saved if saved.seed == seed else CutSeries(seed=seed)


def table(series: CutSeries) -> str:
    """Return the series as a table in Markdown, with a line of sums below it."""
    lines = [
        "| cut | after | acknowledged before it | under way | boot | until all runs | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for cut in series.cuts:
        result = "; ".join(cut.wrong).replace("\n", " ") or "as promised, fsck clean"
        lines.append(
            f"| {cut.number} | {cut.after_s:g} s | {cut.acknowledged}"
            f" | {', '.join(cut.open) or '-'} | {cut.boot_s:g} s | {cut.rest_s:g} s | {result} |"
        )
    good = sum(not cut.wrong for cut in series.cuts)
    orders = sum(cut.acknowledged for cut in series.cuts)
    open_orders = sum(len(cut.open) for cut in series.cuts)
    lines.append("")
    lines.append(
        f"{len(series.cuts)} cuts (seed {series.seed}), {good} clean; {orders} orders acknowledged"
        f" before them, {open_orders} under way."
    )
    return "\n".join(lines)


@click.command("power-cuts")
@lab_command
@click.option("--cuts", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--write", type=click.Path(path_type=Path), help="Write the table there, too.")
def command(lab: Lab, cuts: int, seed: int, write: Path | None) -> None:
    """Cut the power of one guest at random moments; a second call continues the series.

    Stops at the first cut after which something is wrong; the guest is left as it is.
    """
    lab.up(UpOptions(count=1, bare=True))
    work = PowerCuts(lab, seed)
    work.prepare()
    asyncio.run(work.run(cuts))
    text = table(work.series)
    click.echo(text)
    if write:
        write.write_text(text + "\n")
    if any(cut.wrong for cut in work.series.cuts):
        raise LabError("a cut left something wrong behind, see above")
