"""Evaluation of finished policies, chat with one, and what goes with an exported one: model card and upload."""
