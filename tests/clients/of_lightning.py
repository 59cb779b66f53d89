# SPDX-License-Identifier: Apache-2.0
"""Lightning's DeepSpeedStrategy, which has no program: lightning_script.py is its user's script."""

from pathlib import Path

from client import SAVE_EVERY, STEPS, Client, Job

SCRIPT = Path(__file__).with_name("lightning_script.py")


class Lightning(Client):
    title = "Lightning's DeepSpeedStrategy"
    packages = (("lightning==2.6.6", "transformers==5.24.0", "peft==0.21.2"), )

    def command(self, job: Job) -> list[str]:
        resume = ["--resume", str(job.resume)] if job.resume else []
        return ["torchrun", "--nproc-per-node", "2", str(SCRIPT), "--model", str(job.model),
                "--data", str(job.data / "text" / "train.jsonl"), "--out", str(job.out), "--steps", str(STEPS),
                "--deepspeed", str(job.deepspeed), "--save-every", str(SAVE_EVERY),
                *(["--lora"] if job.lora else []), *resume]

    def deepspeed(self, sections: dict) -> dict:
        return {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": self.stage}, **sections}

    def checkpoint(self, job: Job) -> Path:
        return job.out / f"checkpoint-{SAVE_EVERY}.ckpt"

    def losses(self, job: Job, printed: str) -> dict[int, float]:
        rows = (line.split() for line in printed.splitlines() if line.startswith("step "))
        return {int(step): float(loss) for _, step, _, loss in rows}


CLIENT = Lightning()
