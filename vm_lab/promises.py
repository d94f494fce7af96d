"""The promises of an agent by its answers, and checks whether a host keeps them after a cut. Pure.

An answered order has been carried out. An order without an answer may have been carried out or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vm_lab.guest_requests import Done, Order


@dataclass(slots=True)
class LabPromises:
    """The required state of a host, by the orders to its agent and the answers."""

    tasks: dict[str, int] = field(default_factory=dict)
    """Task id → generation last acknowledged, 0 once its removal was ordered."""
    images: dict[str, bool] = field(default_factory=dict)
    """Digest → whether it is there."""
    open: dict[int, Order] = field(default_factory=dict)
    """Number → an order that was given and not answered."""
    acknowledged: int = 0

    def given(self, order: Order) -> None:
        """Record an order that is about to be sent."""
        self.open[order.number] = order

    def answered(self, done: Done) -> None:
        """Record an answer; a refusal promises nothing."""
        order = self.open.pop(done.number, None)
        if order is None or done.error:
            return
        self.acknowledged += order.what not in ("look", "fsck")
        match order.what:
            case "task":
                self.tasks[order.name] = order.generation
            case "no-task":
                self.tasks[order.name] = 0
            case "image":
                self.images[done.digest] = True
            case "no-image":
                self.images[order.image] = False

    def broken(self, seen: Done) -> list[str]:
        """Return each broken promise as text; [] if the host kept all and has no work left."""
        maybe = {o.name: o for o in self.open.values() if o.what in ("task", "no-task")}
        going = {o.image for o in self.open.values() if o.what == "no-image"}
        found = []
        for task_id in sorted({*self.tasks, *seen.tasks, *maybe}):
            allowed = {self.tasks.get(task_id, 0)}
            if task_id in maybe:
                order = maybe[task_id]
                allowed.add(order.generation if order.what == "task" else 0)
            generation, state = seen.tasks.get(task_id, (0, ""))
            if generation not in allowed:
                wanted = " or ".join(str(g) for g in sorted(allowed))
                found.append(f"task {task_id} has generation {generation}, not {wanted}")
            elif generation and state != "running":
                found.append(f"task {task_id} is {state}")
        for digest, there in sorted(self.images.items()):
            if there and digest not in seen.images and digest not in going:
                found.append(f"image {digest} is gone")
            if not there and digest in seen.images:
                found.append(f"image {digest} is back")
        return found

    def renewed(self, seen: Done) -> LabPromises:
        """Return promises that match the present state of the host."""
        tasks = {t: generation for t, (generation, _) in seen.tasks.items()}
        return LabPromises(tasks, dict.fromkeys(seen.images, True), {}, self.acknowledged)
