"""The promises of an agent by its answers, and checks whether a host keeps them after a cut. Pure.

An answered order has been carried out. An order without an answer may have been carried out or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vm_lab.guest_requests import Order, OrderResult


@dataclass(slots=True)
class LabPromises:
    """The state that a host must have after the orders to its agent and the answers."""

    tasks: dict[str, int] = field(default_factory=dict)
    """Task id → generation last acknowledged, 0 once its removal was ordered."""
    images: dict[str, bool] = field(default_factory=dict)
    """Digest → whether it is there."""
    open: dict[int, Order] = field(default_factory=dict)
    """Number → an order that was given and not answered."""
    acknowledged: int = 0

    def order_sent(self, order: Order) -> None:
        """Record an order that is about to be sent."""
        self.open[order.number] = order

    def answer_received(self, done: OrderResult) -> None:
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

    def broken(self, state: OrderResult) -> list[str]:
        """Return each broken promise as text; [] if the host kept all and has no work left."""
        possible = {o.name: o for o in self.open.values() if o.what in ("task", "no-task")}
        may_be_gone = {o.image for o in self.open.values() if o.what == "no-image"}
        broken = []
        for task_id in sorted({*self.tasks, *state.tasks, *possible}):
            allowed = {self.tasks.get(task_id, 0)}
            if task_id in possible:
                order = possible[task_id]
                allowed.add(order.generation if order.what == "task" else 0)
            generation, task_state = state.tasks.get(task_id, (0, ""))
            if generation not in allowed:
                wanted = " or ".join(str(g) for g in sorted(allowed))
                broken.append(f"task {task_id} has generation {generation}, not {wanted}")
            elif generation and task_state != "running":
                broken.append(f"task {task_id} is {task_state}")
        for digest, is_present in sorted(self.images.items()):
            if is_present and digest not in state.images and digest not in may_be_gone:
                broken.append(f"image {digest} is gone")
            if not is_present and digest in state.images:
                broken.append(f"image {digest} is back")
        return broken

    def present_images(self) -> list[str]:
        """Return the digests of the images that are there, sorted."""
        return sorted(digest for digest, is_present in self.images.items() if is_present)

    def renewed(self, state: OrderResult) -> LabPromises:
        """Return promises that match the present state of the host."""
        tasks = {t: generation for t, (generation, _) in state.tasks.items()}
        return LabPromises(tasks, dict.fromkeys(state.images, True), {}, self.acknowledged)
