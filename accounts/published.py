"""Published runs, and the predictions of their times.

    python -m accounts.published

The command prints the error of each run. Three constants of the A100, `matrix`, `wire` and `wave`, are fitted to some
of these runs: they minimise the sum of the squares of log(predicted / published) (`test_plan.py` checks this). The
other constants of `devices.py` have usual values, because these runs do not determine them.

    2021         Narayanan et al., arXiv 2104.04473, Table 1. The fit uses it
    2022         Korthikanti et al., arXiv 2205.05198, Table 5, full recomputation. The fit uses it
    selective    the same table with selective recomputation, and the run with 8 data ranks. No fit uses it
    MPT          MosaicML, LLM Foundry, scripts/train/benchmarking/README.md. No fit uses these 8 runs. They are among
                 the 64 runs whose mean is `seconds.REST`
    MT-NLG       Smith et al., arXiv 2201.11990, section 2.4 (DeepSpeed). No fit uses it
    Jiang        Jiang et al., arXiv 2402.15627, Table 2 (Megatron-LM). No fit uses it

TFLOP/s and tokens/s are those of one GPU. The GPUs are A100 with 80 GB, eight in a node, unless the column "program"
names another device. These settings of `plan.py` predict features of the programs of the first two papers:

    their program                                     setting
    attention's matrix, messages, reductions          code="megatron-2021", "megatron-2022" (`seconds.py`)
    selective recomputation                           recompute=none
    dropout on attention                              code="megatron-2021", "megatron-2022" count it
    gradients of 2 bytes (Narayanan et al.)           none: we count 4 bytes
    one network card for a ring (Table 2)             rings=1

Narayanan et al. do not publish the micro-batch size b and the number of chunks v. One rule chose them for all rows: the
fastest prediction that fits into memory, with 1 to 16 samples and 1 to 4 chunks that divide the layers.
"""

from collections import namedtuple

from accounts import layouts
from accounts.devices import DEVICES
from accounts.flops import hardware_flops
from config import Config

TOKENS = 2048  # of a sample
DEVICE = DEVICES["a100-80g"]._replace(rings=1)  # that of the Megatron programs
# sp: sequence parallelism; zero: ZeRO stage; program: one of seconds.CODES, or a device (then it is "ours").
TABLE = """
  L     h heads tp pp v batch  b  GPUs sp zero recompute program       published unit     name
 24  2304    24  1  1 1   512 16    32  0    0 full      megatron-2021       137 TFLOP/s  1.7B, 2021
 30  3072    32  2  1 1   512 16    64  0    0 full      megatron-2021       138 TFLOP/s  3.6B, 2021
 36  4096    32  4  1 1   512 16   128  0    0 full      megatron-2021       142 TFLOP/s  7.5B, 2021
 40  6144    48  8  1 1  1024 16   256  0    0 full      megatron-2021       135 TFLOP/s  18.4B, 2021
 48  8192    64  8  2 4  1536  8   512  0    0 full      megatron-2021       138 TFLOP/s  39.1B, 2021
 60 10240    80  8  4 3  1792  2  1024  0    0 full      megatron-2021       140 TFLOP/s  76.1B, 2021
 80 12288    96  8  8 2  2304  2  1536  0    0 full      megatron-2021       148 TFLOP/s  145.6B, 2021
 96 16384   128  8 16 3  2160  1  1920  0    0 full      megatron-2021       155 TFLOP/s  310.1B, 2021
105 20480   128  8 35 3  2520  2  2520  0    0 full      megatron-2021       163 TFLOP/s  529.6B, 2021
128 25600   160  8 64 2  3072  1  3072  0    0 full      megatron-2021       163 TFLOP/s  1008.0B, 2021
 48  6144    64  8  1 1     4  4     8  0    0 full      megatron-2022      1.42 s        22B, 2022
 96 12288    96  8  8 3    64  1    64  0    0 full      megatron-2022     18.13 s        175B, 2022
105 20480   128  8 35 3   280  1   280  0    0 full      megatron-2022     49.05 s        530B, 2022
128 25600   160  8 64 1   512  1   512  0    0 full      megatron-2022     94.42 s        1T, 2022
 48  6144    64  8  1 1     4  4     8  1    0 none      megatron-2022      1.10 s        22B, selective
 96 12288    96  8  8 3    64  1    64  1    0 none      megatron-2022     13.75 s        175B, selective
105 20480   128  8 35 3   280  1   280  1    0 none      megatron-2022     37.83 s        530B, selective
128 25600   160  8 64 1   512  1   512  1    0 none      megatron-2022     71.49 s        1T, selective
105 20480   128  8 35 3  2240  1  2240  1    0 none      megatron-2022     39.15 s        530B, selective, dp=8
 24  2048    16  1  1 1   448 14     8  0    3 none      a100-80g          20513 tokens/s MPT 1B
 32  4096    32  1  1 1    96  6     8  0    3 none      a100-80g           4641 tokens/s MPT 7B
 48  7168    56  1  1 1   504  3     8  0    3 full      a100-80g            916 tokens/s MPT 30B
 80  8192    64  1  1 1  2048  8    64  0    3 full      a100-80g            410 tokens/s MPT 70B
 40  5120    40  1  1 1   448 14    32  0    3 full      a100-40g           1998 tokens/s MPT 13B
 32  2560    20  1  1 1   480 10    16  0    3 none      h100              24142 tokens/s MPT 3B
 48  7168    56  1  1 1   504  3     8  0    3 full      h100               2002 tokens/s MPT 30B
 80  8192    64  1  1 1  2048  8    64  0    3 full      h100               1039 tokens/s MPT 70B
105 20480   128  8 35 1  1920  1  2240  0    0 full      a100-80g           60.1 s        MT-NLG 530B
105 20480   128  8 35 1  1920  1  2800  0    0 full      a100-80g           50.2 s        MT-NLG 530B
105 20480   128  8 35 1  1920  1  3360  0    0 full      a100-80g           44.4 s        MT-NLG 530B
 96 12288   128  8  8 6   768  1   256  1    1 none      a100-80g           40.0 s        175B, Jiang
 96 12288   128  8  8 6   768  1  1024  1    1 none      a100-80g           11.9 s        175B, Jiang
 96 12288   128  8  8 6  6144  1  3072  1    1 none      a100-80g          29.02 s        175B, Jiang
 96 12288   128  8  8 6  6144  1  6144  1    1 none      a100-80g          14.78 s        175B, Jiang
 96 12288   128  8  8 6  6144  1 12288  1    1 none      a100-80g           8.57 s        175B, Jiang
"""


class Run(namedtuple("Run", "name config gpus program value unit")):
    @property
    def seconds(self):
        """The seconds of a step. TFLOP/s are those of one GPU, with recomputation."""
        batch = self.config.global_batch_size
        work = hardware_flops(self.config, batch) / 1e12 if self.unit == "TFLOP/s" else batch * TOKENS
        return self.value if self.unit == "s" else work / (self.value * self.gpus)


def published():
    """Return TABLE as (Runs of the fit, other Runs)."""
    fitted, others = [], []
    for line in TABLE.strip().splitlines()[1:]:
        *numbers, recompute, program, value, unit, name = line.split(maxsplit=15)
        L, h, heads, tp, pp, v, batch, b, gpus, sp, zero = map(int, numbers)
        c = Config(
            num_layers=L, hidden_size=h, num_attention_heads=heads, seq_length=TOKENS, vocab_size=51200, dtype="bf16",
            tp=tp, pp=pp, schedule="interleaved" if v > 1 else "1f1b", chunks=v, global_batch_size=batch,
            micro_batch_size=b, sequence_parallel=sp == 1, zero=zero, recompute=recompute, train_iters=1,
        )  # fmt: skip
        fits = program not in DEVICES and recompute == "full"
        (fitted if fits else others).append(Run(name, c, gpus, program, float(value), unit))
    return fitted, others


def predicted(run, device=DEVICE):
    """Return the predicted seconds of a step. device: for the programs of the two papers."""
    place = (DEVICES[run.program], "ours") if run.program in DEVICES else (device, run.program)
    return layouts.judge(run.config, run.gpus, *place, exact=False)["step_seconds"]


def main():
    """Print the published and the predicted seconds of all runs, and the error."""
    print(f"{'run':<25} {'GPUs':>5} {'published':>10} {'predicted':>10} {'error':>7}")
    fitted, others = published()
    for run in [*fitted, *others]:
        now, group = predicted(run), "fitted" if run in fitted else "not fitted"
        error = f"{now / run.seconds - 1:+.1%}"
        print(f"{run.name:<25} {run.gpus:>5} {run.seconds:>10.2f} {now:>10.2f} {error:>7} {group}")


if __name__ == "__main__":
    main()
