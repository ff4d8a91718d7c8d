"""transformers' Trainer on zeroweave's engine: `from zeroweave.integrations.hf import Trainer, TrainingArguments`."""

from zeroweave.errors import UnsupportedError

try:
    import accelerate
    import transformers
    from packaging.version import Version
except ImportError as error:
    raise UnsupportedError(
        "[ZW803] zeroweave.integrations.hf needs transformers and accelerate: "
        "pip install 'transformers>=4.57.1,<6' 'accelerate>=1.15'"
    ) from error
if not Version("4.57.1") <= Version(transformers.__version__) < Version("6.dev0"):
    raise UnsupportedError(
        "[ZW803] zeroweave.integrations.hf needs transformers 4.57.1 or newer, below 6, not "
        f"{transformers.__version__}: pip install 'transformers>=4.57.1,<6'"
    )
if Version(accelerate.__version__) < Version("1.15"):  # older ones resume an epoch with the batches of the first one
    raise UnsupportedError(
        f"[ZW803] zeroweave.integrations.hf needs accelerate 1.15 or newer, not {accelerate.__version__}: "
        "pip install 'accelerate>=1.15'"
    )

from zeroweave.integrations.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from zeroweave.integrations.hf.trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]
