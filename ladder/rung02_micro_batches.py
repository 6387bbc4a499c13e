"""2. Micro-batches (slide "パイプライン並列": micro batch): the batch runs in m parts.

    gradient of the batch = gradient of part 0 + gradient of part 1 + ...

Sends   nothing.
Memory  as rung 1: 2,719,744 bytes. Activations of 8/m samples.
Bad     small matrix products are slow. (train.py divides a part's mean loss by m. The gradient is the same.)
"""

from gpt import GPT, MICRO_BATCHES, Adam, batches, connect, cross_entropy, show

connect(1)
model = GPT()
adam = Adam(model.parameters())

for ids, targets in batches():
    ids, targets = ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)  # lists of [b/m, s]
    total = 0
    for j in range(MICRO_BATCHES):
        loss = cross_entropy(model(ids[j]), targets[j])
        loss.backward()  # adds to w.grad
        total += loss.detach()
    adam.step()
    show(total)
