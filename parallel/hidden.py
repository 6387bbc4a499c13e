"""Tensors that must not be read now: their memory is freed, or another rank's values are still on their way.

torch would read freed memory (the process dies without a word), or old values. Here a read raises one line. While a
tensor is hidden it has another Python class (torch's UninitializedParameter does the same), so a tensor that is not
hidden costs nothing. Between two steps are hidden:

    ZeRO stage      1                                2                            3
    p               until `publish` has arrived      the same                     freed
    p.grad          not summed                       freed                        freed
"""

import torch
from torch import nn

from errors import UserError

WITHOUT_VALUES = "shape grad requires_grad requires_grad_ is_leaf grad_fn dtype device ndim dim size numel".split()
REMEDY = (
    "can't be read between steps or by another unit: `for p in run.zero.whole_parameters()` has this rank's weights "
    "(with tp its slice); the gradients of this rank's shard are in bucket.scaled_gradient (GUIDE.md, Change the model)"
)


class Hidden:
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        """Return what needs no values. function: a method, or `__get__` of an attribute."""
        keywords = keywords or {}
        attribute = getattr(getattr(function, "__self__", None), "__name__", None)
        if attribute in WITHOUT_VALUES or function.__name__ in WITHOUT_VALUES:
            return super().__torch_function__(function, types, arguments, keywords)
        values = *arguments, *keywords.values()
        name = next((x.spec.name for x in values if isinstance(x, Hidden)), "a parameter")
        raise UserError(f"{name} {REMEDY}")


class HiddenParameter(Hidden, nn.Parameter):
    pass


class HiddenGradient(Hidden, torch.Tensor):
    pass


OTHER = {nn.Parameter: HiddenParameter, torch.Tensor: HiddenGradient}
OTHER |= {hidden: shown for shown, hidden in OTHER.items()}


class Views(list):
    """Parameters or gradients that are hidden together."""

    hidden = False

    def set_hidden(self, hidden):
        if hidden != self.hidden:
            self.hidden = hidden
            for view in self:
                # Autograd, buckets and units keep this object, so it must not be replaced by another one.
                view.__class__ = OTHER[type(view)]
