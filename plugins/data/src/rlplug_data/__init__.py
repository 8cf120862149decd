"""Sources of prompts: Hugging Face datasets, also streamed, mixtures, and a curriculum by pass rate."""
