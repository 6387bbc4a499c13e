"""11. テンソル並列 (TP), tensor parallelism: as tp_mlp.py (read it first), and attention is cut, too, by its heads.

データ:冗長  モデル:分散  通信:活性, AllReduce, 層毎

    MLP          x --f--> x A_i --> gelu: Y_i --> Y_i B_i --g--> sum of Y_i B_i          A: fc1, B: fc2
    attention    x --f--> x A_i --> a/n heads: Y_i --> Y_i B_i --g--> sum of Y_i B_i     A: qkv, B: proj

    Columns of qkv are q, k and v of whole heads. A head needs no other head, as gelu needs no other number.

Sends   4 AllReduces per block, 8Lbsh(n-1)/n numbers: 786,432 bytes (n=4: 1,179,648).
Memory  1/n of A (with biases), of B, and of activations between f and g: 1,518,592 bytes (n=4: 918,016).
Bad     オーバーラップ不可 in forward (`Linear.backward` overlaps). Each rank repeats LayerNorms and head (-> 17, 18).
"""

from gpt import GPT, Adam, Block, batches, connect, cross_entropy, show
from torch import nn
from tp_mlp import cut_pair, f, g


class TensorParallelBlock(nn.Module):
    def __init__(self, block, group=None):
        super().__init__()
        self.block, self.group = block, group
        cut_pair(block.qkv, block.proj, group)
        cut_pair(block.fc1, block.fc2, group)

    def forward(self, x):  # [b, s, h]
        x = x + g(self.block.attention(f(self.block.ln1(x), self.group)), self.group)
        return x + g(self.block.mlp(f(self.block.ln2(x), self.group)), self.group)


def tensor_parallel(units, group=None):
    units = [TensorParallelBlock(unit, group) if isinstance(unit, Block) else unit for unit in units]
    return nn.Sequential(*units)


if __name__ == "__main__":
    rank, n = connect(2, 4)
    model = tensor_parallel(GPT())
    adam = Adam(model.parameters())

    for ids, targets in batches():  # all ranks have all samples
        loss = cross_entropy(model(ids), targets)
        loss.backward()
        adam.step()
        show(loss / n)  # `show` adds n equal losses
