"""Generate text with a checkpoint of any layout, on one process.

    python generate.py out/tiny --prompt "def hello_world():" --temperature=0.8 --top_k=50

First, the prompt goes through the model, then each new token alone: a cache keeps the keys and values of earlier
tokens. `draw_token` divides the logits by the temperature and keeps the `top_k` largest. Of these, it keeps the fewest
tokens whose probabilities sum to `top_p` or more (nucleus sampling, Holtzman et al., arXiv 1904.09751).
"""

from errors import UserError, exit_on_user_error, reading  # isort: skip
from options import Parser, within  # isort: skip
import dataclasses
import itertools

import torch

import config as configuration
from parallel import simulation
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.units import Model
from parallel.zero import Zero
from recovery import checkpoint
from tokenizer import copied, load_tokenizer


def load_model(path, device):
    """Return (model, tokenizer). path: a checkpoint or an out_dir."""
    folder = checkpoint.find(path)
    if folder is None:
        raise UserError(checkpoint.nothing_in(path))
    index = checkpoint.read_index(folder)
    config = configuration.of_checkpoint(index)
    config = dataclasses.replace(config, **configuration.layout_of(configuration.Config()))  # one process
    mesh = Mesh()
    model = Model(config, mesh.tp)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = Layout(config, 1, model.unit_specs, simulation.build(config.schedule, 1, 1))
    zero = Zero(model, layout, config, mesh, dtype, device, training=False)
    checkpoint.load_checkpoint(folder, model, zero, moments=False)
    zero.parameters_from_master()
    tokenizer = copied(folder, index["tokenizer"]) or load_tokenizer(index["tokenizer"])
    if tokenizer.n_vocab > config.vocab_size:
        raise UserError(f"{folder}: vocab_size={config.vocab_size}, but its vocabulary has {tokenizer.n_vocab} ids")
    model.units[-1].vocab_size = tokenizer.n_vocab  # no ids without text
    return model, tokenizer


def draw_token(logits, temperature, top_k, top_p, generator):
    """Return a token's id. logits [v]. Raises UserError if a logit is nan or inf."""
    logits, largest = logits.float(), logits.max()
    if not largest.isfinite():
        raise UserError("the model's logits are not finite: its training diverged, or its checkpoint is damaged")
    if temperature < 1e-6:
        return int(logits.argmax())
    # at most 0, so a small temperature gives -inf (probability 0), never inf
    logits, ids = ((logits - largest) / temperature).sort(descending=True)
    p = torch.softmax(logits[: top_k or None], 0)
    if top_p < 1:
        p = p[: int((p.cumsum(0) < top_p).sum()) + 1]  # with the token that reaches top_p
    return int(ids[torch.multinomial(p, 1, generator=generator)])


def compare_logits(logits, others, what):
    """Raise UserError if two tensors of logits differ by more than rounding."""
    difference, largest = (logits - others).abs().max().item(), others.abs().max().item()
    if not difference <= largest * torch.finfo(others.dtype).eps ** 0.5:
        raise UserError(f"{what}: the logits differ by {difference:.2g} of {largest:.2g}")


@torch.no_grad()
def generate(model, ids, count, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Yield `count` ids. When all positions are filled, the last half moves to the first ones.

    After 1, 2, 4, 8 ... new tokens, the logits are also computed without the cache.
    """
    device = next(model.parameters()).device
    positions = model.config.positions
    ids, new, start, caches = list(ids), list(ids), 0, [[] for _ in range(model.config.num_layers)]
    for done in range(count):
        if start + len(new) > positions:
            start, new, caches = 0, ids[-max(1, positions // 2) :], [[] for _ in caches]
        batch = model.micro_batch(torch.tensor([new], device=device), start=start, caches=caches)
        logits = model(batch)[-1]
        token = draw_token(logits, temperature, top_k, top_p, generator)
        if start and done & (done - 1) == 0:
            whole = model.micro_batch(torch.tensor([ids[-start - 1 :]], device=device))
            compare_logits(logits, model(whole)[-1], "attention's cache does not follow a change of the model")
        start, new = start + len(new), [token]
        ids.append(token)
        yield token


def main():
    """Print the text while it is generated, up to an end-of-text token or max_tokens."""
    parser = Parser(prog="python generate.py", description="Writes text with a checkpoint.", allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", help="out_dir of a run, or one of its step_N folders")
    add("--prompt", type=str, default="", help="text to continue (default: new document)")
    add("--max_tokens", type=within(0, 10**9), default=300, help="maximum number of new tokens (300)")
    add("--temperature", type=within(0, 1000, float), default=0.8, help="0: always the likeliest token (0.8)")
    add("--top_k", type=within(0, 10**9), default=0, help="draw from the k likeliest tokens; 0: all (0)")
    add("--top_p", type=within(1e-9, 1, float), default=1.0, help="keep tokens up to this probability sum (1.0)")
    add("--seed", type=within(0, 2**64 - 1), default=0, help="the same seed gives the same text (0)")
    a = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would prepare a kernel for each cache length
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(a.checkpoint, device)
    with reading("--prompt"):
        prompt = tokenizer.encode_ordinary(a.prompt) or [tokenizer.eot_token]
    print(a.prompt, end="", flush=True)
    generator = torch.Generator(device).manual_seed(a.seed)
    ids = generate(model, prompt, a.max_tokens, a.temperature, a.top_k, a.top_p, generator)
    for text in tokenizer.texts(prompt, itertools.takewhile(lambda token: token != tokenizer.eot_token, ids)):
        print(text, end="", flush=True)
    print(flush=True)


if __name__ == "__main__":
    exit_on_user_error(main)
