# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch` with a script that knows nothing of this package: accelerate_script.py, a loop of its own."""

from pathlib import Path

from client import SAVE_EVERY, STEPS, Client, Job

SCRIPT = Path(__file__).with_name("accelerate_script.py")


class Accelerate(Client):
    title = "`accelerate launch`"
    packages = (("accelerate==1.15.0", "transformers==5.24.0", "peft==0.21.2"), )
    kinds = Client.kinds

    def command(self, job: Job) -> list[str]:
        resume = ["--resume", str(job.resume)] if job.resume else []
        return ["accelerate", "launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1",
                "--deepspeed_config_file", str(job.deepspeed), str(SCRIPT), "--model", str(job.model),
                "--data", str(job.data / "text" / "train.jsonl"), "--out", str(job.out), "--steps", str(STEPS),
                "--save-every", str(SAVE_EVERY), *(["--lora"] if job.lora else []), *resume]

    def deepspeed(self, sections: dict) -> dict:
        return super().deepspeed(sections) | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
                                              "gradient_clipping": 1.0, "bf16": {"enabled": True}}

    def losses(self, job: Job, printed: str) -> dict[int, float]:
        rows = (line.split() for line in printed.splitlines() if line.startswith("step "))
        return {int(step): float(loss) for _, step, _, loss in rows}


CLIENT = Accelerate()
