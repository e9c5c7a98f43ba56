"""An imitation of a device that states of optimizers travel to: copies that run as late as they may, or at once."""

import torch

from booster.masters.offload import is_offloaded, tensors_of


class Mark:
    """A point of a queue; of none, where everything is done as it is said."""

    def __init__(self, queue, place, epoch=None):
        self.queue, self.place, self.epoch = queue, place, epoch

    def synchronize(self):
        if self.queue is not None:
            self.queue.run(self.place)


class FakeQueue:
    """Copies that run when somebody waits for them, and not before: the latest moment that a device may choose."""

    def __init__(self, device, at_once):
        self.device, self.at_once, self.todo, self.done = device, at_once, [], 0
        self.knows = 0  # the computation that it waited for
        self.order = []

    def _add(self, what):
        self.todo.append(what)
        if self.at_once:
            self.run(len(self.todo))

    def copy(self, target, source):
        self.order.append("copy")
        assert self.knows == self.device.epoch or self is self.device.into, "saved before the step was computed"
        self._add(lambda: target.copy_(source))

    def wait(self, event):
        self.order.append("wait")
        if event.epoch is not None:
            self.knows = max(self.knows, event.epoch)
        self._add(event.synchronize)

    def mark(self):
        return Mark(self, len(self.todo))

    def run(self, place):
        while self.done < place:
            what, self.done = self.todo[self.done], self.done + 1
            what()


class Computing:
    def __init__(self, device):
        self.device = device

    def wait(self, event):
        event.synchronize()
        self.device.epoch += 1  # what was said to be computed before is not what comes now

    def mark(self):
        return Mark(None, 0, self.device.epoch)


class FakeTransfers:
    made: list = []
    at_once = False

    def __init__(self, device):
        self.epoch = 0
        self.into, self.out, self.computing = (
            FakeQueue(self, self.at_once),
            FakeQueue(self, self.at_once),
            Computing(self),
        )
        self.rooms = {}
        FakeTransfers.made.append(self)

    def allocate_on_host(self, like):
        made = torch.full(like.shape, 77, dtype=like.dtype)
        self.rooms[made.data_ptr()] = made
        return made


def on_host(optimizer):
    """Of everything that may travel: whether it is in the host's memory."""
    rooms = {place for each in FakeTransfers.made for place in each.rooms}
    buckets = optimizer._update.optimizer_state.masters.buckets
    found = [bucket.residual for bucket in buckets if bucket.residual is not None and not bucket.whole]
    for bucket in buckets:
        if not bucket.whole:
            own = optimizer.unwrap().state.get(bucket.handles[0], {})
            found += [t for v in own.values() if is_offloaded(v, bucket.size) for t in tensors_of(v)]
    return [tensor.data_ptr() in rooms for tensor in found]
