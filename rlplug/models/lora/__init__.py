"""LoRA: low-rank adapters train, through peft's layers, and the policy's own weights stay as they are."""
