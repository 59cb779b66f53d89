# SPDX-License-Identifier: Apache-2.0
"""TRL's own programs: `trl sft`, also with `--packing`, `trl dpo`, `trl grpo`, `trl reward`."""

import json

from client import MEAN, RUNS, SAVE_EVERY, STEPS, Client, Job

DATA = {"sft": "text", "packing": "text", "dpo": "preference", "grpo": "prompt", "reward": "preference"}
# Ends completions early, and not on all ranks at once.
ENDS = list(range(3, 400, 5))
MORE = {
    "sft": ["--learning_rate", "2e-3", "--max_length", "128"],
    # Rows of up to 128 tokens, four of which are one without padding: other numbers of tokens on each rank.
    "packing": ["--learning_rate", "2e-3", "--max_length", "128", "--packing"],
    # A small beta and many preferences in a step: the loss compares sums over tokens, whose rounding beta scales.
    "dpo": ["--learning_rate", "2e-4", "--max_length", "128", "--beta", "0.02", "--gradient_accumulation_steps", "4"],
    "grpo": ["--learning_rate", "2e-4", "--num_generations", "4", "--max_completion_length", "24", "--beta", "0.04",
             "--reward_funcs", "rewards.length", "--generation_kwargs", json.dumps({"eos_token_id": ENDS})],
    "reward": ["--learning_rate", "2e-4", "--max_length", "128", "--gradient_accumulation_steps", "8"],
}
LORA = ["--use_peft", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "v_proj",
        "--lora_target_parameters", "experts.gate_up_proj", "experts.down_proj"]


class TRL(Client):
    title = "TRL"
    packages = (("trl==1.16.0", "datasets"), )
    kinds = {"sft": RUNS, "packing": RUNS, "dpo": RUNS, "grpo": RUNS, "reward": RUNS}
    # Rounding alone moves single steps of DPO and of rewards by percents, so means over many preferences are compared.
    # With 8 in a step, and a beta of 0.1, means with adapters differed by 2.1% (DPO) and 1.9% (rewards), and DPO's by
    # 1.2% with "recipe": "bf16", where only the order of sums is another.
    compared = {"dpo": MEAN, "grpo": None, "reward": MEAN}

    def command(self, job: Job) -> list[str]:
        lora = [*LORA, *(["--lora_task_type", "SEQ_CLS"] if job.kind == "reward" else [])]
        resume = ["--resume_from_checkpoint", str(job.resume)] if job.resume else []
        program = "sft" if job.kind == "packing" else job.kind
        return ["trl", program, "--use_deepspeed", "--num_processes", "2", "--model_name_or_path", str(job.model),
                "--dataset_name", str(job.data / DATA[job.kind]), "--output_dir", str(job.out),
                "--deepspeed", str(job.deepspeed), *MORE[job.kind], *(lora if job.lora else []), *resume,
                "--dtype", "bfloat16", "--bf16", "true", "--use_cpu", "--per_device_train_batch_size", "4",
                "--max_steps", str(STEPS), "--save_steps", str(SAVE_EVERY), "--logging_steps", "1",
                "--lr_scheduler_type", "constant", "--seed", "1", "--report_to", "none"]


CLIENT = TRL()
