# SPDX-License-Identifier: Apache-2.0
"""What a client's module says about it: a subclass of `Client`, as CLIENT."""

import json
from dataclasses import dataclass
from pathlib import Path

STEPS, SAVE_EVERY = 8, 4
# The runs of a kind of training. "absent" comes before the package is installed.
ABSENT, PLAIN, SECTION, RESUMED, LORA_PLAIN, LORA = RUNS = ("absent", "plain", "section", "resumed", "lora plain",
                                                            "lora")
EACH_STEP, MEAN = "each step", "mean"


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        kind: one of the client's `kinds`.
        model: folder of the tiny model.
        data: folder with a folder of each form of the data (tiny.py). The run starts in the folder that holds it.
        deepspeed: the JSON.
        out: a folder that does not exist yet, for what the run writes.
        lora: adapters on attention and experts.
        resume: the checkpoint to go on from.
    """

    kind: str
    model: Path
    data: Path
    deepspeed: Path
    out: Path
    lora: bool
    resume: Path | None


class Client:
    """
    Attributes:
        title: its name on the page.
        distribution: its name for pip, if that is not the module's.
        packages: what pip installs into its environment, one tuple of arguments for each call of pip.
        shared: the environment also sees the packages of this repository's, where their releases fit.
        kinds: kind of training -> its runs.
        stage: of ZeRO.
        variables: further environment variables.
        compared: kind of training -> which losses with the section have to be within 1% of those without: those of
            each step, or their mean. None: sampled completions decide them, so that the saved model's alone counts.
    """

    title: str
    distribution: str | None = None
    packages: tuple[tuple[str, ...], ...]
    shared = True
    kinds: dict[str, tuple[str, ...]] = {"sft": RUNS}
    stage = 2
    variables: dict[str, str] = {}
    compared: dict[str, str | None] = {}

    def command(self, job: Job) -> list[str]:
        """Of STEPS steps on two CPU ranks, which writes checkpoints every SAVE_EVERY steps, and the model at the end.
        Programs of the environment are on PATH."""
        raise NotImplementedError

    def deepspeed(self, sections: dict) -> dict:
        """The JSON."""
        return {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": self.stage},
                **sections}

    def losses(self, job: Job, printed: str) -> dict[int, float]:
        """Step -> loss. By default those that the Trainer wrote into its last checkpoint."""
        found = sorted(job.out.rglob("trainer_state.json"), key=lambda path: (path.stat().st_mtime, path))
        logged = json.loads(found[-1].read_text())["log_history"] if found else []
        return {row["step"]: row["loss"] for row in logged if "loss" in row}

    def checkpoint(self, job: Job) -> Path:
        """To resume from, in the folder of an earlier job."""
        return self.saved(job) / f"checkpoint-{SAVE_EVERY}"

    def saved(self, job: Job) -> Path:
        """The folder of the model, or of the adapters."""
        return job.out
