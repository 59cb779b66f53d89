# SPDX-License-Identifier: Apache-2.0
"""The hook that makes the section enough, and what is said where it is off."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# As torch calls it where the package is installed.
ARM = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ds_mxfp8_moe_hook", {str(ROOT / "ds_mxfp8_moe/hook/__init__.py")!r})
sys.modules[spec.name] = hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)
hook.arm(), hook.arm()
"""
SCRIPT = """
import contextlib, io, sys
import deepspeed, torch, transformers

def train(initialize, **sections):
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, **sections}
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**sizes))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine, *_ = initialize(model=model, config=config)
    ids = torch.arange(64)[None]
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return said.getvalue(), loss.item()

EP, OURS = {"enabled": True, "autoep_size": 1}, {"enabled": True, "min_tokens_per_expert": 0}
CONVERTED = "mxfp8_moe: 1 of 1 MoE layers converted"
"""


def run(code: str, *args: str, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"DS_MXFP8_MOE_AUTO": "", "DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1",
                                "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                                "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *args], env=environment, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=240)


def passed(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_section_alone_switches_an_engine_on():
    passed(run(ARM + SCRIPT + """
assert "ds_mxfp8_moe" not in sys.modules and hook._Finder not in sys.meta_path
plain = deepspeed.runtime.engine.DeepSpeedEngine.__init__
_, before = train(deepspeed.initialize)
said, after = train(deepspeed.initialize, mxfp8_moe={"enabled": False})
assert after == before and "mxfp8_moe" not in said, said
assert not any(name.startswith("ds_mxfp8_moe.") for name in sys.modules), "the package was imported"
for _ in range(2):  # a second engine of the process, too
    said, loss = train(deepspeed.initialize, expert_parallel=EP, mxfp8_moe=OURS)
    assert said.count(CONVERTED) == 1, said
    assert abs(loss - before) < 0.01 * before, (loss, before)
import ds_mxfp8_moe
for initialize in (ds_mxfp8_moe.initialize, deepspeed.initialize):
    said, again = train(initialize, expert_parallel=EP, mxfp8_moe=OURS)
    assert said.count(CONVERTED) == 1 and again == loss, said
    ds_mxfp8_moe.enable()
assert train(deepspeed.initialize)[1] == before
try:
    train(deepspeed.initialize, expert_parallel=EP, mxfp8_moe={"recipes": "mxfp8"})
except ds_mxfp8_moe.ConfigError as error:
    assert "recipes" in str(error)
else:
    raise AssertionError("a wrong section is no error")
"""))


def test_a_variable_switches_the_hook_off():
    passed(run(ARM + "assert hook._Finder not in sys.meta_path", DS_MXFP8_MOE_AUTO="0"))


UNREAD_ENGINES = """
def made(**section):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    engine = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config | section)[0]
    engine(torch.ones(1, 8))
"""
IMPORT_PACKAGE, ENABLE = "import ds_mxfp8_moe\n", "ds_mxfp8_moe.enable()\n"
UNREAD, OFF = "made(mxfp8_moe={'enabled': True})\n", "made(mxfp8_moe={'enabled': False})\n"
CLOSED, END = "torch.distributed.destroy_process_group()\n", "print('end')\n"
FAILED = """
try:
    ds_mxfp8_moe.initialize(model=torch.nn.Linear(8, 8), config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "mxfp8_moe": {"enabled": True}})
except AssertionError as error:
    kept = error
"""


CASES = {  # how often it is said before the end, and at the exit
    "import after": (UNREAD + "made()\n" + IMPORT_PACKAGE + END, 1, 0),
    "import before": (IMPORT_PACKAGE + UNREAD + UNREAD + "made()\n" + END + CLOSED, 0, 1),
    "enable after": (IMPORT_PACKAGE + UNREAD + ENABLE + END, 0, 1),
    "no section that is on": (IMPORT_PACKAGE + OFF + "made()\n" + END, 0, 0),
    "enable before": (IMPORT_PACKAGE + ENABLE + UNREAD + END, 0, 0),
    "read, failed": (IMPORT_PACKAGE + FAILED + END, 0, 0)}
# Each is a process that one with torch and DeepSpeed forks, and that ends as every Python does.
FORKS = """
import os, sys
import deepspeed, torch, torch.utils.cpp_extension
torch.compiler.disable(print)  # an engine imports the compiler
for code in sys.argv[1:]:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        exec(UNREAD_ENGINES + code)
        break
    assert os.waitpid(child, 0)[1] == 0
    os.write(1, b"\\nnext\\n")
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each of CASES prints."""
    codes = [code for code, *_ in CASES.values()]
    out = passed(run(f"UNREAD_ENGINES = {UNREAD_ENGINES!r}" + FORKS, *codes, DS_MXFP8_MOE_AUTO="0"))
    return dict(zip(CASES, out.split("\nnext\n"), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_section_that_nothing_read_is_said_once(said, name):
    """At the import, or else at the exit."""
    _, before, after = CASES[name]
    assert [part.count("but nothing read it") for part in said[name].split("\nend\n")] == [before, after], said[name]
    assert "no DeepSpeed engine was created" not in said[name]
