"""What a rank does now: `with watch("backward", action): ...`. Tools that measure a run are told.

    phase       contains                        subject
    pipeline    all actions of a step           the Schedule
    forward     the action F                    the Action
    backward    the actions B, I and W          the Action
    wait        a wait for a message            its key
    batch       a micro-batch is read
    recompute   a block's second forward
    reduce      a sum of gradients starts
    finish      the other sums of gradients
    update      the norm and the optimizer
    setup, evaluate: not in a step

Wait, batch, recompute and reduce are parts of forward or backward.
"""

import contextlib

from parallel.comm import Ledger


class Tool:
    """Is told what a rank does, if it is in `Watch.tools`."""

    def span(self, phase, subject):
        """Return a context for a phase."""
        return contextlib.nullcontext()

    def started(self, pending, phase, axis, what, operation, peer):
        """Called after a communication has started. May replace torch's handle, `pending.work`. peer: of a message."""


class Watch:
    def __init__(self):
        self.phase, self.ledger, self.tools = "setup", Ledger(), []

    @contextlib.contextmanager
    def __call__(self, phase, subject=None):
        """Context: this rank is in `phase`. subject: as in the table above."""
        outer = self.phase
        if outer == "evaluate":  # it runs a pipeline that the tools shall not see
            yield
            return
        with contextlib.ExitStack() as stack:
            for tool in self.tools:
                stack.enter_context(tool.span(phase, subject))
            self.phase = phase
            try:
                yield
            finally:
                self.phase = outer

    def started(self, pending, axis, what, operation, peer=None):
        """Tell the tools that a communication has started. Return its Pending."""
        for tool in self.tools:
            tool.started(pending, self.phase, axis, what, operation, peer)
        return pending
