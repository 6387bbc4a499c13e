"""1. One process (slide "深層学習の用語説明"). The other rungs print its losses (not 14, 20, 22).

Sends   nothing.
Memory  4P numbers (weights, gradients, two optimizer states): 2,719,744 bytes. Activations of 8 samples.
Bad     all activations exist together (-> 2). One process is slow (-> 4). A large model does not fit (-> 6 to 12).
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
