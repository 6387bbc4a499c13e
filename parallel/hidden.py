"""Tensors that must not be read now: their memory is freed, or another rank's values are still on their way.

torch would read freed memory (the process dies without a word), or old values. Here it raises one line. While a tensor
is hidden it has another Python class (torch's UninitializedParameter does the same), so a tensor that is not hidden
costs nothing. Between the steps of a run are hidden:

    ZeRO stage      1                                2                            3
    p               until `publish` has arrived      the same                     freed
    p.grad          not summed                       freed                        freed
"""

import torch
from torch import nn

from errors import UserError

VALUES = "data T mT H mH real imag".split()  # attributes that are values, or views of them
WITHOUT_VALUES = "requires_grad_ size dim numel stride".split()  # methods
REMEDY = (
    "can't be read between steps: `for p in run.zero.whole_parameters()` has whole weights on all ranks; the "
    "gradients of this rank's shard are in bucket.grad.shard (GUIDE.md, Change the loop)"
)


class Hidden:
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        attribute = getattr(getattr(function, "__self__", None), "__name__", None)
        read = function.__name__ == "__get__" and attribute in VALUES
        if function.__name__ in ("__get__", "__set__", *WITHOUT_VALUES) and not read:
            return super().__torch_function__(function, types, arguments, keywords or {})
        groups = [x if isinstance(x, list | tuple) else [x] for x in arguments]
        names = [x.spec.name for group in groups for x in group if isinstance(x, Hidden)]
        raise UserError(f"{', '.join(names) or 'a parameter'}: {REMEDY}")


class HiddenParameter(Hidden, nn.Parameter):
    pass


class HiddenGradient(Hidden, torch.Tensor):
    pass


OTHER = {nn.Parameter: HiddenParameter, torch.Tensor: HiddenGradient}  # {class of a tensor: while it is hidden}
OTHER |= {hidden: shown for shown, hidden in OTHER.items()}
