"""Tests of config.py and errors.py: fields, the command line, mistakes, the lock."""

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import config as configuration
import errors
import prepare
from config import Config
from errors import UserError, locked
from parallel import simulation
from testing.tiny import held_elsewhere, refusal

HERE = Path(__file__).parent


# --- a file and the command line --------------------------------------------------------------------------------------


def test_a_file_assigns_fields_and_the_command_line_has_the_last_word(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import math\nhidden_size = 32 * 2\nlr = 1  # an int is a fine float\n_private = object()\n")
    c = configuration.load([str(file), "--lr=0.5", "--lr=0.25", "--sequence_parallel=True", "--ledger", "--seed=7"])
    assert (c.hidden_size, c.lr, c.sequence_parallel, c.ledger, c.seed) == (64, 0.25, True, True, 7)
    assert c.out_dir == "out/mine" and configuration.load([str(file), "--out_dir=x"]).out_dir == "x"


def test_a_field_without_a_comment_is_no_field_without_an_option(tmp_path):
    text = re.sub(r"(    dropout: .*?)  #.*", r"\1", (HERE / "config.py").read_text("utf-8"))
    (tmp_path / "config.py").write_text(text, "utf-8")
    with pytest.raises(AssertionError, match="needs a comment"):
        runpy.run_path(str(tmp_path / "config.py"))


def test_without_a_file_the_configuration_is_tiny():
    assert configuration.load([]).out_dir == "out/tiny" and configuration.load(["--tp=2"]).tp == 2


@pytest.mark.parametrize("flag", ["--num-layers 24", "--num_layers 24", "--num-layers=24", "--num_layers=24"])
@pytest.mark.parametrize("words", ["configs/gpt2_124m.py {}", "{} configs/gpt2_124m.py", "--tp 2 {} --seed 7"])
def test_a_flag_has_four_forms_before_and_after_the_file(flag, words):
    c = configuration.load(words.format(flag).split())
    assert c.num_layers == 24 and c.hidden_size == (768 if "configs" in words else 128)


@pytest.mark.parametrize("flag", ["--ledger", "--ledger=1", "--ledger=False"])
def test_the_value_of_a_boolean_may_be_left_out(flag):
    for words in ("{}", "{} configs/gpt2_124m.py", "configs/gpt2_124m.py {} --tp=2"):
        c = configuration.load(words.format(flag).split())
        assert c.ledger is ("alse" not in flag) and c.num_layers == (12 if "configs" in words else 4)


def test_help_has_each_field_with_its_default_and_comment():
    text = re.sub(r"-\s+", "-", configuration.parser().format_help())  # argparse breaks lines after a hyphen
    text = " ".join(text.split())
    rows = re.findall(r"    (\w+): \w+ = (.*?)  # (.*)", inspect.getsource(Config))
    assert len(rows) == len(vars(Config()))
    for name, default, comment in rows:
        assert re.search(rf"--{name} \[?{re.escape(default)}\]? {re.escape(comment)}", text), name
    assert "(gelu, relu)" in text


# --- options of other programs, and typos (mistakes.txt has the other mistakes) ---------------------------------------


# The options of huggingface.co/blog/megatron-training and of an article on Megatron-DeepSpeed: GPT-2 345M on 8 GPUs,
# what its DeepSpeed scripts add, and the keys of its JSON file.
LAUNCH = "--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6001 --local-rank=0 "
PREPARE = """--input codeparrot_data.json --output-prefix codeparrot --vocab vocab.json --dataset-impl mmap
--tokenizer-type GPT2BPETokenizer --merge-file merges.txt --json-keys content --workers 32 --chunk-size 25
--append-eod"""
CODEPARROT = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 768
--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 12 --global-batch-size 192
--lr 0.0005 --train-iters 150000 --lr-decay-iters 150000 --lr-decay-style cosine --lr-warmup-iters 2000
--weight-decay .1 --adam-beta2 .999 --fp16 --log-interval 10 --save-interval 2000 --eval-interval 200 --eval-iters 10
--vocab-file vocab.json --merge-file merges.txt --save X --load X --data-path codeparrot_content_document
--tensorboard-dir experiments/tensorboard"""
GPT2_345M = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 8 --global-batch-size 64
--seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --save X --load X
--data-path dataset/BookCorpusDataset_text_document --vocab-file dataset/gpt2-vocab.json --merge-file
dataset/gpt2-merges.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
--checkpoint-activations --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16"""
DEEPSPEED = """ --num_nodes 1 --num_gpus 4 --override-lr-scheduler --lr-warmup-iters 32000 --seed 1234
--no-masked-softmax-fusion --deepspeed --deepspeed_config ds.json --zero-stage 1 --deepspeed-activation-checkpointing
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --hostfile hosts"""
JSON_KEYS = """--train_batch_size 32 --gradient_accumulation_steps 1 --steps_per_print 1 --wandb megatron-deepspeed
--zero_optimization 1 --stage 1 --optimizer adamw --type Adam --lr 0.00015 --max_grad_norm 1.0 --betas 0.9
--gradient_clipping 1.0 --fp16 --loss_scale 0 --loss_scale_window 1000 --hysteresis 2 --min_loss_scale 1
--wall_clock_breakdown --zero_allow_untested_optimizer"""


@pytest.mark.parametrize("words", [LAUNCH + CODEPARROT, LAUNCH + GPT2_345M, GPT2_345M + DEEPSPEED, JSON_KEYS, PREPARE])
def test_each_option_of_the_how_tos_is_accepted_or_answered(words, monkeypatch):
    """An answer names an option that exists, or says that none is needed."""
    option, fields = re.compile(r"--[a-z][a-z0-9_]+"), {f"--{name}" for name in vars(Config())}
    prepares = set(option.findall(Path(prepare.__file__).read_text("utf-8")))
    known = fields | prepares | set(option.findall(torch.distributed.run.get_args_parser().format_help()))
    program, accepted = (prepare.main, prepares) if words == PREPARE else (configuration.load, fields)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words.split()])
    said = refusal(program, *([] if words == PREPARE else [words.split()]))
    answers = dict(answer.split(": ", 1) for answer in re.split(r"; (?=--)", said))
    flags = {word.partition("=")[0] for word in words.split() if word.startswith("--")}
    assert answers.keys() == {flag for flag in flags if "--" + flag[2:].replace("-", "_") not in accepted}
    for flag, answer in answers.items():
        named = set(option.findall(answer))
        assert named <= known and re.match(r"(use|put) .*(--|prepare\.py)|not needed:", answer), (flag, answer)


def test_the_7b_run_has_the_scripts_adam_beta2():
    """Megatron-DeepSpeed does not use the JSON's betas, and the script leaves Megatron's default."""
    assert configuration.load(["configs/gpt2_7b.py"]).adam_beta2 == 0.999


# Options of Megatron-LM, of DeepSpeed's JSON file, of torchtitan, nanotron, NeMo and nanoGPT.
OTHERS = """attention-dropout num-workers qk-layernorm group-query-attention train-data-path
valid-data-path test-data-path ckpt-format no-load-rng no-load-optim no-save-rng full-validation
normalization recompute-activations recompute-granularity recompute-method recompute-num-layers
recompute-modules mock-data swiglu reset-attention-mask reset-position-ids eod-mask-loss
kv-channels position-embedding-type use-rotary-position-embeddings
disable-bias-linear fp8-format attention-backend
use-distributed-optimizer overlap-grad-reduce expert-model-parallel-size moe-z-loss-coeff finetune
exit-interval pretrained-checkpoint save-interval-mins log-timers-to-tensorboard timing-log-level
tensorboard-log-interval wandb-exp-name wandb-save-dir tokenizer-model data-cache-path data-args-path blend
start-weight-decay end-weight-decay train-samples weight-decay-incr-style lr-wsd-decay-style
lr-decay-samples lr-warmup-samples decoder-seq-length encoder-num-layers padded-vocab-size
decrease-batch-size-if-needed num-layers-per-virtual-pipeline-stage init-method-xavier-uniform
reduce_bucket_size overlap_comm offload_optimizer offload_param cpu_offload train_micro_batch_size_per_gpu
sparse_attention data_efficiency training.steps training.local_batch_size training.global_batch_size
training.seq_len training.dataset model.name parallelism.tensor_parallel_degree
parallelism.data_parallel_shard_degree optimizer.lr activation_checkpoint.mode checkpoint.interval
metrics.enable_tensorboard lr_scheduler.warmup_steps optimizer.name lr_scheduler.decay_ratio
comm.init_timeout_seconds hidden-dropout-prob layernorm-epsilon apply-query-key-layer-scaling bias-dropout-fusion
micro-batch-size-per-rank save-retain-interval async-save exit-duration-in-mins exit-signal-handler
log-params-norm log-memory-to-tensorboard manual-gc seed-everything data-parallel-random-init clip-grad-norm
max-tokens-per-batch lr-scheduler-type adam-w-mode vocab-extra-ids make-vocab-size-divisible-by
make_vocab_size_multiple_of optimizer.beta1 optimizer.weight_decay training.max_norm profiling.enable_profiling
checkpoint.folder metrics.log_freq parallelism.pipeline_parallel_schedule num-attention-layers lr-decay-steps
transformer-impl use-flash-attn
moe-token-dispatcher-type moe-expert-capacity-factor rerun-mode sgd-momentum profile-ranks encoder-seq-length
eval-micro-batch-size use-checkpoint-args stage3_max_live_parameters activation_checkpointing partition_activations
scheduler eps warmup_num_steps flops_profiler model.flavor optimizer.eps training.compile training.seed
parallelism.data_parallel_replicate_degree checkpoint.keep_latest_k float8.recipe_name tokens.train_steps
tokens.batch_accumulation_per_replica parallelism.tp parallelism.tp_mode optimizer.zero_stage
checkpoints.checkpoint_interval trainer.max_steps trainer.precision trainer.limit_val_batches exp_manager.exp_dir
model.tensor_model_parallel_size model.optim.sched.warmup_steps n_layer n_head n_embd block_size init_from""".split()


@pytest.mark.parametrize("name", OTHERS)
def test_another_programs_option_has_no_wrong_nearest(name):
    """Options with other words are answered, or called unknown."""
    said = refusal(configuration.load, [f"--{name}"]).removeprefix(f"--{name}: ")
    assert re.match(r"use (--|prepare\.py --)|not (needed|built): |no such option; \S+ train.py --help", said), said
    options = set(re.findall(r"--([a-z][a-z_]+)", said)) - {"help", "nproc_per_node", "nnodes"}
    assert options <= {*vars(Config()), "split", "tokenizer"}, said


TYPOS = (
    "hiden_size seq_lenght num-layer num_layes lr_decay_stile optimiser wieght_decay data-dirs eval_iter sed_length "
)


UNDERSCORES = "microbatch_size clipgrad outdir adam_beta_1 min-l-r".split()


@pytest.mark.parametrize("name", [*TYPOS.split(), "global-batchsize", "micro_batch_sice", "recompte", *UNDERSCORES])
def test_a_typo_is_answered_with_the_nearest(name):
    assert "; the nearest is --" in refusal(configuration.load, [f"--{name}=1"])


def test_0_is_refused_unless_the_comment_says_what_it_means():
    """A few fields are usual numbers, of which 0 needs no words."""
    usual, c = "seed lr weight_decay adam_beta1 adam_beta2 lars_coefficient".split(), Config()
    for _, name, _, comment in configuration.LINES:
        value = vars(c).get(name)
        if type(value) in (int, float) and value > 0 and "0: " not in comment and name not in usual:
            assert f"{name}=0: should be above 0" in refusal(configuration.check_values, Config(**{name: 0}))


# --- batches ----------------------------------------------------------------------------------------------------------


def test_the_batch_grows_evenly_and_the_updates_of_an_epoch_are_counted():
    """From 4 to 12 in two steps, one for each 15 of 30 samples: 4 4 4 4 8 8 12 12 ..."""
    c = Config(global_batch_size=12, rampup_batch_size="4,4,30")
    sizes = [configuration.global_batch_size_at(c, consumed) for consumed in (0, 14, 15, 29, 30, 99)]
    assert sizes == [4, 4, 8, 8, 12, 12]
    assert [configuration.iterations(c, samples) for samples in (15, 16, 31, 32, 43, 44)] == [3, 4, 5, 6, 6, 7]


def test_the_check_does_not_grow_with_the_batch(monkeypatch):
    """interleaved needs multiples of pp=4: a small number with the same remainder is checked."""
    built, build = [], simulation.build
    configuration.parts_of.cache_clear()
    monkeypatch.setattr(simulation, "build", lambda *args: built.append(args[2]) or build(*args))
    fields = dict(train_iters=1, micro_batch_size=1, pp=4, schedule="interleaved", chunks=2, num_layers=6)
    configuration.check(Config(global_batch_size=8000, **fields), 4)
    assert len(built) == 1 and built[0] < 16
    for wrong in (dict(global_batch_size=8002), dict(global_batch_size=8000, rampup_batch_size="4,2,9")):
        assert "interleaved needs a multiple of stages=4" in refusal(configuration.check, Config(**fields, **wrong), 4)


def test_a_link_out_of_a_models_folder_is_refused(tmp_path):
    """A copy of it would publish another file."""
    (tmp_path / "model").mkdir()
    for target in ("secret", "model/own"):
        (tmp_path / target).write_text("x")
        (tmp_path / "model" / f"link_to_{Path(target).name}").symlink_to(tmp_path / target)
    assert errors.fetched(tmp_path / "model/link_to_own")
    assert "out of its folder" in refusal(errors.fetched, tmp_path / "model/link_to_secret")


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_lock_is_refused_until_its_process_ends_though_a_worker_lives_on(tmp_path):
    with held_elsewhere(tmp_path / "lock") as process:
        with pytest.raises(UserError, match="it is taken"), locked(tmp_path / "lock", "it is taken"):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path / "lock", "it is taken"):
            pass


# --- the end of a command ---------------------------------------------------------------------------------------------


def test_torchrun_reads_the_line_as_its_root_cause(monkeypatch, tmp_path):
    """A lost peer is reported one second late, after the peer's own mistake."""
    reports = {0: ("rank 0 waited for ranks [1]", 1), 1: ("out_dir=x: No space left on device", 0)}
    for rank, (text, late) in reports.items():
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        errors.report_error(UserError(text), late)
    failures = {rank: ProcessFailure(rank, 1000 + rank, 2, str(tmp_path / f"{rank}.json")) for rank in reports}
    assert [f.timestamp - int(time.time()) for f in failures.values()] in ([1, 0], [0, -1])
    lines = ChildFailedError("train.py", failures).format_msg().splitlines()
    assert lines[-2] == "  traceback : error: out_dir=x: No space left on device"


def test_a_process_that_dies_while_it_reports_leaves_no_half_report(monkeypatch, tmp_path):
    def killed(report, file):
        file.write("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(errors.json, "dump", killed)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(KeyboardInterrupt):
        errors.report_error(UserError("tp=3"))
    assert not (tmp_path / "error.json").exists()


def test_a_restart_of_torchrun_does_not_repeat_a_mistake(monkeypatch, tmp_path):
    """A restart after another error starts the program."""
    for start, (code, ends) in enumerate([(1, 0), (2, 0), (2, 2), (2, 2)]):
        path = tmp_path / f"attempt_{start}" / "0" / "error.json"
        path.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        assert subprocess.run([sys.executable, "-c", "import errors"], cwd=HERE).returncode == ends, start
        if not ends:
            errors.report_error(UserError("tp=3"), code=code)
    assert "error: tp=3" in path.read_text()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path.rename(tmp_path / "set_by_hand")))  # not of an attempt
    assert subprocess.run([sys.executable, "-c", "import errors"], cwd=HERE).returncode == 0


def end_of(tmp_path, line="pass", redirection="", **environment):
    """Run a program that prints "é", writes a file and then runs `line`. Return (exit code, stdout, stderr)."""
    program = (
        f"import errors, sys\ndef main():\n    print('work \u00e9')\n    open('result', 'w').close()\n    {line}\n"
    )
    (tmp_path / "program.py").write_text(program + "errors.exit_on_user_error(main)\n", "utf-8")
    command = ["bash", "-c", f"{sys.executable} program.py {redirection}"]
    environment = os.environ | {"PYTHONPATH": str(HERE), "PYTHONIOENCODING": "utf-8"} | environment
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert (tmp_path / "result").exists()
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "line, code, err",
    [
        ("pass", 0, ""),
        ("raise errors.UserError('lr=-1: should be zero or more')", 2, "error: lr=-1: should be zero or more\n"),
        ("raise errors.UserError('a\\nb')", 2, "error: a b\n"),
        ("open('missing/file')", 2, "error: missing/file: No such file or directory\n"),
        ("raise MemoryError", 2, "error: not enough memory: MemoryError; in training, set --recompute=full, a smaller"),
        ("raise RuntimeError('CUDA out of memory. Tried')", 2, "error: not enough memory: CUDA out of memory. Tried; "),
        ("raise RuntimeError('[enforce fail] can\\'t allocate memory: 9 bytes')", 2, "error: not enough memory: ["),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise RuntimeError('a defect')", 1, "Traceback"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, line, code, err):
    found = end_of(tmp_path, line)
    assert found[:2] == (code, "work é\n") and found[2].startswith(err) and (err or not found[2])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="macOS has no /dev/full")
def test_a_full_disk_does_not_stop_the_work(tmp_path):
    assert end_of(tmp_path, redirection="2>/dev/full") == (0, "work é\n", "")
    full = (2, "", "error: the system refused a call: No space left on device\n")
    assert end_of(tmp_path, redirection=">/dev/full", PYTHONUNBUFFERED="") == full
    assert end_of(tmp_path, "errors.losable(sys.stdout)", ">/dev/full", PYTHONUNBUFFERED="") == (0, "", "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_does_not_stop_the_work(tmp_path, closed):
    assert end_of(tmp_path, "assert sys.stderr.fileno() == 2 and sys.stdout.fileno() == 1", closed)[0] == 0


def test_a_reader_that_leaves_does_not_stop_the_work(tmp_path):
    many = "[print('x' * 1000) for _ in range(1000)]"
    assert end_of(tmp_path, many, "| head -c 3; exit ${PIPESTATUS[0]}", PYTHONUNBUFFERED="") == (141, "wor", "")
    assert end_of(tmp_path, PYTHONIOENCODING="ascii") == (0, "work \\xe9\n", "")


@pytest.mark.parametrize("change", ["sys.version_info = (3, 10)", "sys.platform, sys.modules['fcntl'] = 'win32', None"])
@pytest.mark.parametrize("program", ["train", "prepare", "generate", "plan", "convert", "exercise"])
def test_an_old_python_and_windows_are_one_line_before_any_other_import(program, change):
    ast.parse((HERE / f"{program}.py").read_text("utf-8"), feature_version=(3, 8))
    code = f"import sys, runpy; {change}; sys.modules['torch'] = None; runpy.run_path('{program}.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch("error: Python .* 3.11 or later.*\n", done.stderr), done.stderr


def test_reading_turns_what_wrong_content_causes_into_one_line():
    wrong = [lambda: {}["x"], lambda: int("x"), lambda: None.x, lambda: float(10**400), lambda: open("missing/file")]
    for cause in wrong:
        with pytest.raises(UserError, match=r"^f\.json: \S+"), errors.reading("f.json"):
            cause()
    with pytest.raises(AssertionError), errors.reading("f.json"):
        raise AssertionError  # a defect of the program keeps its traceback
