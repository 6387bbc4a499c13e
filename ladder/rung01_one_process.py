"""1. One process (slide "深層学習の用語説明"). All other rungs print the losses of this one.

Sends   nothing.
Memory  4P numbers (weights, gradients, two optimizer states): 2,719,744 bytes. Activations of 8 samples.
Bad     all activations exist at a time (-> rung 2). One process is slow (-> 3). Its memory is small (-> 5 to 10).
"""

from gpt import GPT, Adam, batches, connect, cross_entropy, show

connect(1)
model = GPT()
adam = Adam(model.parameters())

for ids, targets in batches():  # each [b, s]
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    adam.step()
    show(loss)
