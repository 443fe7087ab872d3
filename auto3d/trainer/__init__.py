"""Training as users of transformers know it: ``init``, ``TrainingArguments`` and ``Trainer``."""
